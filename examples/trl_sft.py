"""TRL's SFTTrainer with its own fused loss and metrics, on packs that packtool plans and collates.

usage: python examples/trl_sft.py MODEL CACHE       or: torchrun --nproc-per-node 8 examples/trl_sft.py MODEL CACHE
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForImageTextToText, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import packtool


def main(model_dir: str, cache: str, output_dir: str = "output", **options: Any) -> list[float]:
    """Train with options of ``packtool.plan``; return the mean loss over the target tokens of each step."""
    # Prefixes are not shared, because labels of a shared prefix have weights, which TRL's loss does not support.
    plan = packtool.plan(cache, world_size=int(os.environ.get("WORLD_SIZE", 1)), share_prefix="false", **options)
    batches = packtool.Batches(plan, "all", model=model_dir)

    def collate(rows: list[dict[str, int]]) -> dict[str, Any]:
        (row,) = rows
        batch = batches[row["batch"]]
        if batch["targets"].weights is not None:
            raise SystemExit("this cache has target weights, which TRL's loss ignores: use the Trainer's recipe")
        return batch

    args = SFTConfig(
        output_dir,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=batches.micro_batches_per_step,
        train_sampling_strategy="sequential",
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
        num_train_epochs=1,  # the dataset already contains all epochs of the plan
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        report_to="none",
        save_strategy="no",
    )
    # SFTTrainer accepts only a Dataset of the datasets library. This one contains the indices of the micro-batches.
    batch_indices = Dataset.from_dict({"batch": list(range(len(batches)))})
    model = packtool.prepare_model(AutoModelForImageTextToText.from_pretrained(model_dir))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    trainer = SFTTrainer(model, args, data_collator=collate, train_dataset=batch_indices, processing_class=tokenizer)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    main(*sys.argv[1:3], packing_length=4096)
