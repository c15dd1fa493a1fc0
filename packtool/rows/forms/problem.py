"""What a form says about a row that it cannot read."""

from __future__ import annotations


class RowProblem(ValueError):
    """A row that cannot be used.

    Args:
        reason: machine-readable, as in ``dropped.jsonl``.
        detail: for a person.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
