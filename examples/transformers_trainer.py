"""transformers' Trainer without a subclass; checkpoints, resuming, logging, DeepSpeed and FSDP work as usual.

usage: python examples/transformers_trainer.py MODEL CACHE
   or: torchrun --nproc-per-node 8 examples/transformers_trainer.py MODEL CACHE
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments

import packtool


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the only item of the list, which is a collated micro-batch."""
    (batch,) = items
    return batch


def main(model_dir: str, cache: str, output_dir: str = "output", **options: Any) -> list[float]:
    """Train with options of ``packtool.plan``; return the mean loss over the target tokens of each step."""
    plan = packtool.plan(cache, world_size=int(os.environ.get("WORLD_SIZE", 1)), **options)
    batches = packtool.Batches(plan, "all", model=model_dir)
    args = TrainingArguments(
        output_dir,
        # Each item of the dataset is a micro-batch. Every step has the same number of them, in the order of the plan.
        per_device_train_batch_size=1,
        gradient_accumulation_steps=batches.micro_batches_per_step,
        train_sampling_strategy="sequential",
        num_train_epochs=1,  # the dataset already contains all epochs of the plan
        remove_unused_columns=False,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
        report_to="none",
        save_strategy="no",
    )
    trainer = Trainer(
        packtool.prepare_model(AutoModelForImageTextToText.from_pretrained(model_dir)),
        args,
        data_collator=collate,
        train_dataset=batches,
    )
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    main(*sys.argv[1:3], packing_length=4096)
