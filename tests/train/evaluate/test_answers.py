"""Exact matches in packs equal those of each sample alone, computed by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForImageTextToText

from packtool.batch.collate import collate_packs
from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader
from packtool.progress import SilentProgress
from packtool.train.evaluate.answers import exact_match
from packtool.train.run import train
from tests.train.tiny import TinyWorld

SETTINGS: dict[str, Any] = {"gradient_accumulation_steps": 4, "learning_rate": 5e-3, "num_train_epochs": 12.0}


@pytest.fixture(scope="module")
def full(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that has memorized some of the answers."""
    output_dir = tmp_path_factory.mktemp("full")
    return str(train(tiny.config(output_dir, **SETTINGS), SilentProgress()).checkpoint)


@pytest.fixture(scope="module")
def adapter(full: str, tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An adapter of that model: a checkpoint can be trained like any model, with the same cache."""
    settings = SETTINGS | {"model": full, "train_type": "lora", "num_train_epochs": 2.0}
    return str(train(tiny.config(tmp_path_factory.mktemp("lora"), **settings), SilentProgress()).checkpoint)


@pytest.fixture(scope="module", params=["full", "adapter"])
def trained(request: pytest.FixtureRequest) -> str:
    """One of the two."""
    return str(request.getfixturevalue(request.param))


@torch.no_grad()
def one_by_one(checkpoint: str, tiny: TinyWorld) -> list[tuple[int, int, bool]]:
    """Return (sample, turn, exact), computed by transformers for one sample at a time."""
    is_adapter = (Path(checkpoint) / "adapter_config.json").exists()
    base = PeftConfig.from_pretrained(checkpoint).base_model_name_or_path if is_adapter else checkpoint
    model: Any = AutoModelForImageTextToText.from_pretrained(base)
    if is_adapter:
        model = PeftModel.from_pretrained(model, checkpoint)
    model.eval()
    reader = CacheReader.open([tiny.cache])
    spec = InputSpec.load(tiny.model, reader.manifests[0].identity.media_limits)
    answers = []
    for position in range(len(reader)):
        sample = reader.sample(position)
        ids = torch.from_numpy(sample.input_ids.astype(np.int64)).unsqueeze(0)
        inputs = {"input_ids": ids, "mm_token_type_ids": (ids == spec.pad_ids["image"]).int()}
        if sample.images:
            batch = collate_packs([sample], spec)
            inputs |= {"pixel_values": batch.pixel_values, "image_grid_thw": batch.image_grid_thw}
        predicted = model(**inputs).logits[0].argmax(-1)
        for turn, (start, end) in enumerate(sample.turns.reshape(-1, 2).tolist()):
            assert (sample.labels[start:end] != -100).all()
            exact = predicted[start - 1 : end - 1].tolist() == sample.labels[start:end].tolist()
            answers.append((position, turn, exact))
    return answers


def test_packed_answers_equal_those_of_single_samples(trained: str, tiny: TinyWorld) -> None:
    turns = exact_match(trained, tiny.cache, packing_length=300)
    assert turns == one_by_one(trained, tiny)
    assert 0 < sum(exact for *_, exact in turns) < len(turns)


def test_the_packing_length_changes_nothing(trained: str, tiny: TinyWorld) -> None:
    short, long = (exact_match(trained, tiny.cache, packing_length=length) for length in (1, 5000))
    assert short == long
