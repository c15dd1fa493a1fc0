"""A Lightning module that takes an optimizer step when a step of the plan ends.

usage: python examples/lightning_module.py MODEL CACHE
"""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForImageTextToText

import packtool


class Packed(lightning.LightningModule):
    """A model, and the micro-batches of a plan."""

    def __init__(self, model_dir: str, plan: packtool.Plan) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model_dir, self.plan = model_dir, plan
        self.losses: list[float] = []
        self.step_loss: Any = 0.0
        self.model = packtool.prepare_model(AutoModelForImageTextToText.from_pretrained(model_dir)).train()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(packtool.Batches(self.plan, self.global_rank, model=self.model_dir), batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = packtool.loss(self.model(**batch), batch)
        self.manual_backward(loss)
        self.step_loss += loss.detach()
        if batch["targets"].ends_step:
            self.clip_gradients(optimizer, gradient_clip_val=1.0)
            optimizer.step()
            optimizer.zero_grad()
            self.losses.append(float(self.all_gather(self.step_loss).mean()))
            self.step_loss = 0.0


def main(model_dir: str, cache: str, devices: int = 1, **options: Any) -> list[float]:
    """Train with options of ``packtool.plan``; return the mean loss over the target tokens of each step."""
    module = Packed(model_dir, packtool.plan(cache, world_size=devices, **options))
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    # Each rank already has its own batches. A sampler must not divide or shuffle them.
    lightning.Trainer(devices=devices, max_epochs=1, use_distributed_sampler=False, **quiet).fit(module)
    return module.losses


if __name__ == "__main__":
    print(main(*sys.argv[1:3], packing_length=4096))
