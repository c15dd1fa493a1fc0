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
from collections.abc import Callable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packtool.attention.kernel import Varlen
from packtool.attention.parallel.mesh import SequenceParallel, heads_to_tokens, tokens_to_heads
from packtool.batch.shard import SequenceShard, assign_tokens
from packtool.planning.skrull import SHARDED

Recurrence = Callable[[Callable[..., Tensor], Tensor, Varlen], Tensor]
"""Runs a layer's forward on (1, T, C) so that documents are kept apart."""


def share_heads(
    layer: nn.Module, hidden_states: Tensor, shard: SequenceShard, parallel: SequenceParallel, run: Recurrence
) -> Tensor:
    """Run a gated delta net on this rank's part of the sharded documents; all ranks that share them call this.

    Args:
        layer: the complete layer, with its weights.
        hidden_states: (1, T / P, hidden).
        shard: the tokens of the hidden states.
        parallel: the ranks.
        run: runs the forward of the layer's class on documents.

    Returns:
        (1, T / P, hidden).
    """
    net: Any = layer
    size, group = parallel.split.size, parallel.group
    q, k, v, z, b, a = _projected(net, hidden_states)
    num_copies = _num_copies(net, size)
    heads = [*(tensor.repeat_interleave(num_copies, dim=1) for tensor in (q, k)), v, b, a]
    own = torch.cat([torch.unflatten(tensor.flatten(1), 1, (size, -1)) for tensor in heads], dim=2)
    documents = Varlen.of_lengths(shard.sharded_lengths, own.device)
    order, inverse = _token_order(shard, own.device)
    received: Tensor = _TokensOfHeads.apply(own, group)
    forward = partial(type(layer).forward, _HeadShare(net, size, parallel.split.rank))
    states = run(forward, received[order].transpose(0, 1), documents)
    out: Tensor = _HeadsOfTokens.apply(states[0, inverse].unsqueeze(1), group)
    gated = net.norm(out.reshape(-1, net.head_v_dim), z.reshape(-1, net.head_v_dim))
    projected: Tensor = net.out_proj(gated.reshape(*hidden_states.shape[:2], -1))
    return projected


@lru_cache(maxsize=4)
def _token_order(shard: SequenceShard, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of the sharded documents' tokens in the parts of all P ranks laid end to end, and the inverse.

    Returns:
        int64 (T,) each: the row of each token; the token of each row.
    """
    places = [SHARDED] * len(shard.sharded_lengths)
    index = np.concatenate(assign_tokens(shard.sharded_lengths, places, shard.split))
    return torch.from_numpy(np.argsort(index)).to(device), torch.from_numpy(index).to(device)


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


def _num_copies(net: Any, size: int) -> int:
    """Copies of each head of queries and keys, so that the ranks can share them evenly."""
    return math.lcm(int(net.num_k_heads), size) // int(net.num_k_heads)


class _HeadShare:
    """Stands for the layer in the forward of its class: a rank's share of the heads, without projections.

    Its hidden states are those that ``share_heads`` has sent, (1, T, C): q, k, v, b and a of these heads, side by side.
    All other attributes are the layer's.

    Args:
        net: the layer.
        size: ranks that share its heads.
        rank: this one.
    """

    def __init__(self, net: Any, size: int, rank: int) -> None:
        self._net = net
        num_copies = _num_copies(net, size)
        self.num_k_heads, self.num_v_heads = net.num_k_heads * num_copies // size, net.num_v_heads // size
        self.key_dim, self.value_dim = self.num_k_heads * net.head_k_dim, self.num_v_heads * net.head_v_dim
        self.conv_dim = 2 * self.key_dim + self.value_dim

        def share(weight: Tensor, num_copies: int = 1) -> Tensor:
            heads = torch.unflatten(weight, 0, (net.num_k_heads if num_copies > 1 else size, -1))
            return heads.repeat_interleave(num_copies, 0).flatten(0, 1).chunk(size)[rank]

        def share_channels(weight: Tensor) -> Tensor:
            q, k, v = torch.split(weight, [net.key_dim, net.key_dim, net.value_dim])
            return torch.cat([share(q, num_copies), share(k, num_copies), share(v)])

        bias = net.conv1d.bias
        self.conv1d = SimpleNamespace(
            weight=share_channels(net.conv1d.weight), bias=None if bias is None else share_channels(bias)
        )
        self.A_log, self.dt_bias = share(net.A_log), share(net.dt_bias)
        self._widths = [self.key_dim, self.key_dim, self.value_dim, self.num_v_heads, self.num_v_heads]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._net, name)

    def _split(self, sent: Tensor) -> tuple[Tensor, ...]:
        return torch.split(sent, self._widths, dim=-1)

    def in_proj_qkv(self, sent: Tensor) -> Tensor:
        return sent[..., : self.conv_dim]

    def in_proj_z(self, sent: Tensor) -> Tensor:
        """Any tensor of this shape: ``norm`` here does not use it."""
        return self._split(sent)[2]

    def in_proj_b(self, sent: Tensor) -> Tensor:
        return self._split(sent)[3]

    def in_proj_a(self, sent: Tensor) -> Tensor:
        return self._split(sent)[4]

    def in_proj_qkvz(self, sent: Tensor) -> Tensor:
        return sent

    in_proj_ba = in_proj_qkvz

    def fix_query_key_value_ordering(self, sent: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        q, k, v, b, a = self._split(sent)
        q, k = (torch.unflatten(tensor, -1, (-1, self._net.head_k_dim)) for tensor in (q, k))
        v = torch.unflatten(v, -1, (-1, self._net.head_v_dim))
        return q, k, v, v, b, a

    def norm(self, out: Tensor, _: Tensor) -> Tensor:
        """The rank that holds the token applies the norm, as it has the gate."""
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
