"""One call per tower in a forward pass, whose features are written to their tokens by index.

transformers' models run their tower once for pictures and again for videos. Ranks that share a model's weights exchange
them in every call: a rank with pictures *and* videos would wait for one with pictures alone. The models also read the
size of masks of placeholder tokens from the device in every layer that takes features (DeepStack). So where a
micro-batch has ``TowerInputs``, a hook before the forward of the module that owns the towers does their part::

    pixel_values, pixel_values_videos ──► one call of the tower ──► (N, D) ──► embeddings (B, T, D) at N positions
    input_features ─────────────────────► one call of the tower ──► (M, D) ──►            "        at M positions

and the model continues from embeddings with the same numbers. Families whose own processor makes their pictures have
``TowerInputs`` only where ranks share a sequence, and for videos that the model encodes by another call than pictures
(``VIDEO_INPUTS``); their features are those of the model's ``get_image_features``.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from packtool.attention.parallel.mesh import exchange_features
from packtool.batch.tower_inputs import VIDEO_INPUTS, TowerInputs
from packtool.constants import CUT_PICTURE, UNCUT_PICTURE
from packtool.encode.families import family_of
from packtool.rows.sample import MediaKind

if TYPE_CHECKING:
    from packtool.attention.parallel.mesh import SequenceParallel
    from packtool.batch.shard import SequenceShard

_HOOKS_ATTRIBUTE = "_packtool_towers"

Features = dict[MediaKind, list[Tensor]]
"""Features (N, D) of each kind of medium: those of the embeddings, then those of the first layers (DeepStack)."""


def install_tower_hooks(model: nn.Module) -> None:
    """Make a model's towers run at most once per forward pass; idempotent, and without effect on text models."""
    for module in _modules_with_towers(model):
        if not isinstance(getattr(module, _HOOKS_ATTRIBUTE, None), _TowerHooks):
            setattr(module, _HOOKS_ATTRIBUTE, _TowerHooks(module))


def set_feature_ranks(model: nn.Module, parallel: SequenceParallel | None) -> None:
    """Install the tower hooks, and set the ranks that exchange features in calls with a ``sequence_shard``."""
    install_tower_hooks(model)
    for module in _modules_with_towers(model):
        getattr(module, _HOOKS_ATTRIBUTE).parallel = parallel


@contextmanager
def original_features(model: nn.Module) -> Iterator[None]:
    """Let the model compute and merge its features as in transformers inside the context, except ``VIDEO_INPUTS``."""
    hooks = [
        getattr(module, _HOOKS_ATTRIBUTE) for module in _modules_with_towers(model) if hasattr(module, _HOOKS_ATTRIBUTE)
    ]
    for hook in hooks:
        hook.is_enabled = False
    try:
        yield
    finally:
        for hook in hooks:
            hook.is_enabled = True


class _TowerHooks:
    """Forward hooks of a module that owns towers; an object, because a deep copy of the model needs its own."""

    def __init__(self, module: Any) -> None:
        self.parallel: SequenceParallel | None = None
        self.is_enabled = True
        family = family_of({"model_type": module.config.model_type})
        # Of images and videos: names of the forward's arguments for the patches and for the grids.
        self._visual_names = family.visual_inputs
        self._processor_names = family.processor_inputs
        # Set by ``_embed`` for ``_add_deepstack``: flat positions of media tokens, and the features that each of the
        # text tower's first layers adds there.
        self._deepstack: tuple[Tensor, list[Tensor]] | None = None
        module.register_forward_pre_hook(self._embed, with_kwargs=True)
        if self._processor_names:
            return
        module.language_model.register_forward_pre_hook(self._add_deepstack, with_kwargs=True)
        if hasattr(module.language_model, "_deepstack_process"):
            # A bound method, which a deep copy binds to the copy.
            module.language_model._deepstack_process = types.MethodType(_deepstack_process, module.language_model)

    def _embed(self, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Replace the token ids and media of a forward call by embeddings that contain the media's features.

        A pre-hook of the model's forward. ``kwargs["towers"]`` has the ``TowerInputs`` of the media encoders: "vision"
        (images and videos) and "sound". Without it, transformers' own forward encodes the media.

        Returns:
            The arguments that the forward is called with instead, by position and by name.
        """
        towers: Mapping[Any, TowerInputs] = kwargs.pop("towers", None) or {}
        self._deepstack = None
        pixels = kwargs.get("pixel_values")
        if pixels is not None and pixels.dtype == torch.bfloat16:  # as from the processor of Llama 4
            kwargs["pixel_values"] = pixels.to(module.dtype)  # its tower takes no other type than that of its weights
        needs_hook = any(kwargs.get(name) is not None for name in VIDEO_INPUTS)
        if not towers or not (self.is_enabled or needs_hook):
            return args, kwargs

        input_ids = args[0] if args else kwargs["input_ids"]  # LLaVA-NeXT passes its token ids by position
        embeddings = module.get_input_embeddings()(input_ids)  # (B, T, D)
        features = self._run_towers(module, towers, kwargs)
        shard: SequenceShard | None = kwargs.get("sequence_shard")
        if shard is not None:
            # Once, after all towers have run, so that ranks wait for each other only once.
            features = self._exchange(features, shard)
        feature_positions: dict[str, Tensor] = {}  # by kind of medium: (N,), where its features go in all B * T tokens
        for inputs in towers.values():
            feature_positions.update(inputs.positions)
        self._deepstack = _deepstack_inputs(features, feature_positions)  # for the text tower, by another hook

        text_arguments = self._without_media(kwargs)
        text_arguments["input_ids"] = None
        text_arguments["inputs_embeds"] = _with_features(embeddings, features, feature_positions)
        return (), text_arguments  # the token ids are the only argument by position

    def _exchange(self, features: Features, shard: SequenceShard) -> Features:
        """Exchange features with the ranks that share the sequence; return those of this rank's tokens."""
        assert self.parallel is not None, "packed_attention refuses a shard without set_feature_ranks"
        ranks = self.parallel.of(shard.split)
        return {kind: exchange_features(levels, shard.routes[kind], ranks) for kind, levels in features.items()}

    def _without_media(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a forward call's arguments without those that hold media, which the text tower does not take."""
        visual_names = chain.from_iterable(self._visual_names.values())
        media_names = {"input_features", "feature_attention_mask", *self._processor_names, *visual_names}
        media_names.update(VIDEO_INPUTS)
        return {name: value for name, value in kwargs.items() if name not in media_names}

    def _run_towers(self, module: Any, towers: Mapping[Any, TowerInputs], kwargs: Mapping[str, Any]) -> Features:
        """Run each tower once on the media among a forward call's arguments, and return the features."""
        features: Features = {}
        if "vision" in towers and self._processor_names:
            media = {name: kwargs[name] for name in self._processor_names if kwargs.get(name) is not None}
            features["image"] = [_processor_features(module, media, kwargs)]
        elif "vision" in towers:
            features |= self._visual_features(module, towers["vision"], kwargs)
        if "sound" in towers:
            features["audio"] = [_audio_features(module, towers["sound"], kwargs["input_features"])]
        return features

    def _visual_features(self, module: Any, inputs: TowerInputs, media: Mapping[str, Any]) -> Features:
        """Compute the features of images and videos in one call of the vision tower."""
        patches: dict[MediaKind, Tensor] = {}
        grids = []
        for kind, (patches_name, grids_name) in self._visual_names.items():
            if media.get(patches_name) is not None:
                patches[kind] = media[patches_name]
                grids.append(media[grids_name])
        tower = module.visual
        pixels = torch.cat([*patches.values()]).type(tower.dtype)
        output = tower(pixels, grid_thw=torch.cat(grids), return_dict=True, **inputs.arguments)
        levels = [output.pooler_output]  # features (N, D) of all images, then all videos, from the tower's last layer
        levels += getattr(output, "deepstack_features", None) or ()  # the same from earlier layers
        # Computed from the patches, because reading the grids could wait for the device.
        patches_per_feature = tower.spatial_merge_size**2
        return _split_by_kind(levels, {kind: len(each) // patches_per_feature for kind, each in patches.items()})

    def _add_deepstack(self, _module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Give the text tower the DeepStack features that its first layers add, with their positions."""
        if self._deepstack is not None:
            positions, levels = self._deepstack
            self._deepstack = None
            kwargs |= {"visual_pos_masks": positions, "deepstack_visual_embeds": levels}
        return args, kwargs


def _split_by_kind(levels: list[Tensor], num_features: Mapping[MediaKind, int]) -> Features:
    """Split each level (N, D), which has the features of one kind of medium after those of another."""
    features: Features = {kind: [] for kind in num_features}
    for level in levels:
        for kind, level_of_kind in zip(num_features, torch.split(level, list(num_features.values())), strict=True):
            features[kind].append(level_of_kind)
    return features


def _with_features(embeddings: Tensor, features: Features, positions: Mapping[str, Tensor]) -> Tensor:
    """Return embeddings (B, T, D) with the first level of the features at the flat positions, (N,), of each kind."""
    flat = embeddings.flatten(0, 1)
    for kind, levels in features.items():
        flat = flat.index_copy(0, positions[kind], levels[0].to(flat.dtype))
    return flat.view_as(embeddings)


def _deepstack_inputs(features: Features, positions: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]] | None:
    """Return the flat positions of media tokens and their features for each of the text tower's first layers."""
    later_levels = {kind: levels[1:] for kind, levels in features.items() if len(levels) > 1}
    if not later_levels:
        return None
    features_by_layer = [torch.cat(level_of_kinds) for level_of_kinds in zip(*later_levels.values(), strict=True)]
    return torch.cat([positions[kind] for kind in later_levels]), features_by_layer


def _processor_features(module: Any, media: Mapping[str, Tensor], kwargs: Mapping[str, Any]) -> Tensor:
    """Compute features (N, D) of media by the model's ``get_image_features``, in one call of the tower.

    ``kwargs``: arguments of the forward call, with ``VIDEO_INPUTS`` if there are videos.
    """
    tiles, mask = map(kwargs.get, VIDEO_INPUTS)
    if tiles is not None:
        return _tile_features(module, media, tiles)
    output = module.get_image_features(**media, return_dict=True).pooler_output
    outputs = [output] if isinstance(output, Tensor) else output
    features = torch.cat([image_features.flatten(0, -2) for image_features in outputs])
    return features if mask is None else features[mask]


def _tile_features(module: Any, media: Mapping[str, Tensor], tiles: Tensor) -> Tensor:
    """Compute the features of LLaVA-OneVision's media, (N, D) in their order, by one call of the vision tower.

    Some pictures are cut into tiles. All other media are uncut: a picture, or frames of a video, of one tile each.
    The model takes a cut picture as a row of its own, and here all uncut tiles as pictures of one more row.

    Args:
        media: ``pixel_values``, the tiles of all media in order, and ``image_sizes`` of the cut pictures.
        tiles: int64 (media, 2), the number of tiles of each medium and its form, such as ``CUT_PICTURE``.
    """
    tile_counts, forms = (column.tolist() for column in tiles.unbind(1))
    cut_pictures: list[Tensor] = []
    uncut_media: list[Tensor] = []
    for pixels, form in zip(torch.split(media["pixel_values"], tile_counts), forms, strict=True):
        if form == CUT_PICTURE:
            cut_pictures.append(pixels)
        else:
            uncut_media.append(pixels)
    num_uncut_tiles = sum(len(pixels) for pixels in uncut_media)
    if num_uncut_tiles == 1:  # the model would cut a picture that is alone in its row
        uncut_media *= 2
        num_uncut_tiles = 2

    image_sizes = F.pad(media["image_sizes"], (0, 0, 0, num_uncut_tiles))  # those of uncut tiles are not used
    images_per_row = [1] * len(cut_pictures) + [num_uncut_tiles]
    pixel_values = torch.cat([*cut_pictures, *uncut_media])
    output = module.get_image_features(pixel_values, image_sizes, batch_num_images=images_per_row, return_dict=True)
    features = output.pooler_output  # for each image, (n, D)
    cut_features = iter(features[: len(cut_pictures)])
    uncut_features = iter(features[len(cut_pictures) :])
    counts_and_forms = zip(tile_counts, forms, strict=True)
    return torch.cat([*_features_in_order(module, counts_and_forms, cut_features, uncut_features)])


def _features_in_order(
    module: Any,
    media_tiles: Iterable[tuple[int, int]],
    cut_features: Iterator[Tensor],
    uncut_features: Iterator[Tensor],
) -> Iterator[Tensor]:
    """Yield the features of media (tiles, form) in order, from those of cut pictures and of other tiles."""
    for count, form in media_tiles:
        if form == CUT_PICTURE:
            yield next(cut_features)
            continue
        tile_features = torch.stack(list(islice(uncut_features, count)))  # (tiles, patches + 1, D), the newline last
        if form == UNCUT_PICTURE:
            yield tile_features[0]
        else:
            yield from (module.apply_pooling(tile_features[:, :-1]).flatten(0, 1), tile_features[0, -1:])


def _audio_features(module: Any, inputs: TowerInputs, features: Tensor) -> Tensor:
    """Compute features (N, D) of sounds from mel frames (sounds, bins, frames)."""
    arguments = dict(inputs.arguments)
    frame_index = arguments.pop("frames")  # of each chunk; one past the last frame is silence
    frames = features.transpose(1, 2).flatten(0, 1)
    silence = frames.new_zeros(1, frames.shape[1])
    chunks = torch.cat([frames, silence])[frame_index].transpose(1, 2)
    output = module.audio_tower(features, padded_feature=chunks, return_dict=True, **arguments)
    return output.last_hidden_state


def _deepstack_process(module: nn.Module, hidden_states: Tensor, positions: Tensor, features: Tensor) -> Tensor:
    """Add features (N, D) to hidden states (B, T, D) at flat positions (N,), or where a bool mask (B, T) is set."""
    if positions.dtype == torch.bool:
        own_class: Any = type(module)
        return own_class._deepstack_process(module, hidden_states, positions, features)
    flat = hidden_states.flatten(0, 1)
    added = flat.index_select(0, positions) + features.to(flat.dtype)
    return flat.index_copy(0, positions, added).view_as(hidden_states)


def towers_of_media(model: nn.Module) -> Iterator[Any]:
    """Yield the vision and audio towers of a model."""
    for module in _modules_with_towers(model):
        yield from (tower for name, tower in module.named_children() if name in ("visual", "audio_tower"))


def _modules_with_towers(model: nn.Module) -> Iterator[Any]:
    """Yield the modules whose forward calls a tower: those that own one directly, not through a child."""
    name = "get_image_features"
    for module in model.modules():
        if {"visual", "language_model"} <= {child for child, _ in module.named_children()}:
            yield module
        elif hasattr(type(module), name) and not any(hasattr(type(child), name) for child in module.children()):
            config: Any = module.config
            if family_of({"model_type": config.model_type}).processor_inputs:
                yield module
