"""Memory that a rank needs, estimated before any weight is loaded: for a run, and for ``packtool plan --model``."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig

from packtool.attention.parallel.axes import Axes
from packtool.batch.spec import InputSpec, auto_class, model_config, weights_in_one_piece
from packtool.config.plan import PlanConfig
from packtool.config.settings import part_of
from packtool.config.train import TrainConfig
from packtool.encode.families import MediaLimits, family_of
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, UnsupportedModelError
from packtool.launch.world import World
from packtool.planning.epoch import EpochPlan
from packtool.simulate.hardware import Hardware
from packtool.train.model.load import make_trainable, quiet_transformers, resolve_dtype
from packtool.train.model.precision import loaded_dtype
from packtool.train.model.quantize import quantized_layers, saved_bytes, whole_size
from packtool.train.model.sharding import deepspeed_settings, expert_weights
from packtool.train.model.trace import trace_pass
from packtool.train.prepare.costs import with_recomputing
from packtool.train.prepare.figures import RankTokens
from packtool.train.prepare.heaviest import heaviest_tokens, seen_media, share_media, with_longest
from packtool.train.prepare.preview import Preview
from packtool.train.prepare.sequence_parallel import axes_of, with_shares

FEW = 4
"""Samples that the check before the first step looks at, at most."""

CHECKED_POSITIONS = 32
"""Positions of a sample whose logits it compares; all of a long sample's would need gigabytes."""

PassBytesOf = Callable[[TrainConfig, PreTrainedConfig, torch.dtype, RankTokens, Axes], int]
"""Bytes of a pass, by the run's settings, the model's, the precision, the tokens, and how ranks share sequences."""

_LOG = logging.getLogger("packtool.train.memory")
_GIB = 2**30
_LONG = 1 << 17


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of one rank in GiB.

    Args:
        weights, gradients, optimizer: after sharding.
        activations: the most that a forward and backward pass of one micro-batch holds, traced; None where the model
            cannot be traced.
        gathered: weights that FSDP or ZeRO-3 bring together at a time, and gradients that are not sharded yet.
        buckets: copies of the gradients that data-parallel ranks without sharding exchange.
        num_tokens: of that micro-batch.
        num_parameters, num_trainable: of the whole model.
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
    def total(self) -> float:
        """GiB of a rank in all, as far as it is known."""
        return self.weights + self.gradients + self.optimizer + (self.activations or 0.0) + self.gathered + self.buckets

    def sentence(self) -> str:
        """The estimate as one sentence."""
        parts = f"weights {self.weights:.2f}, gradients {self.gradients:.2f}, optimizer {self.optimizer:.2f}"
        parts += f", gathered layers {self.gathered:.2f}" if self.gathered else ""
        parts += f", buckets of gradients {self.buckets:.2f}" if self.buckets else ""
        if self.activations is None:
            return f"estimated memory of a rank: {self.total:.2f} GiB ({parts}) and activations, which cannot be traced"
        return (
            f"estimated memory of a rank: {self.total:.2f} GiB ({parts}, activations {self.activations:.2f} for "
            f"{self.num_tokens:,} tokens)"
        )

    def sentence_on(self, hardware: Hardware) -> str:
        """The estimate against a machine that is planned for, as one sentence."""
        room = hardware.memory_gb * 1e9 / _GIB
        verdict = f"has {room:.1f} GiB" if self.total <= room else f"has only {room:.1f} GiB: this will not fit"
        return f"planned for {hardware.name}, which {verdict}; what is installed there was not looked at"


def estimate_memory(
    config: TrainConfig,
    model: nn.Module,
    model_config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    world_size: int,
    micro_batches: Sequence[RankTokens] = (),
    axes: Axes | None = None,
    trace: PassBytesOf | None = None,
) -> MemoryEstimate:
    """The memory of a rank that trains a full micro-batch.

    Args:
        model: made trainable, on whatever device.
        dtype: of the computation.
        micro_batches: those that may need most; by default the longest, of text alone.
        axes: how ranks share its sequence; None where each has its own.
        trace: what tells the bytes of a pass; by default each is traced.
    """
    sizes = parameter_sizes(model)
    quantized = quantized_layers(model, model_config.model_type, config)
    # Those that are there already take up bytes of their own.
    kept = torch.float32.itemsize if config.torch_dtype == "float32" else dtype.itemsize
    whole_layers = sum(whole_size(layer.weight) * (kept - layer.weight.element_size()) for layer in quantized)
    weights = sum(count * size for count, size, _ in sizes) + whole_layers - saved_bytes(quantized, config, kept)
    # A layer of few bits is brought back to all its digits while it computes.
    restored = max((whole_size(layer.weight) for layer in quantized), default=0) * dtype.itemsize
    trained = sum(count * size for count, size, is_trained in sizes if is_trained)
    stage = _stage(config)
    micro_batches = micro_batches or with_longest(config, model_config.to_dict(), RankTokens(computed=1))
    told = [traced_bytes(config, model_config, dtype, each, axes, trace) for each in micro_batches]
    known = [found for found in told if found is not None]
    tokens = micro_batches[0].computed
    checked = 3 * 4 * _checked_logits(config, tokens, int(model_config.get_text_config().vocab_size))
    gathered = _gathered_bytes(model, dtype, config) if stage >= 3 else 0
    # torch's buckets are no views of the gradients.
    buckets = trained if world_size > 1 and stage == 0 and config.deepspeed is None else 0
    return MemoryEstimate(
        weights=weights / _GIB / (world_size if stage >= 3 else 1),
        gradients=trained / _GIB / (world_size if stage >= 2 else 1),
        optimizer=_optimizer_bytes(config, trained, dtype) / _GIB / (world_size if stage >= 1 else 1),
        activations=(max(*known, checked) + restored) / _GIB if len(known) == len(told) else None,
        gathered=gathered / _GIB,
        buckets=buckets / _GIB,
        num_tokens=tokens,
        num_parameters=sum(count for count, _, _ in sizes),
        num_trainable=sum(count for count, _, is_trained in sizes if is_trained),
    )


def parameter_sizes(model: nn.Module) -> list[tuple[int, int, bool]]:
    """Numbers of each parameter, bytes of one as it is kept, and whether it is trained."""
    return [(whole_size(weight), weight.element_size(), weight.requires_grad) for weight in model.parameters()]


def _optimizer_bytes(config: TrainConfig, trained: int, dtype: torch.dtype) -> int:
    """AdamW's states for so many bytes of trained weights."""
    if config.deepspeed is not None and dtype.itemsize == 2:
        return 6 * trained  # float32: two moments and a copy of the weights
    return (4 if config.master_weights == "kahan" and config.train_type == "full" else 2) * trained


def _checked_logits(config: TrainConfig, tokens: int, vocab_size: int) -> int:
    """Logits that the check before the first step holds."""
    checks = config.removes_padding and config.verify_packing
    return min(FEW * CHECKED_POSITIONS, tokens) * vocab_size if checks else 0


def _gathered_bytes(model: nn.Module, dtype: torch.dtype, config: TrainConfig) -> int:
    """What is not sharded for a while: all that lies in no layer, and two layers, of which one's gradients wait.

    With ``shard_grad_op`` all layers stay together from the forward pass to the backward pass. Of the experts that
    processes divide, a rank gathers its own.
    """
    spread = {id(weight) for weight in expert_weights(model).values()} if config.shares_experts else set()

    def size(parameter: nn.Parameter) -> int:
        return whole_size(parameter) // (config.expert_parallel_size if id(parameter) in spread else 1)

    listed = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in listed]
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = sum(size(parameter) for parameter in model.parameters() if id(parameter) not in inside)
    sizes = [
        (sum(map(size, layer.parameters())), sum(size(p) for p in layer.parameters() if p.requires_grad))
        for layer in layers
    ]
    largest, trained = max(sizes, default=(0, 0))
    layers_at_a_time = sum(each for each, _ in sizes) if "shard_grad_op" in config.fsdp else 2 * largest
    return (outside + layers_at_a_time + trained) * dtype.itemsize


def traced_bytes(
    config: TrainConfig,
    model_config: PreTrainedConfig,
    dtype: torch.dtype,
    tokens: RankTokens,
    axes: Axes | None = None,
    trace: PassBytesOf | None = None,
) -> int | None:
    """The most that a forward and backward pass holds beside weights and gradients; None where it cannot be traced.

    Args:
        axes: how ranks share the micro-batch; None where each has its own.
        trace: what tells the bytes of a pass of at most a quarter million tokens.
    """
    told, axes = trace or traced_pass_bytes, axes or Axes()
    try:
        # Pictures that a model's own processor makes are there while they are traced.
        long = _LONG >> 4 if family_of(model_config.to_dict()).processor_inputs else _LONG
        if tokens.computed <= 2 * long:
            return told(config, model_config, dtype, tokens, axes)
        # What is held is linear in tokens, and positions of a billion would be held on this machine.
        few, more = (told(config, model_config, dtype, tokens.scaled(number), axes) for number in (long, 2 * long))
        return few + int((more - few) / long * (tokens.computed - long))
    except (ConfigError, RuntimeError, TypeError, ValueError) as error:
        _LOG.debug("the memory of a pass cannot be traced: %r", error)
        return None  # a model that asks for numbers on its way, or does not take what batches have


def traced_pass_bytes(
    config: TrainConfig, model_config: PreTrainedConfig, dtype: torch.dtype, tokens: RankTokens, axes: Axes
) -> int:
    """The most that a pass of one rank holds, traced: takes seconds, see ``trace``."""
    with quiet_transformers():
        model = model_without_weights(config, copy.deepcopy(model_config), dtype)
        shards = bool(config.fsdp or config.deepspeed or config.shares_experts)
        if shards:
            model.to(dtype)  # which computes with weights of this precision, whatever it keeps
        autocast = dtype if dtype.itemsize == 2 and not shards else None
        return trace_pass(
            model, InputSpec(config.model, model_config, MediaLimits()), tokens, axes, autocast=autocast
        ).peak


class TracedOnce:
    """``traced_pass_bytes`` for many settings of one model: remembers what was traced."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, torch.dtype], dict[tuple[RankTokens, Axes], int]] = {}

    def __call__(
        self,
        config: TrainConfig,
        model_config: PreTrainedConfig,
        dtype: torch.dtype,
        tokens: RankTokens,
        axes: Axes,
    ) -> int:
        """See ``traced_pass_bytes``."""
        known, key = self._of(config, dtype), (tokens, dataclasses.replace(axes, reason=""))
        if key not in known:
            known[key] = traced_pass_bytes(config, model_config, dtype, tokens, axes)
        return known[key]

    def at_least(self, config: TrainConfig, dtype: torch.dtype, tokens: RankTokens, axes: Axes) -> int:
        """The bytes of the largest pass that was traced and has no more tokens of any kind; 0 if none was.

        One whose sequence ranks share holds no less than one of as many tokens that nobody shares.
        """
        if tokens.computed > 2 * _LONG:
            tokens = tokens.scaled(2 * _LONG)
        alike = (Axes(), dataclasses.replace(axes, reason=""))
        smaller = (
            found
            for (its_tokens, its_axes), found in self._of(config, dtype).items()
            if its_axes in alike and its_tokens.holds_at_most(tokens)
        )
        return max(smaller, default=0)

    def _of(self, config: TrainConfig, dtype: torch.dtype) -> dict[tuple[RankTokens, Axes], int]:
        """What was traced with settings that a pass does not tell from these."""
        way = ("full_shard",) if config.fsdp or config.deepspeed else ()
        looked_at = dataclasses.replace(
            config, packing_length=None, sequence_parallel_size=None, fsdp=way, deepspeed=None
        )
        return self._known.setdefault((repr(looked_at), dtype), {})


def model_without_weights(config: TrainConfig, model_config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    """The model as it would be trained, on the meta device: a second instead of minutes, and no memory.

    Raises:
        ConfigError, UnsupportedModelError: as ``train.model.load.make_trainable``.
    """
    with weights_in_one_piece(), torch.device("meta"):
        model = auto_class(model_config).from_config(model_config, dtype=loaded_dtype(dtype, model_config, config))
        return make_trainable(model, config)


def _stage(config: TrainConfig) -> int:
    """What is sharded: nothing, optimizer states, gradients too, weights too."""
    if config.fsdp or config.shares_experts:
        return 3
    if config.deepspeed is None:
        return 0
    return int((deepspeed_settings(config.deepspeed).get("zero_optimization") or {}).get("stage") or 0)


def planned_memory(config: PlanConfig, found: Preview) -> MemoryEstimate:
    """What ``packtool train --dry-run`` would tell of a rank on a GPU; takes seconds.

    Args:
        config: with a model.
        found: its plan.

    Raises:
        ConfigError, UnsupportedModelError: if training would refuse the model, or transformers does not know it.
    """
    kinds = {
        (stage.inputs.options.packing_length, stage.inputs.sequence_parallel_size): next(stage.stretches()).plan
        for stage in found.timeline.stages
    }
    told = [_memory_of(config, found, plan, room, size) for (room, size), plan in kinds.items()]
    return max(told, key=lambda estimate: estimate.total or 0)


def _memory_of(config: PlanConfig, found: Preview, plan: EpochPlan, room: int, size: int) -> MemoryEstimate:
    """What a rank holds that trains packs of ``room`` tokens, each on ``size`` processes."""
    assert config.model is not None, "asked for"
    run = with_recomputing(part_of(TrainConfig, config, model=config.model, packing_length=room))
    run, files = with_shares(run, size), ModelFiles.load(config.model)
    try:
        model = model_config(files.directory)
    except ValueError as error:
        raise UnsupportedModelError(str(error).splitlines()[0], "Name a model that transformers has.") from error
    dtype = resolve_dtype(model, run, on_gpu=True)
    axes = axes_of(run, World(0, config.world_size, size), files, found.inputs.lengths, trained=True)
    micro_batches = with_longest(run, files.config, RankTokens(computed=1))
    if found.inputs.reader is not None:
        index, shared = found.inputs.reader.index, found.inputs.shared
        tokens = index if shared is None else shared
        shares = share_media(seen_media(index, files.config), files.config, plan, size) if size > 1 else None
        micro_batches = heaviest_tokens(run, plan, files.config, tokens.media_tokens, tokens.audio_tokens, shares)
    with quiet_transformers():
        empty = model_without_weights(run, model, dtype)
    return estimate_memory(
        run, empty, model, dtype=dtype, world_size=config.world_size, micro_batches=micro_batches, axes=axes
    )
