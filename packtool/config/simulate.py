"""Settings of ``packtool simulate``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from packtool.config.conflicts import Settings
from packtool.config.packing import SequenceParallelType
from packtool.config.settings import RecomputedLayers, Tokens, model_option, num_tokens, option, step_option
from packtool.errors import did_you_mean

StrategyName = Literal[
    "padded", "packed", "packed-balanced", "context-parallel", "sorted", "packed-shared", "wlb", "dynamic-cp", "skrull"
]
DistributionName = Literal["wikipedia", "lmsys", "chatqa2"]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)
BASELINE: StrategyName = "packed-shared"
"""Strategy that speed-ups refer to if it is simulated: packs shared by groups, as most frameworks train them."""


@dataclass(frozen=True, kw_only=True)
class StrategyOptions(Settings):
    """Batch sizes of the strategies, and the seed."""

    sequences_per_rank: int = step_option(64, "Train N sequences per step for each group of GPUs.", minimum=1)
    padded_batch_size: int = step_option(4, "Simulate padded training with N sequences per micro-batch.")
    shared_batch_size: int = step_option(
        1, "Use N sequences per micro-batch in the strategies context-parallel and sorted.", minimum=1
    )
    seed: int = step_option(42, "Set the random seed of lengths, packing and order.", minimum=0)


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(StrategyOptions):
    """Settings of ``packtool simulate``."""

    COMMON_OPTIONS: ClassVar[tuple[str, ...]] = (
        *("cached_dataset", "lengths", "distribution", "model", "hardware", "world_size", "gradient_checkpointing"),
        *("sequence_parallel_size", "packing_length", "strategies", "html", "max_length", "steps"),
    )

    cached_dataset: tuple[str, ...] = option((), "Use the sample lengths of these caches.", path=True)
    lengths: str | None = option(None, "Use the sample lengths (tokens) in this .npy, .json or .txt file.", path=True)
    distribution: DistributionName | None = option(
        None, "Draw sample lengths as in Wikipedia, LMSYS-Chat-1M or ChatQA2-Long-SFT."
    )
    max_length: Tokens | None = option(
        None, "Drop samples above N tokens; default is the maximum that fits into memory.", minimum=2
    )
    steps: int | None = option(None, "Simulate N optimizer steps; default is at most 32.", minimum=1)
    strategies: tuple[str, ...] = option(STRATEGIES, "Compare these training strategies.")
    html: str | None = option(None, "Draw one step of each strategy as a web page.", path=True)

    model: str | None = model_option(
        None, "Simulate this model directory, or 8b, qwen2.5-0.5b, qwen2.5-7b; default is the caches' model."
    )
    hardware: str = model_option("h100", "Simulate this GPU: h100, h200, a100, 910b, or a .yaml or .json file.")
    world_size: int = model_option(32, "Simulate N GPUs.")
    zero_stage: int = model_option(
        2, "Shard gradients and optimizer (ZeRO stage 2), or also weights (3).", minimum=2, maximum=3
    )
    gradient_checkpointing: RecomputedLayers = model_option(
        False, "Recompute activations of all layers (true), or of as many as necessary (auto)."
    )

    sequence_parallel_size: int = step_option(8, "Split sequences over groups of N GPUs.", minimum=1)
    sequence_parallel_type: SequenceParallelType = step_option("auto", "Exchange attention data by this method.")
    bucket_size: str = step_option("auto", "Limit each GPU to this many tokens, such as 26K; auto computes the limit.")
    packing_length: Tokens | None = step_option(
        None, "Limit each packed sequence to N tokens on each of its GPUs; default is --bucket-size.", minimum=1
    )

    @property
    def bucket_tokens(self) -> int | None:
        """``--bucket-size`` as a number; None for auto; ValueError if it is neither."""
        return None if self.bucket_size == "auto" else num_tokens(self.bucket_size)

    def value_problems(self) -> list[str]:
        problems = []
        length_sources = (bool(self.cached_dataset), self.lengths is not None, self.distribution is not None)
        if length_sources.count(True) != 1:
            problems.append("give either caches, or --lengths FILE, or --distribution NAME")
        if self.world_size % self.sequence_parallel_size:
            group_size = f"--sequence-parallel-size {self.sequence_parallel_size}"
            problem = f"--world-size {self.world_size} is not a multiple of {group_size}"
            problems.append(f"{problem}: some GPUs would not be used")
        if type(self.gradient_checkpointing) is int:
            problems.append("--gradient-checkpointing: simulate knows true, false and auto, not a number of layers")
        problems += self._bucket_problems()
        known = f"known are {', '.join(STRATEGIES)}"
        unknown = [name for name in self.strategies if name not in STRATEGIES]
        problems += [f"--strategies {name}: {known}{did_you_mean(name, STRATEGIES)}" for name in unknown]
        return problems

    def _bucket_problems(self) -> list[str]:
        """Return problems of ``--bucket-size``, and of a ``--packing-length`` that exceeds it."""
        try:
            limit = self.bucket_tokens
        except ValueError:
            return [f"--bucket-size {self.bucket_size}: give a number of tokens, as in 8192 or 26K, or auto"]
        if self.packing_length is not None and limit is not None and self.packing_length > limit:
            excess = f"--packing-length {self.packing_length} exceeds --bucket-size {self.bucket_size}"
            return [f"{excess}: no pack would fit"]
        return []
