"""One call of the vision tower for all pictures and videos of a micro-batch.

transformers' models look at pictures in one call of their tower and at videos in another. Processes that share a
model's weights exchange them in every call: a process with pictures *and* videos would wait for one with pictures
alone. So a model's ``get_image_features`` and ``get_video_features`` are answered here, on the instance: whichever is
asked first looks at both kinds together, and the other gets what is left. The numbers are the same, for a tower keeps
its pictures apart.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from packtool.attention.parallel.features import exchange_features

if TYPE_CHECKING:
    from packtool.attention.parallel.mesh import SequenceParallel
    from packtool.batch.shard import SequenceShard

VisualKind = Literal["image", "video"]

_INPUTS: dict[VisualKind, tuple[str, str]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
_METHODS: dict[VisualKind, str] = {"image": "get_image_features", "video": "get_video_features"}
_ATTRIBUTE = "_packtool_look"


def look_once(model: nn.Module) -> None:
    """Make a model's vision tower run at most once in a forward pass; may be called again, and for any model."""
    for module in _with_towers(model):
        if not isinstance(getattr(module, _ATTRIBUTE, None), _OneLook):
            setattr(module, _ATTRIBUTE, _OneLook(module))


def share_features(model: nn.Module, parallel: SequenceParallel | None) -> None:
    """Make a model exchange features wherever its forward is given a ``sequence_shard``.

    Args:
        model: see ``look_once``, which this includes.
        parallel: ranks that share rows; None for nobody.
    """
    look_once(model)
    for module in _with_towers(model):
        getattr(module, _ATTRIBUTE).parallel = parallel


class _OneLook:
    """Answers for a module's two methods. An object and not closures: a copied model must not ask the first one.

    Args:
        module: that has the vision tower, and not only something that has it.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parallel: SequenceParallel | None = None
        self._inputs: dict[VisualKind, tuple[Tensor, Tensor]] = {}
        self._found: dict[VisualKind, Any] = {}
        self._look: Any = getattr(module, _METHODS["image"])
        module.register_forward_pre_hook(self._see_inputs, with_kwargs=True)
        for kind, method in _METHODS.items():
            setattr(module, method, partial(self._features, kind))

    def _see_inputs(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        """Before a forward pass: what its tower will be asked to look at."""
        given = {kind: (kwargs.get(pixels), kwargs.get(grids)) for kind, (pixels, grids) in _INPUTS.items()}
        self._inputs = {
            kind: (pixels, grids) for kind, (pixels, grids) in given.items() if pixels is not None and grids is not None
        }
        self._found = {}

    def _features(
        self,
        kind: VisualKind,
        pixels: Tensor,
        grids: Tensor,
        sequence_shard: SequenceShard | None = None,
        **kwargs: Any,
    ) -> Any:
        if kind not in self._found:
            mine, _ = self._inputs.get(kind, (None, None))
            # Somebody may ask outside of a forward pass, as transformers' generation does.
            self._found = self._look_at(self._inputs if mine is pixels else {kind: (pixels, grids)}, kwargs)
            self._inputs = {}
        found = self._found.pop(kind)
        if sequence_shard is not None:
            assert self.parallel is not None, "packed_attention refuses it"
            exchange_features(found, sequence_shard.routes[kind], self.parallel)
        return found

    def _look_at(
        self, inputs: dict[VisualKind, tuple[Tensor, Tensor]], kwargs: dict[str, Any]
    ) -> dict[VisualKind, Any]:
        """The tower's answer for each kind."""
        if len(inputs) == 1:
            ((kind, (pixels, grids)),) = inputs.items()
            return {kind: self._look(pixels, grids, **kwargs)}
        pixels, grids = (torch.cat(tensors) for tensors in zip(*inputs.values(), strict=True))
        seen = self._look(pixels, grids, **kwargs | {"return_dict": True})
        answers: dict[VisualKind, Any] = {}
        start = 0
        for kind, (_, its_grids) in inputs.items():
            its_own = slice(start, start + len(its_grids))
            answers[kind] = answer = copy.copy(seen)
            answer.pooler_output = seen.pooler_output[its_own]
            if getattr(seen, "deepstack_features", None) is not None:
                answer.deepstack_features = [level[its_own] for level in seen.deepstack_features]
            start += len(its_grids)
        return answers


def _with_towers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose forward asks for features: they have the tower, and not only something that has it."""
    for module in model.modules():
        if hasattr(module, _METHODS["image"]) and "visual" in dict(module.named_children()):
            yield module
