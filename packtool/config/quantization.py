"""Weights of the base model in 4 or 8 bits. Names and meanings are ms-swift's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packtool.config.adapters import AdapterOptions
from packtool.config.memory import MemoryOptions
from packtool.config.panels import Panel
from packtool.config.settings import not_together, option

QuantMethod = Literal["bnb"]
_PANEL: Panel = "Precision and memory"
_BITS = (4, 8)


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions:
    """Whether the base model under adapters is kept in few bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314)."""

    quant_method: QuantMethod | None = option(
        None,
        "What keeps the base model in few bits: bnb is bitsandbytes, which --quant-bits takes alone, too.",
        panel=_PANEL,
    )
    quant_bits: int | None = option(
        None,
        "Bits of the language model's linear layers under adapters: 4 (QLoRA) or 8. Towers of media and the head stay "
        "as they are.",
        panel=_PANEL,
        minimum=min(_BITS),
        maximum=max(_BITS),
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option("nf4", "What four bits stand for.", panel=_PANEL)
    bnb_4bit_use_double_quant: bool = option(
        True, "Keep the scales of four-bit weights in 8 bits, which saves 0.37 bits a weight.", panel=_PANEL
    )


def quantization_problems(options: QuantizationOptions) -> list[str]:
    """Options of few bits that contradict each other."""
    if options.quant_bits not in (None, *_BITS):
        return [f"--quant-bits {options.quant_bits}: known are {' and '.join(map(str, _BITS))}"]
    found = []
    if options.quant_method is not None and options.quant_bits is None:
        found.append(f"--quant-method {options.quant_method} needs --quant-bits 4 or 8")
    if options.quant_bits != 4:
        asked = {
            f"--bnb-4bit-quant-type {options.bnb_4bit_quant_type}": options.bnb_4bit_quant_type != "nf4",
            "--bnb-4bit-use-double-quant false": not options.bnb_4bit_use_double_quant,
        }
        found += [f"{name} goes with --quant-bits 4" for name, is_given in asked.items() if is_given]
    return found


def few_bits_problems(
    bits: int | None, adapters: AdapterOptions, memory: MemoryOptions, *, compiles: bool
) -> list[str]:
    """Options of training that do not go with ``--quant-bits``."""
    if bits is None:
        return []
    begin = adapters.init_weights
    refused = {
        "--train-type full: few bits cannot learn, adapters on them can": adapters.train_type == "full",
        f"--init-weights {begin}, which changes the base model's weights": begin in ("pissa", "olora"),
        "--fsdp, which shards weights of one precision": bool(memory.fsdp),
        f"--deepspeed {memory.deepspeed}, which shards weights of one precision": memory.deepspeed is not None,
        "--torch-compile true": compiles,
    }
    return not_together(f"--quant-bits {bits}", refused)
