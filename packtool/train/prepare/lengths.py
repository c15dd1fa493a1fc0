"""The few lengths that micro-batches have for ``--torch-compile``: a compiled layer is compiled anew for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packtool.config.train import TrainConfig
from packtool.encode.families import MediaKind, family_of
from packtool.train.prepare.prepared import PreparedRun

NUM_LENGTHS = 8
"""The number of lengths up to a full micro-batch, which most packs nearly are; one with fillers may have one more."""

_ALIGNED = 16
"""Lengths are multiples of it, as matrix products on GPUs want them."""

_FILLERS: dict[MediaKind, int] = {"image": 3, "audio": 1}
"""Tokens of the documents that let a tower run where no sample brings something for it; see ``batch.collate``."""


def length_step(run: PreparedRun) -> int:
    """What the lengths of this run's micro-batches are multiples of; 1 without ``--torch-compile``."""
    return _step(_most_tokens(run)) if run.config.torch_compile else 1


def _step(tokens: int) -> int:
    return -(-tokens // (NUM_LENGTHS * _ALIGNED)) * _ALIGNED


def _most_tokens(run: PreparedRun) -> int:
    return max(most_tokens(config, config.sequence_parallel_ranks) for config, _ in run.kinds_of_steps)


def most_tokens(config: TrainConfig, sequence_parallel_size: int) -> int:
    """Tokens that one process holds in a micro-batch at most, beside fillers, by the packing length of ``config``."""
    if config.bucket_tokens is not None:
        return config.bucket_tokens
    packs = (config.packing_length or config.max_length or 0) * config.per_device_train_batch_size
    return -(-(config.dynamic_batch_tokens or packs) // sequence_parallel_size)


def longest_micro_batches(config: TrainConfig, kinds: Sequence[MediaKind]) -> tuple[int, int]:
    """Tokens that one process computes at most: with media of its own, and with fillers in their place.

    Args:
        kinds: of media that the model takes.
    """
    tokens = most_tokens(config, config.sequence_parallel_ranks)
    if not config.torch_compile:
        return tokens, tokens
    step, fillers = _step(tokens), _fillers(kinds)
    return -(-tokens // step) * step, -(-(tokens + fillers) // step) * step


def _fillers(kinds: Sequence[MediaKind]) -> int:
    return sum(number for kind, number in _FILLERS.items() if kind in kinds)


def length_lines(run: PreparedRun) -> Iterator[str]:
    """What compiling means for a run's micro-batches, if it compiles."""
    if run.config.torch_compile:
        step, fillers = length_step(run), _fillers(family_of(run.files.config).kinds)
        num_lengths = -(-(_most_tokens(run) + fillers) // step)
        yield (
            f"torch.compile ({run.config.torch_compile_backend}): micro-batches are padded to multiples of {step:,} "
            f"tokens, up to {num_lengths * step:,}; the first step of each of these {num_lengths} lengths takes "
            "longer, for it is compiled"
        )
