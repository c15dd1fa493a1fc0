"""Tracing of the memory of a forward and backward pass, through the real model on tensors without data.

Under torch's ``FakeTensorMode`` a model of any size runs in seconds without data, but creates and frees all tensors as
usual; a dispatch mode adds up the bytes of those that exist. Towers, adapters, gradient checkpointing, autocast's
copies of weights and the chunks of the head are therefore measured and not calculated by a formula. So are the
exchanges of a sequence that ranks share (``attention.parallel``), of which one rank is traced as if the others existed,
and the gathered keys and values of shared prefixes. Attention stores the same tensors as flash attention: q, k, v, the
output and the log-sum-exp (lse).
"""

from __future__ import annotations

import contextlib
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface

from packtool.attention.features import set_feature_ranks, towers_of_media
from packtool.attention.kernel import Kernel
from packtool.attention.parallel.axes import Axes
from packtool.attention.parallel.blocks import AttentionBlock, BlockKernel, Gradients
from packtool.attention.parallel.mesh import AbsentRanks, SequenceParallel
from packtool.attention.recurrent import set_recurrent_ranks
from packtool.attention.register import packed_attention, set_attention, set_text_attention, tower_attention
from packtool.batch.batch import (
    Batch,
    CrossPictures,
    PackedBatch,
    ShardedBatch,
    TreeBatch,
    WholePictures,
    add_cross_attention_mask,
)
from packtool.batch.collate import filler_document
from packtool.batch.media import blank_processed, large_processed
from packtool.batch.prefix_tree import ROOT
from packtool.batch.shard import FeatureRoute, SequenceShard, SequenceSplit
from packtool.batch.spec import InputSpec
from packtool.batch.tower_inputs import tower_inputs
from packtool.train.model.loss import LossFunction, base_model
from packtool.train.model.trainable import switchable_layers
from packtool.train.prepare.figures import RankTokens

_TEXT, _TOWERS = "packtool_traced", "packtool_flash_traced"  # names of the registered attention


@dataclass(frozen=True)
class PassBytes:
    """Bytes of a pass without weights and gradients.

    Args:
        kept: by autograd after the forward pass.
        peak: maximum during the pass.
        layers: of ``kept``, the bytes of each layer of the language model, if layers can be switched to recomputation.
    """

    kept: int
    peak: int
    layers: tuple[int, ...] = ()


def trace_pass(
    model: nn.Module,
    spec: InputSpec,
    tokens: RankTokens,
    axes: Axes | None = None,
    *,
    autocast: torch.dtype | None = None,
) -> PassBytes:
    """Measure the memory of a micro-batch's forward and backward pass with fake tensors, which have no data.

    Args:
        model: made trainable, on the meta device; unusable afterwards.
        spec: properties of the model that collation needs.
        tokens: token counts of the micro-batch.
        axes: how ranks share a sequence; by default each rank has its own.
        autocast: precision of the computation if weights have another precision.
    """
    axes = axes or Axes()
    batch = traced_batch(spec, tokens, axes)
    set_traced_attention(model, _parallel_without_processes(batch, axes))
    # The first backward pass of a process starts a thread for each device, but FakeTensorMode hides GPUs.
    torch.zeros(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]

    # Non-fake inputs are allowed because models also create real tensors, for example positions from numpy.
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    with fake_mode, _real_window_indices(model):
        _create_fake_weights(model)
        model.train()
        reads_input_values = bool(spec.family.processor_inputs)
        if not reads_input_values:  # otherwise inputs stay real
            batch = _fake_on_cpu(batch, fake_mode)
        return run_pass(model, batch, autocast)


def _parallel_without_processes(batch: Batch, axes: Axes) -> SequenceParallel | None:
    """Return sequence parallelism in which other ranks' data has memory, but no process; None if nothing is shared."""
    if not isinstance(batch, ShardedBatch):
        return None
    split = batch.shard.split
    ring, ulysses = AbsentRanks(axes.ring_size), AbsentRanks(axes.ulysses_size)
    return SequenceParallel(split, axes.kv_exchange, ring, ulysses, group=AbsentRanks(split.size))


def _fake_on_cpu(batch: Batch, mode: FakeTensorMode) -> Batch:
    """Return a batch of fake tensors on the CPU, where the fake weights are, whatever the device of the originals."""
    return batch.map(lambda tensor: torch.empty_like(mode.from_tensor(tensor), device="cpu"))


def set_traced_attention(model: nn.Module, parallel: SequenceParallel | None = None) -> None:
    """Give a model, bare or adapted, attention that stores the tensors of flash attention but computes nothing."""
    inner = base_model(model)
    kernels = {"kernel": _TracedKernel(), "blocks": _TracedBlocks(), "parallel": parallel}
    AttentionInterface.register(_TEXT, partial(packed_attention, **kernels))
    AttentionInterface.register(_TOWERS, partial(tower_attention, kernel=_TracedKernel()))
    set_attention(inner)
    set_text_attention(inner, _TEXT)
    set_feature_ranks(inner, parallel)
    set_recurrent_ranks(inner, parallel)
    for tower in towers_of_media(inner):
        tower.config._attn_implementation = _TOWERS


def run_pass(model: nn.Module, batch: Batch, autocast: torch.dtype | None = None) -> PassBytes:
    """Compute losses and gradients of a micro-batch on the CPU, with real or fake tensors, and return the memory."""
    precision = contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    with _LiveBytes() as live:
        with _recorded_layers(switchable_layers(model), live) as kept_by_layers, precision:
            loss = LossFunction(model)(model, batch).weighted_sum()
        kept = live.now
        loss.backward()  # type: ignore[no-untyped-call]
    return PassBytes(kept, live.peak, tuple(after - before for before, after in pairwise(kept_by_layers)))


@contextlib.contextmanager
def _recorded_layers(layers: Sequence[nn.Module], live: _LiveBytes) -> Iterator[list[int]]:
    """Yield a list that receives the live bytes before the first layer, and after each, in a forward pass."""
    kept_by_layers: list[int] = []

    def record(*_: Any) -> None:
        kept_by_layers.append(live.now)

    hooks = [layer.register_forward_pre_hook(record) for layer in layers[:1]]
    hooks += [layer.register_forward_hook(record) for layer in layers]
    yield kept_by_layers
    for hook in hooks:
        hook.remove()


def traced_batch(spec: InputSpec, tokens: RankTokens, axes: Axes) -> Batch:
    """Return a micro-batch with as many tokens of each kind, half of them targets, that needs as much memory.

    Memory depends on numbers of tokens, so it has one document, image and sound. Pixels and mel frames are meta.
    """
    if axes.ring_size * axes.ulysses_size > 1:
        return _traced_sharded_batch(spec, tokens, axes)
    num_tokens = tokens.computed
    # Keys of a shared prefix count for each document that continues it, so there are more keys than tokens.
    num_keys = max(tokens.keys, num_tokens)
    fields = _batch_fields(spec, tokens, num_tokens)
    fields |= {"cu_seqlens": torch.tensor([0, num_tokens], dtype=torch.int32), "lengths": (num_tokens,)}
    fields["pictures"] = _traced_pictures(spec, fields["input_ids"], num_keys, fields["media"])
    shares_prefixes = tokens.keys > 0
    return TreeBatch(**fields, **_tree_fields(num_tokens, num_keys)) if shares_prefixes else PackedBatch(**fields)


def _traced_sharded_batch(spec: InputSpec, tokens: RankTokens, axes: Axes) -> ShardedBatch:
    """Return the part of a shared sequence of the rank that needs most memory."""
    num_tokens = tokens.computed
    if axes.ring_size > 1:
        num_tokens += num_tokens % 2  # a ring gives each rank two chunks of equal length
    fields = _batch_fields(spec, tokens, num_tokens)
    shard = _traced_shard(tokens, axes, num_tokens)
    return ShardedBatch(**fields, shard=shard, index=torch.arange(num_tokens), lengths=shard.sharded_lengths)


def _tree_fields(num_tokens: int, num_keys: int) -> dict[str, Any]:
    """Return the fields that only a ``TreeBatch`` has, for one document of one sample with ``num_keys`` keys."""
    targets = torch.arange(num_tokens // 2)
    return {
        "key_index": torch.arange(num_keys) % num_tokens,  # any tokens: only their number matters
        "cu_seqlens_k": torch.tensor([0, num_keys], dtype=torch.int32),
        "key_lengths": (num_keys,),
        "parents": (ROOT,),
        "target_counts": torch.ones(1, len(targets), dtype=torch.int64),
        "sample_targets": torch.stack((torch.zeros_like(targets), targets)),  # all of sample 0
        "sample_ends": (0,),
    }


def _traced_pictures(
    spec: InputSpec, input_ids: Tensor, num_keys: int, media: dict[str, Tensor]
) -> WholePictures | CrossPictures | None:
    """Return pictures of usual size for the placeholder tokens at the beginning of ``input_ids`` (1, T)."""
    has_pictures = spec.whole_pictures or spec.family.cross_attention
    num_placeholders = int((input_ids == spec.pad_ids["image"]).sum()) if has_pictures else 0
    if not num_placeholders:
        return None
    if spec.family.cross_attention:  # each in a sample of its own, after a token of text
        num_samples = min(num_placeholders, input_ids.shape[1] // 2)
        parts = torch.zeros_like(input_ids[0]).tensor_split(num_samples)
        samples = [[0, spec.pad_ids["image"], *part[2:].tolist()] for part in parts]
        return add_cross_attention_mask([filler_document(sample) for sample in samples], media, spec)
    size, _ = blank_processed(spec)
    spans = [(start, min(start + size, num_placeholders)) for start in range(0, num_placeholders, size)]
    only_windows = spec.whole_pictures == "windows"
    return WholePictures(spans, [input_ids.shape[1]], [num_keys], only_windows=only_windows)


def _batch_fields(spec: InputSpec, tokens: RankTokens, num_tokens: int) -> dict[str, Any]:
    """Return the fields that all kinds of batches have, for ``num_tokens`` tokens; the second half are targets."""
    input_ids = torch.zeros(1, num_tokens, dtype=torch.int64)
    media = _add_media(spec, tokens, input_ids[0])
    positions = torch.arange(num_tokens).unsqueeze(0)
    return {
        "input_ids": input_ids,
        "labels": torch.zeros_like(input_ids),
        "position_ids": positions.expand(4, 1, -1) if spec.has_mrope else positions,
        "media": media,
        "towers": tower_inputs(spec, media, input_ids),
        "target_positions": torch.arange(num_tokens - num_tokens // 2, num_tokens),
        "loss_weights": None,
        "channels": (None,),
        "num_samples": 1,
    }


def _traced_shard(tokens: RankTokens, axes: Axes, num_tokens: int) -> SequenceShard:
    """Return the part of a sequence, ``num_tokens`` on each rank, of the rank that needs most memory."""
    num_ranks = axes.ring_size * axes.ulysses_size
    # With gathered keys, the first rank copies most, because its last chunk attends to nearly all others.
    rank = 0 if axes.kv_exchange == "allgather" else num_ranks - 1
    split = SequenceSplit(axes.ring_size, axes.ulysses_size, rank)
    routes = _routes_to_one_rank(tokens, num_ranks)
    total = num_tokens * num_ranks
    prefix = total // 2 // split.multiple * split.multiple
    num_repeated = tokens.keys - total  # keys of prefixes that documents continue
    if num_repeated <= 0 or not prefix:
        return SequenceShard(split, local_lengths=(), sharded_lengths=(total,), routes=routes)
    # As many documents continue a prefix of half of the tokens as there are repeated keys.
    units = (total - prefix) // split.multiple
    branches = np.array_split(np.full(units, split.multiple), min(math.ceil(num_repeated / prefix), units))
    lengths = (prefix, *(int(branch.sum()) for branch in branches))
    return SequenceShard(split, (), lengths, routes, (ROOT, *[0] * len(branches)), lengths)


def _routes_to_one_rank(tokens: RankTokens, num_ranks: int) -> dict[str, FeatureRoute]:
    """Return routes by which a rank sends all its features to one other rank, and receives all its own from it."""
    counts = {"image": (tokens.local_vision, tokens.vision), "audio": (tokens.local_audio, tokens.audio)}
    routes = {}
    for kind, (num_computed, num_received) in counts.items():
        if num_computed or num_received:
            num_sent, no_rows = max(num_computed, 1), (0,) * (num_ranks - 1)
            send_order, receive_order = torch.arange(num_sent), torch.arange(num_received)
            routes[kind] = FeatureRoute(send_order, (num_sent, *no_rows), (num_received, *no_rows), receive_order)
    return routes


def _add_media(spec: InputSpec, tokens: RankTokens, input_ids: Tensor) -> dict[str, Tensor]:
    """Return the towers' inputs for ``tokens``, and write their placeholder tokens into ``input_ids`` (T,)."""
    media: dict[str, Tensor] = {}
    if spec.family.processor_inputs:
        if tokens.vision:
            num_tokens, media = large_processed(spec, tokens.vision, tokens.computed)
            input_ids[:num_tokens] = spec.pad_ids["image"]
        return media
    if spec.has_vision and max(tokens.vision, tokens.local_vision):
        media |= _wide_image(spec, num_tokens=max(tokens.local_vision, 1))  # a rank without one has a blank image
        input_ids[: tokens.vision] = spec.pad_ids["image"]
    if spec.has_audio and max(tokens.audio, tokens.local_audio):
        num_frames = spec.family.mel_frames_of(max(tokens.local_audio, 1))
        media["input_features"] = torch.empty(1, spec.num_mel_bins, num_frames, device="meta")
        media["feature_attention_mask"] = torch.ones(1, num_frames, dtype=torch.int64)
        input_ids[tokens.vision : tokens.vision + tokens.audio] = spec.pad_ids["audio"]
    return media


def _wide_image(spec: InputSpec, num_tokens: int) -> dict[str, Tensor]:
    """Return the patches of an image that is one token high and ``num_tokens`` wide, and its size."""
    pixels_name, grids_name = spec.family.image_inputs
    side = int(spec.config.vision_config.spatial_merge_size)  # a token is made of side x side patches
    return {
        pixels_name: torch.empty(num_tokens * side**2, spec.patch_dim, device="meta"),
        grids_name: torch.tensor([[1, side, side * num_tokens]]),  # frames, patches in height and in width
    }


def _create_fake_weights(model: nn.Module) -> None:
    """Replace a meta model's weights by fake ones on the CPU, with gradients if they are trained."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            weight = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), parameter.requires_grad)
            if weight.requires_grad:
                # Gradients exist from the second micro-batch on; the estimate counts them separately.
                weight.grad = torch.empty_like(weight)
            setattr(module, name, weight)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes with real tensors inside ``FakeTensorMode``, and whose memory does not count."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def _real_window_indices(model: nn.Module) -> Iterator[None]:
    """Let towers compute attention windows, and the patches to pool, from the real sizes of pictures."""
    fake_one_hot, real_one_hot = F.one_hot, _untraced(F.one_hot)

    def one_hot(indices: Tensor, *args: Any, **kwargs: Any) -> Any:
        compute = fake_one_hot if isinstance(indices, FakeTensor) else real_one_hot
        return compute(indices, *args, **kwargs)

    name = "get_vision_window_index"
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(F, "one_hot", one_hot))
        # Each model's source file has imported the function under this name.
        for source in {sys.modules.get(type(module).__module__) for module in model.modules()}:
            if hasattr(source, name):
                stack.enter_context(patch.object(source, name, _untraced(getattr(source, name))))
        yield


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the tensors that were created under this mode and still exist: ``now``, and the ``peak`` so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self.now = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._count((args, kwargs), is_new=False)
        tensors = [each for each in tree_iter((args, kwargs)) if isinstance(each, Tensor)]
        # Operations on real tensors are computed as usual, because models read the sizes of images.
        is_real = tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if func is torch.ops.aten.index.Tensor and not is_real:
            args = args[0], _without_masks(args[1])
        with _disable_current_modes() if is_real else contextlib.nullcontext():
            out = func(*args, **(kwargs or {}))
        self._count(out, is_new=True)
        self.peak = max(self.peak, self.now)
        return out

    def _count(self, tensors: Any, *, is_new: bool) -> None:
        """Add the memory of new tensors, once per storage; existing ones, such as weights, and views count as 0."""
        for tensor in tree_iter(tensors):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known[storage._cdata] = storage.nbytes() if is_new else 0
                    self.now += self._known[storage._cdata]
                    weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        self.now -= self._known.pop(key)


def _without_masks(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Replace boolean masks of real tensors by the numbers of their elements, which a fake tensor can be indexed by."""
    numbers: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
            numbers.append(index)
            continue
        with _disable_current_modes():
            numbers += index.nonzero(as_tuple=True)
    return numbers


class _Keep(torch.autograd.Function):
    """Attention that stores the tensors of flash attention for the backward pass, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, lse = _unwritten(query, value)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _unwritten(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return uninitialized memory for the output, (T, Hq, D), and the lse, float32 (Hq, T)."""
    return q.new_empty((*q.shape[:2], v.shape[-1])), q.new_empty((q.shape[1], len(q)), dtype=torch.float32)


class _TracedKernel(Kernel):
    """Kernel that stores the tensors of flash attention, and computes nothing."""

    name = "traced"
    has_dropout = True

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        out: Tensor = _Keep.apply(q, k, v)
        return out


class _TracedBlocks(BlockKernel):
    """Kernel for blocks that allocates the tensors of flash attention, and computes nothing."""

    name = "traced"

    def fwd(self, q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        return _unwritten(q, v)

    def bwd(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, block: AttentionBlock
    ) -> Gradients:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
