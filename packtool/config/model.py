"""How a model computes: the names of precisions and of attention kernels, as options take them.

Which weights learn, and through which adapters. Names and meanings are ms-swift's.

Weights of the base model in 4 or 8 bits. Names and meanings are ms-swift's.

Experts of a mixture that are spread over processes.

What decides a rank's memory beside the model and its tokens: precision, recomputation and sharding.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from packtool.config.conflicts import Settings
from packtool.config.settings import YES_OR_NO, Panel, Synonyms, flag, option

DType = Literal["auto", "float32", "bfloat16", "float16"]
AttnImpl = Annotated[
    Literal["auto", "sdpa", "varlen", "flash_attention_2", "flash_attention_3", "flex"],
    Synonyms(
        {
            "flash_attn": "flash_attention_2",
            "flash_attn_2": "flash_attention_2",
            "flash_attn_3": "flash_attention_3",
            "fa2": "flash_attention_2",
            "fa3": "flash_attention_3",
            "flex_attention": "flex",
        },
        refused={"eager": "it makes a matrix of tokens x tokens, and packs have none: sdpa computes the same without"},
    ),
]
ATTN_IMPL_HELP = (
    "Kernel of the packed attention: auto takes flash attention if it is installed, torch's own varlen on CUDA, and "
    "SDPA for each sample elsewhere."
)


ModelPart = Literal["vision tower", "aligner", "language model"]
"""The parts of a model that are frozen, adapted and given learning rates as one."""
_ONLY_LORA = "of adapters, packtool trains LoRA: give lora, perhaps with --use-dora, --use-rslora or --init-weights"
TrainType = Annotated[
    Literal["lora", "full"],
    Synonyms(
        {},
        {
            "qlora": "give lora and --quant-bits 4",
            "freeze": "give full and --freeze-parameters or --trainable-parameters",
            "lora_llm": "towers that are trained in full beside adapters are not done here: give lora with "
            "--freeze-vit false, which puts adapters on them too",
            **dict.fromkeys(
                ("adalora", "adapter", "boft", "fourierft", "llamapro", "longlora", "oft", "reft", "vera"), _ONLY_LORA
            ),
        },
    ),
]
InitWeights = Annotated[
    Literal["true", "false", "gaussian", "orthogonal", "pissa", "olora"],
    YES_OR_NO,
]
_PANEL: Panel = "Parameters"
_LORA, _FULL = ("train_type", "lora"), ("train_type", "full")
_NAMES = (
    "lora_bias",
    "target_modules",
    "target_regex",
    "modules_to_save",
    "freeze_parameters",
    "freeze_parameters_regex",
    "freeze_parameters_ratio",
    "trainable_parameters",
    "trainable_parameters_regex",
)


@dataclass(frozen=True, kw_only=True)
class LearningOptions(Settings):
    """Which parts of a model learn: what a step costs depends on it."""

    train_type: TrainType = option(
        "lora", "Low-rank adapters, or all weights.", panel="Training", aliases=("tuner_type",)
    )
    lora_rank: int = option(8, "Rank of the adapters.", panel=_PANEL, needs=_LORA, minimum=1)
    freeze_vit: bool = option(True, "Keep the vision tower (and an Omni model's audio tower) as it is.", panel=_PANEL)
    freeze_aligner: bool = option(True, "Keep the projection from vision to text as it is.", panel=_PANEL)
    freeze_llm: bool = option(False, "Keep the language model as it is.", panel=_PANEL)
    lora_bias: Literal["none", "all", "lora_only"] = option(
        "none", "Biases that learn too: none, all of the model, or those of adapted modules.", panel=_PANEL, needs=_LORA
    )
    target_modules: tuple[str, ...] = option(
        ("all-linear",), "Modules that get adapters: all-linear or names.", panel=_PANEL, needs=_LORA
    )
    target_regex: str | None = option(
        None,
        "Modules that get adapters, by a regular expression of their whole names; nothing else counts then.",
        panel=_PANEL,
        needs=_LORA,
    )
    modules_to_save: tuple[str, ...] = option(
        (),
        "Modules that learn whole beside the adapters, and are saved with them: embed_tokens lm_head.",
        panel=_PANEL,
        needs=_LORA,
    )
    freeze_parameters: tuple[str, ...] = option(
        (), "With full: keep parameters as they are whose names begin with one of these.", panel=_PANEL, needs=_FULL
    )
    freeze_parameters_regex: str | None = option(
        None,
        "With full: keep parameters as they are in whose names this regular expression is found.",
        panel=_PANEL,
        needs=_FULL,
    )
    freeze_parameters_ratio: float = option(
        0.0,
        "With full: keep this share of the parameters as it is, from the model's first ones on.",
        panel=_PANEL,
        needs=_FULL,
        minimum=0.0,
        maximum=1.0,
    )
    trainable_parameters: tuple[str, ...] = option(
        (),
        "With full: train parameters whose names begin with one of these, whatever else is frozen.",
        panel=_PANEL,
        needs=_FULL,
    )
    trainable_parameters_regex: str | None = option(
        None,
        "With full: train parameters in whose names this is found, whatever else is frozen.",
        panel=_PANEL,
        needs=_FULL,
    )

    @property
    def frozen_parts(self) -> frozenset[ModelPart]:
        """The parts that are kept as they are."""
        flags: dict[ModelPart, bool] = {
            "vision tower": self.freeze_vit,
            "aligner": self.freeze_aligner,
            "language model": self.freeze_llm,
        }
        return frozenset(part for part, frozen in flags.items() if frozen)

    @property
    def learning_words(self) -> str:
        """How each part learns, for people."""
        how = {part: "frozen" if part in self.frozen_parts else self.train_type for part in get_args(ModelPart)}
        told = f"language model {how['language model']}, towers {how['vision tower']}, aligner {how['aligner']}"
        defaults = {field.name: field.default for field in dataclasses.fields(LearningOptions)}
        named = [(name, value) for name in _NAMES if (value := getattr(self, name)) != defaults[name]]
        shown = ((name, " ".join(value) if isinstance(value, tuple) else value) for name, value in named)
        return ", ".join((told, *(f"{flag(name)} {value}" for name, value in shown)))

    def is_target(self, name: str) -> bool:
        """Whether a linear module is among those that adapters are for, if its part learns."""
        if self.target_regex is not None:
            return re.fullmatch(self.target_regex, name) is not None
        return self.target_modules == ("all-linear",) or any(is_named(name, wanted) for wanted in self.target_modules)

    def is_saved(self, name: str) -> bool:
        """Whether a module learns whole beside adapters."""
        return any(is_named(name, wanted) for wanted in self.modules_to_save)

    def is_kept(self, parameter: str) -> bool:
        """Whether ``--freeze-parameters`` or its regular expression means a parameter."""
        return _is_meant(parameter, self.freeze_parameters, self.freeze_parameters_regex)

    def is_wanted(self, parameter: str) -> bool:
        """Whether ``--trainable-parameters`` or its regular expression means a parameter, whatever else is frozen."""
        return _is_meant(parameter, self.trainable_parameters, self.trainable_parameters_regex)


def is_named(name: str, target: str) -> bool:
    """Whether a module is called so, or its full name ends so."""
    return name == target or name.endswith("." + target)


def _is_meant(name: str, prefixes: tuple[str, ...], regex: str | None) -> bool:
    return name.startswith(prefixes) or (regex is not None and re.search(regex, name) is not None)


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(LearningOptions):
    """Which weights learn, and through which adapters."""

    adapters: tuple[str, ...] = option((), "Directory of an adapter to go on training from.", panel=_PANEL, needs=_LORA)
    lora_alpha: int = option(32, "Scale of the adapters.", panel=_PANEL, needs=_LORA, minimum=1)
    lora_dropout: float = option(
        0.05, "Dropout before the adapters.", panel=_PANEL, needs=_LORA, minimum=0.0, maximum=1.0
    )
    use_rslora: bool = option(
        False, "Scale adapters by alpha over the root of the rank (rank-stabilized LoRA).", panel=_PANEL, needs=_LORA
    )
    use_dora: bool = option(
        False, "Learn the magnitudes of the weights apart from their directions.", panel=_PANEL, needs=_LORA
    )
    init_weights: InitWeights = option(
        "true",
        "How adapters begin: true (peft's own, without effect at first), false (at random), gaussian, orthogonal, "
        "pissa or olora.",
        panel=_PANEL,
        needs=_LORA,
    )

    def value_problems(self) -> list[str]:
        """Texts that are no regular expressions."""
        problems = []
        for name in ("target_regex", "freeze_parameters_regex", "trainable_parameters_regex"):
            try:
                re.compile(getattr(self, name) or "")
            except re.error as error:
                problems.append(f"{flag(name)} {getattr(self, name)}: no regular expression: {error}")
        return problems


FSDP_WORDS = ("fsdp2", "full_shard", "shard_grad_op", "auto_wrap", "offload")
MasterWeights = Literal["float32", "kahan", "none"]
_MEMORY_PANEL: Panel = "Precision and memory"


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Settings):
    """What decides a rank's memory beside the model and its tokens."""

    torch_dtype: DType = option(
        "auto",
        "Precision of the computation; auto is the checkpoint's on a GPU and float32 on a CPU.",
        panel=_MEMORY_PANEL,
    )
    master_weights: MasterWeights = option(
        "float32",
        "How all weights are kept while they are trained in 16 bits: float32 (16 bytes each with gradient and AdamW); "
        "kahan, bfloat16 and what rounding takes (12 bytes); none, bfloat16 alone, which loses small updates (8).",
        panel=_MEMORY_PANEL,
    )
    gradient_checkpointing: bool | None = option(
        None,
        "Recompute activations to save memory; by default for models of more than 100 million parameters.",
        panel=_MEMORY_PANEL,
    )
    vit_gradient_checkpointing: bool | None = option(
        None,
        "The same in the vision and audio towers alone; by default as --gradient-checkpointing.",
        panel=_MEMORY_PANEL,
    )
    deepspeed: str | None = option(
        None,
        "DeepSpeed: zero0, zero1, zero2, zero3, zero2_offload, zero3_offload, or a JSON file of its settings.",
        panel=_MEMORY_PANEL,
    )
    fsdp: tuple[str, ...] = option(
        (),
        "FSDP2: full_shard (or fsdp2), or shard_grad_op, which keeps weights whole after the forward; and offload.",
        panel=_MEMORY_PANEL,
    )

    def value_problems(self) -> list[str]:
        """Unknown words of ``--fsdp``."""
        known = ", ".join(FSDP_WORDS)
        return [f"--fsdp {word}: known are {known}" for word in self.fsdp if word not in FSDP_WORDS]


QuantMethod = Literal["bnb"]
_QUANTIZATION_PANEL: Panel = "Precision and memory"
_BITS = (4, 8)


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions(Settings):
    """Whether the base model under adapters is kept in few bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314)."""

    quant_method: QuantMethod | None = option(
        None,
        "What keeps the base model in few bits: bnb is bitsandbytes, which --quant-bits takes alone, too.",
        panel=_QUANTIZATION_PANEL,
    )
    quant_bits: int | None = option(
        None,
        "Bits of the language model's linear layers under adapters: 4 (QLoRA) or 8. Towers of media and the head stay "
        "as they are.",
        panel=_QUANTIZATION_PANEL,
        minimum=min(_BITS),
        maximum=max(_BITS),
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option("nf4", "What four bits stand for.", panel=_QUANTIZATION_PANEL)
    bnb_4bit_use_double_quant: bool = option(
        True,
        "Keep the scales of four-bit weights in 8 bits, which saves 0.37 bits a weight.",
        panel=_QUANTIZATION_PANEL,
    )


@dataclass(frozen=True, kw_only=True)
class ExpertOptions(Settings):
    """Experts of a mixture that are spread over processes."""

    expert_parallel_size: int = option(
        1,
        "Processes that divide the experts of a mixture among themselves and send each other tokens; the number of "
        "processes is a multiple of it. All other weights are sharded over all processes.",
        panel="Precision and memory",
        minimum=1,
    )

    @property
    def shares_experts(self) -> bool:
        """Whether processes hold different experts."""
        return self.expert_parallel_size > 1
