"""Gated delta nets of a shared sequence: each rank runs the convolution and the recurrence of some heads, all tokens.

A state goes through every token of a document, so a rank that held some of them would wait for the rank before it.
Heads do not wait for each other, and neither do channels of the convolution, which belong to heads. So all P ranks
that share a sequence exchange tokens for heads, as Ulysses does (Jacobs et al. 2023), on whatever axes attention goes::

    this rank's tokens    q, k, v, b, a of all heads          projected here
                             │ all-to-all, tokens in order
    all tokens            q, k, v, b, a of H / P heads        convolution, recurrence: transformers' own forward
                             │ all-to-all, tokens as they came
    this rank's tokens    output of all heads                 gate, norm, projected here

Keys and queries may have fewer heads than values, and fewer than there are ranks: they are repeated then. A rank sends
(P - 1) / P of its T / P tokens, with 2 Hk Dk + 2 Hv Dv + 2 Hv numbers each, forward and as many backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from packtool.attention.kernel import Varlen
from packtool.attention.parallel.mesh import SequenceParallel, heads_to_tokens, tokens_to_heads
from packtool.attention.parallel.ring import sharded_order
from packtool.batch.shard import SequenceShard

Recurrence = Callable[[Callable[..., Tensor], Tensor, Varlen], Tensor]
"""Runs a layer's forward on (1, T, C) so that documents are kept apart."""


def share_heads(
    layer: nn.Module, hidden_states: Tensor, shard: SequenceShard, parallel: SequenceParallel, run: Recurrence
) -> Tensor:
    """A gated delta net on this rank's part of the sharded documents; all ranks that share them call this.

    Args:
        layer: whole, with its weights.
        hidden_states: (1, T / P, hidden).
        shard: which tokens those are.
        parallel: the ranks.
        run: the forward of the layer's class on documents.

    Returns:
        (1, T / P, hidden).
    """
    net: Any = layer
    size, group = parallel.cut.size, parallel.whole
    q, k, v, z, b, a = _projected(net, hidden_states)
    copies = _copies(net, size)
    heads = [*(tensor.repeat_interleave(copies, dim=1) for tensor in (q, k)), v, b, a]
    mine = torch.cat([torch.unflatten(tensor.flatten(1), 1, (size, -1)) for tensor in heads], dim=2)
    documents = Varlen.of_lengths(shard.sharded_lengths, mine.device)
    order, back = sharded_order(shard, mine.device)
    came: Tensor = _TokensOfHeads.apply(mine, group)
    forward = partial(type(layer).forward, _SomeHeads(net, size, parallel.cut.rank))
    found = run(forward, came[order].transpose(0, 1), documents)
    out: Tensor = _HeadsOfTokens.apply(found[0, back].unsqueeze(1), group)
    gated = net.norm(out.reshape(-1, net.head_v_dim), z.reshape(-1, net.head_v_dim))
    projected: Tensor = net.out_proj(gated.reshape(*hidden_states.shape[:2], -1))
    return projected


def _projected(net: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """q, k (T, Hk, Dk), v, z (T, Hv, Dv), b and a (T, Hv) of this rank's tokens."""
    if hasattr(net, "in_proj_qkvz"):
        made = net.fix_query_key_value_ordering(net.in_proj_qkvz(hidden_states), net.in_proj_ba(hidden_states))
        return tuple(tensor[0] for tensor in made)
    parts = torch.split(net.in_proj_qkv(hidden_states)[0], [net.key_dim, net.key_dim, net.value_dim], dim=-1)
    sizes = (net.head_k_dim, net.head_k_dim, net.head_v_dim, net.head_v_dim)
    wide = zip((*parts, net.in_proj_z(hidden_states)[0]), sizes, strict=True)
    narrow = (net.in_proj_b(hidden_states)[0], net.in_proj_a(hidden_states)[0])
    return (*(torch.unflatten(tensor, 1, (-1, size)) for tensor, size in wide), *narrow)


def _copies(net: Any, size: int) -> int:
    """How often each head of queries and keys is repeated, so that all ranks have as many."""
    return math.lcm(int(net.num_k_heads), size) // int(net.num_k_heads)


class _SomeHeads:
    """What the forward of a layer's class takes for the layer: a rank's share of the heads, without projections.

    Its hidden states are what ``share_heads`` has sent, (1, T, C): q, k, v, b and a of these heads, side by side. All
    that is not here is the layer's.

    Args:
        net: the layer.
        size: ranks that share its heads.
        rank: this one.
    """

    def __init__(self, net: Any, size: int, rank: int) -> None:
        self._net = net
        copies = _copies(net, size)
        self.num_k_heads, self.num_v_heads = net.num_k_heads * copies // size, net.num_v_heads // size
        self.key_dim, self.value_dim = self.num_k_heads * net.head_k_dim, self.num_v_heads * net.head_v_dim
        self.conv_dim = 2 * self.key_dim + self.value_dim

        def share(weight: Tensor, copies: int = 1) -> Tensor:
            heads = torch.unflatten(weight, 0, (net.num_k_heads if copies > 1 else size, -1))
            return heads.repeat_interleave(copies, 0).flatten(0, 1).chunk(size)[rank]

        def share_channels(weight: Tensor) -> Tensor:
            q, k, v = torch.split(weight, [net.key_dim, net.key_dim, net.value_dim])
            return torch.cat([share(q, copies), share(k, copies), share(v)])

        bias = net.conv1d.bias
        self.conv1d = SimpleNamespace(
            weight=share_channels(net.conv1d.weight), bias=None if bias is None else share_channels(bias)
        )
        self.A_log, self.dt_bias = share(net.A_log), share(net.dt_bias)
        self._widths = [self.key_dim, self.key_dim, self.value_dim, self.num_v_heads, self.num_v_heads]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._net, name)

    def _parts(self, sent: Tensor) -> tuple[Tensor, ...]:
        return torch.split(sent, self._widths, dim=-1)

    def in_proj_qkv(self, sent: Tensor) -> Tensor:
        return sent[..., : self.conv_dim]

    def in_proj_z(self, sent: Tensor) -> Tensor:
        """Nothing looks at it: see ``norm``."""
        return self._parts(sent)[2]

    def in_proj_b(self, sent: Tensor) -> Tensor:
        return self._parts(sent)[3]

    def in_proj_a(self, sent: Tensor) -> Tensor:
        return self._parts(sent)[4]

    def in_proj_qkvz(self, sent: Tensor) -> Tensor:
        return sent

    in_proj_ba = in_proj_qkvz

    def fix_query_key_value_ordering(self, sent: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        q, k, v, b, a = self._parts(sent)
        q, k = (torch.unflatten(tensor, -1, (-1, self._net.head_k_dim)) for tensor in (q, k))
        v = torch.unflatten(v, -1, (-1, self._net.head_v_dim))
        return q, k, v, v, b, a

    def norm(self, out: Tensor, _: Tensor) -> Tensor:
        """The rank that has the token does it, and has its gate."""
        return out

    def out_proj(self, out: Tensor) -> Tensor:
        return out


class _TokensOfHeads(torch.autograd.Function):
    """(T, P, C) of this rank's tokens become (P * T, 1, C) of this rank's heads."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return heads_to_tokens(tensor, group)()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return tokens_to_heads(grad, ctx.group), None


class _HeadsOfTokens(torch.autograd.Function):
    """Undoes ``_TokensOfHeads``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return tokens_to_heads(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return heads_to_tokens(grad, ctx.group)(), None
