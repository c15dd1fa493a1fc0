"""What a form says about a row that it cannot read."""

from __future__ import annotations

from packtool.rows.parsing import JsonProblem


class RowProblem(ValueError):
    """A row that cannot be used.

    Args:
        reason: machine-readable, as in ``dropped.jsonl``.
        detail: explanation for the user.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


def json_problem(reason: str, what: str, problem: JsonProblem) -> RowProblem:
    """What to say of a cell that is no JSON (``reason``, ``what``), or JSON that is not to be trusted (its own)."""
    if problem.reason == "invalid_json":
        return RowProblem(reason, f"{what}: {problem.detail}")
    return RowProblem(problem.reason, problem.detail)
