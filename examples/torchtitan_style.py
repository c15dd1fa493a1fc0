"""A trainer in torchtitan's style: stateful objects, steps of micro-batches, manual FSDP2, distributed checkpoints.

usage: torchrun --nproc-per-node 8 examples/torchtitan_style.py MODEL CACHE
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForImageTextToText

import packtool


class Trainer:
    """Model, optimizer and batches; ``train`` runs the steps of the plan, each of one or more micro-batches."""

    def __init__(self, model_dir: str, plan: packtool.Plan) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model: Any = packtool.prepare_model(AutoModelForImageTextToText.from_pretrained(model_dir)).train()
        self.model.to(self.device)
        if plan.world_size > 1:
            for module in (*self.model.model.language_model.layers, self.model):
                fully_shard(module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.0)
        self.batches = packtool.Batches(plan, model=model_dir, device=self.device)

    def train_step(self, micro_batches: Any) -> float:
        step_loss = torch.zeros((), device=self.device)
        for batch in micro_batches:
            loss = packtool.loss(self.model(**batch).logits, batch)
            loss.backward()
            step_loss += loss.detach()
            if batch["targets"].ends_step:
                break
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if dist.is_initialized():
            dist.all_reduce(step_loss.div_(dist.get_world_size()))  # the mean over the ranks
        return step_loss.item()

    def train(self, checkpoint: str) -> list[float]:
        micro_batches = iter(self.batches)
        losses = [self.train_step(micro_batches) for _ in range(self.batches.num_steps)]
        weights, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": weights, "optimizer": optimizer, "batches": self.batches}, checkpoint_id=checkpoint)
        return losses


if __name__ == "__main__":
    dist.init_process_group()
    plan = packtool.plan(sys.argv[2], packing_length=4096, world_size=dist.get_world_size())
    print(Trainer(sys.argv[1], plan).train("checkpoint"))
