"""Media of a shared sequence are looked at, or heard, once: each rank's towers get some, features go to the tokens.

What comes out for this rank's pictures, the features of all levels (DeepStack) side by side, is exchanged by one
all-to-all, and the model goes on as if it had looked at the pictures of exactly its own tokens. Videos and sounds have
one each. Backward the gradients take the same way home.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from packtool.attention.parallel.exchange import exchange_rows
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.batch.shard import FeatureRoute


def exchange_features(levels: list[Tensor], route: FeatureRoute, parallel: SequenceParallel) -> list[Tensor]:
    """The features of this rank's tokens in exchange for those of this rank's media of one kind.

    Args:
        levels: (n, D) of each level, of this rank's media.
        route: of this kind of media.
        parallel: ranks that share the sequence; all of them call this.

    Returns:
        (m, D) of each level, of this rank's tokens.
    """
    travelled = _Exchange.apply(torch.cat(levels, dim=-1), route, parallel)
    return list(torch.split(travelled, [level.shape[-1] for level in levels], dim=-1))


class _Exchange(torch.autograd.Function):
    """Features (n, D) of this rank's media become (m, D) of its tokens."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, route: FeatureRoute, parallel: SequenceParallel) -> Tensor:
        ctx.route, ctx.parallel, ctx.num_features = route, parallel, len(features)
        order, back = (index.to(features.device) for index in (route.send_order, route.receive_order))
        rows = exchange_rows(features[order], route.send_counts, route.receive_counts, parallel.whole)
        return rows[back]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        route, order = ctx.route, ctx.route.send_order.to(grad.device)
        came = torch.empty_like(grad)
        came[route.receive_order.to(grad.device)] = grad
        rows = exchange_rows(came, route.receive_counts, route.send_counts, ctx.parallel.whole)
        # A blank picture's features went nowhere: zeros come back.
        found = grad.new_zeros(ctx.num_features, grad.shape[-1])
        found[order] = rows
        return found, None, None
