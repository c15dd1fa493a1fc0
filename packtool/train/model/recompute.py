"""Planned recomputation: how many layers recompute their activations in each micro-batch, within a memory budget.

The first layers recompute and the others keep their activations, because kept activations of later layers are free
again when earlier ones are recomputed. The peak of a pass is a maximum of functions that are linear in the bytes that
the recomputing layers save. Such a function is convex, so it is never above the straight line between the traced peaks
without recomputation and with recomputation in all layers. This line tells how many layers suffice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedConfig

from packtool.attention.parallel.axes import Axes
from packtool.batch.batch import Batch, TreeBatch
from packtool.batch.spec import InputSpec
from packtool.config.plan import PlanConfig
from packtool.config.settings import format_bytes
from packtool.config.train import TrainConfig
from packtool.constants import CHUNK_LOGITS
from packtool.encode.families import family_of
from packtool.errors import ConfigError, UnsupportedModelError
from packtool.launch.world import all_gather_objects
from packtool.progress import Progress
from packtool.simulate.hardware import read_hardware
from packtool.simulate.machine import Constants
from packtool.train.model.load import model_without_weights
from packtool.train.model.loss import base_model
from packtool.train.model.memory import (
    PlannedRun,
    device_bytes,
    estimate_memory,
    planned_runs,
    traced_bytes,
    traced_pass,
)
from packtool.train.model.trace import PassBytes
from packtool.train.model.trainable import switchable_layers, tower_prefixes
from packtool.train.prepare.cached import CachedSource
from packtool.train.prepare.costs import RunCosts
from packtool.train.prepare.figures import RankTokens, num_fillers, tokens_per_micro_batch
from packtool.train.prepare.parallelism import zero_stage
from packtool.train.prepare.preview import Preview
from packtool.train.prepare.run import Run

_GIB = 2**30
_KINDS = ("computed", "vision", "audio", "keys")  # fields of ``RankTokens``


@dataclass(frozen=True)
class PassBound:
    """Upper bound of the peak bytes of passes, without weights and gradients.

    Args:
        floor: bytes of the shortest traced pass, which shorter passes do not exceed.
        base, per_token: longer passes of n text tokens need at most ``base + per_token * n`` bytes.
        extra: additional bytes per token of other kinds, by the names of ``RankTokens``.
    """

    floor: float
    base: float = 0.0
    per_token: float = 0.0
    extra: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def traced(cls, trace: Callable[[RankTokens], int], longest: RankTokens, num_short: int) -> PassBound:
        """Trace passes of ``num_short`` and of ``longest`` tokens, and one for each other kind of token."""
        num_long = longest.computed
        floor, long_bytes = trace(RankTokens(computed=num_short)), trace(RankTokens(computed=num_long))
        per_token = (long_bytes - floor) / max(num_long - num_short, 1)
        text = cls(floor, floor - per_token * num_short, per_token)
        extra = {}
        for kind, num in (("vision", longest.vision), ("audio", longest.audio)):
            if num:
                # Media only: in a longer pass, the language model's peak might be above that of the towers.
                num_bytes = trace(RankTokens(computed=num + 1, **{kind: num}))
                extra[kind] = max(num_bytes - text(computed=num + 1), 0.0) / num
        if longest.keys:
            num_bytes = trace(RankTokens(computed=num_long, keys=longest.keys))
            extra["keys"] = max(num_bytes - long_bytes, 0.0) / longest.keys
        return dataclasses.replace(text, extra=extra)

    def __call__(self, computed: Any, **others: Any) -> Any:
        """Bytes of a pass, or of several if the numbers of tokens are arrays (C,)."""
        num_bytes = np.maximum(self.floor, self.base + self.per_token * computed)
        return num_bytes + sum(per_token * others.get(kind, 0) for kind, per_token in self.extra.items())


@dataclass(frozen=True, eq=False)
class LayerPlan:
    """Numbers of recomputing layers by the tokens of a micro-batch, which are numbers or arrays (C,) for several.

    Args:
        budget: bytes that a pass may use, besides weights, gradients and optimizer.
        without_recomputation, with_recomputation: bounds of passes in which no layer of the language model recomputes,
            and in which all do.
        saved_shares: share of the saved bytes that the first k of L layers save, float (L + 1,), from 0 to 1.
        fixed: bytes of weights, gradients and optimizer.
        layer_flops: upper bound of the FLOPs of recomputing all layers, relative to a pass that keeps all activations.
    """

    budget: float
    without_recomputation: PassBound
    with_recomputation: PassBound
    saved_shares: npt.NDArray[np.float64]
    fixed: float = 0.0
    layer_flops: float = 0.0

    def num_layers(self, **tokens: Any) -> Any:
        """Number of layers of the language model that must recompute."""
        kept_bytes = self.without_recomputation(**tokens)
        saved_bytes = np.maximum(kept_bytes - self.with_recomputation(**tokens), 1.0)
        return np.searchsorted(self.saved_shares, np.clip((kept_bytes - self.budget) / saved_bytes, 0.0, 1.0))

    def shares(self, **tokens: Any) -> Any:
        """Share of the layers, 0 to 1, that must recompute."""
        return self.num_layers(**tokens) / (len(self.saved_shares) - 1)

    def exceeds(self, **tokens: Any) -> Any:
        """Return whether a pass may exceed the budget although all layers of the language model recompute."""
        return self.with_recomputation(**tokens) > self.budget

    def peak(self, **tokens: Any) -> Any:
        """Bound of the bytes of a rank in a pass with these tokens, weights, gradients and optimizer included."""
        kept_bytes = self.without_recomputation(**tokens)
        saved_bytes = np.maximum(kept_bytes - self.with_recomputation(**tokens), 0.0)
        return self.fixed + kept_bytes - self.saved_shares[self.num_layers(**tokens)] * saved_bytes

    def figures(self, **tokens: Any) -> dict[str, Any]:
        """Figures of micro-batches with these ``tokens``, arrays (C,), by their names in JSON."""
        layers, total_layers = self.num_layers(**tokens), len(self.saved_shares) - 1
        recomputed_share = np.average(layers, weights=tokens["computed"]) / total_layers
        return {
            "layers": total_layers,
            "recomputing_layers": {
                "min": int(layers.min()),
                "median": float(np.median(layers)),
                "max": int(layers.max()),
            },
            "recomputed_flops": self.layer_flops * float(recomputed_share),
            "peak_gib": float(np.max(self.peak(**tokens))) / _GIB,
            "budget_gib": (self.fixed + self.budget) / _GIB,
            "num_exceeding": int(np.sum(self.exceeds(**tokens))),
        }

    def line(self, **tokens: Any) -> str:
        """Describe the plan for C micro-batches with these tokens, arrays (C,)."""
        figures = self.figures(**tokens)
        layers = figures["recomputing_layers"]
        line = (
            f"gradient checkpointing auto: {layers['min']} to {layers['max']} of {figures['layers']} layers recompute "
        )
        line += f"in a micro-batch (median {layers['median']:g}), {figures['recomputed_flops']:.1%} more FLOPs than "
        line += f"without; peak {figures['peak_gib']:,.2f} of {figures['budget_gib']:,.2f} GiB"
        if figures["num_exceeding"]:
            line += f"; {figures['num_exceeding']:,} micro-batches may need more and recompute the towers, too"
        return line


def budget_of(config: TrainConfig) -> float | None:
    """Return the memory of a device in bytes: ``--memory-budget``, the planned hardware's, this GPU's, or None."""
    if config.memory_budget is not None:
        return config.memory_budget
    if config.dry_run and config.hardware is not None:
        return read_hardware(config.hardware).memory_gb * 1e9
    return device_bytes(on_gpu=True) if torch.cuda.is_available() else None


def plan_recomputation_of_run(
    run: Run, spec: InputSpec, dtype: torch.dtype, budget: float | None
) -> tuple[LayerPlan | None, str]:
    """Plan which layers of a run recompute their activations, so that a rank fits into ``budget`` bytes of memory.

    A run has one or more stages, each with settings of its own; one plan serves all of them. ``dtype`` is the precision
    of the computation.

    Returns:
        The plan, None if it is impossible, so that all layers recompute; and a line for the user.
    """
    peak_batches: list[RankTokens] = []  # of all stages: the micro-batches that may need most memory
    for stage in range(len(run.step_configs)):
        peak_batches += run.peak_memory_batches(stage)
    try:
        config, axes = _stage_with_longest_packs(run.step_configs)
        layer_plan = plan_recomputation(
            config, axes, peak_batches, spec.config, dtype=dtype, world_size=run.world.size, budget=budget
        )
    except UnsupportedModelError as error:
        return None, _all_layers_line(error)

    if run.config.removes_padding and isinstance(run.source, CachedSource):
        # The token counts of all micro-batches are known.
        epoch_plan = run.source.timeline.span_at(run.start).plan  # of the epoch in which the run starts
        tokens_by_kind = tokens_per_micro_batch(epoch_plan, run.source.inputs)
    else:
        tokens_by_kind = _tokens_by_kind(peak_batches)
    return layer_plan, layer_plan.line(**tokens_by_kind)  # an array for each kind of token, (C,) for C micro-batches


def _stage_with_longest_packs(step_configs: Sequence[tuple[TrainConfig, Axes]]) -> tuple[TrainConfig, Axes]:
    """Return the settings of the stage with the longest packs; raise if stages differ in sequence parallelism."""
    longest, axes = max(step_configs, key=lambda pair: pair[0].packing_length or 0)
    if any(other_axes != axes for _, other_axes in step_configs):
        raise UnsupportedModelError("the stages differ in --sequence-parallel-size", "")
    return longest, axes


def plan_recomputation_of_preview(config: PlanConfig, preview: Preview) -> list[tuple[dict[str, Any] | None, str]]:
    """Plan the layers that recompute in each run of a plan with ``--gradient-checkpointing auto``; takes seconds.

    Return each run's figures by their names in JSON (None if all layers recompute), and a line for the user.
    """
    runs = [run for run in planned_runs(config, preview) if run.config.plans_recomputation]
    return [_plan_recomputation_of(run, preview, config.world_size) for run in runs]


def _plan_recomputation_of(run: PlannedRun, preview: Preview, world_size: int) -> tuple[dict[str, Any] | None, str]:
    """Return the result of ``plan_recomputation_of_preview`` for one run."""
    config, peak_batches = run.config, run.micro_batches
    budget = budget_of(dataclasses.replace(config, dry_run=True))  # of --hardware in place of this machine
    try:
        layer_plan = plan_recomputation(
            config, run.axes, peak_batches, run.model, dtype=run.dtype, world_size=world_size, budget=budget
        )
    except UnsupportedModelError as error:
        return None, _all_layers_line(error)
    tokens = _tokens_by_kind(peak_batches)
    if config.removes_padding and preview.inputs.reader is not None:  # the lengths of all batches are known
        tokens = tokens_per_micro_batch(run.plan, preview.inputs)
    return layer_plan.figures(**tokens), layer_plan.line(**tokens)


def _all_layers_line(error: UnsupportedModelError) -> str:
    return f"gradient checkpointing auto: all layers recompute, because {error.message}"


def _tokens_by_kind(batches: Sequence[RankTokens]) -> dict[str, Any]:
    """Return the numbers of tokens of C micro-batches, an array (C,) for each kind."""
    return {kind: np.array([getattr(batch, kind) for batch in batches]) for kind in _KINDS}


def plan_recomputation(
    config: TrainConfig,
    axes: Axes,
    peak_batches: Sequence[RankTokens],
    model_config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    world_size: int,
    budget: float | None,
    trace: Callable[..., PassBytes] = traced_pass,
) -> LayerPlan:
    """Plan how many layers recompute their activations, so that each pass fits into the memory of a device.

    Args:
        axes: how ranks share a sequence.
        peak_batches: token counts of the micro-batches that may need most memory.
        dtype: precision of the computation.
        budget: memory of a device in bytes; None if unknown.
        trace: returns the bytes of a pass; takes the arguments of ``traced_pass``.

    Raises:
        UnsupportedModelError: if layers cannot be planned, so that all of them must recompute.
    """
    if budget is None:
        raise UnsupportedModelError("the memory of the device is unknown", "Give --memory-budget.")
    model = model_without_weights(config, model_config, dtype)
    if not switchable_layers(model):
        raise UnsupportedModelError(f"layers of a {model_config.model_type} model cannot be switched one by one", "")

    setup: dict[str, Any] = {"dtype": dtype, "world_size": world_size, "axes": axes}
    estimate = estimate_memory(config, model, model_config, **setup, micro_batches=peak_batches, trace=no_bytes)
    fixed_bytes = estimate.total * _GIB  # without the pass, of which ``no_bytes`` counts none
    pass_budget = _usable_pass_bytes(config, budget, fixed_bytes)

    keeping_all = with_all_layers(config, recompute=False)
    recomputing_all = with_all_layers(config, recompute=True)
    kept = _trace_passes(keeping_all, axes, peak_batches, model_config, dtype, trace)
    recomputed = _trace_passes(recomputing_all, axes, peak_batches, model_config, dtype, trace)
    return LayerPlan(
        budget=pass_budget,
        without_recomputation=kept.bound,
        with_recomputation=recomputed.bound,
        saved_shares=_saved_shares(kept.layer_bytes, recomputed.layer_bytes),
        fixed=fixed_bytes,
        layer_flops=_layer_flops(config, model_config),
    )


def no_bytes(*_: object) -> int:
    """``PassTracer`` for estimates of memory without that of a pass."""
    return 0


def with_all_layers(config: TrainConfig, *, recompute: bool) -> TrainConfig:
    """Return the settings with which all layers of the language model recompute, or none does."""
    # By default, towers recompute only if the layers of the language model do not suffice.
    in_towers = bool(config.vit_gradient_checkpointing)
    return dataclasses.replace(
        config, gradient_checkpointing=recompute, vit_gradient_checkpointing=in_towers, memory_budget=None
    )


def _saved_shares(
    bytes_without: npt.NDArray[np.float64], bytes_with: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Return ``LayerPlan.saved_shares`` from the bytes that each layer keeps without and with recomputation, (L,)."""
    saved_bytes = np.maximum(bytes_without - bytes_with, 0.0)
    shares = np.concatenate(([0.0], np.cumsum(saved_bytes))) / max(saved_bytes.sum(), 1.0)
    shares[-1] = 1.0  # despite rounding, and even if no layer saves anything
    return shares


def _layer_flops(config: TrainConfig, model_config: PreTrainedConfig) -> float:
    """Return the FLOPs of recomputing all layers relative to a pass without, for text of which half are targets.

    This is an upper bound: attention counts less, and torch does not recompute the last product of a layer.
    """
    every_layer = dataclasses.replace(config, gradient_checkpointing=True, memory_budget=None)
    costs = RunCosts.of(every_layer, model_config.to_dict())
    pass_flops = costs.without_recomputation.per_token + costs.without_recomputation.per_target_token / 2
    return (costs.with_recomputation.per_token - costs.without_recomputation.per_token) / pass_flops


class _TracedPasses(NamedTuple):
    """A bound of the peak bytes of passes, and the bytes that each layer keeps in the largest one, float64 (L,)."""

    bound: PassBound
    layer_bytes: npt.NDArray[np.float64]


def _trace_passes(
    config: TrainConfig,
    axes: Axes,
    peak_batches: Sequence[RankTokens],
    model_config: PreTrainedConfig,
    dtype: torch.dtype,
    trace: Callable[..., PassBytes],
) -> _TracedPasses:
    """Trace the memory of forward and backward passes of different lengths, up to that of the longest micro-batch.

    Whether layers recompute is part of ``config``. Raise an UnsupportedModelError if the model cannot be traced.
    """
    traced_passes: list[PassBytes] = []

    def trace_and_record(*args: Any) -> int:
        pass_bytes = trace(*args)
        traced_passes.append(pass_bytes)
        return pass_bytes.peak

    def peak_bytes(tokens: RankTokens) -> int:
        num_bytes = traced_bytes(config, model_config, dtype, tokens, axes, trace_and_record)
        if num_bytes is None:
            raise UnsupportedModelError(f"the memory of a {model_config.model_type} model cannot be traced", "")
        return num_bytes

    if _needs_same_layers_everywhere(config):
        # The bound of each micro-batch is the largest of all, so each recomputes as many layers.
        largest_peak = max(map(peak_bytes, peak_batches))
        bound = PassBound(floor=largest_peak)
    else:
        longest, num_short = _traced_tokens(peak_batches, model_config)
        bound = PassBound.traced(peak_bytes, longest, num_short)
    largest_pass = max(traced_passes, key=lambda pass_bytes: pass_bytes.kept)
    return _TracedPasses(bound, layer_bytes=np.array(largest_pass.layers, np.float64))


def _needs_same_layers_everywhere(config: TrainConfig) -> bool:
    """Return whether all ranks must recompute the same layers, because they communicate in a layer's forward pass."""
    # FSDP does not count: it gathers weights before that forward pass.
    return config.sequence_parallel_ranks > 1 or config.shares_experts or zero_stage(config) == 3


def _usable_pass_bytes(config: TrainConfig, budget: float, fixed_bytes: float) -> float:
    """Return the usable bytes of ``budget`` besides the fixed ones; raise if there are none."""
    usable_bytes = budget * Constants().usable_memory
    if fixed_bytes < usable_bytes:
        return usable_bytes - fixed_bytes
    problem = f"weights, gradients and optimizer need {fixed_bytes / _GIB:.2f} of {usable_bytes / _GIB:.2f} usable GiB"
    if config.memory_budget is None:
        raise UnsupportedModelError(problem, "")
    raise ConfigError(
        f"--memory-budget {format_bytes(config.memory_budget)}: {problem}",
        "Raise it, shard weights with --fsdp full_shard, or train adapters with --train-type lora.",
    )


def _traced_tokens(peak_batches: Sequence[RankTokens], model_config: PreTrainedConfig) -> tuple[RankTokens, int]:
    """Return the maxima of all kinds of tokens, with fillers, and the length of the shortest pass to trace.

    The head's memory grows with the length only until logits are computed in chunks. If the longest pass has chunks,
    the shortest one has them too; otherwise the bytes of the passes in between would be above the line.
    """
    longest = RankTokens(**{kind: max(getattr(tokens, kind) for tokens in peak_batches) for kind in _KINDS})
    num_long = longest.computed + num_fillers(family_of(model_config.to_dict()).kinds)
    num_chunked = 2 * CHUNK_LOGITS // int(model_config.get_text_config().vocab_size) + 1  # half are targets
    return dataclasses.replace(longest, computed=num_long), num_chunked if num_chunked < num_long else 2


class LayerSwitch:
    """Switch of the layers of a model, bare or inside an adapter, between keeping and recomputing activations.

    Recomputation is enabled in all layers before. ``switches_towers``: towers keep their activations, unless the layers
    of the language model do not suffice.
    """

    def __init__(self, model: nn.Module, plan: LayerPlan, spec: InputSpec, *, switches_towers: bool) -> None:
        self.plan, self._pad_ids = plan, spec.pad_ids
        self._layers: list[Any] = switchable_layers(model)
        inner = base_model(model)
        towers = tower_prefixes(inner, spec.config.model_type)
        modules = inner.named_modules() if switches_towers else ()
        parts = [module for name, module in modules if towers.part_of(name) != "language model"]
        self._in_towers: list[Any] = [module for module in parts if hasattr(module, "gradient_checkpointing")]
        self._num_computed = self._num_recomputed = 0  # tokens times layers, since the last ``take_counts``

    def set_for(self, batch: Batch) -> int:
        """Switch all layers for a micro-batch on the host; return how many of the language model recompute."""
        # By token: families that take videos as pictures have one placeholder for both.
        counts = {pad_id: int((batch.input_ids == pad_id).sum()) for pad_id in self._pad_ids.values()}
        num_audio = counts.pop(self._pad_ids.get("audio", -1), 0)
        tokens = {"computed": batch.input_ids.numel(), "audio": num_audio, "vision": sum(counts.values())}
        tokens["keys"] = len(batch.key_index) if isinstance(batch, TreeBatch) else 0
        num_layers = int(self.plan.num_layers(**tokens))
        for index, layer in enumerate(self._layers):
            layer.gradient_checkpointing = index < num_layers
        for module in self._in_towers:
            module.gradient_checkpointing = bool(self.plan.exceeds(**tokens))
        self._num_computed += tokens["computed"] * len(self._layers)
        self._num_recomputed += tokens["computed"] * num_layers
        return num_layers

    def take_counts(self) -> tuple[int, int]:
        """Return this rank's tokens times recomputing layers, and times all layers, since the last call."""
        counts = self._num_recomputed, self._num_computed
        self._num_recomputed = self._num_computed = 0
        return counts


def switch_of(
    run: Run, spec: InputSpec, dtype: torch.dtype, model: nn.Module, progress: Progress
) -> LayerSwitch | None:
    """Return the switch of a run's layers, planned by all ranks for the smallest device; None without such layers."""
    if not run.config.plans_recomputation:
        return None
    budgets = all_gather_objects(budget_of(run.config), run.world.size)
    budget = min((num_bytes for num_bytes in budgets if num_bytes is not None), default=None)
    with torch.random.fork_rng():  # so that dropout has the same masks as without tracing
        plan, line = plan_recomputation_of_run(run, spec, dtype, budget)
    progress.note(line)
    switches_towers = run.config.vit_gradient_checkpointing is None
    return None if plan is None else LayerSwitch(model, plan, spec, switches_towers=switches_towers)
