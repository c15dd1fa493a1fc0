"""The comparison with other tools finds differences of samples, targets and losses."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Trainer

from packtool.progress import SilentProgress
from packtool.train.loop.trainer import PackTrainer
from packtool.train.run import train
from scripts._compare_recorder import Recorder, split_batch
from tests.scripts.loading import load_script
from tests.train.tiny import make_tiny_world

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def compare_tools() -> ModuleType:
    return load_script("compare_tools")


def step(samples: list[Any], **values: float) -> dict[str, Any]:
    return {"samples": samples, "learning_rate": 1.0, "loss": 2.0, "grad_norm": 4.0, "seconds": 3.0} | values


def samples_of(lengths: list[int]) -> list[tuple[list[int], list[int]]]:
    """Samples with different ids, whose last token is a target."""
    starts = [10 * i for i in range(len(lengths))]
    pairs = zip(starts, lengths, strict=True)
    return [(list(range(start, start + length)), [length - 1]) for start, length in pairs]


def test_steps_of_packtool_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, names in ((Trainer, ("training_step", "log")), (PackTrainer, ("_train_micro_batch", "log"))):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # restores what the recorder replaces
    tiny, recorder = make_tiny_world(tmp_path), Recorder()
    recorder.patch_trainer()
    recorder.patch_packtool()
    train(tiny.config(tmp_path / "out", max_steps=2), SilentProgress())
    steps = recorder.result()
    logs = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [step["loss"] for step in steps] == [log["loss"] for log in logs if "loss" in log]
    assert len(steps) == 2
    for step in steps:
        assert step["micro_batches"] == 1
        assert step["grad_norm"] > 0
        assert all(targets for _, targets in step["samples"])


@given(LENGTHS, st.sampled_from(["mask", "numbers", "positions", "boundaries"]))
def test_split_batch_returns_samples(lengths: list[int], form: str) -> None:
    samples = samples_of(lengths)
    width = max(lengths)
    padding = [width - length if form == "mask" else 0 for length in lengths]
    pairs = list(zip(samples, padding, strict=True))
    ids = [sample[0] + [0] * count for sample, count in pairs]
    labels = [[-100] * (len(sample[0]) - 1) + [1] + [-100] * count for sample, count in pairs]
    if form == "mask":
        mask = torch.tensor([[1] * len(sample[0]) + [0] * count for sample, count in pairs])
        batch = split_batch(torch.tensor(ids), torch.tensor(labels), mask)
    else:
        numbers = torch.tensor([[i + 1 for i, length in enumerate(lengths) for _ in range(length)]])
        positions = torch.tensor([[i for length in lengths for i in range(length)]])
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        fields = {"numbers": (numbers,), "positions": (None, positions), "boundaries": (None, None, bounds)}
        batch = split_batch(torch.tensor([list(chain(*ids))]), torch.tensor([list(chain(*labels))]), *fields[form])
    assert list(batch) == samples


def test_equal_records_differ_in_time_only(compare_tools: ModuleType) -> None:
    left = [step([([1, 2], [1]), ([3, 4, 5], [1, 2])], seconds=6.0)]
    right = [step([([3, 4, 5], [1, 2]), ([1, 2], [1])])]
    result = compare_tools.compare(left, right)
    assert (result.equal_samples, result.tokens, result.targets) == (1, (5, 5), (3, 3))
    assert (result.rate, result.loss, result.norm, result.time) == (0, 0, 0, 2)
    assert not result.extra


def test_differences_are_reported(compare_tools: ModuleType) -> None:
    equal = [step([([9], [])])]
    left = [*equal, step([([1, 198], [1]), ([2, 3], [])], loss=2.5, learning_rate=0.75, grad_norm=5.0)]
    right = [*equal, step([([1, 198], []), ([2, 3], [1])])]
    result = compare_tools.compare(left, right)
    assert result.extra == {198: 1, 3: -1}
    assert (result.loss, result.rate, result.norm) == (0.5, 0.25, 0.25)
    line = compare_tools.summary_line(
        "TRL 1.0", "text", result, compare_tools.compare(right, right), {198: "\n", 3: "c"}.get
    )
    assert line.startswith(
        '| TRL 1.0 | text | 2 of 2 | 5 / 5 | 1 / 1 | +1 "\\n", -1 "c" | 2.5e-01 | 5.0e-01 | 0.0e+00 |'
    )


def test_other_samples_are_reported(compare_tools: ModuleType) -> None:
    result = compare_tools.compare([step([([1, 2], [1])])], [step([([1, 3], [1])])])
    assert result.equal_samples == 0
    assert not result.extra


def test_numbers_of_steps_must_agree(compare_tools: ModuleType) -> None:
    with pytest.raises(SystemExit, match="2 steps and packtool 1"):
        compare_tools.compare([step([]), step([])], [step([])])


def test_marks_surround_what_the_assistant_writes(compare_tools: ModuleType) -> None:
    opening, ending = "{{- '<|im_start|>' + message.role + '\\n' + content }}", "{{- '<|im_end|>\\n' }}"
    marked = compare_tools.with_marks(f"a{opening}b{ending}c")
    body = "{%- generation %}{{- content }}b{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}c"
    assert marked == "a{{- '<|im_start|>' + message.role + '\\n' }}" + body


def test_a_tool_is_required(compare_tools: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare_tools.main([])
    assert "--trl-python" in capsys.readouterr().err
