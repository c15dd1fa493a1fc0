"""Noise on embeddings: each sample of a pack has that of its own length, and only while a batch is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from packtool.batch.batch import PackedBatch, PaddedBatch
from packtool.progress import SilentProgress
from packtool.train.loop.trainer import EmbeddingNoise, sample_lengths
from packtool.train.run import train
from tests.batch.reduced import reduced_model
from tests.train.tiny import TinyWorld

ALPHA = 5.0


def batch(kind: type, ids: torch.Tensor, **fields: Any) -> Any:
    empty = {"labels": ids, "position_ids": ids, "media": {}, "towers": {}, "loss_weights": None, "channels": ()}
    return kind(input_ids=ids, num_samples=2, target_positions=ids[0, :1], **empty, **fields)


def packed(*lengths: int) -> PackedBatch:
    ids = torch.ones(1, sum(lengths), dtype=torch.int64)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return batch(PackedBatch, ids, cu_seqlens=ends, lengths=lengths)


def test_lengths_of_samples_not_of_packs() -> None:
    assert sample_lengths(packed(2, 3)).tolist() == [[2, 2, 3, 3, 3]]
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert sample_lengths(batch(PaddedBatch, mask, attention_mask=mask)).tolist() == [[2, 2, 2], [3, 3, 3]]


def test_noise_is_bounded_by_sample_length() -> None:
    model = reduced_model("qwen3").train()
    embeddings: Any = model.get_input_embeddings()
    plain = embeddings(torch.ones(1, 404, dtype=torch.int64))
    noise = EmbeddingNoise(model, ALPHA)
    noise.batch = packed(4, 400)
    torch.manual_seed(0)
    noise_size = (embeddings(noise.batch.input_ids) - plain).abs()[0]
    width = plain.shape[-1]
    for part, length in ((noise_size[:4], 4), (noise_size[4:], 400)):
        max_noise = ALPHA / (length * width) ** 0.5
        assert part.max() <= max_noise * 1.001
        assert part.max() > 0.9 * max_noise
    model.eval()
    assert torch.equal(embeddings(noise.batch.input_ids), plain)
    model.train()
    noise.batch = None
    assert torch.equal(embeddings(torch.ones(1, 404, dtype=torch.int64)), plain)


def test_noise_changes_training_reproducibly(tiny: TinyWorld, tmp_path: Path) -> None:
    def loss(name: str, **settings: Any) -> float:
        result = train(tiny.config(tmp_path / name, max_steps=1, save_strategy="no", **settings), SilentProgress())
        assert result.last_loss is not None
        return result.last_loss

    plain = loss("plain")
    noisy = loss("noisy", neftune_noise_alpha=20.0)
    assert noisy != plain
    assert loss("set", training={"neftune_noise_alpha": 20.0}) == noisy
