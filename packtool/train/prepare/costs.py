"""FLOPs of a run's samples, and the time of its planned steps, by the models of ``planning.cost`` and ``simulate``.

A micro-batch of packs on P ranks that share it takes

    max(launches, language model / P + towers of the rank with the most media
        + exchanges that its attention does not hide, collectives of sharded weights)

because towers process each picture or sound on one rank, and ranks wait for each other after them
(``planning.towers``); weights are gathered, and gradients sent, while layers compute. A step takes as long as its
slowest rank. Gradients that are exchanged once a step overlap with the backward pass of the last micro-batch; the rest
of that exchange is waited for, as are 16-bit weights that ZeRO-1 and ZeRO-2 send back.

Left out: the optimizer's own time, loading, evaluation and stragglers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.cache.reader import SplitIndex
from packtool.config.model import AdapterOptions, LearningOptions
from packtool.config.packing import SequenceParallelType
from packtool.config.settings import load_json
from packtool.config.train import TrainConfig
from packtool.constants import CHUNK_LOGITS
from packtool.encode.families import text_config_of
from packtool.encode.model_files import ModelFiles
from packtool.planning.cost import CostModel, ModelSizes
from packtool.planning.epoch import EpochPlan
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import Costs
from packtool.planning.towers import MediaShares, TowerWork
from packtool.simulate.hardware import Hardware
from packtool.simulate.machine import Machine
from packtool.train.prepare.trained import ADAPTER_FILE

MAX_PARAMETERS = 100_000_000
"""Parameters of the largest model that keeps its activations by default."""


def with_recomputing(config: TrainConfig) -> TrainConfig:
    """Decide ``--gradient-checkpointing`` by the size of the model.

    Recomputation takes about a third more time and saves nearly all activations, for which models of billions of
    parameters have no memory.
    """
    if config.gradient_checkpointing is not None:
        return config
    try:
        num_parameters = ModelSizes.of_config(ModelFiles.load(config.model).config).num_parameters
    except (KeyError, TypeError, ValueError):  # a configuration of unknown form, which need not be small
        num_parameters = MAX_PARAMETERS + 1
    return dataclasses.replace(config, gradient_checkpointing=num_parameters > MAX_PARAMETERS)


def recomputing_lines(config: TrainConfig, decided: TrainConfig) -> list[str]:
    """The message that recomputation was chosen by default; empty if it was not."""
    if config.gradient_checkpointing is not None or not decided.gradient_checkpointing:
        return []
    return [
        "activations are recomputed in the backward pass, which saves memory and takes about a third more time; "
        "--gradient-checkpointing false keeps them"
    ]


@dataclass(frozen=True)
class RunCosts:
    """FLOPs of a run: of its model, for MFU; and of the hardware, with recomputed activations, for HFU."""

    model: CostModel
    hardware: CostModel

    @classmethod
    def of(cls, config: TrainConfig, model: Mapping[str, Any]) -> RunCosts:
        """FLOPs of a model with the trained weights and the recomputation of a run."""
        recomputes, in_towers = bool(config.gradient_checkpointing), config.vit_gradient_checkpointing
        vocabulary = text_config_of(model).get("vocab_size") or 0
        again = cost_of(
            model,
            config,
            recomputes_language=recomputes,
            recomputes_towers=recomputes if in_towers is None else in_towers,
            # The head recomputes chunks of logits; a pack with few targets may have a single chunk, which costs little.
            recomputes_head=config.packing_length is None or config.packing_length * vocabulary > CHUNK_LOGITS,
        )
        return cls(cost_of(model, config), again)


def cost_of(model: Mapping[str, Any], learning: LearningOptions, **recomputes: bool) -> CostModel:
    """FLOPs of a model with these trained weights; of 8 billion weights if its ``config.json`` gives no sizes."""
    if isinstance(learning, AdapterOptions) and learning.adapters:
        # Take the target modules of an adapter that is trained further; if it cannot be read, loading fails later.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            with open(os.path.join(learning.adapters[0], ADAPTER_FILE), encoding="utf-8") as file:
                adapter = load_json(file.read())
            targets = adapter["target_modules"]
            if not isinstance(targets, str):
                targets = rf"(?:.*\.)?(?:{'|'.join(map(re.escape, targets))})"
            saved, rank, bias = adapter.get("modules_to_save") or (), int(adapter["r"]), adapter.get("bias", "none")
            learning = dataclasses.replace(
                learning, target_regex=targets, modules_to_save=tuple(saved), lora_rank=rank, lora_bias=bias
            )
    try:
        return CostModel.of_config(model, learning, **recomputes)
    except (KeyError, TypeError, ValueError):
        return CostModel.of_8b()


def tower_work(cost: CostModel, index: SplitIndex) -> TowerWork:
    """FLOPs of the media of each sample of a cache, and number of its media."""
    flops = cost.towers(index.vision_tokens, index.patch_squares, index.audio_tokens)
    return TowerWork(np.rint(flops).astype(np.int64), index.num_images + index.num_videos + index.num_audios)


def sample_costs(cost: CostModel, index: SplitIndex, target_tokens: npt.NDArray[np.integer[Any]]) -> Costs:
    """FLOPs of each sample of a cache alone, (N,)."""
    return cost(index.length, cost.attention(index.length), target_tokens, tower_work(cost, index).flops)


def with_costs(
    options: PlanOptions,
    model: Mapping[str, Any],
    learning: LearningOptions,
    hardware: Hardware,
    way: SequenceParallelType = "auto",
) -> PlanOptions:
    """Add a model's FLOPs to the options, and for Skrull the speed of devices and links.

    Args:
        way: how ranks share sequences; ``auto`` depends on model and hardware alone, so that every machine plans alike
            (``simulate.machine.exchanges_of``).
    """
    options = dataclasses.replace(options, cost=cost_of(model, learning))
    if options.skrull is None:
        return options
    sequence_parallel_size = options.skrull.sequence_parallel_size
    machine = Machine(
        sizes=ModelSizes.or_8b(model), hardware=hardware, world_size=sequence_parallel_size, sequence_parallel_type=way
    )
    return dataclasses.replace(
        options, skrull=dataclasses.replace(options.skrull, times=machine.step_time(sequence_parallel_size))
    )


Seconds = npt.NDArray[np.float64]
_BACKWARD = 2 / 3
"""Approximate fraction of a micro-batch's time that its backward pass takes."""


@dataclass(frozen=True, kw_only=True)
class ExpectedTime:
    """The time of steps of a model on ``world_size`` ranks.

    Args:
        model: its ``config.json``.
        weight_bytes: of all weights in the precision of the computation.
        gradient_bytes: of the gradients as they are exchanged.
        trained_bytes: of the trained weights, in the precision of the computation.
    """

    model: Mapping[str, Any]
    hardware: Hardware
    world_size: int
    weight_bytes: int
    gradient_bytes: int
    trained_bytes: int

    def steps(self, config: TrainConfig, plan: EpochPlan, index: SplitIndex, shares: MediaShares) -> Seconds:
        """Seconds of each step of an epoch, (S,); ``shares`` assigns media to ranks that share a sequence."""
        packs, steps = plan.packs, plan.steps
        sequence_parallel_size = config.sequence_parallel_ranks
        cost, sizes = RunCosts.of(config, self.model).hardware, ModelSizes.or_8b(self.model)
        machine = Machine(
            sizes=sizes,
            hardware=self.hardware,
            world_size=self.world_size,
            recompute=bool(config.gradient_checkpointing),
            sequence_parallel_type=config.sequence_parallel_type,
        )
        # The costs of the run include recomputation and frozen weights, so the machine must not add recomputation;
        # exchanges and launches are those with recomputation.
        run_machine = dataclasses.replace(machine, sizes=dataclasses.replace(sizes, cost=cost), recompute=False)
        recomputing = machine.step_time(sequence_parallel_size)
        times = dataclasses.replace(
            run_machine.step_time(sequence_parallel_size),
            exchanges=recomputing.exchanges,
            launch_seconds=recomputing.launch_seconds,
        )
        sample_flops = sample_costs(cost, index, index.target_tokens)
        work, attention_work = times.work(index.length, sample_flops, sequence_parallel_size)

        def per_batch(per_sample: Seconds) -> Seconds:
            """Sums over the samples of each micro-batch of each rank, (C,)."""
            return steps.micro_batch_sums(np.add.reduceat(per_sample[packs.samples], packs.offsets[:-1]))

        flops = per_batch(work)
        tower_flops = slowest_tower = per_batch(tower_work(cost, index).flops.astype(np.float64))
        if sequence_parallel_size > 1:
            media = shares.media
            slowest_tower = shares.max_per_rank(cost.towers(media.tokens, media.squares, media.sounds))
        speed = times.flops_per_second
        attention = per_batch(attention_work) / sequence_parallel_size / speed
        language_flops = (flops - tower_flops) / sequence_parallel_size
        seconds = (language_flops + slowest_tower + np.where(flops > 0, times.batch_flops, 0.0)) / speed
        seconds += times.exposed_seconds(per_batch(index.length.astype(np.float64)), np.zeros(len(flops)), attention)
        with_each, with_last, exposed = self.collectives(config)
        ranks = steps.rank_sums(np.maximum(seconds, max(times.launch_seconds, with_each)))
        # The last backward pass hides a part of the exchange; a step waits for its slowest rank.
        hidden = _BACKWARD * ranks.min(axis=1) / np.maximum(np.diff(steps.step_offsets) // steps.world_size, 1)
        return np.asarray(ranks.max(axis=1) + np.maximum(with_last - hidden, 0.0) + exposed)

    def collectives(self, config: TrainConfig) -> tuple[float, float, float]:
        """Seconds of exchanges of weights and gradients, by the sharding of a run.

        Returns:
            overlapping with each micro-batch; overlapping with the backward pass of a step's last micro-batch; and
            exposed, per step.
        """
        if self.world_size == 1:
            return 0.0, 0.0, 0.0
        gathered, reduced = self._seconds(self.weight_bytes), self._seconds(self.gradient_bytes)
        if config.fsdp:
            passes = 1 if "shard_grad_op" in config.fsdp else 2
            return passes * gathered + reduced, 0.0, 0.0
        stage = config.deepspeed[4:5] if config.deepspeed is not None else ""
        if stage == "3":
            return 2 * gathered + reduced, 0.0, 0.0
        if stage in ("1", "2"):
            exposed = self._seconds(self.trained_bytes)
            return (reduced, 0.0, exposed) if stage == "2" else (0.0, reduced, exposed)
        return 0.0, 2 * reduced, 0.0

    def _seconds(self, num_bytes: int) -> float:
        """Seconds of a collective of ``num_bytes`` over all ranks, layer by layer."""
        num_layers = ModelSizes.or_8b(self.model).num_layers
        return num_layers * self.hardware.collective_seconds(num_bytes / num_layers, self.world_size)
