"""Muon and AdamW as one optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon

from packtool.config.train import TrainConfig
from packtool.progress import SilentProgress
from packtool.train.model.muon import MuonAdamW
from packtool.train.run import train
from tests.train.tiny import TinyWorld, check_same_rest, read_metrics

LR, DECAY, BETAS, EPS = 1e-2, 0.1, (0.9, 0.98), 1e-8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed_tokens = nn.Embedding(5, 8)
        self.hidden = nn.Linear(8, 6)
        self.lm_head = nn.Linear(6, 5, bias=False)


def test_each_weight_moves_as_with_its_own_optimizer() -> None:
    joint, separate = Model(), Model()
    optimizer = MuonAdamW(joint.named_parameters(), lr=LR, weight_decay=DECAY, betas=BETAS, eps=EPS)
    matrix = separate.hidden.weight
    others = [weight for weight in separate.parameters() if weight is not matrix]
    expected = [
        Muon([matrix], lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        AdamW(others, lr=LR, weight_decay=DECAY, betas=BETAS, eps=EPS),
    ]
    for step in range(3):
        torch.manual_seed(step)
        for weight, other in zip(joint.parameters(), separate.parameters(), strict=True):
            weight.grad = torch.randn_like(weight)
            other.grad = weight.grad.clone()
        for group in (group for each in (optimizer, *expected) for group in each.param_groups):
            group["lr"] = LR / (1 + step)
        for each in (optimizer, *expected):
            each.step()
        for weight, other in zip(joint.parameters(), separate.parameters(), strict=True):
            assert torch.equal(weight, other)


@pytest.mark.parametrize("settings", [{}, {"train_type": "lora", "lora_dropout": 0.0, "vit_lr": 1e-4}])
def test_resumed_run_is_bit_identical(tiny: TinyWorld, tmp_path: Path, settings: dict[str, object]) -> None:
    settings = {"optim": "muon", "max_steps": 3, "save_steps": 2, **settings}
    train(tiny.config(tmp_path / "full", **settings), SilentProgress())
    checkpoint = str(tmp_path / "full" / "checkpoint-2")
    train(tiny.config(tmp_path / "resumed", **settings, resume_from_checkpoint=checkpoint), SilentProgress())
    check_same_rest(tmp_path / "full", tmp_path / "resumed", 2)
    losses = [line["loss"] for line in read_metrics(tmp_path / "full")]
    assert losses[-1] < losses[0]


def test_sharded_weights_are_refused() -> None:
    config = TrainConfig(model="m", cached_dataset=("c",), output_dir="o", optim="muon", fsdp=("full_shard",))
    assert any("--optim muon cannot be combined with --fsdp" in line for line in config.problems())
