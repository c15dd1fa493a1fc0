"""Recurrent layers whose state is reset at every document.

A gated delta net (Qwen3-Next, Qwen3.5) mixes along the sequence twice: a short convolution over the last few tokens,
and a recurrence over all before. Both must know where documents begin::

    sequence     a0 a1 a2 | b0 b1 b2 b3
    convolution  .. .. ..   .. .. .. ..      a window of 4 would show a1 and a2 to b0 and b1
    recurrence   S1 S2 S3   S4 S5 S6 S7      b0 would start from the state S3

transformers hands ``cu_seqlens`` to the recurrence and ``seq_idx`` to the convolution, and only the kernels of
flash-linear-attention and causal-conv1d use them. Without the first, 5.17 leaks and 5.23 raises; the convolution leaks
in both unless the caller passes ``seq_idx``, which the models do not [read in modeling_qwen3_5 and hub_kernels]. So
each layer is *tried* once per device: if a change of one document changes the other at all, or the two differ from
their outputs alone, every document is run through the layer on its own.

Documents that continue a shared prefix (``batch.prefix_tree``) start where it ends: each is given the state and the
last tokens before the convolution, as transformers' caches keep them while text is generated. A layer is tried first:
if a document in two parts differs from itself complete, documents are run with their complete prefixes instead.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from packtool.attention.kernel import LeakError, Varlen, refuse_leaks, reveal_boundaries
from packtool.attention.parallel.delta_nets import RunIsolated, run_sharded
from packtool.batch.prefix_tree import ROOT
from packtool.encode.families import FAMILIES

if TYPE_CHECKING:
    from packtool.attention.parallel.mesh import SequenceParallel
    from packtool.batch.shard import SequenceShard

RECURRENT_LAYER = "linear_attention"
"""Layer type of the isolated layers (and of others, which are not), in a config's ``layer_types``."""

_ISOLATED_CLASSES = frozenset(name for family in FAMILIES for name in family.recurrent_layers)
"""Names of classes whose forward takes (hidden_states, cache_params, attention_mask, **boundaries), and no more."""

ISOLATED_MODEL_TYPES = frozenset(name for family in FAMILIES for name in family.recurrent_types)
"""Text towers whose recurrent layers are all of these classes."""

_PARALLEL_ATTRIBUTE = "_packtool_ranks"
_TRIAL_LENGTHS = (70, 9)
"""Longer than a chunk of the recurrence (64), and long enough for the convolution to reach back."""

_TRIAL_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Allowed difference between a packed document and itself alone (sums in another order), relative to the maximum."""

_Forward = Callable[..., Tensor]
_Trial = Callable[[_Forward, Tensor], bool]
_trial_results: dict[tuple[_Trial, type, str, torch.dtype], bool] = {}


def isolate_recurrent_layers(model: nn.Module) -> int:
    """Make a model's recurrent layers reset their state at each document, in place; return their number. Idempotent.

    Afterwards the model can only be called with boundaries, as in ``PackedBatch.model_inputs``.
    """
    layers = recurrent_layers(model)
    for layer in layers:
        # A bound method, which a deep copy binds to the copy.
        layer.forward = types.MethodType(_isolated_forward, layer)
    return len(layers)


def set_recurrent_ranks(model: nn.Module, parallel: SequenceParallel | None) -> None:
    """Set the ranks that share the sequences of the isolated layers; None for none."""
    for layer in recurrent_layers(model):
        setattr(layer, _PARALLEL_ATTRIBUTE, parallel)


def restore_recurrent_layers(model: nn.Module) -> None:
    """Restore the layers' own forward."""
    for layer in recurrent_layers(model):
        layer.__dict__.pop("forward", None)


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that ``isolate_recurrent_layers`` changes."""
    return [module for module in model.modules() if type(module).__name__ in _ISOLATED_CLASSES]


@torch.compiler.disable(reason="boundaries differ in every micro-batch")  # type: ignore[no-untyped-call]
def _isolated_forward(
    layer: nn.Module,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Run a recurrent layer so that its state starts anew at each document; replaces the layer's own forward.

    Args:
        hidden_states: the packed sequence, (1, T, hidden); the result has the same shape.
        cache_params, attention_mask: must be None.
        kwargs: the boundaries of the documents, as for ``packed_attention``. A LeakError refuses calls without them.
    """
    parallel: SequenceParallel | None = getattr(layer, _PARALLEL_ATTRIBUTE, None)
    kwargs = reveal_boundaries(kwargs)  # which compiled layers hide
    refuse_leaks(layer, hidden_states, attention_mask, kwargs, parallel)
    if cache_params is not None:
        name = type(layer).__name__
        raise LeakError(f"{name} was given a cache, whose state would go from one document into the next")
    # One call of the class's own forward for all documents if it keeps them apart, else a call for each.
    run: RunIsolated = _run_packed if keeps_documents_apart(layer, hidden_states) else _run_each_document
    shard: SequenceShard | None = kwargs.get("sequence_shard")
    if shard is not None:
        assert parallel is not None, "refuse_leaks has checked it"
        return _run_shard(layer, hidden_states, shard, parallel, run)
    parents = kwargs.get("document_parents")
    if parents is not None:  # documents continue others, which are their prefixes
        run = _with_prefixes(run, parents, layer, hidden_states)
    varlen = Varlen(kwargs["cu_seq_lens_q"], kwargs["max_length_q"], kwargs.get("document_lengths"))
    return run(_class_forward(layer), hidden_states, varlen)


class _PrefixState:
    """The state in which a document leaves a layer, and from which others continue: transformers' cache of a layer."""

    def __init__(self, before: _PrefixState | None = None) -> None:
        self._inputs: Tensor | None = None if before is None else before._inputs  # last inputs of the convolution
        self._state: Tensor | None = None if before is None else before._state  # of the recurrence

    def get_conv_state(self, *_: Any, **__: Any) -> Tensor | None:
        return self._inputs

    def get_recurrent_state(self, *_: Any, **__: Any) -> Tensor | None:
        return self._state

    def is_recording_past(self, *_: Any) -> bool:
        """True: the convolution must not update its inputs in place, as it does for a generated token."""
        return True

    def update_conv_state(self, inputs: Tensor, *_: Any, conv_kernel_size: int) -> Tensor:
        """Return the inputs (1, C, T) of the convolution behind those that it still needs of the prefix."""
        inputs = inputs if self._inputs is None else torch.cat([self._inputs, inputs], dim=-1)
        self._inputs = inputs[..., 1 - conv_kernel_size :]
        return inputs

    def update_recurrent_state(self, state: Tensor, *_: Any) -> None:
        self._state = state


def _with_prefixes(run: RunIsolated, parents: Sequence[int], layer: nn.Module, like: Tensor) -> RunIsolated:
    """Return a ``run`` in which each document continues its parent (``TreeBatch.parents``)."""
    continues_states = _try_once(_continues_states, layer, like)
    return partial(_run_trees, parents=parents, run=run, continues_states=continues_states)


def _run_trees(
    forward: _Forward,
    hidden_states: Tensor,
    varlen: Varlen,
    *,
    parents: Sequence[int],
    run: RunIsolated,
    continues_states: bool,
) -> Tensor:
    """Run a layer on packed documents, (1, T, hidden), that continue others; return the same shape.

    Args:
        parents: for each document, the number of the earlier one that it continues, its prefix; or ``ROOT``.
        run: calls ``forward`` on documents that continue no other.
        continues_states: whether ``forward`` can start from the state after a prefix. If not, a document is run behind
            all of its prefixes, whose outputs are then dropped.
    """
    paths: list[list[Tensor]] = []  # of each document, the tokens of all documents from the root down to it
    for document, parent in zip(varlen.documents(hidden_states.shape[1]), parents, strict=True):
        prefixes = [] if parent == ROOT else paths[parent]
        paths.append([*prefixes, hidden_states[:, document]])
    outs: dict[int, Tensor] = {}  # by number of the document
    if continues_states:
        outs = _run_from_states(forward, paths, parents)  # all but documents that share nothing
    remaining = {number: torch.cat(path, dim=1) for number, path in enumerate(paths) if number not in outs}
    if remaining:
        outs |= _run_complete(forward, remaining, run)
    own_outs = []
    for number, length in enumerate(varlen.host_lengths()):
        own_outs.append(outs[number][:, -length:])  # the outputs of prefixes, if any, come first
    return torch.cat(own_outs, dim=1)


def _run_complete(forward: _Forward, documents: dict[int, Tensor], run: RunIsolated) -> dict[int, Tensor]:
    """Run a layer on documents by number, (1, L, hidden) each, in one packed call; return their outputs by number."""
    complete = list(documents.values())
    varlen = Varlen.of_lengths([tokens.shape[1] for tokens in complete], complete[0].device)
    out = run(forward, torch.cat(complete, dim=1), varlen)
    outs = (out[:, document] for document in varlen.documents(out.shape[1]))
    return dict(zip(documents, outs, strict=True))


def _run_from_states(forward: _Forward, paths: Sequence[Sequence[Tensor]], parents: Sequence[int]) -> dict[int, Tensor]:
    """Run each document that has a parent or is one, from the state of its parent; return the outputs by number."""
    outs: dict[int, Tensor] = {}
    states: dict[int, _PrefixState] = {}
    for number, (path, parent) in enumerate(zip(paths, parents, strict=True)):
        if parent == ROOT and number not in parents:
            continue
        tokens, before = path[-1], states.get(parent)
        if tokens.shape[1] == 1:
            # A single token that continues a state would take a kernel for generation, which may have no gradient.
            tokens, before = torch.cat(list(path), dim=1), None
        states[number] = _PrefixState(before)
        outs[number] = forward(tokens, cache_params=states[number])
    return outs


def _run_shard(
    layer: nn.Module, hidden_states: Tensor, shard: SequenceShard, parallel: SequenceParallel, run: RunIsolated
) -> Tensor:
    """Run a recurrent layer on this rank's part of a sequence that ranks share, (1, T, hidden)."""
    # Documents of this rank alone come first in its sequence, then its tokens of documents that all ranks share.
    outs = []
    if shard.local_lengths:
        local_varlen = Varlen.of_lengths(shard.local_lengths, hidden_states.device)
        outs.append(run(_class_forward(layer), hidden_states[:, : shard.num_local], local_varlen))
    if shard.sharded_lengths:
        if shard.parents:
            run = _with_prefixes(run, shard.parents, layer, hidden_states)
        outs.append(run_sharded(layer, hidden_states[:, shard.num_local :], shard, parallel.of(shard.split), run))
    return torch.cat(outs, dim=1)


def _class_forward(layer: nn.Module) -> _Forward:
    """Return the forward of the layer's class, which the instance's forward replaces."""
    return partial(type(layer).forward, layer)


def keeps_documents_apart(layer: nn.Module, like: Tensor) -> bool:
    """Test once per class, device and type of ``like`` (..., hidden) whether a layer's forward respects boundaries."""
    return _try_once(_respects_boundaries, layer, like)


@torch.no_grad()
def _try_once(trial: _Trial, layer: nn.Module, like: Tensor) -> bool:
    """Return the result of a trial of a layer's forward, which is made once per class, device and type of ``like``."""
    key = trial, type(layer), like.device.type, like.dtype
    if key not in _trial_results:
        # A trial needs numbers. Without them, only transformers' own code runs, which continues states.
        if like.device.type == "meta" or isinstance(like, FakeTensor):
            return trial is _continues_states
        _trial_results[key] = trial(_class_forward(layer), like)
    return _trial_results[key]


def _continues_states(forward: _Forward, like: Tensor) -> bool:
    """Return whether two parts of a document, the second from the state of the first, have the output of one call."""
    first_length, _ = _TRIAL_LENGTHS
    states, _ = _trial_states(like)
    state = _PrefixState()
    try:
        first_out = forward(states[:, :first_length], cache_params=state)
        out = torch.cat([first_out, forward(states[:, first_length:], cache_params=_PrefixState(state))], dim=1)
    except Exception:  # a layer that keeps its state in another way
        return False
    return _is_close(out, forward(states))


def _is_close(out: Tensor, expected: Tensor) -> bool:
    """Return whether two outputs of a layer are equal up to rounding."""
    max_error = _TRIAL_TOLERANCES[out.dtype] * expected.abs().max()
    return bool((out - expected).abs().max() <= max_error)


def _respects_boundaries(forward: _Forward, like: Tensor) -> bool:
    """Try out whether a layer's forward keeps two random documents apart that are packed into one call.

    The layer passes if a change of the first document changes the output of the first and not of the second, and if
    both outputs are those of separate calls, up to rounding. ``like`` (..., hidden) has the device and type to try.
    """
    first_length, _ = _TRIAL_LENGTHS
    states, changed_states = _trial_states(like)
    varlen = Varlen.of_lengths(_TRIAL_LENGTHS, like.device)
    try:
        out = _run_packed(forward, states, varlen)
        changed_out = _run_packed(forward, changed_states, varlen)
    except Exception:  # a layer that raises on unknown boundaries does not respect them
        return False
    if torch.equal(out[:, :first_length], changed_out[:, :first_length]):
        return False  # the output does not depend on the states, so it shows nothing
    if not torch.equal(out[:, first_length:], changed_out[:, first_length:]):
        return False
    separate_out = _run_each_document(forward, states, varlen)
    return _is_close(out, separate_out)


def _trial_states(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return random states (1, T, hidden) of two packed documents, and the same with another first document."""
    # Drawn on the CPU by a generator of its own, so that the run's random numbers do not change.
    generator = torch.Generator().manual_seed(0)
    first_length, _ = _TRIAL_LENGTHS
    shape = 1, sum(_TRIAL_LENGTHS), like.shape[-1]
    states = torch.randn(shape, generator=generator).to(like)
    other_states = torch.randn(shape, generator=generator).to(like)
    return states, torch.cat([other_states[:, :first_length], states[:, first_length:]], dim=1)


def _run_packed(forward: _Forward, hidden_states: Tensor, varlen: Varlen) -> Tensor:
    """Run the complete sequence in one call, with boundaries for the recurrence and the convolution."""
    device, lengths = hidden_states.device, varlen.host_lengths()
    cu_seqlens = Varlen.of_lengths(lengths, device).cu_seqlens
    document_of_token = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seq_idx = document_of_token.to(device, torch.int32).unsqueeze(0)
    return forward(hidden_states, cu_seq_lens_q=cu_seqlens, cu_seq_lens_k=cu_seqlens, seq_idx=seq_idx)


def _run_each_document(forward: _Forward, hidden_states: Tensor, varlen: Varlen) -> Tensor:
    return torch.cat([forward(hidden_states[:, document]) for document in varlen.documents(hidden_states.shape[1])], 1)
