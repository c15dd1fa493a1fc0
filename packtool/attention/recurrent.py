"""Layers that carry a state along the sequence, run so that the state starts anew with every document.

A gated delta net (Qwen3-Next, Qwen3.5) mixes along the sequence twice: a short convolution over the last few tokens,
and a recurrence over all before. Both must know where documents begin::

    sequence     a0 a1 a2 | b0 b1 b2 b3
    convolution  .. .. ..   .. .. .. ..      a window of 4 would show a1 and a2 to b0 and b1
    recurrence   S1 S2 S3   S4 S5 S6 S7      S3 would be the state that b0 starts from

transformers hands ``cu_seqlens`` to the recurrence and ``seq_idx`` to the convolution, and only the kernels of
flash-linear-attention and causal-conv1d heed them. Without the first, 5.17 leaks and 5.23 raises; the convolution leaks
in both unless somebody passes ``seq_idx``, which the models do not [read in modeling_qwen3_5 and hub_kernels]. So each
layer is *tried* once on a device: if a change of one document moves the other in the least, or the two are not what
they are alone, every document is run through the layer on its own.

Of a sequence that ranks share, documents that are one rank's alone are run there, and of the others each rank runs some
heads (``attention.parallel.delta_nets``).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from packtool.attention.kernel import LeakError, Varlen
from packtool.attention.opaque import with_shown_boundaries
from packtool.attention.parallel.delta_nets import Recurrence, share_heads
from packtool.encode.families import FAMILIES
from packtool.errors import UnsupportedModelError

if TYPE_CHECKING:
    from packtool.attention.parallel.mesh import SequenceParallel
    from packtool.batch.shard import SequenceShard

RECURRENT_LAYER = "linear_attention"
"""The layer type, in a config's ``layer_types``, of what is isolated here (and of others, which are not)."""

ISOLATED_CLASSES = frozenset(name for family in FAMILIES for name in family.recurrence.layers)
"""Names of classes whose forward takes (hidden_states, cache_params, attention_mask, **boundaries), and no more."""

ISOLATED_MODEL_TYPES = frozenset(name for family in FAMILIES for name in family.recurrence.text_types)
"""Text towers whose recurrent layers are all of these classes."""

_RANKS = "_packtool_ranks"
_TRIED_LENGTHS = (70, 9)
"""Longer than a chunk of the recurrence (64), and long enough for the convolution to reach back."""

_SAME_AS_ALONE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""How far a document in company may be from itself alone, relative to the largest number: other blocks, other sums."""

_tried: dict[tuple[type, str, torch.dtype], bool] = {}


def isolate_recurrent_layers(model: nn.Module) -> int:
    """Make every recurrent layer of a model start anew with each document; may be called again.

    Only the instances are changed, not their classes, and neither weights nor names: checkpoints and copies are as
    before. Afterwards the model can only be called with boundaries, as ``PackedBatch.model_inputs`` has them.

    Returns:
        how many layers there are.
    """
    layers = recurrent_layers(model)
    for layer in layers:
        # A bound method, which a deep copy binds to the copy.
        layer.forward = types.MethodType(_forward, layer)
    return len(layers)


def share_recurrent_layers(model: nn.Module, parallel: SequenceParallel | None) -> None:
    """Tell isolated layers which ranks share the sequences that they are given a part of; None for nobody."""
    for layer in recurrent_layers(model):
        setattr(layer, _RANKS, parallel)


def release_recurrent_layers(model: nn.Module) -> None:
    """Give the layers their own forward back."""
    for layer in recurrent_layers(model):
        layer.__dict__.pop("forward", None)


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that ``isolate_recurrent_layers`` changes."""
    return [module for module in model.modules() if type(module).__name__ in ISOLATED_CLASSES]


@torch.compiler.disable(reason="boundaries differ in every micro-batch")  # type: ignore[no-untyped-call]
def _forward(
    layer: nn.Module,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """The layer's forward on a packed sequence.

    Args:
        hidden_states: (1, T, hidden).
        cache_params, attention_mask: must be None.
        kwargs: ``cu_seq_lens_q`` int32 (S + 1,), ``max_length_q``, optionally ``document_lengths``, as for attention;
            or a ``sequence_shard``, for a sequence that ranks share.

    Returns:
        (1, T, hidden).

    Raises:
        LeakError: on a call in which one document could see another.
        UnsupportedModelError: for documents that share prefixes: the state at the end of one is not handed on.
    """
    name = type(layer).__name__
    kwargs = with_shown_boundaries(kwargs)
    if kwargs.get("key_index") is not None:
        raise UnsupportedModelError(
            f"{name} carries a state along the row, which documents cannot take over from a prefix that they share",
            "Compute each sample of this model with its whole prefix.",
        )
    shard: SequenceShard | None = kwargs.get("sequence_shard")
    if shard is None and kwargs.get("cu_seq_lens_q") is None:
        raise LeakError(f"{name} was called without cu_seq_lens_q: the documents of a pack could not be told apart")
    if cache_params is not None:
        raise LeakError(f"{name} was given a cache, whose state would go from one document into the next")
    if attention_mask is not None:
        raise LeakError(f"{name} was given a mask; packed documents are told apart by cu_seq_lens_q alone")
    if hidden_states.shape[0] != 1:
        raise LeakError(f"{name} was given {hidden_states.shape[0]} sequences; a packed micro-batch is one sequence")
    run = _at_once if keeps_documents_apart(layer, hidden_states) else _one_by_one
    if shard is not None:
        return _of_shard(layer, hidden_states, shard, run)
    varlen = Varlen(kwargs["cu_seq_lens_q"], kwargs["max_length_q"], kwargs.get("document_lengths"))
    return run(_own_forward(layer), hidden_states, varlen)


def _of_shard(layer: nn.Module, hidden_states: Tensor, shard: SequenceShard, run: Recurrence) -> Tensor:
    """``_forward`` of this rank's part of a sequence that ranks share."""
    parallel: SequenceParallel | None = getattr(layer, _RANKS, None)
    if parallel is None:
        name = type(layer).__name__
        raise LeakError(f"{name} was given a part of a sequence, but the model was not told which ranks have the rest")
    local, sharded = hidden_states[:, : shard.num_local], hidden_states[:, shard.num_local :]
    found = []
    if shard.local_lengths:
        found.append(run(_own_forward(layer), local, Varlen.of_lengths(shard.local_lengths, local.device)))
    if shard.sharded_lengths:
        found.append(share_heads(layer, sharded, shard, parallel.of(shard.cut), run))
    return torch.cat(found, dim=1)


def _own_forward(layer: nn.Module) -> Callable[..., Tensor]:
    """The forward of the layer's class: the instance's is this module's."""
    return partial(type(layer).forward, layer)


def keeps_documents_apart(layer: nn.Module, like: Tensor) -> bool:
    """Whether the layer's own forward honours boundaries; tried once for its class, device and precision.

    Args:
        like: of any shape, on the device and in the precision in question.
    """
    key = type(layer), like.device.type, like.dtype
    if key not in _tried:
        # Tensors without numbers tell nothing.
        if like.device.type == "meta" or isinstance(like, FakeTensor):
            return False
        _tried[key] = _try(layer, like)
    return _tried[key]


@torch.no_grad()
def _try(layer: nn.Module, like: Tensor) -> bool:
    # Drawn on the CPU by a generator of its own: the run's random numbers stay as they would have been.
    generator = torch.Generator().manual_seed(0)
    first, last = _TRIED_LENGTHS
    sequence, other = (torch.randn(1, first + last, like.shape[-1], generator=generator).to(like) for _ in range(2))
    changed = torch.cat([other[:, :first], sequence[:, first:]], dim=1)
    forward, varlen = _own_forward(layer), Varlen.of_lengths(_TRIED_LENGTHS, like.device)
    try:
        before, after = (_at_once(forward, hidden, varlen) for hidden in (sequence, changed))
    except Exception:  # whatever a layer says to boundaries that it does not know, it does not honour them
        return False
    if torch.equal(before[:, :first], after[:, :first]) or not torch.equal(before[:, first:], after[:, first:]):
        return False
    alone = _one_by_one(forward, sequence, varlen)
    return bool((before - alone).abs().max() <= _SAME_AS_ALONE[before.dtype] * alone.abs().max())


def _at_once(forward: Callable[..., Tensor], hidden_states: Tensor, varlen: Varlen) -> Tensor:
    """One call for the whole sequence, which tells the boundaries to the recurrence and to the convolution."""
    device, lengths = hidden_states.device, varlen.host_lengths()
    bounds = Varlen.of_lengths(lengths, device).cu_seqlens
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seq_idx = numbers.to(device, torch.int32).unsqueeze(0)
    return forward(hidden_states, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, seq_idx=seq_idx)


def _one_by_one(forward: Callable[..., Tensor], hidden_states: Tensor, varlen: Varlen) -> Tensor:
    """The price: as many calls as there are documents."""
    return torch.cat([forward(hidden_states[:, document]) for document in varlen.documents(hidden_states.shape[1])], 1)
