"""What decides a rank's memory beside the model and its tokens: precision, recomputation and sharding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from packtool.config.model import DType
from packtool.config.panels import Panel
from packtool.config.settings import option

FSDP_WORDS = ("fsdp2", "full_shard", "shard_grad_op", "auto_wrap", "offload")
MasterWeights = Literal["float32", "kahan", "none"]
_PANEL: Panel = "Precision and memory"


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """What decides a rank's memory beside the model and its tokens."""

    torch_dtype: DType = option(
        "auto",
        "Precision of the computation; auto is the checkpoint's on a GPU and float32 on a CPU.",
        panel=_PANEL,
    )
    master_weights: MasterWeights = option(
        "float32",
        "How all weights are kept while they are trained in 16 bits: float32 (16 bytes each with gradient and AdamW); "
        "kahan, bfloat16 and what rounding takes (12 bytes); none, bfloat16 alone, which loses small updates (8).",
        panel=_PANEL,
    )
    gradient_checkpointing: bool | None = option(
        None,
        "Recompute activations to save memory; by default for models of more than 100 million parameters.",
        panel=_PANEL,
    )
    vit_gradient_checkpointing: bool | None = option(
        None,
        "The same in the vision and audio towers alone; by default as --gradient-checkpointing.",
        panel=_PANEL,
    )
    deepspeed: str | None = option(
        None,
        "DeepSpeed: zero0, zero1, zero2, zero3, zero2_offload, zero3_offload, or a JSON file of its settings.",
        panel=_PANEL,
    )
    fsdp: tuple[str, ...] = option(
        (),
        "FSDP2: full_shard (or fsdp2), or shard_grad_op, which keeps weights whole after the forward; and offload.",
        panel=_PANEL,
    )


def sharding_problems(options: MemoryOptions) -> list[str]:
    """Options of sharding that contradict each other."""
    found = []
    if options.deepspeed is not None and options.fsdp:
        found.append("--deepspeed and --fsdp are two ways to shard: give one of them")
    return found + [
        f"--fsdp {word}: known are {', '.join(FSDP_WORDS)}" for word in options.fsdp if word not in FSDP_WORDS
    ]


def master_problems(options: MemoryOptions, optim: str, train_type: str, computed_in: DType) -> list[str]:
    """Where ``--master-weights`` says something that would not be done."""
    if options.master_weights == "float32":
        return []
    given, found = f"--master-weights {options.master_weights}", []
    if train_type == "lora":
        found.append(f"{given}: adapters are small and always float32; it goes with --train-type full")
    if options.fsdp or options.deepspeed is not None:
        found.append(f"{given}: FSDP and DeepSpeed keep float32 weights, sharded over the processes; leave it out")
    if options.torch_dtype == "float32" and computed_in != "float32":
        found.append(f"{given} contradicts --torch-dtype float32, which keeps weights in float32")
    if computed_in == "float16":
        found.append(f"{given}: float16 gradients cannot be unscaled; use bfloat16")
    if options.master_weights == "kahan" and not optim.startswith("adamw_torch"):
        found.append(f"{given} is an AdamW of its own: leave out --optim {optim}")
    return found
