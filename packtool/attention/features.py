"""Towers run once in a forward pass, and their features go to their tokens by index.

transformers' models look at pictures in one call of their tower and at videos in another. Processes that share a
model's weights exchange them in every call: a process with pictures *and* videos would wait for one with pictures
alone. They also look for placeholder tokens with masks whose size the host has to ask the device for, in every layer
that takes features (DeepStack) and once more in the backward pass. So where a micro-batch brings ``TowerInputs``, a
hook before the forward of the module that has the towers does their part::

    pixel_values, pixel_values_videos ──► one call of the tower ──► (N, D) ──► embeddings (B, T, D) at N positions
    input_features ─────────────────────► one call of the tower ──► (M, D) ──►            "        at M positions

and the model goes on from embeddings. The numbers are the same, for a tower keeps its pictures apart, and without
``TowerInputs`` everything is as transformers has it. Families whose own processor makes their pictures bring them only
where ranks share a sequence: features are the model's own ``get_image_features`` then, exchanged before they are put in
their places.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from packtool.attention.parallel.mesh import exchange_features
from packtool.encode.families import MediaKind, family_of

if TYPE_CHECKING:
    from packtool.attention.parallel.mesh import SequenceParallel
    from packtool.batch.shard import SequenceShard
    from packtool.batch.tower_inputs import TowerInputs

_SOUNDS = ("input_features", "feature_attention_mask")
_ATTRIBUTE = "_packtool_look"

Features = dict[MediaKind, list[Tensor]]
"""The features (N, D) of each kind of medium: what the embeddings get, then what the first layers get (DeepStack)."""


def look_once(model: nn.Module) -> None:
    """Make a model's towers run at most once in a forward pass; may be called again, and for any model."""
    for module in _with_towers(model):
        if not isinstance(getattr(module, _ATTRIBUTE, None), _OneLook):
            setattr(module, _ATTRIBUTE, _OneLook(module))


def share_features(model: nn.Module, parallel: SequenceParallel | None) -> None:
    """Make a model exchange features wherever its forward is given a ``sequence_shard``.

    Args:
        model: see ``look_once``, which this includes.
        parallel: ranks that share sequences; None for nobody.
    """
    look_once(model)
    for module in _with_towers(model):
        getattr(module, _ATTRIBUTE).parallel = parallel


@contextmanager
def own_features(model: nn.Module) -> Iterator[None]:
    """Inside, the model finds and merges its features as transformers would by itself."""
    looks = [getattr(module, _ATTRIBUTE, None) for module in _with_towers(model)]
    found = [look for look in looks if isinstance(look, _OneLook)]
    for look in found:
        look.is_on = False
    try:
        yield
    finally:
        for look in found:
            look.is_on = True


class _OneLook:
    """Hooks of a module. An object and not closures: a copied model must not ask the first one.

    Args:
        module: that has the towers, and not only something that has them.
    """

    def __init__(self, module: Any) -> None:
        self.parallel: SequenceParallel | None = None
        self.is_on = True
        family = family_of({"model_type": module.config.model_type})
        self._pixels, self._made = family.visual_inputs, family.processor_inputs
        self._deeper: tuple[Tensor, list[Tensor]] | None = None
        module.register_forward_pre_hook(self._merge, with_kwargs=True)
        if self._made:
            return
        module.language_model.register_forward_pre_hook(self._go_deeper, with_kwargs=True)
        if hasattr(module.language_model, "_deepstack_process"):
            # A bound method, which a deep copy binds to the copy.
            module.language_model._deepstack_process = types.MethodType(_add_features, module.language_model)

    def _merge(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Put embeddings of tokens and media in place of a forward pass's inputs."""
        towers: Mapping[Any, TowerInputs] = kwargs.pop("towers", None) or {}
        self._deeper = None
        if not towers or not self.is_on:
            return args, kwargs
        if args:  # LLaVA-NeXT hands its tokens on by place
            (kwargs["input_ids"],) = args
        shard: SequenceShard | None = kwargs.get("sequence_shard")
        embeddings = module.get_input_embeddings()(kwargs["input_ids"])
        found: Features = {}
        if "vision" in towers:
            if self._made:
                found["image"] = [_look_by_itself(module, {name: kwargs.get(name) for name in self._made})]
            else:
                found |= self._look(module, towers["vision"], kwargs)
        if "sound" in towers:
            found["audio"] = [_listen(module, towers["sound"], kwargs)]
        if shard is not None:
            assert self.parallel is not None, "packed_attention refuses it"
            # Behind all towers: whose pictures are soon done may have the longer sounds.
            parallel = self.parallel.of(shard.cut)
            found = {kind: exchange_features(levels, shard.routes[kind], parallel) for kind, levels in found.items()}
        where = {kind: index for inputs in towers.values() for kind, index in inputs.positions.items()}
        flat = embeddings.flatten(0, 1)
        for kind, levels in found.items():
            flat = flat.index_copy(0, where[kind], levels[0].to(flat.dtype))
        deeper = {kind: levels[1:] for kind, levels in found.items() if levels[1:]}
        if deeper:
            levels = [torch.cat(level) for level in zip(*deeper.values(), strict=True)]
            self._deeper = torch.cat([where[kind] for kind in deeper]), levels
        media = {*_SOUNDS, *self._made, *chain(*self._pixels.values())}
        left = {name: value for name, value in kwargs.items() if name not in media}
        return (), left | {"input_ids": None, "inputs_embeds": flat.view_as(embeddings)}

    def _look(self, module: Any, inputs: TowerInputs, media: Mapping[str, Any]) -> Features:
        """Features of pictures and videos, by one call."""
        given = {kind: names for kind, names in self._pixels.items() if media.get(names[0]) is not None}
        pixels, grids = (torch.cat([media[names[i]] for names in given.values()]) for i in (0, 1))
        tower = module.visual
        seen = tower(pixels.type(tower.dtype), grid_thw=grids, return_dict=True, **inputs.arguments)
        levels = [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or ())]
        merged = tower.spatial_merge_size**2
        # Patches are counted on the host: a grid may be on the device.
        counts = [len(media[names[0]]) // merged for names in given.values()]
        found: Features = {kind: [] for kind in given}
        for level in levels:
            for kind, part in zip(given, torch.split(level, counts), strict=True):
                found[kind].append(part)
        return found

    def _go_deeper(self, _module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Hand the layers what the first of them add at some positions."""
        if self._deeper is not None:
            positions, levels = self._deeper
            self._deeper = None
            kwargs |= {"visual_pos_masks": positions, "deepstack_visual_embeds": levels}
        return args, kwargs


def _look_by_itself(module: Any, media: Mapping[str, Any]) -> Tensor:
    """Features of pictures that a model's own processor made, (N, D), by the model's own method."""
    given = {name: tensor for name, tensor in media.items() if tensor is not None}
    found = module.get_image_features(**given, return_dict=True).pooler_output
    parts = [found] if isinstance(found, Tensor) else found
    return torch.cat([part.flatten(0, -2) for part in parts])


def _listen(module: Any, inputs: TowerInputs, media: Mapping[str, Any]) -> Tensor:
    """Features of sounds, (N, D)."""
    arguments = dict(inputs.arguments)
    features: Tensor = media["input_features"]
    frames = features.transpose(1, 2).flatten(0, 1)
    silent = frames.new_zeros(1, frames.shape[1])
    chunks = torch.cat([frames, silent])[arguments.pop("frames")].transpose(1, 2)
    found: Tensor = module.audio_tower(features, padded_feature=chunks, return_dict=True, **arguments).last_hidden_state
    return found


def _add_features(module: nn.Module, hidden_states: Tensor, where: Tensor, features: Tensor) -> Tensor:
    """A text tower's ``_deepstack_process``, also for positions (N,) of the flat batch in place of a mask (B, T)."""
    if where.dtype == torch.bool:
        own: Any = type(module)
        found: Tensor = own._deepstack_process(module, hidden_states, where, features)
        return found
    flat = hidden_states.flatten(0, 1)
    added = flat.index_select(0, where) + features.to(flat.dtype)
    return flat.index_copy(0, where, added).view_as(hidden_states)


def towers_of_media(model: nn.Module) -> Iterator[Any]:
    """The vision and audio towers of a model."""
    for module in _with_towers(model):
        yield from (tower for name, tower in module.named_children() if name in ("visual", "audio_tower"))


def _with_towers(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose forward asks for features: they have the tower, and not only something that has it."""
    for module in model.modules():
        if {"visual", "language_model"} <= {name for name, _ in module.named_children()} or _looks_by_itself(module):
            yield module


def _looks_by_itself(module: Any) -> bool:
    """Whether a module has a tower for what the model's own processor makes."""
    name = "get_image_features"
    if not hasattr(type(module), name) or any(hasattr(type(child), name) for child in module.children()):
        return False
    return bool(family_of({"model_type": module.config.model_type}).processor_inputs)
