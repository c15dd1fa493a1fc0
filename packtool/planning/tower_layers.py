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
_GATED_TOWERS = (_PIXTRAL, "gemma4_vision")  # that do not say so by ``hidden_act``
_LEGACY_PICTURE_TOKENS = 1024  # assumed for caches that lack the sizes of pictures
_PADDED_FRAME_TOKENS = 70  # of a frame of Gemma 4, by default; caches lack the sizes of frames
_CLASS_TOKEN_TOWERS = ("clip_vision_model", "internvl_vision", "llama4_vision_model")  # one more position per tile
_GLM4V_TOWERS = ("glm4v_vision", "glm4v_moe_vision")  # MLPs of ``out_hidden_size``; the merger's are as configured
_MERGE_SETTINGS = (
    *("spatial_merge_size", "merge_kernel_size", "pooling_kernel_size"),
    *("downsample_factor", "scale_factor", "hidden_stride"),
)
_QWEN3_CHUNK_WIDTHS = (50, 25, 13)
"""Positions of a chunk of 100 mel frames after each convolution of Qwen3-Omni; each also halves the mel bins."""


def _depth(vision: Mapping[str, Any]) -> int:
    """Return the number of layers of a tower; 0 if it is unknown."""
    return first_setting(vision, "depth", "num_hidden_layers") + int(vision.get("num_global_layers") or 0)


def _tower_width(vision: Mapping[str, Any]) -> int:
    """Return the width of a patch: Qwen2-VL's config calls it embed_dim, and the text's width hidden_size."""
    return first_setting(vision, "embed_dim", "hidden_size") if _depth(vision) else 0


def _is_qwen3(vision: Mapping[str, Any]) -> bool:
    """Return whether a tower is that of Qwen3-VL or later, or of Qwen3-Omni."""
    return "num_position_embeddings" in vision


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
        """Read the names and widths from a model's ``config.json``, which must have a ``vision_config``.

        The modules of most towers have one of three sets of names: those of Qwen3-VL, those of earlier towers, and
        those of gated MLPs.
        """
        vision: Mapping[str, Any] = config["vision_config"]
        hidden = _tower_width(vision)
        num_heads = first_setting(vision, "num_heads", "num_attention_heads") or 1
        num_key_heads = first_setting(vision, "num_key_value_heads") or num_heads
        key_and_value_width = 2 * hidden * num_key_heads // num_heads
        qkv_outputs = {"qkv": hidden + key_and_value_width}
        up, down = "linear_fc1", "linear_fc2"
        if not _is_qwen3(vision):
            up, down = "fc1", "fc2"
            if "audio_config" in config:  # Qwen2.5-Omni
                qkv_outputs = {"q": hidden, "k": hidden, "v": hidden}
        is_gated = str(vision.get("hidden_act")) in _GATED or vision.get("model_type") in _GATED_TOWERS
        if is_gated:
            up, down = "up_proj", "down_proj"
        return cls(hidden, _mlp_width(vision, hidden), qkv_outputs, up, down, is_gated)


def _mlp_width(vision: Mapping[str, Any], hidden: int) -> int:
    if vision.get("model_type") in _GLM4V_TOWERS:
        return int(vision["out_hidden_size"])
    return int(vision.get("intermediate_size") or hidden * float(vision.get("mlp_ratio") or 4))


def vision_modules(config: Mapping[str, Any]) -> Iterator[ModuleCost]:
    """Yield the modules of the vision tower, with their work for one unit, as in ``VisionPatches``."""
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    hidden = _tower_width(vision)
    if not hidden:
        return
    patches = vision_patches(config)
    num_positions = float(patches.num_positions)
    module = partial(new_module, "model.visual.", part="vision tower", uses_per_unit=num_positions, has_bias=True)
    yield from _embedding_modules(module, vision, hidden, float(patches.num_patches))
    names = _VisionNames.of_config(config)
    merge_layer = _early_merge_layer(config)
    share = 1.0  # of the positions, in this layer
    for layer in range(_depth(vision)):
        block = partial(module, layer=layer, uses_per_unit=num_positions * share)
        yield from _vision_layer(block, f"blocks.{layer}", names, patches.attention_flops(layer, hidden, share))
        if layer == merge_layer:
            yield from _early_merger_modules(module, hidden, names.mlp_width, patches.num_positions)
            share = 1 / 4  # 2 x 2 positions are merged
    if _pads_pictures(config):  # the tower ends with a product that averages the patches of each token
        yield module("pooler", kind="attention", flops_per_square=2 * hidden / patches.padded_merge)


def _embedding_modules(module: Any, vision: Mapping[str, Any], hidden: int, num_patches: float) -> Iterator[ModuleCost]:
    """Yield the modules that embed patches and, where these have weights, their positions."""
    yield module("patch_embed.proj", _values_per_patch(vision), hidden, kind="convolution", uses_per_unit=num_patches)
    num_embeddings = int(vision.get("num_position_embeddings") or 0)
    if num_embeddings:
        yield module("pos_embed", num_embeddings, hidden, kind="no_matmul")


def _values_per_patch(vision: Mapping[str, Any]) -> int:
    """Count the color values of a patch."""
    pixels = square_side(vision, "patch_size", 14) ** 2 * int(vision.get("temporal_patch_size") or 1)
    return pixels * int(vision.get("in_channels") or vision.get("in_chans") or 3)


def _vision_layer(
    module: Any, name: str, names: _VisionNames, attention_flops: Mapping[str, float]
) -> Iterator[ModuleCost]:
    """Yield the modules of the layer ``name`` of a vision tower; ``module`` makes one from its name and widths."""
    hidden, mlp_width = names.hidden, names.mlp_width
    yield module(f"{name}.norm1", 1, hidden, kind="no_matmul")
    for index, (qkv_name, outputs) in enumerate(names.qkv_outputs.items()):
        yield module(f"{name}.attn.{qkv_name}", hidden, outputs, shares_input=index > 0)
    yield module(f"{name}.attn", kind="attention", **attention_flops)
    yield module(f"{name}.attn.proj", hidden, hidden)
    yield module(f"{name}.norm2", 1, hidden, kind="no_matmul")
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
    yield module("vit_merger.attn", kind="attention", flops_per_unit=positions * 4.0 * hidden * 4)
    yield module("vit_merger.attn.proj", hidden, hidden)
    yield module("vit_merger.linear_1", 4 * hidden, 4 * mlp_width, uses_per_unit=positions / 4)
    yield module("vit_merger.linear_2", 4 * mlp_width, hidden, uses_per_unit=positions / 4)


def merger_modules(config: Mapping[str, Any], text_hidden: int) -> tuple[tuple[ModuleCost, ...], ...]:
    """Return the modules of each merger, which turns patches of the vision tower into tokens of width ``text_hidden``.

    The first merger reads the last layer of the tower, others read earlier layers. () for a model without a tower.
    """
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    hidden = _tower_width(vision)
    if not hidden:
        return ()
    num_tokens = float(vision_patches(config).num_tokens)
    module = partial(new_module, "model.visual.", part="aligner", uses_per_unit=num_tokens, has_bias=True)
    projector = family_of(config).projector
    if projector != Family.projector:  # the default, a merger as in Qwen2-VL
        widths = _projector_widths(config, text_hidden)
        return (_projector_modules(module, projector, widths),)

    output_width = int(vision.get("out_hidden_size") or text_hidden)
    merged_width = hidden * _merge_side(config) ** 2
    norm, up, down = "norm", "linear_fc1", "linear_fc2"
    if "audio_config" in config or not _is_qwen3(vision):
        norm, up, down = "ln_q", "mlp.0", "mlp.2"
    mergers = []
    for name in _merger_names(config):
        norm_module = module(f"{name}.{norm}", 1, hidden, kind="no_matmul")
        up_module = module(f"{name}.{up}", merged_width, merged_width)
        down_module = module(f"{name}.{down}", merged_width, output_width)
        mergers.append((norm_module, up_module, down_module))
    return tuple(mergers)


def _projector_modules(module: Any, projector: Sequence[str], widths: Mapping[str, int]) -> tuple[ModuleCost, ...]:
    """Return the modules of a projector, each given by the names of its input and output width."""
    pairs = map(str.split, projector)
    return tuple(
        module(f"merger.{number}", widths[inputs], widths[outputs]) for number, (inputs, outputs) in enumerate(pairs)
    )


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
    """Return the widths of a projector's modules by the names that ``Family.projector`` gives them."""
    vision = config["vision_config"]
    tower_width = _tower_width(vision) * _num_feature_layers(config)
    # If MiniCPM-V has merged squares of 2 x 2 patches inside its tower, the projector merges 2 x 2 of these.
    merge_side = 2 if _early_merge_layer(config) is not None else _merge_side(config)
    out_width = int(vision.get("out_hidden_size") or text_hidden)
    is_glm4v = vision.get("model_type") in _GLM4V_TOWERS
    aligned_width = int(config.get("alignment_intermediate_size") or text_hidden)
    vocabulary = int(vision.get("vocab_size") or 0)
    return {
        "tower": tower_width,  # a patch, from all layers that the projector reads
        "merged": tower_width * merge_side**2,  # all patches of a token
        # GLM's merger: its output and its MLP.
        "out": out_width,
        "wide": int(vision.get("intermediate_size") or 0) if is_glm4v else 3 * out_width,
        # A gated projector: before the gate, and after it.
        "aligned": aligned_width,
        "gated": aligned_width // 2,
        # Llama 4 and 3.2: in the adapter of its tower, and the output of the tower.
        "adapted": int(vision.get("projector_output_dim") or 0),
        "output": int(vision.get("vision_output_dim") or 0),
        # Ovis: probabilities of visual words, without and with the words that mark images.
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

    With cross-attention, the unit is a picture, which has one token.

    Args:
        num_patches: patches of the unit.
        num_positions: the same with the class token of a tile.
        num_tokens: output tokens of the unit.
        positions_per_window: positions of a window of attention; a tile is one window.
        full_layers: layers with attention to full frames; the others attend to windows.
        tile_squares, squares_per_token, padded_merge, merges_frames: as in ``ModelLayers``.
        features_per_square: features that text attends to by cross-attention, divided by (patches of a tile)^2.
    """

    num_patches: int = 1
    num_positions: int = 1
    num_tokens: int = 1
    positions_per_window: int = 0
    full_layers: range | set[int] = range(0)
    tile_squares: int = 0
    squares_per_token: float = 0.0
    padded_merge: int = 0
    merges_frames: bool = False
    features_per_square: float = 0.0

    def attention_flops(self, layer: int, hidden: int, share: float) -> dict[str, float]:
        """Return the FLOPs of a layer's attention, by field of ``ModuleCost``, to a ``share`` of the positions."""
        pair_flops = 4.0 * hidden  # 2 each for a score and a sum of values, for every channel
        if layer in self.full_layers:
            return {"flops_per_square": pair_flops * share**2}
        return {"flops_per_unit": pair_flops * (float(self.num_positions) * share * self.positions_per_window)}


def _pads_pictures(config: Mapping[str, Any]) -> bool:
    """Return whether pictures are padded to equally many patches, of which those of a token are averaged (Gemma 4)."""
    return "image_position_ids" in family_of(config).processor_inputs


def vision_patches(config: Mapping[str, Any]) -> VisionPatches:
    """Compute the patches of a unit of the vision tower."""
    vision: Mapping[str, Any] = config.get("vision_config") or {}
    if not _tower_width(vision):
        return VisionPatches()
    family = family_of(config)
    if family.cross_attention:
        return _patches_of_picture(vision)
    has_grids = not {"image_grid_thw", "target_sizes", "image_position_ids"}.isdisjoint(family.processor_inputs)
    has_grids |= bool(family.visual_inputs or vision.get("spatial_merge_size"))
    if has_grids or vision.get("model_type") == _PIXTRAL:
        patches = _patches_of_tokens(vision, _merge_side(config), is_legacy=bool(family.processor_inputs))
        merge = patches.num_patches
        if "image_merge_sizes" in family.processor_inputs:
            return patches._replace(padded_merge=merge, merges_frames=True)
        if not _pads_pictures(config):
            return patches
        return patches._replace(squares_per_token=float(_PADDED_FRAME_TOKENS * merge**2), padded_merge=merge)
    num_tokens = int(config.get("mm_tokens_per_image") or 0)
    if not family.processor_inputs:
        num_tokens = num_tokens or int(config.get("image_seq_length") or 0)
    return _patches_of_tiles(vision, _merge_side(config), num_tokens)


def _patches_of_picture(vision: Mapping[str, Any]) -> VisionPatches:
    """Return the patches of a picture for a tower whose positions attend to all tiles, also to those of padding."""
    tile = _patches_of_tiles(vision, 1, 0)
    num_tiles = int(vision.get("max_num_tiles") or 1)
    num_features = tile.num_patches + 1  # of a tile, with its class token
    num_positions = num_tiles * (-(-num_features // 8) * 8)  # each tile is padded to a multiple of 8
    return VisionPatches(
        num_patches=num_tiles * tile.num_patches,
        num_positions=num_positions,
        num_tokens=num_tiles * num_features,
        positions_per_window=num_positions,
        features_per_square=num_features / tile.tile_squares,
    )


def _patches_of_tokens(vision: Mapping[str, Any], merge: int, *, is_legacy: bool) -> VisionPatches:
    """Return the patches of a token, a square with side ``merge``, of a tower whose pictures keep their shapes.

    ``is_legacy``: caches may lack the sizes of pictures.
    """
    legacy_squares = float(_LEGACY_PICTURE_TOKENS * merge**4) if is_legacy else 0.0
    patches = VisionPatches(merge**2, merge**2, squares_per_token=legacy_squares)
    full_layers = vision.get("fullatt_block_indexes")
    if full_layers is None or not vision.get("window_size"):
        return patches._replace(full_layers=range(_depth(vision)))
    window_side = int(vision["window_size"]) // merge // square_side(vision, "patch_size", 14) * merge
    return patches._replace(positions_per_window=window_side**2, full_layers=set(map(int, full_layers)))


def _patches_of_tiles(vision: Mapping[str, Any], merge: int, num_tokens: int) -> VisionPatches:
    """Return the patches of a tile, for a tower that resizes all pictures to square tiles of one size.

    ``num_tokens`` are those of a tile, or 0 to compute them from ``merge``, the side of a token in patches.
    """
    patch_side = square_side(vision, "patch_size", 14)  # in pixels
    image_side = square_side(vision, "image_size", patch_side)  # in pixels
    patches_per_side = image_side // patch_side
    num_patches = patches_per_side**2
    has_class_token = vision.get("model_type") in _CLASS_TOKEN_TOWERS
    num_positions = num_patches + int(has_class_token)
    tokens_per_side = -(-patches_per_side // merge)  # rounded up
    num_tokens = num_tokens or tokens_per_side**2
    return VisionPatches(
        num_patches,
        num_positions,
        num_tokens,
        positions_per_window=num_positions,
        tile_squares=num_patches**2,
        squares_per_token=num_patches**2 / num_tokens,
    )


def audio_modules(audio: Mapping[str, Any]) -> Iterator[ModuleCost]:
    """Yield the modules of an audio tower and of its projections, with their work for one output token.

    ``audio``: the ``audio_config`` of a model; nothing is yielded if it has no layers. A position attends to a window
    of positions, and every window counts as full.
    """
    hidden, depth = int(audio.get("d_model") or 0), int(audio.get("encoder_layers") or 0)
    if not hidden or not depth:
        return
    is_qwen3 = bool(audio.get("downsample_hidden_size"))  # Qwen3-Omni; other towers are like that of Qwen2.5-Omni
    positions_per_token = 1.0 if is_qwen3 else 2.0  # two are averaged at the end of the tower
    # ``--freeze-vit`` freezes the audio tower, too.
    module = partial(
        new_module, "model.audio_tower.", part="vision tower", uses_per_unit=positions_per_token, has_bias=True
    )
    convolutions = _qwen3_convolutions if is_qwen3 else _qwen2_convolutions
    yield from convolutions(module, audio, hidden)
    mlp_width = int(audio.get("encoder_ffn_dim") or 4 * hidden)
    attention_flops = 4 * hidden * positions_per_token * _audio_window(audio)
    for layer in range(depth):
        yield from _audio_layer(partial(module, layer=layer), f"layers.{layer}", hidden, mlp_width, attention_flops)
    yield module("ln_post", 1, hidden, kind="no_matmul")
    output_width = int(audio.get("output_dim") or hidden)
    projection = partial(module, uses_per_unit=1.0)
    if is_qwen3:
        yield projection("proj1", hidden, hidden, part="aligner")
        yield projection("proj2", hidden, output_width, part="aligner")
    else:
        yield projection("proj", hidden, output_width)


def _audio_window(audio: Mapping[str, Any]) -> int:
    """Return the positions of a window of an audio tower's attention."""
    n_window = int(audio.get("n_window") or 100)
    if not audio.get("downsample_hidden_size"):
        return n_window
    chunk_frames = 2 * n_window
    window_frames = int(audio.get("n_window_infer") or 4 * chunk_frames)
    return window_frames // chunk_frames * _QWEN3_CHUNK_WIDTHS[-1]


def _qwen2_convolutions(module: Any, audio: Mapping[str, Any], hidden: int) -> Iterator[ModuleCost]:
    """Yield the convolutions of Qwen2.5-Omni's tower, of width 3; the second halves the four frames of a token."""
    mel_bins = int(audio.get("num_mel_bins") or 128)
    yield module("conv1", 3 * mel_bins, hidden, uses_per_unit=4.0, kind="convolution")
    yield module("conv2", 3 * hidden, hidden, kind="convolution")


def _qwen3_convolutions(module: Any, audio: Mapping[str, Any], hidden: int) -> Iterator[ModuleCost]:
    """Yield the convolutions of Qwen3-Omni's tower; each halves the bins (height) and the frames (width)."""
    height, in_channels = int(audio.get("num_mel_bins") or 128), 1
    channels = int(audio["downsample_hidden_size"])
    for number, width in enumerate(_QWEN3_CHUNK_WIDTHS, start=1):
        height = (height - 1) // 2 + 1
        outputs_per_token = height * width / _QWEN3_CHUNK_WIDTHS[-1]
        yield module(f"conv2d{number}", 9 * in_channels, channels, uses_per_unit=outputs_per_token, kind="convolution")
        in_channels = channels
    yield module("conv_out", channels * height, hidden)


def _audio_layer(module: Any, name: str, hidden: int, mlp_width: int, attention_flops: float) -> Iterator[ModuleCost]:
    """Yield the modules of the layer ``name`` of an audio tower; ``module`` makes one from its name and widths."""
    yield module(f"{name}.self_attn_layer_norm", 1, hidden, kind="no_matmul")
    for projection in ("k_proj", "v_proj", "q_proj"):
        yield module(f"{name}.self_attn.{projection}", hidden, hidden, shares_input=projection != "k_proj")
    yield module(f"{name}.self_attn", kind="attention", flops_per_unit=attention_flops)
    yield module(f"{name}.self_attn.out_proj", hidden, hidden)
    yield module(f"{name}.final_layer_norm", 1, hidden, kind="no_matmul")
    yield module(f"{name}.fc1", hidden, mlp_width)
    yield module(f"{name}.fc2", mlp_width, hidden)
