"""``packtool plan --fit``: the settings that a GPU's memory holds, by a trace of each, the cheapest first.

Searched is what the user has not set: the packing length, whether activations are computed again, how weights,
gradients and optimizer are sharded, and how many ranks share a pack.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from packtool.attention.parallel.axes import Axes
from packtool.attention.support import refuse_unsupported
from packtool.batch.spec import model_config
from packtool.config.plan import PlanConfig
from packtool.config.settings import part_of
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, DataError, UnsupportedModelError
from packtool.launch.world import World
from packtool.planning.epoch import EpochPlan
from packtool.planning.towers import MediaShares
from packtool.progress import Progress
from packtool.simulate.cost import Constants
from packtool.simulate.run import read_hardware
from packtool.train.model.load import quiet_transformers, resolve_dtype
from packtool.train.model.memory import (
    MemoryEstimate,
    PassBytesOf,
    TracedOnce,
    estimate_memory,
    model_without_weights,
    parameter_sizes,
)
from packtool.train.prepare.costs import ExpectedTime
from packtool.train.prepare.figures import RankTokens
from packtool.train.prepare.heaviest import heaviest_tokens, seen_media, share_media
from packtool.train.prepare.opening import open_to_train
from packtool.train.prepare.result import option_words
from packtool.train.prepare.sequence_parallel import axes_of
from packtool.train.prepare.shared_prefixes import find_shared

SHOWN = 12
"""Proposals that are made, at most."""
_GRAIN = 128
_LONGEST = 1 << 20
"""Tokens of the longest pack that is tried, unless a sample is longer."""
_ALIKE = 0.01
"""Times that differ by less than this share are taken for equal: the estimate is no more exact."""
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Settings of a run, and the time and memory that it is expected to take.

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
        memory: of a rank; None before it is traced.
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
    memory: MemoryEstimate | None = None

    @property
    def seconds_per_token(self) -> float:
        """Seconds of the run for each of its tokens."""
        return self.seconds / self.tokens

    @property
    def sharding(self) -> str:
        """How weights, gradients and optimizer are sharded, in a word."""
        return " ".join(("fsdp", *self.run.fsdp)) if self.run.fsdp else self.run.deepspeed or "none"

    def figures(self, gpus_per_node: int) -> dict[str, Any]:
        """The settings and the estimates, by name, as JSON has them, of a run that fits."""
        assert self.memory is not None
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
            "memory_gib": self.memory.total,
            "command": self.command(gpus_per_node),
        }

    def command(self, gpus_per_node: int) -> str:
        """The command that trains with these settings; ``packtool train`` alone for one process."""
        bare = dataclasses.replace(self.run, output_dir="output", hardware=None, dry_run=False)
        words = shlex.join(["packtool", "train", *option_words(bare)])
        nodes = -(-self.world_size // gpus_per_node)
        if nodes > 1:
            place = f"NNODES={nodes} NODE_RANK=0 MASTER_ADDR=10.0.0.1"
            return f"{place} NPROC_PER_NODE={self.world_size // nodes} {words}"
        return f"NPROC_PER_NODE={self.world_size} {words}" if self.world_size > 1 else words


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Result of the search.

    Args:
        proposals: the cheapest first.
        num_settings: that there are.
        num_tried: those that were looked at, from the cheapest on, until there were enough proposals: the others of
            them do not fit.
        memory: bytes of a GPU, as given.
        budget: bytes of them that a run may fill.
        hardware: whose speed was taken.
        gpus_per_node: of such machines.
        shareable: part of the tokens that shared prefixes would save, which the search leaves out; 0 where
            ``--share-prefix auto`` would share none.
    """

    proposals: list[Proposal]
    num_settings: int
    num_tried: int
    memory: int
    budget: float
    hardware: str
    gpus_per_node: int
    shareable: float

    def figures(self) -> dict[str, Any]:
        """All of it by name, as JSON has it."""
        return {
            "fit": self.memory,
            "budget_gib": self.budget / _GIB,
            "hardware": self.hardware,
            "num_settings": self.num_settings,
            "num_tried": self.num_tried,
            "num_too_large": self.num_tried - len(self.proposals),
            "shareable": self.shareable,
            "proposals": [proposal.figures(self.gpus_per_node) for proposal in self.proposals],
        }


def find_fit(config: PlanConfig, progress: Progress) -> Fit:
    """Search settings that fit into ``--fit``, with those that the user has set.

    Raises:
        ConfigError: if none fits, with the nearest; or what training would refuse.
        UnsupportedModelError: for a model that cannot be packed, or traced.
        DataError, MismatchError, StorageError: as for training.
    """
    assert config.fit is not None
    search = Search(config)
    budget = config.fit * Constants().usable_memory
    runs = search.settings()
    progress.start("expecting steps", len(runs))
    candidates = []
    for run in runs:
        candidates.append(search.expected(run))
        progress.advance(1)
    progress.finish()
    proposals: list[Proposal] = []
    num_tried = 0
    progress.start("tracing memory, of the cheapest first", None)
    for each in cheapest_first(candidates):
        num_tried += 1
        progress.advance(1)
        if search.min_bytes(each) <= budget and (memory := search.memory(each)).total * _GIB <= budget:
            proposals.append(dataclasses.replace(each, memory=memory))
        if len(proposals) == SHOWN:
            break
    progress.finish()
    if not proposals:
        raise _nothing_fits(search, candidates, budget)
    capacity = proposals[0].run.packing_length or search.max_length
    shared, _ = find_shared(config, search.files.config, search.reader, capacity=capacity, max_length=search.max_length)
    return Fit(
        proposals=proposals,
        num_settings=len(candidates),
        num_tried=num_tried,
        memory=config.fit,
        budget=budget,
        hardware=search.hardware.name,
        gpus_per_node=search.hardware.gpus_per_node,
        shareable=0.0 if shared is None else shared.saved,
    )


class Search:
    """The settings to try for a model on caches, with their estimates: no plan is made and no pass traced twice.

    Args:
        config: what the user has set.

    Raises:
        ConfigError, DataError, MismatchError, StorageError: as for training.
    """

    def __init__(self, config: PlanConfig) -> None:
        from packtool.cache.reader import CacheReader

        model = config.model or str(CacheReader.open(config.cached_dataset).manifests[0].identity.spec["model"])
        self.config, self.hardware = config, read_hardware(config.hardware)
        self.base = part_of(TrainConfig, config, model=model, share_prefix="false")
        self.inputs = open_to_train(self.base)
        _, self.files, self.reader = self.inputs.of_run
        self.max_length = self.inputs.options.max_length
        self._first_plans: dict[int, EpochPlan] = {}
        self._plans: dict[tuple[int, int], EpochPlan] = {}
        self._shares: dict[tuple[int, int], MediaShares] = {}
        self._axes: dict[int, Axes] = {}
        self._media = seen_media(self.reader.index, self.files.config)
        self._model_config = model_config(self.files.directory)
        refuse_unsupported(self._model_config)
        self._trace = TracedOnce()
        self._models: dict[tuple[bool, bool], nn.Module] = {}
        self._memory: dict[str, MemoryEstimate] = {}

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
            options = dataclasses.replace(self.inputs.options, packing_length=run.packing_length)
            inputs = dataclasses.replace(self.inputs, options=options)
            shape = ranks, run.gradient_accumulation_steps, run.per_device_train_batch_size
            first = self._first_plans.get(run.packing_length)
            if first is None:
                first = self._first_plans[run.packing_length] = self._plans[key] = inputs.plan_of(0, shape)
            else:
                self._plans[key] = inputs.assign(first.packs, shape)
        return self._plans[key]

    def expected(self, run: TrainConfig) -> Proposal:
        """The settings of a run with the time that it is expected to take."""
        plan, index, size = self.plan(run), self.reader.index, run.sequence_parallel_ranks
        assert run.packing_length is not None
        key = run.packing_length, size
        if key not in self._shares:
            self._shares[key] = share_media(self._media, self.files.config, plan, size)
        shares = self._shares[key]
        micro_batches = heaviest_tokens(
            run, plan, self.files.config, index.media_tokens, index.audio_tokens, shares if size > 1 else None
        )
        return Proposal(
            run=run,
            world_size=self.config.world_size,
            micro_batches=micro_batches,
            axes=self._axes_of(size),
            fill=plan.summary.fill,
            num_steps=plan.steps.num_steps,
            tokens=plan.packs.num_tokens,
            seconds=float(self._time(run).steps(run, plan, index, shares).sum()),
            num_epochs=self.config.num_train_epochs,
        )

    def memory(self, proposal: Proposal) -> MemoryEstimate:
        """Memory of a rank, as ``packtool train --dry-run`` estimates it.

        Raises:
            UnsupportedModelError: if the model cannot be traced.
        """
        key = repr(proposal.run)
        if key not in self._memory:
            self._memory[key] = self._estimate(proposal, self._trace)
        found = self._memory[key]
        if found.activations is None:
            raise UnsupportedModelError(
                f"--fit: what a {self._model_config.model_type} keeps of a token cannot be traced",
                "Leave --fit out; packtool train --dry-run tells what is known of its memory.",
            )
        return found

    def min_bytes(self, proposal: Proposal) -> float:
        """Bytes that a rank needs at least, by the traces so far: a pass of more tokens holds no less."""

        def traced(run: TrainConfig, _: Any, dtype: torch.dtype, tokens: RankTokens, axes: Axes) -> int:
            return self._trace.at_least(run, dtype, tokens, axes)

        return self._estimate(proposal, traced).total * _GIB

    def _time(self, run: TrainConfig) -> ExpectedTime:
        """The model of a run on its devices, for estimates of time."""
        sizes = parameter_sizes(self._model(run))
        dtype = self._dtype(run)
        trained = [(count, size) for count, size, is_trained in sizes if is_trained]
        # FSDP reduces in float32, DeepSpeed in the computation's precision, and torch's data-parallel ranks as kept.
        kept = {True: 4, False: dtype.itemsize}[bool(run.fsdp)] if run.fsdp or run.deepspeed else None
        return ExpectedTime(
            model=self.files.config,
            hardware=self.hardware,
            world_size=self.config.world_size,
            weight_bytes=sum(count for count, _, _ in sizes) * dtype.itemsize,
            gradient_bytes=sum(count * (kept or size) for count, size in trained),
            trained_bytes=sum(count for count, _ in trained) * dtype.itemsize,
        )

    def _estimate(self, proposal: Proposal, trace: PassBytesOf) -> MemoryEstimate:
        run = proposal.run
        return estimate_memory(
            run,
            self._model(run),
            self._model_config,
            dtype=self._dtype(run),
            world_size=proposal.world_size,
            micro_batches=proposal.micro_batches,
            axes=proposal.axes,
            trace=trace,
        )

    def _dtype(self, run: TrainConfig) -> torch.dtype:
        return resolve_dtype(self._model_config, run, on_gpu=True)

    def _model(self, run: TrainConfig) -> nn.Module:
        """The model with its weights as a run keeps them, which depends on who shards it."""
        key = bool(run.fsdp), run.deepspeed is not None
        if key not in self._models:
            with quiet_transformers():
                self._models[key] = model_without_weights(run, self._model_config, self._dtype(run))
        return self._models[key]

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


def cheapest_first(found: list[Proposal]) -> list[Proposal]:
    """Sort by time per token, and what takes about as long by tokens of a step, ranks that share, and sharding."""
    least = min((each.seconds_per_token for each in found), default=0.0)

    def key(each: Proposal) -> tuple[float, ...]:
        alike = (each.seconds_per_token / least - 1) // _ALIKE
        plainness = (0, *(each.run.fsdp != (), each.run.deepspeed is not None))
        return alike, each.tokens / each.num_steps, each.run.sequence_parallel_ranks, *plainness

    return sorted(found, key=key)


def _nothing_fits(search: Search, candidates: list[Proposal], budget: float) -> ConfigError:
    """Which comes nearest, by how much it is too large, and what else there is to do."""
    config, each = search.config, min(candidates, key=search.min_bytes)
    for other in sorted(candidates, key=search.min_bytes):
        # What is certain to be larger needs no trace.
        if search.min_bytes(other) < search.memory(each).total * _GIB:
            each = min(each, other, key=lambda proposal: search.memory(proposal).total)
    run, total = each.run, search.memory(each).total * _GIB
    told = f"--packing-length {run.packing_length}, --gradient-checkpointing {str(run.gradient_checkpointing).lower()}"
    told += f", sharding {each.sharding}, --sequence-parallel-size {run.sequence_parallel_ranks}"
    remedies = ["more GPUs (--world-size)"]
    remedies += ["adapters (--train-type lora)"] if config.train_type == "full" else []
    remedies += ["shorter samples (--max-length)"]
    remedies += ["--fsdp full_shard offload, which keeps weights in the machine's memory"] if not config.fsdp else []
    return ConfigError(
        f"--fit: nothing fits into {budget / _GIB:.1f} GiB, which is {Constants().usable_memory:.0%} of it: "
        f"the rest is for libraries and the allocator. Nearest is {told}: {total / _GIB:.1f} GiB, "
        f"{(total - budget) / _GIB:.1f} too many ({search.memory(each).sentence()}).",
        f"Try {'; or '.join(remedies)}.",
    )
