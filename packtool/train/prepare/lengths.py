"""The few lengths that micro-batches have for ``--torch-compile``: a compiled layer is compiled anew for each."""

from __future__ import annotations

from collections.abc import Iterator

from packtool.encode.families import family_of
from packtool.train.prepare.prepared import PreparedRun

NUM_LENGTHS = 8
"""The number of lengths up to a full micro-batch, which most packs nearly are; one with fillers may have one more."""

_ALIGNED = 16
"""Lengths are multiples of it, as matrix products on GPUs want them."""

_FILLERS = {"image": 3, "audio": 1}
"""Tokens of the documents that let a tower run where no sample brings something for it; see ``batch.collate``."""


def length_step(run: PreparedRun) -> int:
    """What the lengths of this run's micro-batches are multiples of; 1 without ``--torch-compile``."""
    return -(-_most_tokens(run) // (NUM_LENGTHS * _ALIGNED)) * _ALIGNED if run.config.torch_compile else 1


def _most_tokens(run: PreparedRun) -> int:
    """Tokens that one process holds in a micro-batch at most, beside fillers."""
    config = run.config
    if config.bucket_tokens is not None:
        return config.bucket_tokens
    tokens = config.dynamic_batch_tokens or run.state.packing_length * config.per_device_train_batch_size
    return -(-tokens // run.world.sequence_parallel_size)


def length_lines(run: PreparedRun) -> Iterator[str]:
    """What compiling means for a run's micro-batches, if it compiles."""
    if run.config.torch_compile:
        step, kinds = length_step(run), family_of(run.files.config).kinds
        fillers = sum(number for kind, number in _FILLERS.items() if kind in kinds)
        num_lengths = -(-(_most_tokens(run) + fillers) // step)
        yield (
            f"torch.compile ({run.config.torch_compile_backend}): micro-batches are padded to multiples of {step:,} "
            f"tokens, up to {num_lengths * step:,}; the first step of each of these {num_lengths} lengths takes "
            "longer, for it is compiled"
        )
