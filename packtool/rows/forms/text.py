"""A text for pretraining."""

from __future__ import annotations

from packtool.rows.forms.columns import Columns, Fields
from packtool.rows.forms.contents import content_of
from packtool.rows.forms.form import RowForm
from packtool.rows.forms.media import Found
from packtool.rows.forms.problem import RowProblem
from packtool.rows.sample import Turn


def _fits(columns: Columns, formatting: str | None) -> bool:
    return formatting != "sharegpt" and columns.find("text") is not None


def _turns(fields: Fields, found: Found) -> list[Turn]:
    text = content_of("'text'", fields.raw("text"), found).text
    if not text.strip():
        raise RowProblem("empty_text", "there is nothing but blanks in it")
    return [Turn("assistant", text)]


TEXT = RowForm("text", "text: a text for pretraining", _fits, _turns)
