"""Gated delta nets of a shared sequence: each rank runs the convolution and the recurrence of some heads, all tokens.

A state passes through every token of a document, so a rank that held some of them would wait for the rank before it.
Heads are independent, and so are channels of the convolution, which belong to heads. So all P ranks that share a
sequence exchange tokens for heads, as Ulysses does (Jacobs et al. 2023), whatever axes attention uses::

    this rank's tokens    q, k, v, b, a of all heads          projected here
                             │ all-to-all, tokens in order
    all tokens            q, k, v, b, a of H / P heads        convolution, recurrence: transformers' own forward
                             │ all-to-all, tokens in the ranks' order
    this rank's tokens    output of all heads                 gate, norm, projected here

Keys and queries may have fewer heads than values, and fewer than there are ranks: they are repeated then. A rank sends
(P - 1) / P of its T / P tokens, with 2 Hk Dk + 2 Hv Dv + 2 Hv numbers each, forward and as many backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packtool.attention.kernel import Varlen
from packtool.attention.parallel.mesh import SequenceParallel, gather_heads, scatter_heads
from packtool.batch.shard import SequenceShard, assign_tokens
from packtool.planning.skrull import SHARDED

RunIsolated = Callable[[Callable[..., Tensor], Tensor, Varlen], Tensor]
"""Function that calls a layer's forward on packed documents (1, T, C), in such a way that none affects another."""

_SCATTER, _GATHER = False, True  # directions of _ExchangeHeads


def run_sharded(
    layer: nn.Module, hidden_states: Tensor, shard: SequenceShard, parallel: SequenceParallel, run: RunIsolated
) -> Tensor:
    """Run a gated delta net, a recurrent layer, on documents whose tokens are divided among P ranks.

    All ranks must call it. The recurrence needs all tokens of a document in order, but its heads are independent, so
    each rank runs some heads on the tokens of all ranks.

    Args:
        hidden_states: this rank's tokens of these documents, (1, T / P, hidden); the result has the same shape.
        run: calls the layer's forward on packed documents so that none affects another.
    """
    net: Any = layer
    num_ranks = parallel.split.size
    # Queries, keys, values, the output's gate, how much is written into the state (b), and how fast it decays (a).
    q, k, v, gate, b, a = _projected(net, hidden_states)
    channels_by_rank = _channels_by_rank(net, (q, k, v, b, a), num_ranks)  # (T / P, P, C)
    # Exchange all heads of this rank's tokens for this rank's heads of all tokens.
    inputs: Tensor = _ExchangeHeads.apply(channels_by_rank, parallel.group, _SCATTER)
    # Call the forward of the layer's class with another ``self``, which has only this rank's heads.
    layer_of_rank = _RankHeads(net, num_ranks, parallel.split.rank)
    forward = partial(type(layer).forward, layer_of_rank)
    outputs = _run_in_document_order(forward, inputs, shard, run)
    # Exchange this rank's heads of all tokens back for all heads of this rank's tokens.
    out: Tensor = _ExchangeHeads.apply(outputs, parallel.group, _GATHER)
    gated = net.norm(out.reshape(-1, net.head_v_dim), gate.reshape(-1, net.head_v_dim))
    return net.out_proj(gated.reshape(*hidden_states.shape[:2], -1))


def _run_in_document_order(
    forward: Callable[..., Tensor], inputs: Tensor, shard: SequenceShard, run: RunIsolated
) -> Tensor:
    """Run a forward on all ranks' tokens, (T, 1, C) rank by rank; return its output, (T, 1, C'), in the same order."""
    row_of_token, token_of_row = _token_order(shard, inputs.device)
    if not shard.parents:
        documents = Varlen.of_lengths(shard.sharded_lengths, inputs.device)
        outputs = run(forward, inputs[row_of_token].transpose(0, 1), documents)
        return outputs[0, token_of_row].unsqueeze(1)
    # Other documents continue the state at the last token of a prefix, without its padding.
    sizes = zip(shard.sharded_lengths, shard.sharded_tokens, strict=True)
    is_token = np.concatenate([np.arange(length) < num_tokens for length, num_tokens in sizes])
    rows = row_of_token[torch.from_numpy(is_token).to(inputs.device)]
    documents = Varlen.of_lengths(shard.sharded_tokens, inputs.device)
    outputs = run(forward, inputs[rows].transpose(0, 1), documents)
    all_outputs = outputs.new_zeros((len(row_of_token), 1, outputs.shape[-1]))
    return all_outputs.index_copy(0, rows, outputs.transpose(0, 1))


def _channels_by_rank(net: Any, projections: Sequence[Tensor], num_ranks: int) -> Tensor:
    """Join the projections q, k, v, b and a of this rank's tokens: (T / P, P, C), the channels of each rank's heads."""
    q, k, v, b, a = projections
    num_copies = _num_copies(net, num_ranks)
    q = q.repeat_interleave(num_copies, dim=1)
    k = k.repeat_interleave(num_copies, dim=1)
    parts = [torch.unflatten(tensor.flatten(1), 1, (num_ranks, -1)) for tensor in (q, k, v, b, a)]
    return torch.cat(parts, dim=2)


@lru_cache(maxsize=4)
def _token_order(shard: SequenceShard, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the row of each sharded token in the sequences of all ranks laid end to end, and the token of each row."""
    placement = [SHARDED] * len(shard.sharded_lengths)
    token_of_row = np.concatenate(assign_tokens(shard.sharded_lengths, placement, shard.split))
    return torch.from_numpy(np.argsort(token_of_row)).to(device), torch.from_numpy(token_of_row).to(device)


def _projected(net: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """Project this rank's tokens to q, k (T, Hk, Dk), v, the output's gate (T, Hv, Dv), b and a (T, Hv)."""
    if hasattr(net, "in_proj_qkvz"):
        qkvz, ba = net.in_proj_qkvz(hidden_states), net.in_proj_ba(hidden_states)
        return tuple(tensor[0] for tensor in net.fix_query_key_value_ordering(qkvz, ba))
    q, k, v = torch.split(net.in_proj_qkv(hidden_states)[0], [net.key_dim, net.key_dim, net.value_dim], dim=-1)
    q, k = (torch.unflatten(tensor, 1, (-1, net.head_k_dim)) for tensor in (q, k))
    v, z = (torch.unflatten(tensor, 1, (-1, net.head_v_dim)) for tensor in (v, net.in_proj_z(hidden_states)[0]))
    return q, k, v, z, net.in_proj_b(hidden_states)[0], net.in_proj_a(hidden_states)[0]


def _num_copies(net: Any, num_ranks: int) -> int:
    """Copies of each head of queries and keys, so that the ranks can share them evenly."""
    return math.lcm(int(net.num_k_heads), num_ranks) // int(net.num_k_heads)


class _RankHeads:
    """Stands for the layer in the forward of its class: one rank's heads, without projections, gate and norm.

    Its hidden states are (1, T, C): q, k, v, b and a of these heads, side by side, as ``run_sharded`` exchanges them.
    """

    def __init__(self, net: Any, num_ranks: int, rank: int) -> None:
        # The public attributes are those that the forward of the layer's class reads, here of this rank's heads.
        self._net = net
        self._num_ranks, self._rank = num_ranks, rank
        self.num_k_heads = net.num_k_heads * _num_copies(net, num_ranks) // num_ranks
        self.num_v_heads = net.num_v_heads // num_ranks
        self.key_dim = self.num_k_heads * net.head_k_dim
        self.value_dim = self.num_v_heads * net.head_v_dim
        self.conv_dim = 2 * self.key_dim + self.value_dim
        bias = None if net.conv1d.bias is None else self._conv_channels(net.conv1d.bias)
        self.conv1d = SimpleNamespace(weight=self._conv_channels(net.conv1d.weight), bias=bias)
        self.A_log = self._part_of_rank(net.A_log)
        self.dt_bias = self._part_of_rank(net.dt_bias)
        self._widths = [self.key_dim, self.key_dim, self.value_dim, self.num_v_heads, self.num_v_heads]

    def _part_of_rank(self, weight: Tensor) -> Tensor:
        """Return this rank's rows of weights (Hv ..., ...) that belong to the heads of values."""
        return weight.chunk(self._num_ranks)[self._rank]

    def _key_channels(self, weight: Tensor) -> Tensor:
        """Return this rank's rows of weights (Hk Dk, ...) of queries or keys, whose heads are repeated."""
        heads = torch.unflatten(weight, 0, (self._net.num_k_heads, -1))
        repeated = heads.repeat_interleave(_num_copies(self._net, self._num_ranks), dim=0)
        return self._part_of_rank(repeated.flatten(0, 1))

    def _conv_channels(self, weight: Tensor) -> Tensor:
        """Return this rank's rows of weights (channels of q, k and v, ...) of the convolution."""
        net = self._net
        q, k, v = torch.split(weight, [net.key_dim, net.key_dim, net.value_dim])
        return torch.cat([self._key_channels(q), self._key_channels(k), self._part_of_rank(v)])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._net, name)

    def _split(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, v, b and a."""
        return torch.split(hidden_states, self._widths, dim=-1)

    def in_proj_qkv(self, hidden_states: Tensor) -> Tensor:
        return hidden_states[..., : self.conv_dim]

    def in_proj_z(self, hidden_states: Tensor) -> Tensor:
        """Return any tensor of this shape: ``norm`` here does not use it."""
        return self._split(hidden_states)[2]

    def in_proj_b(self, hidden_states: Tensor) -> Tensor:
        return self._split(hidden_states)[3]

    def in_proj_a(self, hidden_states: Tensor) -> Tensor:
        return self._split(hidden_states)[4]

    def in_proj_qkvz(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    in_proj_ba = in_proj_qkvz

    def fix_query_key_value_ordering(self, hidden_states: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        q, k, v, b, a = self._split(hidden_states)
        q, k = (torch.unflatten(tensor, -1, (-1, self._net.head_k_dim)) for tensor in (q, k))
        v = torch.unflatten(v, -1, (-1, self._net.head_v_dim))
        return q, k, v, v, b, a

    def norm(self, out: Tensor, _: Tensor) -> Tensor:
        """The rank that holds the token applies the norm, as it has the gate."""
        return out

    def out_proj(self, out: Tensor) -> Tensor:
        return out


class _ExchangeHeads(torch.autograd.Function):
    """Differentiable ``scatter_heads`` or, with ``gathers``, ``gather_heads``: each is the gradient of the other.

    Scattered, (T, P, C), the channels of each rank for this rank's tokens, become (P * T, 1, C), its channels for all.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any, gathers: bool) -> Tensor:
        ctx.group, ctx.gathers = group, gathers
        return gather_heads(tensor, group) if gathers else scatter_heads(tensor, group)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        gradient = scatter_heads(grad, ctx.group)() if ctx.gathers else gather_heads(grad, ctx.group)
        return gradient, None, None
