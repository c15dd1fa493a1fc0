"""A model is called with two documents on the meta device: every layer asks for its attention, and nothing is computed.

It takes half a second for a model of eight billion weights, and no memory.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig

from packtool.attention.recurrent import isolate_recurrent_layers
from packtool.attention.register import packed_attention, route
from packtool.attention.varlen import LeakError, Varlen
from packtool.batch.spec import weights_in_one_piece
from packtool.errors import UnsupportedModelError

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
