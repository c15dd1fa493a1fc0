"""``packtool plan --fit``: the settings that are tried, and what each is expected to take. No torch.

Searched is what the user has not given: the packing length, whether activations are computed again, how weights,
gradients and optimizer are sharded, and how many ranks share a pack. Whether a setting fits, ``train.model.fit`` finds
out by a trace of the model.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from packtool.attention.parallel.axes import Axes
from packtool.config.plan import PlanConfig
from packtool.config.settings import part_of
from packtool.config.train import TrainConfig
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, DataError, UnsupportedModelError
from packtool.launch.world import World
from packtool.plan.epoch import EpochPlan, assign_packs, plan_epoch
from packtool.plan.pack_plan import PackPlan
from packtool.plan.towers import MediaShares
from packtool.simulate.run import read_hardware
from packtool.train.prepare.check import open_caches
from packtool.train.prepare.costs import ExpectedTime, tower_work, with_model
from packtool.train.prepare.figures import RankTokens
from packtool.train.prepare.heaviest import heaviest_tokens, seen_media, share_media
from packtool.train.prepare.planner import plan_options
from packtool.train.prepare.result import option_words
from packtool.train.prepare.sequence_parallel import axes_of

_GRAIN = 128
_LONGEST = 1 << 20
"""Tokens of the longest pack that is tried, unless a sample is longer."""
_ALIKE = 0.01
"""Times that differ by less than this share are taken for equal: the model that tells them is no better."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a run with certain settings is expected to take.

    Args:
        run: its settings.
        world_size: ranks.
        micro_batches: of a rank, those that may need most memory.
        axes: how ranks share sequences.
        fill: of the packs.
        num_steps: of an epoch.
        tokens: of an epoch.
        seconds: of an epoch.
        num_epochs: of the run.
    """

    run: TrainConfig
    world_size: int
    micro_batches: tuple[RankTokens, ...]
    axes: Axes
    fill: float
    num_steps: int
    tokens: int
    seconds: float
    num_epochs: float

    @property
    def seconds_per_token(self) -> float:
        """Seconds of the run for each of its tokens."""
        return self.seconds / self.tokens

    @property
    def sharding(self) -> str:
        """How weights, gradients and optimizer are sharded, in a word."""
        return " ".join(("fsdp", *self.run.fsdp)) if self.run.fsdp else self.run.deepspeed or "none"

    def figures(self) -> dict[str, Any]:
        """The settings and what is expected of them, by name, as JSON has them."""
        return {
            "packing_length": self.run.packing_length,
            "gradient_checkpointing": self.run.gradient_checkpointing,
            "sharding": self.sharding,
            "sequence_parallel_size": self.run.sequence_parallel_ranks,
            "fill": self.fill,
            "steps_per_epoch": self.num_steps,
            "tokens_per_step": self.tokens / self.num_steps,
            "step_seconds": self.seconds / self.num_steps,
            "tokens_per_second": self.tokens / self.seconds,
            "hours": self.seconds * self.num_epochs / 3600,
        }

    def command(self, gpus_per_node: int) -> str:
        """The command that trains with these settings; ``packtool train`` alone for one process."""
        bare = dataclasses.replace(self.run, hardware=None, dry_run=False)
        words = shlex.join(["packtool", "train", *option_words(bare)])
        nodes = -(-self.world_size // gpus_per_node)
        if nodes > 1:
            place = f"NNODES={nodes} NODE_RANK=0 MASTER_ADDR=10.0.0.1"
            return f"{place} NPROC_PER_NODE={self.world_size // nodes} {words}"
        return f"NPROC_PER_NODE={self.world_size} {words}" if self.world_size > 1 else words


class Search:
    """The settings to try for a model on caches.

    Args:
        config: what was given.

    Raises:
        ConfigError, DataError, MismatchError, StorageError: as for training.
    """

    def __init__(self, config: PlanConfig) -> None:
        from packtool.cache.reader import CacheReader

        model = config.model or str(CacheReader.open(config.cached_dataset).manifests[0].identity.spec["model"])
        self.config, self.hardware = config, read_hardware(config.hardware)
        self.base = part_of(TrainConfig, config, model=model, output_dir="output", share_prefix="false")
        self.files = ModelFiles.load(model)
        self.reader = open_caches(config.cached_dataset, self.base, self.files)
        self.max_length = config.max_length or max(manifest.max_length for manifest in self.reader.manifests)
        self._packs: dict[int, PackPlan] = {}
        self._plans: dict[tuple[int, int], EpochPlan] = {}
        self._shares: dict[tuple[int, int], MediaShares] = {}
        self._axes: dict[int, Axes] = {}
        self._media = seen_media(self.reader.index, self.files.config)

    def settings(self) -> list[TrainConfig]:
        """All settings that training takes, in groups of rising packing lengths.

        Raises:
            ConfigError: if training takes none of them.
        """
        tried = [
            dataclasses.replace(self.base, packing_length=length, **ways)
            for ways in self._ways()
            for length in self._packing_lengths(ways["sequence_parallel_size"] or 1)
        ]
        problems = {problem: None for run in tried for problem in run.problems()}
        found = [run for run in tried if not run.problems()]
        if not found:
            raise ConfigError.from_problems(list(problems))
        return found

    def plan(self, run: TrainConfig) -> EpochPlan:
        """The first epoch of a run: as training plans it."""
        assert run.packing_length is not None
        ranks = self.config.world_size // run.sequence_parallel_ranks
        key = run.packing_length, ranks
        if key not in self._plans:
            options = plan_options(run, max_length=self.max_length, world_size=ranks)
            options = with_model(options, self.files.config, run, self.hardware)
            index = self.reader.index
            assert options.cost is not None
            towers = tower_work(options.cost, index)
            packs = self._packs.get(run.packing_length)
            if packs is None:
                found = plan_epoch(
                    index.length,
                    index.target_tokens,
                    options,
                    seed=run.seed,
                    media_tokens=index.media_tokens,
                    towers=towers,
                )
                self._packs[run.packing_length] = found.packs
            else:
                found = assign_packs(
                    packs, index.target_tokens, options, media_tokens=index.media_tokens, towers=towers
                )
            self._plans[key] = found
        return self._plans[key]

    def expected(self, run: TrainConfig, time: ExpectedTime) -> Expected:
        """What a run is expected to take."""
        plan, index, size = self.plan(run), self.reader.index, run.sequence_parallel_ranks
        assert run.packing_length is not None
        key = run.packing_length, size
        if key not in self._shares:
            self._shares[key] = share_media(self._media, self.files.config, plan, size)
        shares = self._shares[key]
        micro_batches = heaviest_tokens(
            run, plan, self.files.config, index.media_tokens, index.audio_tokens, shares if size > 1 else None
        )
        return Expected(
            run=run,
            world_size=self.config.world_size,
            micro_batches=micro_batches,
            axes=self._axes_of(size),
            fill=plan.summary.fill,
            num_steps=plan.steps.num_steps,
            tokens=plan.packs.num_tokens,
            seconds=float(time.steps(run, plan, index, shares).sum()),
            num_epochs=self.config.num_train_epochs,
        )

    def _ways(self) -> Iterator[dict[str, Any]]:
        """All that is searched but the packing length."""
        given = self.config.gradient_checkpointing
        for size in self._sequence_parallel_sizes():
            for sharding in self._shardings():
                for recomputes in (False, True) if given is None else (given,):
                    yield {"sequence_parallel_size": size, "gradient_checkpointing": recomputes, **sharding}

    def _shardings(self) -> list[dict[str, Any]]:
        """The plainest first, then what needs least; DeepSpeed's only where it is installed."""
        if self.config.fsdp or self.config.deepspeed is not None:
            return [{}]
        ways: list[dict[str, Any]] = [{}]
        if self.config.world_size > 1:
            ways += [{"fsdp": ("full_shard",)}, {"fsdp": ("shard_grad_op",)}]
            if importlib.util.find_spec("deepspeed") is not None:
                ways += [{"deepspeed": f"zero{stage}"} for stage in (1, 2, 3)]
        return ways

    def _sequence_parallel_sizes(self) -> list[int | None]:
        """Powers of two within a machine, as far as the model's sequences can be shared so; None for what was given."""
        config = self.config
        asked = config.sequence_parallel_size or config.ulysses_size or config.ring_size
        if asked is not None:
            self._axes_of(config.sequence_parallel_ranks)
            return [config.sequence_parallel_size]
        sizes: list[int | None] = [None]
        size = 2
        while config.world_size % size == 0 and size <= self.hardware.gpus_per_node:
            try:
                self._axes_of(size)
            except (ConfigError, UnsupportedModelError):
                break
            sizes.append(size)
            size *= 2
        return sizes

    def _axes_of(self, size: int) -> Axes:
        """How so many ranks share a sequence.

        Raises:
            ConfigError, UnsupportedModelError: if they cannot.
        """
        if size not in self._axes:
            run = dataclasses.replace(self.base, sequence_parallel_size=size)
            world, lengths = World(0, self.config.world_size, size), self.reader.index.length
            self._axes[size] = axes_of(run, world, self.files, lengths, trained=True)
        return self._axes[size]

    def _packing_lengths(self, sequence_parallel_size: int) -> list[int]:
        """The longest sample's, and powers of two above it as long as an epoch fills a step."""
        if self.config.packing_length is not None:
            return [self.config.packing_length]
        kept = self._kept_lengths
        first = -(-int(kept.max()) // _GRAIN) * _GRAIN
        config = self.config
        num_ranks = config.world_size // sequence_parallel_size
        packs = num_ranks * config.gradient_accumulation_steps * config.per_device_train_batch_size
        most = min(int(kept.sum()) // packs, _LONGEST)
        return [first, *(length for power in range(8, 21) if first < (length := 1 << power) <= most)]

    @cached_property
    def _kept_lengths(self) -> Any:
        lengths = self.reader.index.length
        kept = lengths[lengths <= self.max_length]
        if not len(kept):
            raise DataError(
                f"No sample is left to train on: none of {len(lengths):,} has at most {self.max_length:,} tokens.",
                "Raise --max-length.",
            )
        return kept


def cheapest_first(found: list[Expected]) -> list[Expected]:
    """Sort by time per token, and what takes about as long by tokens of a step, ranks that share, and sharding."""
    least = min((each.seconds_per_token for each in found), default=0.0)

    def key(each: Expected) -> tuple[float, ...]:
        alike = (each.seconds_per_token / least - 1) // _ALIKE
        plainness = (0, *(each.run.fsdp != (), each.run.deepspeed is not None))
        return alike, each.tokens / each.num_steps, each.run.sequence_parallel_ranks, *plainness

    return sorted(found, key=key)
