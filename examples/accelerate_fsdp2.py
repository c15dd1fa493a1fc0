"""accelerate with FSDP2: weights, gradients and optimizer states are sharded over the processes.

usage: accelerate launch --num-processes 8 examples/accelerate_fsdp2.py MODEL CACHE
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin

import packtool


def main(model_dir: str, cache: str, **options: Any) -> list[float]:
    """Train with options of ``packtool.plan``; return the mean loss over the target tokens of each step."""
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = packtool.prepare_model(transformers.AutoModelForImageTextToText.from_pretrained(model_dir))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    # These batches already belong to one rank, so they are not prepared: accelerate would divide them again.
    plan = packtool.plan(cache, world_size=accelerator.num_processes, **options)
    batches = packtool.Batches(plan, accelerator.process_index, model=model_dir, device=accelerator.device)
    accelerator.register_for_checkpointing(batches)

    losses = []
    step_loss = torch.zeros((), device=accelerator.device)
    model.train()
    for batch in batches:
        loss = packtool.loss(model(**batch), batch)
        accelerator.backward(loss)
        step_loss += loss.detach()
        if batch["targets"].ends_step:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(step_loss, "mean")))
            accelerator.print(f"step {len(losses)} of {batches.num_steps}: loss {losses[-1]:.4f}")
            step_loss = torch.zeros_like(step_loss)
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:3], packing_length=4096)
