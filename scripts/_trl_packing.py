"""transformers' own Trainer as TRL's packing sets it up, written after TRL's documentation: TRL is not needed.

Samples are packed best-fit decreasing to a fixed length, a packed sequence is a micro-batch, positions restart with
every sample, a sample's first token carries no loss, and the model makes its own loss over the logits of all tokens.
Attention is transformers' SDPA: from the positions it makes a mask of blocks, T x T for every layer. On a GPU TRL asks
for flash attention instead, which needs no mask. TRL refuses to pack rows with pictures; here they get the pixels and
positions that packtool makes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from packtool.batch.media import load_pixels
from packtool.batch.positions import sample_positions
from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample


@dataclass(frozen=True)
class PeersEpoch:
    """Seconds from the first step's beginning to the last one's end, and what was trained in them."""

    seconds: float
    target_tokens: int
    num_packs: int
    fill: float


def pack_best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The longest sample first, each into the fullest pack that has room."""
    packs: list[list[int]] = []
    room: list[int] = []
    for sample in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [pack for pack in range(len(packs)) if room[pack] >= lengths[sample]]
        pack = min(fitting, key=lambda i: room[i], default=len(packs))
        if pack == len(packs):
            packs.append([])
            room.append(capacity)
        packs[pack].append(sample)
        room[pack] -= lengths[sample]
    return packs


@dataclass(frozen=True)
class FlatteningCollator:
    """One row for transformers' own forward and loss: nothing but the positions tells samples apart."""

    spec: InputSpec

    def __call__(self, features: Sequence[Sequence[EncodedSample]]) -> dict[str, Any]:
        samples = [sample for pack in features for sample in pack]
        # The model shifts labels by itself: a first token would be predicted from the sample before it.
        labels = [np.append(np.int64(IGNORE_INDEX), sample.labels[1:].astype(np.int64)) for sample in samples]
        positions = np.concatenate([sample_positions(sample, self.spec) for sample in samples], axis=1)
        ids = np.concatenate([sample.input_ids for sample in samples], dtype=np.int64)
        return {
            "input_ids": torch.from_numpy(ids)[None],
            "labels": torch.from_numpy(np.concatenate(labels))[None],
            "position_ids": torch.from_numpy(positions)[:, None],
            # With a key-value cache transformers would not look for samples in the positions.
            "use_cache": False,
            **load_pixels(samples, self.spec),
        }


class StopWatch(TrainerCallback):
    """Counts the seconds of all steps."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begin = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds = time.perf_counter() - self.begin


def train_an_epoch(
    model: Path, cache: Path, output_dir: Path, *, packing_length: int, learning_rate: float, seed: int
) -> PeersEpoch:
    """Train with the optimizer, schedule and number of data workers that packtool takes unless told otherwise."""
    reader = CacheReader.open([str(cache)])
    spec = InputSpec.load(str(model), reader.manifests[0].identity.media_limits)
    samples = [reader.sample(number) for number in range(len(reader))]
    lengths = [sample.length for sample in samples]
    packs = pack_best_fit_decreasing(lengths, packing_length)
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        num_train_epochs=1,
        per_device_train_batch_size=1,
        learning_rate=learning_rate,
        weight_decay=0.1,
        warmup_steps=math.ceil(0.05 * len(packs)),
        lr_scheduler_type="cosine",
        dataloader_num_workers=1,
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=seed,
    )
    loaded = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
    data: Any = [[samples[number] for number in pack] for pack in packs]
    watch = StopWatch()
    trainer = Trainer(loaded, arguments, FlatteningCollator(spec), data, callbacks=[watch])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    targets = sum(int(np.count_nonzero(sample.labels[1:] != IGNORE_INDEX)) for sample in samples)
    return PeersEpoch(watch.seconds, targets, len(packs), sum(lengths) / (len(packs) * packing_length))
