"""A plain torch loop over a plan. It resumes where it was stopped; under torchrun it uses DDP.

usage: python examples/torch_loop.py MODEL CACHE      or: torchrun --nproc-per-node 8 examples/torch_loop.py MODEL CACHE
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers

import packtool


def main(model_dir: str, cache: str, state: str = "state.pt", steps: int | None = None, **options: Any) -> list[float]:
    """Train ``steps`` steps (None: all) with options of ``packtool.plan``; resume if the file ``state`` exists."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"
    plan = packtool.plan(cache, world_size=world_size, **options)
    batches = packtool.Batches(plan, model=model_dir, device=device)
    model: Any = packtool.prepare_model(transformers.AutoModelForImageTextToText.from_pretrained(model_dir)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    stateful = {"model": model, "optimizer": optimizer, "batches": batches}
    if os.path.exists(state):
        states = torch.load(state, map_location=device)
        for name, component in stateful.items():
            component.load_state_dict(states[name])
    if world_size > 1:
        dist.init_process_group()
        model = torch.nn.parallel.DistributedDataParallel(model)
    model.train()
    losses = []
    step_loss = torch.zeros((), device=device)
    for batch in batches:
        loss = packtool.loss(model(**batch), batch)
        loss.backward()
        step_loss += loss.detach()
        if batch["targets"].ends_step:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if world_size > 1:
                dist.all_reduce(step_loss.div_(world_size))  # the mean over the ranks
            losses.append(step_loss.item())
            step_loss.zero_()
            if len(losses) == steps:
                break
    if batches.rank == 0:
        torch.save({name: component.state_dict() for name, component in stateful.items()}, state)
    return losses


if __name__ == "__main__":
    print(main(*sys.argv[1:3], packing_length=4096))
