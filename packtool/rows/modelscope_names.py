"""Hugging Face ids of datasets in ms-swift's registry, whose names are ModelScope ids."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def _hugging_face_ids() -> dict[str, str]:
    text = resources.files("packtool.rows").joinpath("modelscope_names.tsv").read_text(encoding="utf-8")
    return dict(line.split("\t") for line in text.splitlines())


def modelscope_remedy(name: str) -> str:
    """Return how to get a dataset of ms-swift's registry, given its ModelScope id; "" for another name."""
    other = _hugging_face_ids().get(name)
    if other is None:
        return ""
    hugging_face = f"on the Hugging Face hub it is {other}; or " if other else ""
    return (
        f" {name} is a ModelScope id: {hugging_face}add --use-hf false, or download it with modelscope download "
        f"--dataset {name} --local_dir DIR and pass DIR."
    )
