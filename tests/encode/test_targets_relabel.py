"""Targets chosen at training are those that an export would have chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtool.config.data import EncodeSpec
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.encode.targets import TargetChoice
from packtool.rows.forms import to_sample
from packtool.rows.sample import Dropped, Sample
from packtool.rows.source import Source

FILES = {
    "qwen2.5-vl": ("mm_llamafactory_mllm_demo.jsonl", "mm_llamafactory_mllm_video_demo.jsonl"),
    "qwen3-vl": ("mm_qwen3vl_demo.jsonl", "mm_llamafactory_mllm_video_demo.jsonl", "tool_reasoning_50.jsonl"),
    "qwen3-omni": ("mm_llamafactory_mllm_audio_demo.jsonl", "mm_llamafactory_mllm_video_audio_demo.jsonl"),
}


def encode(model: Path, samples: list[Sample], loss_scale: str) -> list[EncodedSample | None]:
    spec = EncodeSpec(model=str(model), max_length=1 << 20, loss_scale=loss_scale, fps_max_frames=4)
    results = Encoder(spec, ModelFiles.load(str(model))).encode(samples)
    return [None if isinstance(item, Dropped) else item[0] for item in results]


@pytest.mark.parametrize("family", FILES)
def test_relabeling_equals_an_export(family: str, data: Path) -> None:
    model = data / "tokenizers" / family
    samples = []
    for name in FILES[family]:
        source = Source(str(data / name))
        for row_index, line in enumerate((data / name).read_text().splitlines()[:12]):
            samples.append(to_sample(json.loads(line), source, row_index))
    config = json.loads((model / "config.json").read_text())
    by_base = {base: encode(model, samples, base) for base in ("default", "last_round", "all")}
    compared = 0
    for had in by_base:
        for base in by_base:
            choice = TargetChoice.of_config(base, config)  # type: ignore[arg-type]
            for before, after in zip(by_base[had], by_base[base], strict=True):
                if before is None or after is None:
                    continue
                np.testing.assert_array_equal(choice(before).labels, after.labels)
                compared += 1
    assert compared >= 9 * 5


def sample(**changes: Any) -> EncodedSample:
    ids = np.arange(10, 20, dtype=np.int32)
    fields: dict[str, Any] = {"turns": np.array([2, 4, 6, 8], np.int32), "images": (), "channel": None}
    labels = np.where(np.isin(np.arange(10), [2, 3, 6, 7]), ids, -100).astype(np.int32)
    return EncodedSample(**{"input_ids": ids, "labels": labels, "source": "s", "row": 0, **fields, **changes})


def test_old_targets_keep_their_weights_and_new_ones_get_one() -> None:
    weights = np.zeros(10, np.float32)
    weights[[2, 3, 6, 7]] = (0.5, 2, 3, 1)
    choice = TargetChoice.of_config("all", {})
    result_weights = choice(sample(loss_scale=weights)).loss_scale
    assert result_weights is not None
    assert result_weights.tolist() == [1, 1, 0.5, 2, 1, 1, 3, 1, 1, 1]
    last = TargetChoice.of_config("last_round", {})(sample(loss_scale=weights))
    assert last.loss_scale is not None
    assert last.loss_scale.tolist() == [0, 0, 0, 0, 0, 0, 3, 1, 0, 0]
    assert (last.labels >= 0).nonzero()[0].tolist() == [6, 7]


def test_first_token_of_a_truncated_sample_is_no_target() -> None:
    choice = TargetChoice.of_config("all", {})
    assert choice(sample()).labels[0] == 10
    assert choice(sample(num_truncated=3)).labels[0] == -100


def test_tokens_excluded_by_a_rule_stay_excluded() -> None:
    """An empty thinking block at the beginning of the last turn, 6, was no target of an export with such a rule."""
    before = sample()
    before.labels[6] = -100
    assert (TargetChoice.of_config("last_round", {})(before).labels >= 0).nonzero()[0].tolist() == [6, 7]
    choice = TargetChoice.of_config("last_round", {}, among_targets=True)
    assert (choice(before).labels >= 0).nonzero()[0].tolist() == [7]
