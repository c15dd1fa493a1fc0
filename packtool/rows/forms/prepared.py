"""Rows that another tool has tokenized: ``input_ids``, and what these tools write beside them.

Labels are ``labels`` (the token itself, or -100), or ``completion_mask`` and ``assistant_masks``; without any of them
every token is a target, as in pretraining. Padding is where ``attention_mask`` is 0. A row may be a pack of several
samples; where each begins is said by ``seq_lengths``, by an ``attention_mask`` that numbers them from 1 on, or by
``position_ids`` that begin anew.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.constants import IGNORE_INDEX
from packtool.rows.forms.columns import Columns, Fields
from packtool.rows.forms.form import RowForm
from packtool.rows.forms.media import Found
from packtool.rows.forms.problem import RowProblem
from packtool.rows.forms.values import shown
from packtool.rows.sample import PreparedTokens, Turn

TOKENS = "tokens"
"""The ``formatting`` that takes tokens also where a row still has what they were made of."""

_Ints = npt.NDArray[np.int64]
_MASKS = ("completion_mask", "assistant_masks")


def _fits(columns: Columns, formatting: str | None) -> bool:
    return formatting in (None, TOKENS) and columns.find("input_ids") is not None


def _no_turns(fields: Fields, found: Found) -> list[Turn]:
    return []


def _tokens(fields: Fields) -> PreparedTokens:
    ids = _column(fields, "input_ids", None)
    if ids is None or not len(ids):
        raise RowProblem("empty_tokens", "there is no token in 'input_ids'")
    mask = _column(fields, "attention_mask", len(ids))
    trained = _trained(fields, ids)
    weights = _weights(fields, len(ids))
    kept = np.ones(len(ids), bool) if mask is None else mask != 0
    begins = _begins(fields, mask, len(ids))
    # A sample of one token has nothing to predict: such are what some tools pad packs with.
    alone = begins & np.append(begins[1:], True)
    if not alone.all():
        kept &= ~alone
    if not kept.any():
        raise RowProblem("empty_tokens", "all of its tokens are padding: 'attention_mask' is 0 everywhere")
    # Where padding stands before a sample, the first token behind it is the sample's first.
    number = np.cumsum(begins)[kept]
    return PreparedTokens(
        ids=ids[kept],
        trained=None if trained is None else trained[kept],
        weights=None if weights is None else weights[kept],
        starts=np.flatnonzero(np.diff(number, prepend=number[0] - 1)),
    )


def _begins(fields: Fields, mask: _Ints | None, length: int) -> npt.NDArray[np.bool_]:
    """Where the samples of a row begin, bool (length,)."""
    begins = np.zeros(length, bool)
    begins[0] = True
    counts = _column(fields, "seq_lengths", None)
    if counts is not None and len(counts):
        if counts.sum() != length or counts.min() < 0:
            detail = f"'seq_lengths' tells of {int(counts.sum()):,} tokens, and the row has {length:,}"
            raise RowProblem("invalid_tokens", detail)
        begins[(np.cumsum(counts) - counts)[counts > 0]] = True
    elif mask is not None and mask.max() > 1:
        begins[1:] = mask[1:] != mask[:-1]
    elif (positions := _column(fields, "position_ids", length)) is not None:
        begins[1:] = positions[1:] != positions[:-1] + 1
        if mask is not None:
            begins &= mask != 0  # positions of padding say nothing
            begins[np.flatnonzero(mask)[:1]] = True
    return begins


def _trained(fields: Fields, ids: _Ints) -> npt.NDArray[np.bool_] | None:
    """Which tokens are targets; None if no column says it."""
    labels = _column(fields, "labels", len(ids))
    masks = [mask for name in _MASKS if (mask := _column(fields, name, len(ids))) is not None]
    if labels is None and not masks:
        return None
    trained = np.ones(len(ids), bool)
    if labels is not None:
        trained = labels != IGNORE_INDEX
        _check_labels(ids, labels, trained)
    for mask in masks:
        trained &= mask != 0
    return trained


def _check_labels(ids: _Ints, labels: _Ints, trained: npt.NDArray[np.bool_]) -> None:
    wrong = np.flatnonzero(trained & (labels != ids))
    if not len(wrong):
        return
    told = trained[:-1]
    if told.any() and (labels[:-1][told] == ids[1:][told]).all():
        raise RowProblem(
            "labels_shifted",
            "each label is the next token, so the labels are shifted already; here a label stands at its own token "
            "and the loss shifts",
        )
    at = int(wrong[0])
    detail = f"token {at:,} is {ids[at]} and its label {labels[at]}, which is neither the token nor {IGNORE_INDEX}"
    raise RowProblem("labels_differ", detail)


def _weights(fields: Fields, length: int) -> npt.NDArray[np.float32] | None:
    value = fields.get("loss_scale")
    if value is None:
        return None
    try:
        weights = np.asarray(value, np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise RowProblem("invalid_tokens", f"'loss_scale' is {shown(value)}, not a list of numbers") from error
    if weights.shape != (length,) or not np.isfinite(weights).all() or (weights < 0).any():
        detail = f"'loss_scale' must be a number from 0 on for each of {length:,} tokens, and is {shown(value)}"
        raise RowProblem("invalid_tokens", detail)
    return None if (weights == 1).all() else weights


def _column(fields: Fields, name: str, length: int | None) -> _Ints | None:
    """A column of integers, int64; None if the row has none, or positions of several axes.

    Args:
        length: that it must have.
    """
    value: Any = fields.parsed(name)
    if value is None:
        return None
    try:
        found = np.asarray(value)
    except ValueError:  # lists of different lengths in it
        found = np.zeros(0, object)
    if name == "position_ids" and found.ndim > 1:
        return None
    if found.ndim == 1 and not len(found):
        found = found.astype(np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iub":
        raise RowProblem("invalid_tokens", f"{name!r} is {shown(value)}, not a list of integers")
    if length is not None and len(found) != length:
        raise RowProblem("invalid_tokens", f"{name!r} has {len(found):,} values for {length:,} tokens")
    return found.astype(np.int64)


PREPARED = RowForm(
    "prepared",
    "input_ids, perhaps labels, attention_mask, position_ids: tokens that another tool has made",
    _fits,
    _no_turns,
    _tokens,
)
