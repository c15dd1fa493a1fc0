"""FLOPs of a run's samples, and the time of its planned steps, by the models of ``planning.cost`` and ``simulate``.

A micro-batch of packs on P ranks that share it takes

    max(launches, language model / P + towers of the rank with the most media
        + exchanges that its attention does not hide + gathering of shared keys and values,
        collectives of sharded weights)

because towers process each picture or sound on one rank, and ranks wait for each other after them
(``planning.towers``); weights are gathered, and gradients sent, while layers compute. A step takes as long as its
slowest rank, and waits for exchanges once a step that its last backward pass does not hide.

Left out: the optimizer's own time, loading, evaluation and stragglers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from packtool.planning.cost import CostModel, ModelSizes, StepTime
from packtool.planning.epoch import EpochPlan
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import Costs
from packtool.planning.steps import StepPlan
from packtool.planning.towers import MediaShares, TowerWork
from packtool.simulate.hardware import Hardware
from packtool.simulate.machine import Machine
from packtool.train.prepare.parallelism import zero_stage
from packtool.train.prepare.shared_prefixes import SharedPrefixes, tower_work
from packtool.train.prepare.trained import ADAPTER_FILE

MAX_PARAMETERS = 100_000_000
"""Parameters of the largest model that keeps its activations by default."""


def with_recomputing(config: TrainConfig, *, knows_memory: bool = False) -> TrainConfig:
    """Decide ``--gradient-checkpointing`` by the size of the model.

    ``auto`` recomputes only as many layers as necessary. It needs a ``--memory-budget``, or a device of known memory
    (``knows_memory``).
    """
    if config.gradient_checkpointing is not None:
        return config
    recomputes: Any = "auto"
    if config.memory_budget is None:
        if not _is_large(config.model):
            recomputes = False
        elif not knows_memory:
            recomputes = True
    return dataclasses.replace(config, gradient_checkpointing=recomputes)


def _is_large(model_directory: str) -> bool:
    """Return whether a model has more than ``MAX_PARAMETERS``; True if its sizes are unknown."""
    try:
        num_parameters = ModelSizes.of_config(ModelFiles.load(model_directory).config).num_parameters
    except (KeyError, TypeError, ValueError):
        return True
    return num_parameters > MAX_PARAMETERS


def recomputing_lines(config: TrainConfig, decided: TrainConfig) -> list[str]:
    """The message that recomputation was chosen by default; empty if it was not."""
    if config.gradient_checkpointing is not None or decided.gradient_checkpointing is not True:
        return []
    return [
        "activations are recomputed in the backward pass, which saves memory and takes about a third more time; "
        "--gradient-checkpointing false keeps them"
    ]


@dataclass(frozen=True)
class RunCosts:
    """FLOPs of a run, without those of recomputed activations (for MFU) and with them (for HFU)."""

    without_recomputation: CostModel
    with_recomputation: CostModel

    @classmethod
    def of(cls, config: TrainConfig, model: Mapping[str, Any]) -> RunCosts:
        """FLOPs of a model with the trained weights and the recomputation of a run."""
        recomputes: Any = config.gradient_checkpointing
        in_towers = config.vit_gradient_checkpointing
        vocabulary = text_config_of(model).get("vocab_size") or 0
        hardware = cost_of(
            model,
            config,
            recomputes_language=True if recomputes == "auto" else recomputes or False,
            # With ``auto``, towers recompute only if the layers of the language model do not suffice.
            recomputes_towers=bool(recomputes) and recomputes != "auto" if in_towers is None else in_towers,
            # The head recomputes chunks of logits; a pack with few targets may have a single chunk, which costs little.
            recomputes_head=config.packing_length is None or config.packing_length * vocabulary > CHUNK_LOGITS,
        )
        return cls(cost_of(model, config), hardware)


def cost_of(model: Mapping[str, Any], learning: LearningOptions, **recomputes: Any) -> CostModel:
    """FLOPs of a model by its ``config.json`` and trained weights; those of an 8B model if its sizes are unknown."""
    if isinstance(learning, AdapterOptions) and learning.adapters:
        # An adapter that is trained further decides which modules are trained. An unreadable one is reported later.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            learning = _with_adapter_settings(learning)
    try:
        return CostModel.of_config(model, learning, **recomputes)
    except (KeyError, TypeError, ValueError):
        return CostModel.of_8b()


def has_known_sizes(model: Mapping[str, Any]) -> bool:
    """Return whether a ``config.json`` has the sizes from which ``cost_of`` computes FLOPs."""
    try:
        CostModel.of_config(model)
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _with_adapter_settings(learning: AdapterOptions) -> AdapterOptions:
    """The options with the trained modules and the rank of the first adapter of ``--adapters``."""
    with open(os.path.join(learning.adapters[0], ADAPTER_FILE), encoding="utf-8") as file:
        adapter = load_json(file.read())
    target_regex = adapter["target_modules"]
    if not isinstance(target_regex, str):  # but a list of the ends of module names
        target_regex = rf"(?:.*\.)?(?:{'|'.join(map(re.escape, target_regex))})"
    return dataclasses.replace(
        learning,
        target_regex=target_regex,
        modules_to_save=tuple(adapter.get("modules_to_save") or ()),
        lora_rank=int(adapter.get("r") or learning.lora_rank),
        lora_bias=adapter.get("bias", "none"),
    )


def sample_costs(cost: CostModel, index: SplitIndex, target_tokens: npt.NDArray[np.integer[Any]]) -> Costs:
    """FLOPs of each sample of a cache alone, (N,)."""
    return cost(index.length, cost.attention(index.length), target_tokens, tower_work(cost, index).flops)


def with_costs(
    options: PlanOptions,
    model: Mapping[str, Any],
    learning: LearningOptions,
    hardware: Hardware,
    sequence_parallel_type: SequenceParallelType = "auto",
) -> PlanOptions:
    """Add a model's FLOPs to the options of a plan, which balances these between ranks.

    The scheduler Skrull also needs the speed of devices and links. ``model`` is a ``config.json``; ``learning`` says
    which weights are trained.
    """
    options = dataclasses.replace(options, cost=cost_of(model, learning))
    if options.skrull is None:
        return options

    num_ranks = options.skrull.sequence_parallel_size
    machine = Machine(
        sizes=ModelSizes.or_8b(model),
        hardware=hardware,
        world_size=num_ranks,  # not that of the run, so that plans do not depend on it
        sequence_parallel_type=sequence_parallel_type,
    )
    skrull_options = dataclasses.replace(options.skrull, step_time=machine.step_time(num_ranks))
    return dataclasses.replace(options, skrull=skrull_options)


Seconds = npt.NDArray[np.float64]
_BACKWARD_FRACTION = 2 / 3
"""Approximate fraction of a micro-batch's time that its backward pass takes."""


class ExchangeSeconds(NamedTuple):
    """Seconds of exchanges of weights and gradients over all ranks."""

    per_micro_batch: float = 0.0  # overlapping with the computation of each micro-batch
    per_last_backward: float = 0.0  # once per step, overlapping with the backward pass of its last micro-batch
    exposed: float = 0.0  # once per step, overlapping with nothing


@dataclass(frozen=True, kw_only=True)
class ExpectedTime:
    """The time of steps of a model on ``world_size`` ranks.

    Args:
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

    def step_seconds(
        self,
        config: TrainConfig,
        plan: EpochPlan,
        index: SplitIndex,
        shares: MediaShares,
        shared: SharedPrefixes | None = None,
        recomputed: npt.NDArray[np.float64] | float | None = None,
    ) -> Seconds:
        """Estimate the seconds of each of the S optimizer steps of an epoch, (S,).

        Args:
            shares: assigns media to ranks that share a sequence.
            recomputed: fraction of the layers that recompute activations in the backward pass, of each of the C
                micro-batches, (C,), or of all; None for the setting of ``config``.
        """
        batch_seconds = self._batch_seconds(config, plan, index, shares, shared)  # (C,)
        if recomputed is not None:
            keeping_config = dataclasses.replace(config, gradient_checkpointing=False)
            keeping_seconds = self._batch_seconds(keeping_config, plan, index, shares, shared)
            batch_seconds = recomputed * batch_seconds + (1 - recomputed) * keeping_seconds

        # Ranks exchange weights and gradients while they compute: whatever takes longer counts.
        exchange = self.exchange_seconds(config)
        batch_seconds = np.maximum(batch_seconds, exchange.per_micro_batch)
        rank_seconds = plan.steps.rank_sums(batch_seconds)  # (S, ranks)
        last_backward_seconds = _last_backward_seconds(plan.steps, rank_seconds)
        waiting_seconds = np.maximum(exchange.per_last_backward - last_backward_seconds, 0.0)
        slowest_rank_seconds = rank_seconds.max(axis=1)
        return np.asarray(slowest_rank_seconds + waiting_seconds + exchange.exposed)

    def _batch_seconds(
        self,
        config: TrainConfig,
        plan: EpochPlan,
        index: SplitIndex,
        shares: MediaShares,
        shared: SharedPrefixes | None,
    ) -> Seconds:
        """Estimate the seconds of each of the C micro-batches of an epoch, (C,); exchanges of weights are not included.

        If ranks share a micro-batch, the towers on each of them encode some of its images, videos and sounds, which
        ``shares`` assigns. ``shared``: prefixes of several samples that are computed only once.
        """
        cost = RunCosts.of(config, self.model).with_recomputation
        speed = self._step_time(config, cost)
        num_sharing = config.sequence_parallel_ranks  # ranks that share a micro-batch
        sample_flops, sample_attention_flops, towers = _sample_work(speed, cost, index, shared, num_sharing)

        # The ranks divide the language model evenly, and wait for the slowest tower. All arrays are (C,).
        total_flops = _batch_sums(plan, sample_flops)
        tower_flops = _batch_sums(plan, towers.flops.astype(np.float64))
        slowest_tower_flops = tower_flops
        if num_sharing > 1:
            slowest_tower_flops = _slowest_tower_flops(cost, index, shares)
        language_flops = (total_flops - tower_flops) / num_sharing
        fixed_flops = np.where(total_flops > 0, speed.batch_flops, 0.0)  # none in empty micro-batches
        seconds = (language_flops + slowest_tower_flops + fixed_flops) / speed.flops_per_second

        # Ranks exchange keys and values during attention: only the time that this takes longer counts.
        attention_flops = _batch_sums(plan, sample_attention_flops) / num_sharing
        seconds += _exposed_exchange_seconds(speed, plan, attention_flops)
        seconds += self.gathering_seconds(config, plan)  # of shared prefixes
        return np.maximum(seconds, speed.launch_seconds)

    def gathering_seconds(self, config: TrainConfig, plan: EpochPlan) -> Seconds:
        """Seconds in which a rank gathers the keys and values of shared prefixes in each micro-batch, (C,)."""
        keys = plan.steps.micro_batch_sums(plan.packs.gathered_keys_per_pack())
        return np.asarray(keys * self._machine(config).key_seconds / config.sequence_parallel_ranks)

    def _machine(self, config: TrainConfig) -> Machine:
        """Return a model of this run's devices and links."""
        return Machine(
            sizes=ModelSizes.or_8b(self.model),
            hardware=self.hardware,
            world_size=self.world_size,
            recompute=bool(config.gradient_checkpointing),
            sequence_parallel_type=config.sequence_parallel_type,
        )

    def _step_time(self, config: TrainConfig, cost: CostModel) -> StepTime:
        """The speed of this run's devices and links; ``cost`` includes recomputation."""
        machine = self._machine(config)
        # ``recompute`` adds the exchanges, launches and FLOPs of recomputation; those FLOPs are already in ``cost``.
        computing_machine = dataclasses.replace(
            machine, sizes=dataclasses.replace(machine.sizes, cost=cost), recompute=False
        )
        num_sharing = config.sequence_parallel_ranks
        with_recomputation = machine.step_time(num_sharing)
        return dataclasses.replace(
            computing_machine.step_time(num_sharing),
            exchanges=with_recomputation.exchanges,
            launch_seconds=with_recomputation.launch_seconds,
        )

    def exchange_seconds(self, config: TrainConfig) -> ExchangeSeconds:
        """Seconds of exchanges of weights and gradients, by the sharding of a run."""
        if self.world_size == 1:
            return ExchangeSeconds()
        gather = self._seconds(self.weight_bytes)
        reduce_scatter = self._seconds(self.gradient_bytes)
        stage = zero_stage(config)
        if config.fsdp or stage == 3:
            # Weights are gathered in the forward pass and, unless ``shard_grad_op`` keeps them, in the backward pass.
            num_gathers = 1 if config.fsdp and "shard_grad_op" in config.fsdp else 2
            return ExchangeSeconds(per_micro_batch=num_gathers * gather + reduce_scatter)
        if stage == 2:
            return ExchangeSeconds(per_micro_batch=reduce_scatter, exposed=self._seconds(self.trained_bytes))
        if stage == 1:
            return ExchangeSeconds(per_last_backward=reduce_scatter, exposed=self._seconds(self.trained_bytes))
        return ExchangeSeconds(per_last_backward=2 * reduce_scatter)  # an all-reduce: reduce-scatter and all-gather

    def _seconds(self, num_bytes: int) -> float:
        """Seconds of a collective of ``num_bytes`` over all ranks, layer by layer."""
        num_layers = ModelSizes.or_8b(self.model).num_layers
        return num_layers * self.hardware.collective_seconds(num_bytes / num_layers, self.world_size)


def _last_backward_seconds(steps: StepPlan, rank_seconds: Seconds) -> Seconds:
    """About the seconds of the backward pass of the fastest rank's last micro-batch in each step, (S,)."""
    num_micro_batches = np.maximum(np.diff(steps.step_offsets) // steps.world_size, 1)  # of each rank, (S,)
    return np.asarray(_BACKWARD_FRACTION * rank_seconds.min(axis=1) / num_micro_batches)


def _exposed_exchange_seconds(speed: StepTime, plan: EpochPlan, attention_flops: Seconds) -> Seconds:
    """Seconds of each micro-batch, (C,), that exchanges of keys and values take longer than attention on a rank."""
    tokens = plan.steps.micro_batch_sums(plan.packs.tokens_per_pack()).astype(np.float64)
    return speed.exposed_seconds(
        sharded_tokens=tokens,
        local_attention=np.zeros(len(attention_flops)),  # none: every sample is divided among the ranks
        sharded_attention=attention_flops / speed.flops_per_second,
    )


def _sample_work(
    speed: StepTime, cost: CostModel, index: SplitIndex, shared: SharedPrefixes | None, num_ranks: int
) -> tuple[Costs, Costs, TowerWork]:
    """FLOPs of each sample, those of its attention, (N,) each, and those of its media.

    FLOPs of slow kernels count more (``StepTime.work``). With shared prefixes, they are those that a sample adds.
    """
    if shared is None:
        sample_flops = sample_costs(cost, index, index.target_tokens)
        return *speed.work(index.length, sample_flops, num_ranks), tower_work(cost, index)
    work, attention = speed.work(index.length, shared.sample_costs(cost, index.target_tokens), num_ranks)
    prefix_work, prefix_attention = speed.work(shared.shared_tokens, np.zeros(1), num_ranks)
    return work - prefix_work, attention - prefix_attention, shared.towers(cost, index.target_tokens)


def _batch_sums(plan: EpochPlan, per_sample: Seconds) -> Seconds:
    """Sums of values of all samples of the caches, (N,), over the samples of each micro-batch, (C,)."""
    packs = plan.packs
    per_pack = np.add.reduceat(per_sample[packs.samples], packs.offsets[:-1])
    return plan.steps.micro_batch_sums(per_pack)


def _slowest_tower_flops(cost: CostModel, index: SplitIndex, shares: MediaShares) -> Seconds:
    """FLOPs of the towers of the rank with the most media in each micro-batch of the plan of ``shares``, (C,)."""
    media = shares.media
    padded_tokens = cost.padded_tokens(index.vision_tokens, index.patch_squares, index.picture_squares)
    tokens = media.tokens * (padded_tokens / np.maximum(index.vision_tokens, 1))[media.samples]
    return shares.max_per_rank(cost.towers(tokens, media.squares, media.sounds))
