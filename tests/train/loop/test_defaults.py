"""Defaults that differ from transformers' are in the documentation's table, with what they are."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from packtool.config.train import TrainConfig

DOCS = Path(__file__).parents[3] / "docs" / "training-reference.md"
# Decided elsewhere when they are left out, or none of training's.
NOT_SAID = {"output_dir", "metric_for_best_model", "lr_scheduler_kwargs", "max_steps", "bf16", "fsdp", "warmup_steps"}


def default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def table() -> dict[str, list[str]]:
    """Cells of the table by the option: packtool's, ms-swift's, transformers', why."""
    rows = re.findall(r"^\| `--([a-z0-9-]+)` \| (.*) \|$", DOCS.read_text().partition("## Defaults")[2], re.MULTILINE)
    return {name.replace("-", "_"): cells.split(" | ") for name, cells in rows}


def test_docs_list_every_default_that_differs_from_transformers() -> None:
    transformers_defaults = {field.name: default_of(field) for field in dataclasses.fields(TrainingArguments)}
    packtool_defaults = {
        field.name: default_of(field)
        for field in dataclasses.fields(TrainConfig)
        if field.name in transformers_defaults
    }
    differing = {name for name, value in packtool_defaults.items() if value != transformers_defaults[name]} - NOT_SAID
    assert differing - table().keys() == set()
    for name in differing & table().keys():
        default_text, _, other, _ = table()[name]
        for value, cell in ((packtool_defaults[name], default_text), (transformers_defaults[name], other)):
            if isinstance(value, int | float) and not isinstance(value, bool) and re.fullmatch(r"[\d.e-]+", cell):
                assert float(cell) == pytest.approx(value), name
