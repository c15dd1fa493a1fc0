"""Which models can be packed without leaks, told before any weight is read; and which inputs could not.

Three looks at a model, the cheapest first: the types of its layers, settings that are known to need more than causal
attention, and a trial with two documents on the meta device, where nothing is computed but every call is made. The
trial finds what no setting tells: sinks, a cache, attention that is not asked for by its interface, or without the
boundaries.

A model is called with two documents on the meta device: every layer asks for its attention, and nothing is computed.

It takes half a second for a model of eight billion weights, and no memory.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig

from packtool.attention.kernel import LeakError, Varlen
from packtool.attention.recurrent import ISOLATED_MODEL_TYPES, RECURRENT_LAYER, isolate_recurrent_layers
from packtool.attention.register import packed_attention, route
from packtool.batch.spec import auto_class, weights_in_one_piece
from packtool.errors import MismatchError, UnsupportedModelError

_TRIAL_NAME = "packtool_trial"
_LENGTHS = (4, 2)
_REMEDY = "Train it with --packing false, or another model."


def refuse_after_trial(config: PreTrainedConfig, model_class: Any) -> None:
    """Call a model of this configuration, and raise if its attention could leak.

    A model that cannot be called in this way for other reasons passes: not everything runs on the meta device.

    Args:
        model_class: the class with a language head that ``config`` belongs to.

    Raises:
        UnsupportedModelError: with the layer and the reason.
    """
    asked: list[str] = []

    def attention(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        asked.append(type(module).__name__)
        return packed_attention(module, *args, **kwargs)

    AttentionInterface.register(_TRIAL_NAME, attention)
    # A copy: making a model writes the choice of attention into its configuration.
    config = copy.deepcopy(config)
    try:
        with weights_in_one_piece(), torch.device("meta"):
            model = model_class._from_config(config, attn_implementation=route(config, _TRIAL_NAME))
        num_recurrent = isolate_recurrent_layers(model)
        with torch.no_grad():
            model(**_two_documents())
    except LeakError as error:
        raise UnsupportedModelError(f"{model_class.__name__} cannot be packed: {error}", _REMEDY) from error
    except UnsupportedModelError:
        raise
    except TypeError as error:
        if "cu_seq_lens" not in str(error):
            return
        raise UnsupportedModelError(
            f"{model_class.__name__} cannot be told where packed samples end: {error}", _REMEDY
        ) from error
    except Exception:  # what does not run on the meta device tells nothing about leaks
        return
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if len(asked) + num_recurrent < num_layers:
        raise UnsupportedModelError(
            f"only {len(asked) + num_recurrent} of the {num_layers} layers of {model_class.__name__} take their "
            "attention from transformers' attention interface: the others would leak from one packed sample into the "
            "next",
            _REMEDY,
        )


def _two_documents() -> dict[str, Any]:
    """Keyword arguments of a forward pass, as ``PackedBatch.model_inputs`` has them for text."""
    varlen = Varlen.of_lengths(_LENGTHS)
    return {
        "input_ids": torch.zeros(1, sum(_LENGTHS), dtype=torch.int64, device="meta"),
        "use_cache": False,
        "cu_seq_lens_q": varlen.cu_seqlens,
        "cu_seq_lens_k": varlen.cu_seqlens,
        "max_length_q": varlen.max_seqlen,
        "max_length_k": varlen.max_seqlen,
        "document_lengths": _LENGTHS,
    }


ISOLATED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
"""Layers whose only mixing along the sequence is attention that ``packed_attention`` computes."""

_WHY = {
    RECURRENT_LAYER: "carry a state along the sequence (Mamba, a gated delta net or another linear attention)",
    "conv": "convolve along the sequence",
    "chunked_attention": "attend within chunks that are counted from the sequence's beginning",
    "hybrid": "carry a state along the sequence beside their attention",
    "hybrid_sliding": "carry a state along the sequence beside their attention",
    "indexed_attention": "choose keys from the whole sequence",
    "compressed_sparse_attention": "attend to summaries of the sequence",
    "heavily_compressed_attention": "attend to summaries of the sequence",
    "minimax_m3_sparse": "choose keys from the whole sequence",
}
_RECURRENT_SETTING = re.compile(
    r"(^|_)(mamba|ssm|conv_l_cache|linear_(num|key|value|conv)|lru|rwkv|block_types?)", re.I
)

# Classes and configurations, as JSON, of models that have passed the trial: a run asks before collation and before
# loading.
_PASSED: set[tuple[Any, str]] = set()


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Raise if packed samples of this model could not be kept apart by ``set_attention``.

    Raises:
        UnsupportedModelError: with the setting of ``config``, or the call, that stands in the way.
    """
    name = config.model_type
    model_class = _model_class(config)
    if model_class is None:
        raise UnsupportedModelError(
            f"transformers has no class for a {name!r} model with a language head",
            "Update transformers, or check model_type in the model's config.json.",
        )
    text = config.get_text_config()
    settings: dict[str, Any] = text.to_dict()
    _refuse_layers(name, text.model_type, settings)
    # Hybrids do not claim it for the sake of their recurrent layers, which is what the trial is for.
    is_hybrid = text.model_type in ISOLATED_MODEL_TYPES
    if not is_hybrid and not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModelError(
            f"{model_class.__name__} does not take its attention function from transformers' attention interface, "
            "so packed samples cannot be kept apart",
            _REMEDY,
        )
    if settings.get("is_causal") is False or settings.get("use_bidirectional_attention"):
        raise UnsupportedModelError(f"{name} attends in both directions; packed attention is causal", _REMEDY)
    if settings.get("attn_logit_softcapping"):
        raise UnsupportedModelError(f"{name} uses soft-capped scores, which packed attention does not compute", _REMEDY)
    tried = (model_class, config.to_json_string())
    if tried not in _PASSED:
        refuse_after_trial(config, model_class)
        _PASSED.add(tried)


def _refuse_layers(name: str, text_type: str, settings: Mapping[str, Any]) -> None:
    """Raise on layers that mix along the sequence, unless they are run for each sample alone."""
    is_isolated = text_type in ISOLATED_MODEL_TYPES
    known = ISOLATED_LAYER_TYPES | ({RECURRENT_LAYER} if is_isolated else set())
    foreign = sorted(set(settings.get("layer_types") or ()) - known)
    if foreign:
        why = "; ".join(
            f"{kind} layers {_WHY.get(kind, 'mix along the sequence in a way of their own')}" for kind in foreign
        )
        raise UnsupportedModelError(
            f"{name} cannot be packed: its {why}. One packed sample would leak into the next", _REMEDY
        )
    recurrent = sorted(key for key in settings if _RECURRENT_SETTING.search(key))
    if recurrent and not is_isolated:
        raise UnsupportedModelError(
            f"{name} has recurrent or convolutional layers ({recurrent[0]}), which would leak from one packed sample "
            "into the next",
            _REMEDY,
        )


def refuse_leaky_inputs(inputs: Mapping[str, Any]) -> None:
    """Raise on keyword arguments of a forward pass with which packed samples could see each other.

    What ``PackedBatch.model_inputs`` makes passes; this is for inputs that were made or changed elsewhere.

    Raises:
        MismatchError: listing everything that is wrong.
    """
    found = []
    if inputs.get("use_cache") is not False:
        found.append("the key-value cache is on, which lets transformers' attention see all of it: use_cache=False")
    if inputs.get("past_key_values") is not None:
        found.append("past_key_values go from one sample into the next: leave them out")
    if inputs.get("attention_mask") is not None:
        found.append("an attention_mask, even of ones, hides the samples' boundaries: leave it out")
    found += _problems_of_boundaries(inputs) or _problems_of_positions(inputs)
    if found:
        lines = "\n".join(f"  - {problem}" for problem in found)
        raise MismatchError(f"packed samples could see each other:\n{lines}")


def _problems_of_boundaries(inputs: Mapping[str, Any]) -> list[str]:
    """What is wrong with where the documents end."""
    bounds = inputs.get("cu_seq_lens_q")
    if bounds is None:
        return ["cu_seq_lens_q is missing: nothing else says where a sample ends"]
    num_rows, num_tokens = inputs["input_ids"].shape
    starts: list[int] = bounds.tolist()
    lengths = [stop - start for start, stop in pairwise(starts)]
    if num_rows != 1:
        return [f"{num_rows} sequences; packed samples lie in one"]
    if starts[0] != 0 or starts[-1] != num_tokens or min(lengths, default=0) < 0:
        return [f"cu_seq_lens_q runs from {starts[0]} to {starts[-1]} for {num_tokens} tokens"]
    found = _problems_of_lengths(inputs, lengths, "q", "document_lengths")
    return found + (_problems_of_prefixes(inputs) if inputs.get("key_index") is not None else [])


def _problems_of_lengths(inputs: Mapping[str, Any], lengths: Sequence[int], side: str, name: str) -> list[str]:
    """What is told of lengths besides, where it is not what the boundaries of ``side``, q or k, say."""
    found = []
    told, longest = inputs.get(f"max_length_{side}"), max(lengths, default=0)
    if told != longest:
        found.append(f"max_length_{side} is {told}, the longest sample has {longest}")
    if inputs.get(name) is not None and list(inputs[name]) != list(lengths):
        found.append(f"{name} are not those of cu_seq_lens_{side}")
    return found


def _problems_of_prefixes(inputs: Mapping[str, Any]) -> list[str]:
    """What is wrong with the keys of documents that share prefixes: each ends with its own tokens."""
    keys: list[int] = inputs["key_index"].tolist()
    starts: list[int] = inputs["cu_seq_lens_q"].tolist()
    bounds: list[int] = inputs["cu_seq_lens_k"].tolist()
    if len(bounds) != len(starts) or bounds[0] != 0 or bounds[-1] != len(keys):
        return [
            f"cu_seq_lens_k runs from {bounds[0]} to {bounds[-1]} in {len(bounds) - 1} documents for the {len(keys)} "
            f"tokens of key_index and {len(starts) - 1} documents"
        ]
    lengths = [stop - start for start, stop in pairwise(bounds)]
    found = _problems_of_lengths(inputs, lengths, "k", "key_lengths")
    for number, ((start, stop), (first, end)) in enumerate(zip(pairwise(starts), pairwise(bounds), strict=True)):
        if keys[max(end - (stop - start), first) : end] != list(range(start, stop)):
            return [*found, f"the keys of document {number} do not end with its own tokens"]
    return found


def _problems_of_positions(inputs: Mapping[str, Any]) -> list[str]:
    """What is wrong with the position ids."""
    positions = inputs.get("position_ids")
    if positions is None:
        return ["position_ids are missing: positions would run on from one sample into the next"]
    if positions.ndim == 3 and positions.shape[0] != 4:
        return [
            f"position_ids have {positions.shape[0]} rows; with four, [text, t, h, w], samples are told apart, with "
            "three they leak"
        ]
    text = positions[0, 0] if positions.ndim == 3 else positions[0]
    if (key_index := inputs.get("key_index")) is not None:
        bounds = inputs["cu_seq_lens_k"].long()
        counted = torch.arange(len(key_index)) - torch.repeat_interleave(bounds[:-1], bounds.diff())
        if not torch.equal(text[key_index], counted):
            return ["position_ids do not count from 0 through every sample and its prefix"]
        return []
    starts = inputs["cu_seq_lens_q"].long()
    starts = starts[:-1][starts.diff() > 0]
    if text[starts].any():
        return ["position_ids do not begin at 0 in every sample"]
    return []


def _model_class(config: PreTrainedConfig) -> Any:
    """The class with a language head that ``config`` belongs to, or None."""
    classes = auto_class(config)._model_mapping
    if type(config) not in classes:
        return None
    found = classes[type(config)]
    return found[0] if isinstance(found, tuple) else found
