"""Modules of vision and audio towers and of the projections to the text's width, for ``layers``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from packtool.encode.families import family_of
from packtool.encode.families.record import Family, square_side
from packtool.planning.module_cost import ModuleCost, first_setting, new_module

_GATED = ("silu", "swish")
# Types of vision towers, by ``model_type`` of the ``vision_config``.
_PIXTRAL = "pixtral"
_LEGACY_PICTURE_TOKENS = 1024  # assumed for caches that lack the sizes of pictures
_CLASS_TOKEN_TOWERS = ("clip_vision_model", "internvl_vision")  # an additional position in each tile
_OUTPUT_WIDE_TOWERS = ("glm4v_vision", "glm4v_moe_vision")  # MLPs of ``out_hidden_size``
_MERGE_SETTINGS = ("spatial_merge_size", "merge_kernel_size", "downsample_factor", "scale_factor", "hidden_stride")
# Qwen3-Omni: three convolutions of stride 2 over 100 mel frames leave 13 positions, each of an eighth of the bins.
_STRIDES = (50, 25, 13)


def _depth(vision: Mapping[str, Any]) -> int:
    """Return the number of layers of a tower; 0 if it is unknown."""
    return first_setting(vision, "depth", "num_hidden_layers")


def _tower_width(vision: Mapping[str, Any]) -> int:
    """Return the width of a patch: Qwen2-VL's config calls it embed_dim, and the text's width hidden_size."""
    return first_setting(vision, "embed_dim", "hidden_size") if _depth(vision) else 0


class _VisionNames(NamedTuple):
    """Names, widths and kinds of the modules of a vision tower's layers."""

    hidden: int  # width of a patch
    mlp_width: int
    qkv_outputs: dict[str, int]  # outputs of each module that computes queries, keys or values
    up: str
    down: str
    is_gated: bool

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> _VisionNames:
        """Read the layers of a model's vision tower, which must have one."""
        vision: Mapping[str, Any] = config["vision_config"]
        hidden = _tower_width(vision)
        mlp_width = int(vision.get("intermediate_size") or hidden * float(vision.get("mlp_ratio") or 4))
        if vision.get("model_type") in _OUTPUT_WIDE_TOWERS:
            mlp_width = int(vision["out_hidden_size"])
        num_heads = first_setting(vision, "num_heads", "num_attention_heads") or 1
        num_key_heads = first_setting(vision, "num_key_value_heads") or num_heads
        qkv_outputs = {"qkv": hidden + 2 * hidden * num_key_heads // num_heads}
        # Towers before Qwen3-VL have other names, and the tower of Qwen2.5-Omni has separate modules for Q, K and V.
        is_before_qwen3 = "num_position_embeddings" not in vision
        if is_before_qwen3 and "audio_config" in config:
            qkv_outputs = {"q": hidden, "k": hidden, "v": hidden}
        up, down = ("fc1", "fc2") if is_before_qwen3 else ("linear_fc1", "linear_fc2")
        is_gated = str(vision.get("hidden_act")) in _GATED or vision.get("model_type") == _PIXTRAL
        if is_gated:
            up, down = "up_proj", "down_proj"
        return cls(hidden, mlp_width, qkv_outputs, up, down, is_gated)


def vision_modules(config: Mapping[str, Any]) -> Iterator[ModuleCost]:
    """Yield the modules of the vision tower; ``times`` are its positions per unit."""
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    hidden = _tower_width(vision)
    if not hidden:
        return
    patches = vision_patches(config)
    module = partial(new_module, "model.visual.", part="vision tower", times=float(patches.positions), has_bias=True)
    values_per_patch = _values_per_patch(vision)
    yield module("patch_embed.proj", values_per_patch, hidden, kind="convolution", times=float(patches.per_unit))
    num_positions = int(vision.get("num_position_embeddings") or 0)
    if num_positions:
        yield module("pos_embed", num_positions, hidden, kind="no_product")
    names = _VisionNames.of_config(config)
    merge_layer = _early_merge_layer(config)
    share = 1.0  # of the positions that reach a layer
    for layer in range(_depth(vision)):
        block = partial(module, layer=layer, times=patches.positions * share)
        attention_flops = {"per_square": 4.0 * hidden * share**2}
        if layer not in patches.full_layers:
            attention_flops = {"per_unit": patches.positions * 4.0 * hidden * patches.per_window}
        yield from _vision_layer(block, f"blocks.{layer}", names, attention_flops)
        if layer == merge_layer:
            yield from _early_merger_modules(module, hidden, names.mlp_width, patches.positions)
            share = 1 / 4


def _values_per_patch(vision: Mapping[str, Any]) -> int:
    """Count the color values of a patch."""
    pixels = square_side(vision, "patch_size", 14) ** 2 * int(vision.get("temporal_patch_size") or 1)
    return pixels * int(vision.get("in_channels") or vision.get("in_chans") or 3)


def _vision_layer(
    module: Any, name: str, names: _VisionNames, attention_flops: Mapping[str, float]
) -> Iterator[ModuleCost]:
    """Yield the modules of the layer ``name`` of a vision tower; ``module`` makes one from its name and widths."""
    hidden, mlp_width = names.hidden, names.mlp_width
    yield module(f"{name}.norm1", 1, hidden, kind="no_product")
    for index, (qkv_name, outputs) in enumerate(names.qkv_outputs.items()):
        yield module(f"{name}.attn.{qkv_name}", hidden, outputs, shares_input=index > 0)
    yield module(f"{name}.attn", kind="attention", **attention_flops)
    yield module(f"{name}.attn.proj", hidden, hidden)
    yield module(f"{name}.norm2", 1, hidden, kind="no_product")
    if names.is_gated:
        yield module(f"{name}.mlp.gate_proj", hidden, mlp_width)
    yield module(f"{name}.mlp.{names.up}", hidden, mlp_width, shares_input=names.is_gated)
    yield module(f"{name}.mlp.{names.down}", mlp_width, hidden)


def _early_merge_layer(config: Mapping[str, Any]) -> int | None:
    """Return the layer after which MiniCPM-V merges each square of 2 x 2 patches inside its tower; None without."""
    layer = config.get("insert_layer_id")
    is_ocr = (config.get("vision_config") or {}).get("model_type") == "minicpm_ocr_vision"
    mode = config.get("downsample_mode") or ("4x" if is_ocr else "16x")
    return None if layer is None or mode == "4x" else int(layer)


def _early_merger_modules(module: Any, hidden: int, mlp_width: int, positions: int) -> Iterator[ModuleCost]:
    """Yield the modules that merge 2 x 2 patches: attention within the square, then an MLP over its four patches."""
    yield module("vit_merger.attn.qkv", hidden, 3 * hidden)
    yield module("vit_merger.attn", kind="attention", per_unit=positions * 4.0 * hidden * 4)
    yield module("vit_merger.attn.proj", hidden, hidden)
    yield module("vit_merger.linear_1", 4 * hidden, 4 * mlp_width, times=positions / 4)
    yield module("vit_merger.linear_2", 4 * mlp_width, hidden, times=positions / 4)


def merger_modules(config: Mapping[str, Any], text_hidden: int) -> tuple[tuple[ModuleCost, ...], ...]:
    """Return the modules of each merger, which projects outputs of a layer of the vision tower to the text's width.

    A merger joins merge^2 patches to one token. The first one reads the last layer, others read earlier layers.
    """
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    hidden = _tower_width(vision)
    if not hidden:
        return ()
    tokens = float(vision_patches(config).tokens)
    module = partial(new_module, "model.visual.", part="aligner", times=tokens, has_bias=True)
    projector = family_of(config).projector
    if projector != Family.projector:
        return (_projector_modules(module, projector, _projector_widths(config, text_hidden)),)
    output_width = int(vision.get("out_hidden_size") or text_hidden)
    merged_width = hidden * _merge_side(config) ** 2
    up, down, norm = "linear_fc1", "linear_fc2", "norm"
    if "audio_config" in config or "num_position_embeddings" not in vision:  # an Omni model, or before Qwen3-VL
        up, down, norm = "mlp.0", "mlp.2", "ln_q"
    mergers = []
    for name in _merger_names(config):
        norm_module = module(f"{name}.{norm}", 1, hidden, kind="no_product")
        up_module = module(f"{name}.{up}", merged_width, merged_width)
        down_module = module(f"{name}.{down}", merged_width, output_width)
        mergers.append((norm_module, up_module, down_module))
    return tuple(mergers)


def _projector_modules(module: Any, projector: Sequence[str], widths: Mapping[str, int]) -> tuple[ModuleCost, ...]:
    """Return the modules of a projector, each given by the names of its input and output width."""
    modules = []
    for number, pair in enumerate(projector):
        inputs, outputs = pair.split()
        modules.append(module(f"merger.{number}", widths[inputs], widths[outputs]))
    return tuple(modules)


def _merger_names(config: Mapping[str, Any]) -> list[str]:
    """List the mergers: one after the tower, and in Qwen3's "deepstack" further ones after earlier layers."""
    vision = config["vision_config"]
    list_name = "merger_list" if "audio_config" in config else "deepstack_merger_list"
    names = ["merger"]
    for number, layer in enumerate(vision.get("deepstack_visual_indexes") or ()):
        if int(layer) < _depth(vision):
            names.append(f"{list_name}.{number}")
    return names


def _projector_widths(config: Mapping[str, Any], text_hidden: int) -> dict[str, int]:
    """Return the widths that ``Family.projector`` names.

    ``tower``: a patch, from each layer that is read; ``merged``: all patches of a token; ``out`` and ``wide``: output
    and MLP of GLM's merger; ``aligned`` and ``gated``: before and after a gate; ``words`` and ``vocabulary``: Ovis'
    visual words without and with its marks; ``text``: the language model.
    """
    vision = config["vision_config"]
    tower_width = _tower_width(vision) * _num_feature_layers(config)
    # MiniCPM-V merges 2 x 2 patches inside its tower, and 2 x 2 of the results here.
    merge = _merge_side(config) if _early_merge_layer(config) is None else 2
    out_width = int(vision.get("out_hidden_size") or text_hidden)
    mlp_width = int(vision.get("intermediate_size") or 0)
    aligned_width = int(config.get("alignment_intermediate_size") or text_hidden)
    vocabulary = int(vision.get("vocab_size") or 0)
    return {
        "tower": tower_width,
        "merged": tower_width * merge**2,
        "out": out_width,
        "wide": mlp_width if vision.get("model_type") in _OUTPUT_WIDE_TOWERS else 3 * out_width,
        "aligned": aligned_width,
        "gated": aligned_width // 2,
        "words": vocabulary - int(vision.get("num_visual_indicator_tokens") or 5),
        "vocabulary": vocabulary,
        "text": text_hidden,
    }


def _num_feature_layers(config: Mapping[str, Any]) -> int:
    """Return the number of the tower's layers whose outputs the projector reads, side by side."""
    feature_layers = config.get("vision_feature_layers") or config.get("vision_feature_layer")
    return len(feature_layers) if isinstance(feature_layers, list | tuple) else 1


def _merge_side(config: Mapping[str, Any]) -> int:
    """Return the side, in patches, of the square of patches that becomes a token."""
    if _early_merge_layer(config) is not None:
        return 4
    for part in (config.get("vision_config") or {}, config):
        for name in _MERGE_SETTINGS:
            if part.get(name):
                return square_side(part, name, 1)
    if ratio := config.get("downsample_ratio"):
        return round(1 / float(ratio))
    family = family_of(config)
    return 2 if family.kinds and family.projector[0].startswith("merged") else 1  # 1 for unknown families


class VisionPatches(NamedTuple):
    """Patches of a unit of the vision tower: of a token if pictures keep their shapes, otherwise of a tile.

    Args:
        per_unit: patches of the unit.
        positions: the same with the class token of a tile.
        tokens: output tokens of the unit.
        per_window: positions of a window, or of a tile.
        full_layers: layers with attention to full frames; the others attend to windows.
        tile_squares, squares_per_token: as in ``ModelLayers``.
    """

    per_unit: int = 1
    positions: int = 1
    tokens: int = 1
    per_window: int = 0
    full_layers: range | set[int] = range(0)
    tile_squares: int = 0
    squares_per_token: float = 0.0


def vision_patches(config: Mapping[str, Any]) -> VisionPatches:
    """Compute the patches of a unit of the vision tower."""
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    if not _tower_width(vision):
        return VisionPatches()
    family = family_of(config)
    has_grids = not {"image_grid_thw", "target_sizes"}.isdisjoint(family.processor_inputs)
    has_grids |= bool(family.visual_inputs or vision.get("spatial_merge_size"))
    if has_grids or vision.get("model_type") == _PIXTRAL:
        return _patches_of_tokens(vision, _merge_side(config), is_legacy=bool(family.processor_inputs))
    num_tokens = 0  # unknown
    if not family.processor_inputs:
        num_tokens = int(config.get("mm_tokens_per_image") or config.get("image_seq_length") or 0)
    return _patches_of_tiles(vision, _merge_side(config), num_tokens)


def _patches_of_tokens(vision: Mapping[str, Any], merge: int, *, is_legacy: bool) -> VisionPatches:
    """Return the patches of a token of a tower whose pictures keep their shapes.

    ``merge`` is the side of the square of patches that becomes a token. ``is_legacy``: caches may lack the sizes of
    pictures.
    """
    legacy_squares = float(_LEGACY_PICTURE_TOKENS * merge**4) if is_legacy else 0.0
    patches = VisionPatches(merge**2, merge**2, squares_per_token=legacy_squares)
    full_layers = vision.get("fullatt_block_indexes")
    if full_layers is None or not vision.get("window_size"):
        return patches._replace(full_layers=range(_depth(vision)))
    window_side = int(vision["window_size"]) // merge // square_side(vision, "patch_size", 14) * merge
    return patches._replace(per_window=window_side**2, full_layers=set(map(int, full_layers)))


def _patches_of_tiles(vision: Mapping[str, Any], merge: int, num_tokens: int) -> VisionPatches:
    """Return the patches of a tile, for a tower that resizes all pictures to tiles of one size.

    ``num_tokens`` are those of a tile, or 0 to compute them from ``merge``, the side of a token in patches.
    """
    patch_side = square_side(vision, "patch_size", 14)
    tile_side = square_side(vision, "image_size", patch_side) // patch_side
    positions = tile_side**2 + int(vision.get("model_type") in _CLASS_TOKEN_TOWERS)
    tokens_per_side = -(-tile_side // merge)  # rounded up
    tokens = num_tokens or tokens_per_side**2
    return VisionPatches(
        tile_side**2,
        positions,
        tokens,
        per_window=positions,
        tile_squares=tile_side**4,
        squares_per_token=tile_side**4 / tokens,
    )


def audio_modules(audio: Mapping[str, Any]) -> Iterator[ModuleCost]:
    """Yield the modules of an audio tower and its projections; windows of attention count at their full width.

    The unit is an output token of the tower. ``part`` is "vision tower", since ``--freeze-vit`` freezes audio towers,
    too. Only the tower of Qwen3-Omni has ``downsample_hidden_size``; others are like that of Qwen2.5-Omni.
    """
    hidden, depth = int(audio.get("d_model") or 0), int(audio.get("encoder_layers") or 0)
    if not hidden or not depth:
        return
    mel_bins = int(audio.get("num_mel_bins") or 128)
    window = int(audio.get("n_window") or 100)  # positions, or for Qwen3-Omni half the frames of a chunk
    channels = int(audio.get("downsample_hidden_size") or 0)
    # In Qwen2.5-Omni, four frames make two positions of the tower, which are averaged to one token.
    positions_per_token = 1.0 if channels else 2.0

    module = partial(new_module, "model.audio_tower.", part="vision tower", times=positions_per_token, has_bias=True)
    if channels:
        yield from _qwen3_convolutions(module, mel_bins, channels, hidden)
        # An attention window has several chunks of 2 * n_window frames, each of 13 positions.
        chunks_per_window = int(audio.get("n_window_infer") or 8 * window) // (2 * window)
        window = chunks_per_window * _STRIDES[-1]
    else:
        yield module("conv1", 3 * mel_bins, hidden, times=4.0, kind="convolution")
        yield module("conv2", 3 * hidden, hidden, kind="convolution")
    mlp_width = int(audio.get("encoder_ffn_dim") or 4 * hidden)
    attention_flops = positions_per_token * 4 * hidden * window
    for layer in range(depth):
        yield from _audio_layer(partial(module, layer=layer), f"layers.{layer}", hidden, mlp_width, attention_flops)
    yield module("ln_post", 1, hidden, kind="no_product")
    output_width = int(audio.get("output_dim") or hidden)
    if channels:
        yield module("proj1", hidden, hidden, times=1.0, part="aligner")
        yield module("proj2", hidden, output_width, times=1.0, part="aligner")
    else:
        yield module("proj", hidden, output_width, times=1.0)


def _qwen3_convolutions(module: Any, mel_bins: int, channels: int, hidden: int) -> Iterator[ModuleCost]:
    """Yield the convolutions of Qwen3-Omni's tower; each halves the bins (height) and the frames (width)."""
    height, in_channels = mel_bins, 1
    for number, width in enumerate(_STRIDES, start=1):
        height = (height - 1) // 2 + 1
        outputs_per_token = height * width / _STRIDES[-1]
        yield module(f"conv2d{number}", 9 * in_channels, channels, times=outputs_per_token, kind="convolution")
        in_channels = channels
    yield module("conv_out", channels * height, hidden)


def _audio_layer(module: Any, name: str, hidden: int, mlp_width: int, attention_flops: float) -> Iterator[ModuleCost]:
    """Yield the modules of the layer ``name`` of an audio tower; ``module`` makes one from its name and widths."""
    yield module(f"{name}.self_attn_layer_norm", 1, hidden, kind="no_product")
    for projection in ("k_proj", "v_proj", "q_proj"):
        yield module(f"{name}.self_attn.{projection}", hidden, hidden, shares_input=projection != "k_proj")
    yield module(f"{name}.self_attn", kind="attention", per_unit=attention_flops)
    yield module(f"{name}.self_attn.out_proj", hidden, hidden)
    yield module(f"{name}.final_layer_norm", 1, hidden, kind="no_product")
    yield module(f"{name}.fc1", hidden, mlp_width)
    yield module(f"{name}.fc2", mlp_width, hidden)
