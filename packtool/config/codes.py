"""Codes of drop reasons, errors and exits, such as ``R002``, declared in ``codes.tsv``; its first lines say how."""

from __future__ import annotations

import functools
from fnmatch import fnmatchcase
from importlib import resources
from typing import NamedTuple

INTERNAL_ERROR, SEVERAL_PROBLEMS = "E001", "O002"


class Code(NamedTuple):
    """One code.

    Args:
        name: one word; for reasons of dropped rows, the reason.
        origins: ``CLASS:MODULE`` of the errors that have this code, separated by spaces; a ``*`` stands for any text.
        meaning, example, remedy: sentences for users.
    """

    code: str
    name: str
    origins: str
    meaning: str
    example: str
    remedy: str

    def figures(self) -> dict[str, str]:
        """Return the output of ``packtool explain --json``."""
        return {name: value for name, value in self._asdict().items() if name != "origins"}

    def lines(self) -> list[str]:
        """Return the output of ``packtool explain``."""
        return [f"{self.code} {self.name}", "", self.meaning, "", f"Example: {self.example}", f"Remedy: {self.remedy}"]


@functools.cache
def codes() -> dict[str, Code]:
    """Return all codes in the order of the table."""
    text = resources.files("packtool.config").joinpath("codes.tsv").read_text(encoding="utf-8")
    rows = [Code(*line.split("\t")) for line in text.splitlines() if not line.startswith("#")]
    return {row.code: row for row in rows}


@functools.cache
def reason_codes() -> dict[str, Code]:
    """Return the codes of dropped rows by reason."""
    return {row.name: row for row in codes().values() if row.code.startswith("R")}


def with_code(reason: str) -> str:
    """Return a reason of dropped rows with its code, such as ``media_missing [R002]``, if this version knows it."""
    row = reason_codes().get(reason)
    return reason if row is None else f"{reason} [{row.code}]"


@functools.cache
def code_of_error(class_names: tuple[str, ...], module: str) -> str:
    """Return the code of an error by its class, then its base classes, and the module that raised it."""
    code_by_origin = {origin: row.code for row in codes().values() for origin in row.origins.split()}
    for class_name in class_names:
        matching = [origin for origin in code_by_origin if fnmatchcase(f"{class_name}:{module}", origin)]
        if matching:
            return code_by_origin[max(matching, key=len)]
    return INTERNAL_ERROR
