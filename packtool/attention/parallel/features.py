"""Pictures of a shared row are looked at once: each rank's towers see some, and the features go where the tokens are.

A model's ``get_image_features`` (and its like for videos) is wrapped on the instance: what comes out for this rank's
pictures, the features of all levels (DeepStack) side by side, is exchanged by one all-to-all, and the model goes on as
if it had looked at the pictures of exactly its own tokens. Backward the gradients take the same way home.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from packtool.attention.parallel.exchange import exchange_rows
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.batch.shard import FeatureRoute, SequenceShard

_METHODS = {"get_image_features": "image", "get_video_features": "video"}


def share_features(model: nn.Module, parallel: SequenceParallel) -> None:
    """Make a model exchange features wherever its forward is given a ``sequence_shard``; may be called again."""
    for module in _with_towers(model):
        stop_sharing_features(module)
        for method, kind in _METHODS.items():
            if hasattr(module, method):
                setattr(module, method, _exchanging(getattr(module, method), kind, parallel))


def stop_sharing_features(model: nn.Module) -> None:
    """Undo it."""
    for module in _with_towers(model):
        for method in _METHODS:
            vars(module).pop(method, None)


def _with_towers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose forward asks for features: they have the tower, and not only something that has it."""
    for module in model.modules():
        if hasattr(module, "get_image_features") and "visual" in dict(module.named_children()):
            yield module


def _exchanging(method: Callable[..., Any], kind: str, parallel: SequenceParallel) -> Callable[..., Any]:
    @functools.wraps(method)
    def features(*args: Any, sequence_shard: SequenceShard | None = None, **kwargs: Any) -> Any:
        # Without the shard: Qwen3-VL asks for videos' features as for pictures', and they must not travel twice.
        found = method(*args, **kwargs)
        if sequence_shard is None:
            return found
        route = sequence_shard.routes[kind]
        levels = [torch.cat(list(found.pooler_output))]
        deeper = getattr(found, "deepstack_features", None)
        levels += [torch.cat(list(level)) for level in deeper or ()]
        travelled = _Exchange.apply(torch.cat(levels, dim=-1), route, parallel)
        arrived = torch.split(travelled, [level.shape[-1] for level in levels], dim=-1)
        found.pooler_output = (arrived[0],)
        if deeper is not None:
            found.deepstack_features = [(level,) for level in arrived[1:]]
        return found

    return features


class _Exchange(torch.autograd.Function):
    """Features (n, D) of this rank's pictures become (m, D) of its tokens."""

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
