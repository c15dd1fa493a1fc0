"""``packtool plan --fit``: which settings a GPU's memory holds, by a trace of each, and the cheapest of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from packtool.attention.parallel.axes import Axes
from packtool.attention.support import refuse_unsupported
from packtool.batch.spec import model_config
from packtool.config.plan import PlanConfig
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, UnsupportedModelError
from packtool.progress import Progress
from packtool.simulate.cost import Constants
from packtool.train.model.load import quiet_transformers, resolve_dtype
from packtool.train.model.memory import (
    MemoryEstimate,
    TracedOnce,
    estimate_memory,
    model_without_weights,
)
from packtool.train.model.quantize import whole_size
from packtool.train.prepare.costs import ExpectedTime
from packtool.train.prepare.figures import RankTokens
from packtool.train.prepare.fit import Expected, Search, cheapest_first
from packtool.train.prepare.shared_prefixes import find_shared

SHOWN = 12
"""Proposals that are made, at most."""

_GIB = 2**30


@dataclass(frozen=True)
class Proposal:
    """Settings that fit.

    Args:
        expected: the settings, and how long they take.
        memory: of a rank.
    """

    expected: Expected
    memory: MemoryEstimate


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What was found.

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
            "proposals": [
                {
                    **found.expected.figures(),
                    "memory_gib": found.memory.total,
                    "command": found.expected.command(self.gpus_per_node),
                }
                for found in self.proposals
            ],
        }


def find_fit(config: PlanConfig, progress: Progress) -> Fit:
    """Search what is not given for settings that fit into ``--fit``.

    Raises:
        ConfigError: if none fits, with the nearest; or what training would refuse.
        UnsupportedModelError: for a model that cannot be packed, or traced.
        DataError, MismatchError, StorageError: as for training.
    """
    assert config.fit is not None
    search = Search(config)
    budget = config.fit * Constants().usable_memory
    memory = _Memory(search)
    runs = search.settings()
    progress.start("expecting steps", len(runs))
    expected = []
    for run in runs:
        expected.append(search.expected(run, memory.time(run)))
        progress.advance(1)
    progress.finish()
    proposals: list[Proposal] = []
    num_tried = 0
    progress.start("tracing memory, of the cheapest first", None)
    for each in cheapest_first(expected):
        num_tried += 1
        progress.advance(1)
        if memory.at_least(each) <= budget and (found := memory.of(each)).total * _GIB <= budget:
            proposals.append(Proposal(each, found))
        if len(proposals) == SHOWN:
            break
    progress.finish()
    if not proposals:
        raise _nothing_fits(config, expected, memory, budget)
    capacity = proposals[0].expected.run.packing_length or search.max_length
    shared, _ = find_shared(config, search.files.config, search.reader, capacity=capacity, max_length=search.max_length)
    return Fit(
        proposals=proposals,
        num_settings=len(expected),
        num_tried=num_tried,
        memory=config.fit,
        budget=budget,
        hardware=search.hardware.name,
        gpus_per_node=search.hardware.gpus_per_node,
        shareable=0.0 if shared is None else shared.saved,
    )


class _Memory:
    """The memory of a rank for settings of one model, traced no more often than need be."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._config: PreTrainedConfig = model_config(search.files.directory)
        refuse_unsupported(self._config)
        self._trace = TracedOnce()
        self._models: dict[tuple[bool, bool], nn.Module] = {}
        self._known: dict[str, MemoryEstimate] = {}

    def of(self, expected: Expected) -> MemoryEstimate:
        """The estimate that ``packtool train --dry-run`` tells.

        Raises:
            UnsupportedModelError: if the model cannot be traced.
        """
        key = repr(expected.run)
        if key not in self._known:
            self._known[key] = self._estimate(expected, self._trace)
        found = self._known[key]
        if found.activations is None:
            raise UnsupportedModelError(
                f"--fit: what a {self._config.model_type} keeps of a token cannot be traced",
                "Leave --fit out; packtool train --dry-run tells what is known of its memory.",
            )
        return found

    def at_least(self, expected: Expected) -> float:
        """Bytes that it will be at least, by what was traced so far: a pass of more tokens holds no less."""
        return self._estimate(expected, self._known_of).total * _GIB

    def time(self, run: TrainConfig) -> ExpectedTime:
        """What tells the time of a run."""
        sizes = [
            (whole_size(weight), weight.element_size(), weight.requires_grad)
            for weight in self._model(run).parameters()
        ]
        dtype = self._dtype(run)
        trained = [(count, size) for count, size, is_trained in sizes if is_trained]
        # FSDP reduces in float32, DeepSpeed in the computation's precision, and torch's data-parallel ranks as kept.
        kept = {True: 4, False: dtype.itemsize}[bool(run.fsdp)] if run.fsdp or run.deepspeed else None
        return ExpectedTime(
            model=self._search.files.config,
            hardware=self._search.hardware,
            world_size=self._search.config.world_size,
            weight_bytes=sum(count for count, _, _ in sizes) * dtype.itemsize,
            gradient_bytes=sum(count * (kept or size) for count, size in trained),
            trained_bytes=sum(count for count, _ in trained) * dtype.itemsize,
        )

    def _estimate(self, expected: Expected, trace: Any) -> MemoryEstimate:
        run = expected.run
        return estimate_memory(
            run,
            self._model(run),
            self._config,
            dtype=self._dtype(run),
            world_size=expected.world_size,
            micro_batches=expected.micro_batches,
            axes=expected.axes,
            trace=trace,
        )

    def _known_of(
        self, run: TrainConfig, _model: PreTrainedConfig, dtype: torch.dtype, tokens: RankTokens, axes: Axes
    ) -> int:
        return self._trace.at_least(run, dtype, tokens, axes)

    def _dtype(self, run: TrainConfig) -> torch.dtype:
        return resolve_dtype(self._config, run, on_gpu=True)

    def _model(self, run: TrainConfig) -> nn.Module:
        """The model with its weights as a run keeps them, which depends on who shards it."""
        key = bool(run.fsdp), run.deepspeed is not None
        if key not in self._models:
            with quiet_transformers():
                self._models[key] = model_without_weights(run, self._config, self._dtype(run))
        return self._models[key]


def _nothing_fits(config: PlanConfig, expected: list[Expected], memory: _Memory, budget: float) -> ConfigError:
    """Which comes nearest, by how much it is too large, and what else there is to do."""
    each = min(expected, key=memory.at_least)
    for other in sorted(expected, key=memory.at_least):
        # What is certain to be larger needs no trace.
        if memory.at_least(other) < memory.of(each).total * _GIB and memory.of(other).total < memory.of(each).total:
            each = other
    run, total = each.run, memory.of(each).total * _GIB
    told = f"--packing-length {run.packing_length}, --gradient-checkpointing {str(run.gradient_checkpointing).lower()}"
    told += f", sharding {each.sharding}, --sequence-parallel-size {run.sequence_parallel_ranks}"
    remedies = ["more GPUs (--world-size)"]
    remedies += ["adapters (--train-type lora)"] if config.train_type == "full" else []
    remedies += ["shorter samples (--max-length)"]
    remedies += ["--fsdp full_shard offload, which keeps weights in the machine's memory"] if not config.fsdp else []
    return ConfigError(
        f"--fit: nothing fits into {budget / _GIB:.1f} GiB, which is {Constants().usable_memory:.0%} of it: "
        f"the rest is for libraries and the allocator. Nearest is {told}: {total / _GIB:.1f} GiB, "
        f"{(total - budget) / _GIB:.1f} too many ({memory.of(each).sentence()}).",
        f"Try {'; or '.join(remedies)}.",
    )
