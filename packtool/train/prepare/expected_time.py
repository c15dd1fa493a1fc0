"""How long a planned epoch takes on paper: computation, and what ranks tell each other, by the models of ``simulate``.

A micro-batch of packs on P ranks that share it takes

    max(launches, language model / P + towers of the rank with most to look at
        + exchanges that its attention does not hide, collectives of sharded weights)

for pictures are looked at, and sounds heard, whole, and ranks wait for each other behind their towers
(``plan.media_shares``); a rank's neighbours' weights are gathered, and its gradients sent, while layers compute. A step
takes what its slowest rank takes for its micro-batches. Gradients that are exchanged once a step travel behind the
backward pass of the last micro-batch, and what is longer than that is waited for; 16-bit weights that come back from
ZeRO-1 and ZeRO-2 travel in the open.

Left out: the optimizer's own time, loading, evaluation and stragglers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.cache.reader import SplitIndex
from packtool.config.train import TrainConfig
from packtool.plan.epoch import EpochPlan
from packtool.plan.media_shares import MediaShares
from packtool.simulate.cost import Machine
from packtool.simulate.hardware import Hardware
from packtool.simulate.model_sizes import MODEL_PRESETS, ModelSizes
from packtool.train.prepare.costs import RunCosts, sample_costs, tower_work

Seconds = npt.NDArray[np.float64]
_BACKWARD = 2 / 3
"""The share of a micro-batch that its backward pass is, about."""


@dataclass(frozen=True)
class Collectives:
    """Seconds that ranks take to exchange weights and gradients.

    Args:
        each: beside every micro-batch.
        last: beside the backward pass of a step's last micro-batch.
        open: of a step, with nothing to hide behind.
    """

    each: float = 0.0
    last: float = 0.0
    open: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ExpectedTime:
    """A model on devices, as it is trained.

    Args:
        model: its ``config.json``.
        hardware: of each rank.
        world_size: ranks.
        weight_bytes: of all weights in the precision of the computation.
        gradient_bytes: of the gradients as they are exchanged.
        trained_bytes: of the weights that are trained, in the precision of the computation.
    """

    model: Mapping[str, Any]
    hardware: Hardware
    world_size: int
    weight_bytes: int
    gradient_bytes: int
    trained_bytes: int

    def steps(self, config: TrainConfig, plan: EpochPlan, index: SplitIndex, shares: MediaShares) -> Seconds:
        """Seconds of each step of an epoch, (S,).

        Args:
            config: of the run.
            plan: its packs, assigned.
            index: of the caches that it is made for.
            shares: who looks at which of their pictures.
        """
        steps = plan.steps
        cells = self._cells(config, plan, index, shares)
        ranks = steps.rank_sums(cells)
        told = self.collectives(config)
        hidden = _BACKWARD * ranks.min(axis=1) / np.maximum(np.diff(steps.step_offsets) // steps.world_size, 1)
        return np.asarray(ranks.max(axis=1) + np.maximum(told.last - hidden, 0.0) + told.open)

    def collectives(self, config: TrainConfig) -> Collectives:
        """What the way of sharding exchanges, and when."""
        if self.world_size == 1:
            return Collectives()
        gathered, reduced = self._seconds(self.weight_bytes), self._seconds(self.gradient_bytes)
        if config.fsdp:
            passes = 1 if "shard_grad_op" in config.fsdp else 2
            return Collectives(each=passes * gathered + reduced)
        stage = config.deepspeed[4:5] if config.deepspeed is not None else ""
        if stage == "3":
            return Collectives(each=2 * gathered + reduced)
        if stage in ("1", "2"):
            sends = {"each" if stage == "2" else "last": reduced}
            return Collectives(**sends, open=self._seconds(self.trained_bytes))
        return Collectives(last=2 * reduced)

    def _seconds(self, num_bytes: int) -> float:
        """Seconds of a collective over all ranks, layer by layer."""
        num_layers = self._sizes.num_layers
        return num_layers * self.hardware.collective_seconds(num_bytes / num_layers, self.world_size)

    @property
    def _sizes(self) -> ModelSizes:
        try:
            return ModelSizes.of_config(self.model)
        except (KeyError, TypeError, ValueError):
            return ModelSizes.of_config(MODEL_PRESETS["8b"])

    def _cells(self, config: TrainConfig, plan: EpochPlan, index: SplitIndex, shares: MediaShares) -> Seconds:
        """Seconds of each micro-batch on each data-parallel rank, (C,)."""
        sequence_parallel_size = config.sequence_parallel_ranks
        cost, sizes = RunCosts.of(config, self.model).hardware, self._sizes
        machine = Machine(
            sizes=sizes,
            hardware=self.hardware,
            world_size=self.world_size,
            recompute=bool(config.gradient_checkpointing),
            way=config.sequence_parallel_type,
        )
        # The costs of this run have its recomputation in them, and what is frozen.
        own = dataclasses.replace(machine, sizes=dataclasses.replace(sizes, cost=cost), recompute=False)
        again = machine.step_time(sequence_parallel_size)
        times = dataclasses.replace(
            own.step_time(sequence_parallel_size), exchanges=again.exchanges, launch_seconds=again.launch_seconds
        )
        lengths = index.length.astype(np.float64)
        slower = lengths * (times.square_flops * lengths + times.query_flops * sequence_parallel_size)
        packs, steps = plan.packs, plan.steps

        def cells(per_sample: Seconds) -> Seconds:
            return steps.cell_sums(np.add.reduceat(per_sample[packs.samples], packs.offsets[:-1]))

        flops = cells(sample_costs(cost, index, index.target_tokens) + slower)
        looked = towers = cells(tower_work(cost, index).flops.astype(np.float64))
        if sequence_parallel_size > 1:
            towers = shares.most(cost.towers(shares.media.tokens, shares.media.squares, shares.media.sounds))
        speed = times.flops_per_second
        attention = cells(times.attention_flops * lengths**2 + slower) / sequence_parallel_size / speed
        busy = (
            (flops - looked) / sequence_parallel_size + towers + np.where(flops > 0, times.batch_flops, 0.0)
        ) / speed
        busy += times.waited(cells(lengths), np.zeros(len(flops)), attention)
        return np.maximum(busy, max(times.launch_seconds, self.collectives(config).each))
