"""Checks that packed samples cannot leak: of a model before its weights are read, and of inputs before a forward pass.

A model is checked in three ways, the cheapest first: the types of its layers, settings that are known to need more than
causal attention, and a trial: two documents on the meta device, where every call is made and nothing is computed. The
trial finds what no setting tells: sinks, a cache, attention that bypasses transformers' interface or gets no
boundaries. It takes half a second for a model of eight billion weights, and no memory.
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
from packtool.attention.register import packed_attention, text_attention
from packtool.batch.spec import auto_class, without_zero3
from packtool.errors import MismatchError, UnsupportedModelError

_TRIAL_NAME = "packtool_trial"
_TRIAL_LENGTHS = (4, 2)
_REMEDY = "Train it with --packing false, or another model."

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Layer types whose only mixing along the sequence is attention that ``packed_attention`` computes."""

_REASONS = {
    RECURRENT_LAYER: "carry a state along the sequence (Mamba, a gated delta net or another linear attention)",
    "conv": "convolve along the sequence",
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

# Classes and configurations (JSON) of models that have passed the trial, as a run checks its model more than once.
_PASSED_TRIALS: set[tuple[Any, str]] = set()


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Raise an UnsupportedModelError if packtool cannot keep packed samples apart in models of this configuration.

    Checks the kinds of layers, then settings of attention, then a trial call without weights, once per configuration.
    """
    model_class = _class_with_language_head(config)
    text_config = config.get_text_config()
    settings: dict[str, Any] = text_config.to_dict()
    _refuse_layers(config.model_type, text_config.model_type, settings)
    # Recurrent models lack this attribute in transformers, but packtool can reset some of them at documents.
    has_attention_interface = getattr(model_class, "_supports_attention_backend", False)
    resets_recurrent_layers = text_config.model_type in ISOLATED_MODEL_TYPES
    if not has_attention_interface and not resets_recurrent_layers:
        raise UnsupportedModelError(
            f"{model_class.__name__} does not take its attention function from transformers' attention interface, "
            "so packed samples cannot be kept apart",
            _REMEDY,
        )
    _refuse_attention_settings(config.model_type, settings)
    trial_key = model_class, config.to_json_string()
    if trial_key not in _PASSED_TRIALS:
        _refuse_leaks_in_trial(config, model_class)
        _PASSED_TRIALS.add(trial_key)


def _class_with_language_head(config: PreTrainedConfig) -> Any:
    """Return transformers' class of a model with a language head; raise UnsupportedModelError if it has none."""
    model_classes = auto_class(config)._model_mapping  # by class of the configuration
    if type(config) not in model_classes:
        raise UnsupportedModelError(
            f"transformers has no class for a {config.model_type!r} model with a language head",
            "Update transformers, or check model_type in the model's config.json.",
        )
    model_class = model_classes[type(config)]
    return model_class[0] if isinstance(model_class, tuple) else model_class


def _refuse_attention_settings(name: str, settings: Mapping[str, Any]) -> None:
    """Raise on settings of a text tower whose attention is more than causal attention of plain scores."""
    # "vision": only tokens of a picture see each other in both directions, which ``Family.whole_pictures`` describes.
    is_bidirectional = settings.get("use_bidirectional_attention") not in (None, False, "vision")
    if settings.get("is_causal") is False or is_bidirectional:
        raise UnsupportedModelError(f"{name} attends in both directions; packed attention is causal", _REMEDY)
    if settings.get("attn_logit_softcapping"):
        raise UnsupportedModelError(f"{name} uses soft-capped scores, which packed attention does not compute", _REMEDY)


def _refuse_layers(name: str, text_type: str, settings: Mapping[str, Any]) -> None:
    """Raise on layers that mix along the sequence, unless they are isolated."""
    is_isolated = text_type in ISOLATED_MODEL_TYPES
    supported = _ATTENTION_LAYERS | ({RECURRENT_LAYER} if is_isolated else set())
    if unsupported := sorted(set(settings.get("layer_types") or ()) - supported):
        unknown = "mix along the sequence in a way of their own"
        reasons = "; ".join(f"{kind} layers {_REASONS.get(kind, unknown)}" for kind in unsupported)
        problem = f"{name} cannot be packed: its {reasons}. One packed sample would leak into the next"
        raise UnsupportedModelError(problem, _REMEDY)
    recurrent = sorted(key for key in settings if _RECURRENT_SETTING.search(key))
    if recurrent and not is_isolated:
        raise UnsupportedModelError(
            f"{name} has recurrent or convolutional layers ({recurrent[0]}), which would leak from one packed sample "
            "into the next",
            _REMEDY,
        )


def _refuse_leaks_in_trial(config: PreTrainedConfig, model_class: Any) -> None:
    """Raise UnsupportedModelError if a trial call of a model shows that packed samples could see each other.

    The model is called on the meta device, without weights and results, so it is only seen which functions it calls.
    """
    try:
        num_separated = _count_separated_layers(copy.deepcopy(config), model_class)
    except UnsupportedModelError:  # packed_attention has refused a feature of a layer
        raise
    except LeakError as error:
        raise UnsupportedModelError(f"{model_class.__name__} cannot be packed: {error}", _REMEDY) from error
    except Exception as error:
        lacks_argument = isinstance(error, TypeError) and "cu_seq_lens" in str(error)
        if lacks_argument:
            problem = f"{model_class.__name__} cannot be told where packed samples end: {error}"
            raise UnsupportedModelError(problem, _REMEDY) from error
        return  # an operation that the meta device lacks shows nothing about leaks
    text_config = config.get_text_config()
    # The trial has no pictures, so these layers are skipped; with pictures, ``packed_attention`` requires boundaries.
    num_skipped = len(getattr(text_config, "cross_attention_layers", None) or ())
    num_layers = getattr(text_config, "num_hidden_layers", 0) - num_skipped
    if num_separated < num_layers:
        raise UnsupportedModelError(
            f"only {num_separated} of the {num_layers} layers of {model_class.__name__} take their "
            "attention from transformers' attention interface: the others would leak from one packed sample into the "
            "next",
            _REMEDY,
        )


def _count_separated_layers(config: PreTrainedConfig, model_class: Any) -> int:
    """Call a new model on two packed documents, and return the number of its layers that keep documents apart.

    These are the layers that call ``packed_attention``, and the recurrent layers that packtool resets at documents. The
    model is on the meta device, where nothing is computed. ``config`` gets the name of the trial's attention.
    """
    num_attention_calls = 0

    def counted_attention(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        nonlocal num_attention_calls
        num_attention_calls += 1
        return packed_attention(module, *args, **kwargs)

    AttentionInterface.register(_TRIAL_NAME, counted_attention)  # replaces that of an earlier trial
    varlen = Varlen.of_lengths(_TRIAL_LENGTHS)
    boundaries: dict[str, Any] = {"cu_seq_lens_q": varlen.cu_seqlens, "max_length_q": varlen.max_seqlen}
    boundaries |= {"cu_seq_lens_k": varlen.cu_seqlens, "max_length_k": varlen.max_seqlen}
    boundaries["document_lengths"] = _TRIAL_LENGTHS  # the same, on the host
    with without_zero3(), torch.device("meta"):
        model = model_class._from_config(config, attn_implementation=text_attention(config, _TRIAL_NAME))
    num_recurrent = isolate_recurrent_layers(model)
    input_ids = torch.zeros(1, sum(_TRIAL_LENGTHS), dtype=torch.int64, device="meta")
    with torch.no_grad():
        model(input_ids=input_ids, use_cache=False, **boundaries)
    return num_attention_calls + num_recurrent


def refuse_leaky_inputs(inputs: Mapping[str, Any]) -> None:
    """Raise a MismatchError for keyword arguments of a forward pass with which packed samples could see each other."""
    problems = []
    if inputs.get("use_cache") is not False:
        problems.append("the key-value cache is on, which lets transformers' attention see all of it: use_cache=False")
    if inputs.get("past_key_values") is not None:
        problems.append("past_key_values go from one sample into the next: leave them out")
    if inputs.get("attention_mask") is not None:
        problems.append("an attention_mask, even of ones, hides the samples' boundaries: leave it out")
    boundary_problems = _boundary_problems(inputs)
    problems += boundary_problems
    if not boundary_problems:  # positions are compared with the boundaries
        problems += _position_problems(inputs)
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise MismatchError(f"packed samples could see each other:\n{lines}")


def _boundary_problems(inputs: Mapping[str, Any]) -> list[str]:
    """Describe what is wrong with the document boundaries in a forward call's arguments; an empty list if nothing."""
    if inputs.get("cu_seq_lens_q") is None:
        return ["cu_seq_lens_q is missing: nothing else says where a sample ends"]
    num_rows, num_tokens = inputs["input_ids"].shape
    cu_seqlens: list[int] = inputs["cu_seq_lens_q"].tolist()
    lengths = [stop - start for start, stop in pairwise(cu_seqlens)]
    if num_rows != 1:
        return [f"{num_rows} sequences; packed samples lie in one"]
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != num_tokens or min(lengths, default=0) < 0:
        return [f"cu_seq_lens_q runs from {cu_seqlens[0]} to {cu_seqlens[-1]} for {num_tokens} tokens"]
    problems = _length_problems(inputs, lengths, "q", "document_lengths")
    return problems if inputs.get("key_index") is None else problems + _key_problems(inputs, cu_seqlens)


def _key_problems(inputs: Mapping[str, Any], query_cu_seqlens: Sequence[int]) -> list[str]:
    """Describe what is wrong with the boundaries of keys, for documents that share prefixes."""
    key_index: list[int] = inputs["key_index"].tolist()  # positions in the sequence: each document's prefix and itself
    key_cu_seqlens: list[int] = inputs["cu_seq_lens_k"].tolist()  # boundaries of the documents in ``key_index``
    first, last = key_cu_seqlens[0], key_cu_seqlens[-1]
    num_documents, num_key_documents = len(query_cu_seqlens) - 1, len(key_cu_seqlens) - 1
    if num_key_documents != num_documents or first != 0 or last != len(key_index):
        return [
            f"cu_seq_lens_k runs from {first} to {last} in {num_key_documents} documents for the {len(key_index)} "
            f"tokens of key_index and {num_documents} documents"
        ]
    key_lengths = [stop - start for start, stop in pairwise(key_cu_seqlens)]
    problems = _length_problems(inputs, key_lengths, "k", "key_lengths")
    document = _first_document_without_own_keys(key_index, key_cu_seqlens, query_cu_seqlens)
    if document is not None:
        problems.append(f"the keys of document {document} do not end with its own tokens")
    return problems


def _first_document_without_own_keys(
    key_index: Sequence[int], key_cu_seqlens: Sequence[int], cu_seqlens: Sequence[int]
) -> int | None:
    """Return the number of the first document whose keys do not end with its own tokens; None if there is none."""
    bounds = zip(pairwise(cu_seqlens), pairwise(key_cu_seqlens), strict=True)
    for document, ((start, stop), (key_start, key_stop)) in enumerate(bounds):
        own_key_start = max(key_stop - (stop - start), key_start)  # not before the document's first key
        if key_index[own_key_start:key_stop] != list(range(start, stop)):
            return document
    return None


def _length_problems(inputs: Mapping[str, Any], lengths: Sequence[int], q_or_k: str, name: str) -> list[str]:
    """Describe where ``max_length_q`` (or ``_k``), or the lengths called ``name``, differ from ``lengths``."""
    problems = []
    max_length, longest = inputs.get(f"max_length_{q_or_k}"), max(lengths, default=0)
    if max_length != longest:
        problems.append(f"max_length_{q_or_k} is {max_length}, the longest sample has {longest}")
    if inputs.get(name) is not None and list(inputs[name]) != list(lengths):
        problems.append(f"{name} are not those of cu_seq_lens_{q_or_k}")
    return problems


def _position_problems(inputs: Mapping[str, Any]) -> list[str]:
    """Describe why the ``position_ids`` of a forward call do not keep packed samples apart; empty if they do.

    They are (1, T), or (4, 1, T) with rows for text, time, height and width. Text positions must begin at 0 in each
    sample. Where samples share prefixes, ``key_index`` lists the tokens of each sample, prefix included.
    """
    positions = inputs.get("position_ids")
    if positions is None:
        return ["position_ids are missing: positions would run on from one sample into the next"]
    if positions.ndim == 3 and positions.shape[0] != 4:
        return [
            f"position_ids have {positions.shape[0]} rows; with four, [text, t, h, w], samples are told apart, with "
            "three they leak"
        ]
    text_positions = positions[0, 0] if positions.ndim == 3 else positions[0]
    key_index = inputs.get("key_index")
    if key_index is not None:
        key_positions = text_positions[key_index]
        if _counts_from_zero(key_positions, inputs["cu_seq_lens_k"].long()):
            return []
        return ["position_ids do not count from 0 through every sample and its prefix"]

    cu_seqlens = inputs["cu_seq_lens_q"].long()
    is_empty = cu_seqlens.diff() == 0
    sample_starts = cu_seqlens[:-1][~is_empty]
    if text_positions[sample_starts].any():
        return ["position_ids do not begin at 0 in every sample"]
    return []


def _counts_from_zero(key_positions: Tensor, key_cu_seqlens: Tensor) -> bool:
    """Return whether the positions (T',) of keys count up from 0 in every document."""
    document_starts = torch.repeat_interleave(key_cu_seqlens[:-1], key_cu_seqlens.diff())  # for each key
    return torch.equal(key_positions, torch.arange(len(key_positions)) - document_starts)
