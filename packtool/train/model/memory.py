"""Estimates of a rank's memory before any weight is loaded.

They are made for a run, for ``packtool plan --model`` and ``--fit``, and for ``--bucket-size auto``: the largest number
of tokens that fits. Memory is linear in tokens, so two traced passes (``train.model.trace``) give that number, and
further ones confirm it.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig

from packtool.attention.parallel.axes import Axes
from packtool.batch.spec import InputSpec, model_config
from packtool.config.plan import PlanConfig
from packtool.config.settings import part_of
from packtool.config.train import TrainConfig
from packtool.encode.families import MediaLimits, family_of, is_multimodal
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, UnsupportedModelError
from packtool.launch.world import World, processes_of_machine
from packtool.planning.epoch import EpochPlan
from packtool.progress import Progress
from packtool.simulate.hardware import Hardware, read_hardware
from packtool.simulate.machine import Constants
from packtool.train.model.load import has_gpu, model_without_weights, quiet_transformers, resolve_dtype
from packtool.train.model.precision import bytes_saved_by_quantization, quantized_layers, scale_bytes, unsharded_numel
from packtool.train.model.sharding import expert_weights, layers_of_model, shards_weights
from packtool.train.model.trace import PassBytes, trace_pass
from packtool.train.prepare.costs import with_recomputing
from packtool.train.prepare.figures import NO_MEDIA, RankTokens, longest_micro_batches, peak_memory_batches
from packtool.train.prepare.parallelism import axes_of, with_sequence_parallel_size, zero_stage
from packtool.train.prepare.preview import Preview

MAX_CHECKED_SAMPLES = 4
"""Maximum number of samples that the check before the first step compares."""

CHECKED_POSITIONS = 32
"""Positions per sample whose logits that check compares; those of all positions would need gigabytes."""

PassTracer = Callable[[TrainConfig, PreTrainedConfig, torch.dtype, RankTokens, Axes], int]
"""Function that returns the peak bytes of a pass, from options, model, precision, tokens and sequence parallelism."""

_LOG = logging.getLogger("packtool.train.memory")
_GIB = 2**30
_MAX_TRACED_TOKENS = 1 << 18  # longer passes are extrapolated
_MAX_TRACED_WITH_PROCESSOR = 1 << 14  # the same for models whose images are real data while they are traced
_ASSUMED_LENGTH = 1 << 17  # of the longest sample without --max-length, in tokens
_FEW_TOKENS, _MORE_TOKENS = 2048, 4096  # traced for the bytes of each token
_BUCKET_MULTIPLE = 128


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank in GiB.

    Args:
        weights, gradients, optimizer: after sharding.
        activations: traced peak of a forward and backward pass of one micro-batch; None if the model cannot be traced.
        gathered: unsharded weights and gradients that exist at a time with FSDP or ZeRO-3.
        buckets: copies of gradients that data-parallel ranks exchange without sharding.
        num_parameters, num_trainable: of the model, before sharding.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float | None
    gathered: float
    buckets: float
    num_tokens: int
    num_parameters: int
    num_trainable: int

    @property
    def fixed(self) -> float:
        """GiB of a rank besides activations."""
        return self.total - (self.activations or 0.0)

    @property
    def total(self) -> float:
        """GiB of a rank in total; excludes activations if these are unknown."""
        return self.weights + self.gradients + self.optimizer + (self.activations or 0.0) + self.gathered + self.buckets

    def sentence(self) -> str:
        """Return the estimate as one sentence."""
        parts = f"weights {self.weights:.2f}, gradients {self.gradients:.2f}, optimizer {self.optimizer:.2f}"
        parts += f", gathered layers {self.gathered:.2f}" if self.gathered else ""
        parts += f", gradient buckets {self.buckets:.2f}" if self.buckets else ""
        prefix = f"estimated memory of a rank: {self.total:.2f} GiB ({parts}"
        if self.activations is None:
            return f"{prefix}) plus activations, which cannot be estimated for this model"
        return f"{prefix}, activations {self.activations:.2f} for {self.num_tokens:,} tokens)"

    def sentence_on(self, hardware: Hardware) -> str:
        """Compare the estimate with the memory of the hardware that is planned for, in one sentence."""
        memory = hardware.memory_gb * 1e9 / _GIB
        verdict = f"has {memory:.1f} GiB" if self.total <= memory else f"has only {memory:.1f} GiB: this will not fit"
        return f"planned for {hardware.name}, which {verdict}; its installed software was not checked"


def estimate_memory(
    config: TrainConfig,
    model: nn.Module,
    model_config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    world_size: int,
    micro_batches: Sequence[RankTokens] = (),
    axes: Axes | None = None,
    trace: PassTracer | None = None,
) -> MemoryEstimate:
    """Estimate the peak memory of a rank.

    Args:
        model: made trainable, on any device; only the sizes of its weights matter.
        dtype: precision of the computation.
        micro_batches: token counts of those that may need most memory; by default of the longest one, text only.
        axes: how ranks share a sequence; by default each has its own.
        trace: replaces ``traced_pass``, for example by a cache.
    """
    if not micro_batches:
        micro_batches = longest_micro_batches(config, model_config.to_dict(), NO_MEDIA)
    num_tokens = micro_batches[0].computed
    quantized = quantized_layers(model, model_config.model_type, config)

    pass_bytes = [traced_bytes(config, model_config, dtype, batch, axes, trace) for batch in micro_batches]
    known_bytes = [num_bytes for num_bytes in pass_bytes if num_bytes is not None]
    is_traceable = len(known_bytes) == len(pass_bytes)
    activations = None
    if is_traceable:
        peak_bytes = max(*known_bytes, _check_bytes(config, model_config, num_tokens))
        # A quantized layer is dequantized while it computes.
        max_layer_weights = max((unsharded_numel(layer.weight) for layer in quantized), default=0)
        activations = (peak_bytes + max_layer_weights * dtype.itemsize) / _GIB

    memory_of_weights = _memory_of_weights(config, model, dtype, world_size, quantized)
    return MemoryEstimate(activations=activations, num_tokens=num_tokens, **memory_of_weights)


def _memory_of_weights(
    config: TrainConfig, model: nn.Module, dtype: torch.dtype, world_size: int, quantized: list[nn.Linear]
) -> dict[str, Any]:
    """Estimate a rank's GiB of weights, gradients and optimizer, which do not depend on micro-batches.

    ``dtype`` is the precision of the computation, ``quantized`` are the layers with weights of 4 or 8 bits. Returns the
    fields of ``MemoryEstimate`` by name, except ``activations`` and ``num_tokens``.
    """
    parameters = parameter_sizes(model)
    trained = [parameter for parameter in parameters if parameter.is_trained]
    gradient_bytes = sum(parameter.num_bytes for parameter in trained)
    optimizer_bytes = gradient_bytes * _optimizer_bytes_per_weight_byte(config, dtype)
    weight_bytes, unsharded_scale_bytes = _weight_bytes(parameters, quantized, config, dtype)
    if config.asft_alpha is not None:
        weight_bytes *= 2  # the copy of the initial model

    # Stage 1 shards optimizer states among all ranks, 2 also gradients, 3 (as FSDP, expert parallelism) also weights.
    stage = 3 if shards_weights(config) else zero_stage(config)
    optimizer_ranks = world_size if stage >= 1 else 1
    gradient_ranks = world_size if stage >= 2 else 1
    weight_ranks = world_size if stage >= 3 else 1
    has_buckets = world_size > 1 and stage == 0 and config.deepspeed is None  # DDP copies gradients into buckets
    return {
        "weights": weight_bytes / _GIB / weight_ranks + unsharded_scale_bytes / _GIB,
        "gradients": gradient_bytes / _GIB / gradient_ranks,
        "optimizer": optimizer_bytes / _GIB / optimizer_ranks,
        "gathered": _gathered_bytes(model, dtype, config, quantized) / _GIB if stage >= 3 else 0.0,
        "buckets": gradient_bytes / _GIB if has_buckets else 0.0,
        "num_parameters": sum(parameter.num_elements for parameter in parameters),
        "num_trainable": sum(parameter.num_elements for parameter in trained),
    }


def _check_bytes(config: TrainConfig, model_config: PreTrainedConfig, num_tokens: int) -> int:
    """Return the bytes of logits, three float32 tensors, in the check before the first step; 0 if there is none."""
    if not (config.removes_padding and config.verify_packing):
        return 0
    num_positions = min(MAX_CHECKED_SAMPLES * CHECKED_POSITIONS, num_tokens)
    return 3 * torch.float32.itemsize * num_positions * int(model_config.get_text_config().vocab_size)


def _weight_bytes(
    sizes: Sequence[ParameterSize], quantized: list[nn.Linear], config: TrainConfig, dtype: torch.dtype
) -> tuple[int, int]:
    """Return the bytes of all weights, and of the scales of ``quantized`` layers, which are not sharded."""
    # First the bytes without quantization, also if the model is already quantized; then minus the saved bytes.
    bytes_per_weight = torch.float32.itemsize if config.torch_dtype == "float32" else dtype.itemsize
    weight_bytes = sum(size.num_bytes for size in sizes)
    weight_bytes += sum(
        unsharded_numel(layer.weight) * (bytes_per_weight - layer.weight.element_size()) for layer in quantized
    )
    weight_bytes -= bytes_saved_by_quantization(quantized, config, bytes_per_weight)
    unsharded_scale_bytes = scale_bytes(quantized, config)
    return weight_bytes - unsharded_scale_bytes, unsharded_scale_bytes


def _optimizer_bytes_per_weight_byte(config: TrainConfig, dtype: torch.dtype) -> int:
    """Return the bytes of optimizer states per byte of trained weights."""
    if config.deepspeed is not None and dtype.itemsize == 2:
        return 6  # two moments and a copy of the weights, all in float32
    if config.master_weights == "kahan" and config.train_type == "full":
        return 4  # two moments and two tensors of lost digits
    return 2  # two moments


class ParameterSize(NamedTuple):
    """Size of a parameter before sharding."""

    num_elements: int
    element_bytes: int
    is_trained: bool

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.element_bytes


def parameter_sizes(model: nn.Module) -> list[ParameterSize]:
    """Return the sizes of all parameters of a model, and of the permutation matrices of BOFT adapters."""
    weights = [*model.parameters(), *(each for name, each in model.named_buffers() if name.endswith("boft_P"))]
    return [ParameterSize(unsharded_numel(weight), weight.element_size(), weight.requires_grad) for weight in weights]


class _LayerBytes(NamedTuple):
    """Bytes of a layer's full weights, and of the gradients of the trained ones."""

    weights: float
    gradients: float


def _gathered_bytes(model: nn.Module, dtype: torch.dtype, config: TrainConfig, quantized: Sequence[nn.Linear]) -> float:
    """Return the peak bytes of full weights and gradients on a rank that stores only shards (FSDP or ZeRO-3).

    The ranks gather the weights of a layer while it computes; weights outside of layers stay gathered. ``dtype`` is the
    precision of the computation, ``quantized`` are the layers with weights of 4 or 8 bits.
    """
    bytes_by_id = _unsharded_bytes_by_id(model, dtype, config, quantized)
    layers: list[_LayerBytes] = []
    ids_in_layers: set[int] = set()
    for layer in layers_of_model(model):
        weights = list(layer.parameters())
        weight_bytes = sum(bytes_by_id[id(weight)] for weight in weights)
        gradient_bytes = sum(bytes_by_id[id(weight)] for weight in weights if weight.requires_grad)
        layers.append(_LayerBytes(weight_bytes, gradient_bytes))
        ids_in_layers.update(id(weight) for weight in weights)

    outside_bytes = sum(num_bytes for weight_id, num_bytes in bytes_by_id.items() if weight_id not in ids_in_layers)
    largest = max(layers, default=_LayerBytes(0.0, 0.0))  # by weights
    if "shard_grad_op" in config.fsdp:  # keeps all weights from the forward pass to the backward pass
        return outside_bytes + sum(layer_bytes.weights for layer_bytes in layers) + largest.gradients
    # Beside the largest layer there are the weights of the next one, prefetched, which may be as large.
    return outside_bytes + 2 * largest.weights + largest.gradients


def _unsharded_bytes_by_id(
    model: nn.Module, dtype: torch.dtype, config: TrainConfig, quantized: Sequence[nn.Linear]
) -> dict[int, float]:
    """Return the bytes of each weight when a rank has gathered it, by the ``id`` of the weight."""
    expert_ids: set[int] = set()
    if config.shares_experts:
        expert_ids = {id(weight) for weight in expert_weights(model).values()}
    quantized_ids = {id(layer.weight) for layer in quantized}
    bytes_by_id = {}
    for parameter in model.parameters():
        num_ranks = config.expert_parallel_size if id(parameter) in expert_ids else 1
        bytes_per_element = 0.5 if id(parameter) in quantized_ids else dtype.itemsize
        bytes_by_id[id(parameter)] = unsharded_numel(parameter) // num_ranks * bytes_per_element
    return bytes_by_id


def traced_bytes(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    dtype: torch.dtype,
    tokens: RankTokens,
    axes: Axes | None = None,
    trace: PassTracer | None = None,
) -> int | None:
    """Return the peak bytes of a forward and backward pass, without weights and gradients; None if not traceable.

    Args:
        dtype: precision of the computation.
        tokens: token counts of the micro-batch. The bytes of many tokens are extrapolated from two shorter passes.
        axes: how ranks share a sequence; by default each has its own.
        trace: replaces ``traced_pass``, for example by a cache.
    """

    def trace_bytes(short_tokens: RankTokens) -> int:
        if trace is None:
            return traced_pass(config, model_config, dtype, short_tokens, axes or Axes()).peak
        return trace(config, model_config, dtype, short_tokens, axes or Axes())

    try:
        max_traced = _max_traced_tokens(model_config)
        if tokens.computed <= max_traced:
            return trace_bytes(tokens)
        return _extrapolated_bytes(trace_bytes, tokens, max_traced)
    except (ConfigError, RuntimeError, TypeError, ValueError) as error:
        # The model reads values during its forward, or does not take the batch's inputs.
        _LOG.debug("the memory of a pass cannot be traced: %r", error)
        return None


def _max_traced_tokens(model_config: PreTrainedConfig) -> int:
    """Return the tokens of the longest pass to trace: real tensors, such as positions, must fit into this machine."""
    has_processor = bool(family_of(model_config.to_dict()).processor_inputs)
    return _MAX_TRACED_WITH_PROCESSOR if has_processor else _MAX_TRACED_TOKENS


def _extrapolated_bytes(trace_bytes: Callable[[RankTokens], int], tokens: RankTokens, max_traced: int) -> int:
    """Extrapolate the peak bytes of a pass from passes of ``max_traced`` tokens and of half as many."""
    num_short, num_long = max_traced // 2, max_traced
    short_bytes = trace_bytes(tokens.scaled(num_short))
    long_bytes = trace_bytes(tokens.scaled(num_long))
    token_bytes = (long_bytes - short_bytes) / (num_long - num_short)
    return short_bytes + int(token_bytes * (tokens.computed - num_short))


@quiet_transformers()
def traced_pass(
    config: TrainConfig, model_config: PreTrainedConfig, dtype: torch.dtype, tokens: RankTokens, axes: Axes
) -> PassBytes:
    """Trace a forward and backward pass of one rank; return all its bytes. Takes seconds."""
    model = model_without_weights(config, copy.deepcopy(model_config), dtype)
    is_sharded = bool(config.fsdp or config.deepspeed or config.shares_experts)
    if is_sharded:
        model.to(dtype)  # gathered weights have the precision of the computation
    autocast = dtype if dtype.itemsize == 2 and not is_sharded else None
    spec = InputSpec(config.model, model_config, MediaLimits())
    return trace_pass(model, spec, tokens, axes, autocast=autocast)


class CachedTracer:
    """``traced_pass`` with a cache, for many settings of one model."""

    def __init__(self) -> None:
        self._traces: dict[tuple[str, torch.dtype], dict[tuple[RankTokens, Axes], PassBytes]] = {}

    def all_bytes(
        self, config: TrainConfig, model_config: PreTrainedConfig, dtype: torch.dtype, tokens: RankTokens, axes: Axes
    ) -> PassBytes:
        """Return all bytes of a pass, including those of each layer."""
        traces, key = self._traces_of(config, dtype), (tokens, axes)
        if key not in traces:
            traces[key] = traced_pass(config, model_config, dtype, tokens, axes)
        return traces[key]

    def __call__(
        self, config: TrainConfig, model_config: PreTrainedConfig, dtype: torch.dtype, tokens: RankTokens, axes: Axes
    ) -> int:
        return self.all_bytes(config, model_config, dtype, tokens, axes).peak

    def lower_bound(
        self, config: TrainConfig, _: PreTrainedConfig, dtype: torch.dtype, tokens: RankTokens, axes: Axes
    ) -> int:
        """Return a lower bound of the peak bytes, from smaller passes traced so far; 0 if there are none."""
        if tokens.computed > _MAX_TRACED_TOKENS:
            tokens = tokens.scaled(_MAX_TRACED_TOKENS)
        smaller_passes = (
            traced.peak
            for (traced_tokens, traced_axes), traced in self._traces_of(config, dtype).items()
            if traced_axes in (Axes(), axes)  # without sequence parallelism, a rank needs less
            and traced_tokens.is_at_most(tokens)
        )
        return max(smaller_passes, default=0)

    def _traces_of(self, config: TrainConfig, dtype: torch.dtype) -> dict[tuple[RankTokens, Axes], PassBytes]:
        fsdp = ("full_shard",) if config.fsdp or config.deepspeed else ()
        relevant = dataclasses.replace(
            config, packing_length=None, sequence_parallel_size=None, fsdp=fsdp, deepspeed=None, memory_budget=None
        )
        if config.vit_gradient_checkpointing is None:
            relevant = dataclasses.replace(relevant, vit_gradient_checkpointing=bool(config.gradient_checkpointing))
        return self._traces.setdefault((repr(relevant), dtype), {})


class PlannedRun(NamedTuple):
    """A run that trains an epoch of a plan; ``micro_batches`` are those of a rank that may need most memory."""

    config: TrainConfig
    axes: Axes
    model: PreTrainedConfig
    dtype: torch.dtype
    plan: EpochPlan
    micro_batches: tuple[RankTokens, ...]


def planned_runs(config: PlanConfig, preview: Preview) -> list[PlannedRun]:
    """Return the training runs of a plan, to estimate their memory.

    A training has stages with settings of their own. There is one run for each pair of packing length and sequence
    parallel size in them, with the plan of the first epoch of the last such stage.
    """
    files, lengths = preview.inputs.files, preview.inputs.lengths
    assert config.model is not None, "checked by the caller"
    assert files is not None, "there is a model"
    try:
        model = model_config(files.directory)
    except ValueError as error:
        raise UnsupportedModelError(str(error).splitlines()[0], "Use a model that transformers supports.") from error

    runs = []
    for (packing_length, sequence_parallel_size), plan in _plans_by_lengths_and_sizes(preview).items():
        run_config = part_of(TrainConfig, config, model=config.model, packing_length=packing_length)
        run_config = with_recomputing(run_config, knows_memory=config.hardware is not None)
        run_config = with_sequence_parallel_size(run_config, sequence_parallel_size)
        world = World(size=config.world_size, sequence_parallel_size=sequence_parallel_size)
        run = PlannedRun(
            config=run_config,
            axes=axes_of(run_config, world, files, lengths, trained=True),
            model=model,
            dtype=resolve_dtype(model, run_config, on_gpu=True),
            plan=plan,
            micro_batches=peak_memory_batches(run_config, plan, preview.inputs),
        )
        runs.append(run)
    return runs


def _plans_by_lengths_and_sizes(preview: Preview) -> dict[tuple[int | None, int], EpochPlan]:
    """Return the plan of an epoch for each packing length and sequence parallel size of the stages."""
    plans: dict[tuple[int | None, int], EpochPlan] = {}
    for stage in preview.timeline.stages:
        first_epoch = next(stage.spans())
        plans[stage.inputs.options.packing_length, stage.inputs.sequence_parallel_size] = first_epoch.plan
    return plans


def planned_memory(config: PlanConfig, preview: Preview) -> MemoryEstimate:
    """Estimate the memory of a rank that trains a plan on GPUs, the maximum over its stages; takes seconds."""
    estimates = [
        estimate_memory(
            run.config,
            model_without_weights(run.config, run.model, run.dtype),
            run.model,
            dtype=run.dtype,
            world_size=config.world_size,
            micro_batches=run.micro_batches,
            axes=run.axes,
        )
        for run in planned_runs(config, preview)
    ]
    return max(estimates, key=lambda estimate: estimate.total)


def with_bucket(config: TrainConfig, world: World, progress: Progress) -> TrainConfig:
    """Replace ``--bucket-size auto`` by a number of tokens; raise if a vision tower is trained, or no bucket fits."""
    if config.bucket_size != "auto":
        return config
    model = model_config(config.model)
    if is_multimodal(model.to_dict()) and not config.freeze_vit:
        raise ConfigError(
            "--bucket-size auto measures text only, but with --freeze-vit false the vision tower needs memory too",
            "Give a number of tokens, as in --bucket-size 8192.",
        )
    num_tokens = _largest_bucket(config, model, world, progress)
    return dataclasses.replace(config, bucket_size=str(num_tokens))


def _largest_bucket(config: TrainConfig, model: PreTrainedConfig, world: World, progress: Progress) -> int:
    """Return the largest multiple of 128 text tokens whose micro-batch fits into a rank's memory.

    Activations grow linearly with tokens. So calculate the number from the bytes of two short traced passes, then trace
    a pass with that many tokens, and reduce the number until it fits. Raise a ConfigError if not even 128 tokens fit.
    """
    dtype = resolve_dtype(model, config, on_gpu=has_gpu(config))
    sample_lengths = np.array([config.max_length or _ASSUMED_LENGTH])  # as if all samples were the longest
    axes = axes_of(config, world, ModelFiles.load(config.model), sample_lengths, trained=True)

    usable_bytes = _usable_bytes(config)
    fixed_bytes, few_tokens_bytes = _few_tokens_memory(config, model, dtype, world, axes)
    activation_budget = usable_bytes - fixed_bytes
    bytes_of_pass = partial(_text_pass_bytes, config, model, dtype, axes=axes)  # takes a number of tokens
    if bytes_of_pass(_BUCKET_MULTIPLE) > activation_budget:
        raise _no_bucket_error(fixed_bytes, usable_bytes)

    token_bytes = bytes_per_token(config, model, dtype, axes)
    num_more_tokens = (activation_budget - few_tokens_bytes) / token_bytes  # besides the few tokens
    estimated_tokens = int(_FEW_TOKENS + num_more_tokens)
    num_tokens = _reduce_to_budget(estimated_tokens, activation_budget, token_bytes, bytes_of_pass)
    progress.note(_bucket_line(num_tokens, fixed_bytes, usable_bytes, token_bytes))
    return num_tokens


def _bucket_line(num_tokens: int, fixed_bytes: float, usable_bytes: float, token_bytes: float) -> str:
    return (
        f"bucket size: {num_tokens:,} tokens per process; weights, gradients and optimizer need "
        f"{fixed_bytes / _GIB:.2f} of {usable_bytes / _GIB:.2f} GiB, and each token {token_bytes / 1024:,.1f} KiB"
    )


def _no_bucket_error(fixed_bytes: float, usable_bytes: float) -> ConfigError:
    return ConfigError(
        f"--bucket-size auto: weights, gradients and optimizer need {fixed_bytes / _GIB:.1f} of "
        f"{usable_bytes / _GIB:.1f} GiB",
        "Shard them with --fsdp full_shard, train adapters with --train-type lora, or give a number of tokens.",
    )


def _few_tokens_memory(
    config: TrainConfig, model: PreTrainedConfig, dtype: torch.dtype, world: World, axes: Axes
) -> tuple[float, float]:
    """Estimate a rank's bytes with a bucket of ``_FEW_TOKENS``: (without activations, activations)."""
    few_tokens = dataclasses.replace(config, bucket_size=str(_FEW_TOKENS))
    empty_model = model_without_weights(config, model, dtype)
    estimate = estimate_memory(few_tokens, empty_model, model, dtype=dtype, world_size=world.size, axes=axes)
    return estimate.fixed * _GIB, (estimate.activations or 0.0) * _GIB


def _usable_bytes(config: TrainConfig) -> float:
    """Return the memory that a rank may use, of the hardware that is planned for or of this process's device."""
    on_gpu = has_gpu(config)
    hardware = None if config.hardware is None else read_hardware(config.hardware)
    total_bytes = device_bytes(on_gpu=on_gpu) if hardware is None else hardware.memory_gb * 1e9
    return total_bytes * Constants().usable_memory


def _reduce_to_budget(num_tokens: int, budget: float, token_bytes: float, pass_bytes: Callable[[int], int]) -> int:
    """Round a number of tokens down to a multiple of 128, at least one; reduce it while a pass exceeds the budget."""
    multiple = _BUCKET_MULTIPLE
    num_tokens = max(num_tokens // multiple * multiple, multiple)
    while num_tokens > multiple:
        excess_bytes = pass_bytes(num_tokens) - budget
        if excess_bytes <= 0:
            break
        num_excess = (int(excess_bytes / token_bytes) // multiple + 1) * multiple
        num_tokens = max(num_tokens - num_excess, multiple)
    return num_tokens


def device_bytes(*, on_gpu: bool) -> int:
    """Return the bytes of this process's GPU, or its share of the machine's memory."""
    if on_gpu:
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return pages * size // processes_of_machine()


def _text_pass_bytes(
    config: TrainConfig, model: PreTrainedConfig, dtype: torch.dtype, num_tokens: int, axes: Axes | None
) -> int:
    """Return ``traced_bytes`` of text tokens; raise a ConfigError if the model cannot be traced."""
    num_bytes = traced_bytes(config, model, dtype, RankTokens(computed=num_tokens), axes)
    if num_bytes is None:
        raise ConfigError(
            f"--bucket-size auto: the memory of a {model.model_type} model per token cannot be estimated",
            "Give a number of tokens, as in --bucket-size 8192.",
        )
    return num_bytes


def bytes_per_token(
    config: TrainConfig, model: PreTrainedConfig, dtype: torch.dtype, axes: Axes | None = None
) -> float:
    """Return the bytes that each text token adds to the peak memory of a pass, from two traced passes."""
    few_bytes = _text_pass_bytes(config, model, dtype, _FEW_TOKENS, axes)
    more_bytes = _text_pass_bytes(config, model, dtype, _MORE_TOKENS, axes)
    return (more_bytes - few_bytes) / (_MORE_TOKENS - _FEW_TOKENS)
