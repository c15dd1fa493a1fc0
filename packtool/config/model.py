"""Options of the model: trained weights and adapters, quantization, expert parallelism, precision and memory.

Names and meanings of the options are ms-swift's.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from packtool.config.conflicts import Settings
from packtool.config.settings import (
    YES_OR_NO,
    Bytes,
    RecomputedLayers,
    Synonyms,
    flag,
    memory_option,
    parameter_option,
    training_option,
)

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
ATTN_IMPL_HELP = "Use this attention kernel; auto prefers flash attention if it is installed."


ModelPart = Literal["vision tower", "aligner", "language model"]
"""The parts of a model that have freezing, adapters and learning rates of their own."""
ADAPTER_SETTINGS: dict[str, dict[str, int | float]] = {
    "boft": {"boft_block_size": 4, "boft_block_num": 0, "boft_n_butterfly_factor": 1, "boft_dropout": 0.0},
    "bone": {"r": 4},
    "oft": {"r": 0, "oft_block_size": 32, "module_dropout": 0.0},
    "vera": {"r": 256, "projection_prng_key": 0, "vera_dropout": 0.0, "d_initial": 0.1},
}
"""Defaults of ``--adapter-settings`` by type, named as in peft: LLaMA-Factory's for OFT, ms-swift's for the others."""
_NO_ADAPTER = "known adapters are lora, boft, bone, oft and vera: give one of them"
TrainType = Annotated[
    Literal["lora", "full", "boft", "bone", "oft", "vera"],
    Synonyms(
        {},
        {
            "qlora": "give lora and --quant-bits 4",
            "freeze": "give full and --freeze-parameters or --trainable-parameters",
            "lora_llm": "give lora, --modules-to-save vision-tower aligner and --lora-dropout 0",
            "miss": "give bone, the older name of MiSS",
            **dict.fromkeys(("adalora", "adapter", "fourierft", "llamapro", "longlora", "reft"), _NO_ADAPTER),
        },
    ),
]
InitWeights = Annotated[Literal["true", "false", "gaussian", "orthogonal", "pissa", "olora"], YES_OR_NO]
lora_option = functools.partial(parameter_option, needs=("train_type", "lora"))
adapter_option = functools.partial(parameter_option, needs=("train_type", "|".join(("lora", *ADAPTER_SETTINGS))))
full_option = functools.partial(parameter_option, needs=("train_type", "full"))
_NAME_OPTIONS = (
    *("lora_bias", "target_modules", "target_regex", "target_parameters", "modules_to_save", "freeze_parameters"),
    *("freeze_parameters_regex", "freeze_parameters_ratio", "trainable_parameters", "trainable_parameters_regex"),
)


@dataclass(frozen=True, kw_only=True)
class LearningOptions(Settings):
    """Trained parts of a model, which determine the cost of a step."""

    train_type: TrainType = training_option("lora", "Train adapters or all weights.", aliases=("tuner_type",))
    lora_rank: int = lora_option(8, "Set the rank of the LoRA adapters.")
    freeze_vit: bool = parameter_option(True, "Freeze the vision tower and, in Omni models, the audio tower.")
    freeze_aligner: bool = parameter_option(True, "Freeze the projection from vision to text (aligner).")
    freeze_llm: bool = parameter_option(False, "Freeze the language model.")
    lora_bias: Literal["none", "all", "lora_only"] = lora_option(
        "none", "Train no biases, all biases, or only those of modules with adapters."
    )
    target_modules: tuple[str, ...] = adapter_option(
        ("all-linear",), "Add adapters to these modules: all-linear, names, or both."
    )
    target_regex: str | None = adapter_option(None, "Add adapters to modules whose name matches this expression.")
    target_parameters: tuple[str, ...] = lora_option(
        (), "Add LoRA weights to parameters with these names, such as experts.gate_up_proj."
    )
    modules_to_save: tuple[str, ...] = lora_option(
        (), "Train all weights of these modules beside the adapters: names, vision-tower or aligner."
    )
    freeze_parameters: tuple[str, ...] = full_option((), "Freeze parameters with these name prefixes.")
    freeze_parameters_regex: str | None = full_option(
        None, "Freeze parameters whose names match this regular expression."
    )
    freeze_parameters_ratio: float = full_option(
        0.0, "Freeze this fraction of all parameters, starting with the model's first layers.", minimum=0.0, maximum=1.0
    )
    trainable_parameters: tuple[str, ...] = full_option(
        (), "Train parameters with these name prefixes, even if another option freezes them."
    )
    trainable_parameters_regex: str | None = full_option(
        None, "Train parameters matching this regular expression, even if another option freezes them."
    )

    @property
    def frozen_parts(self) -> frozenset[ModelPart]:
        flags: dict[ModelPart, bool] = {
            "vision tower": self.freeze_vit,
            "aligner": self.freeze_aligner,
            "language model": self.freeze_llm,
        }
        return frozenset(part for part, frozen in flags.items() if frozen)

    @property
    def training_summary(self) -> str:
        """Description of the training of each part, with the given options about names of modules."""
        how = {part: "frozen" if part in self.frozen_parts else self.train_type for part in get_args(ModelPart)}
        words = [f"language model {how['language model']}, towers {how['vision tower']}, aligner {how['aligner']}"]
        for name in _NAME_OPTIONS:
            if (value := getattr(self, name)) != getattr(LearningOptions, name):
                words.append(f"{flag(name)} {' '.join(value) if isinstance(value, tuple) else value}")
        return ", ".join(words)

    def is_target(self, name: str, *, is_linear: bool = True) -> bool:
        """Return whether a module of a trained part gets an adapter; all-linear selects only those that are linear."""
        if self.target_regex is not None:
            return re.fullmatch(self.target_regex, name) is not None
        selects_linear = is_linear and "all-linear" in self.target_modules
        return selects_linear or any(has_name(name, wanted) for wanted in self.target_modules)

    def freezes_name(self, parameter: str) -> bool:
        """Return whether ``--freeze-parameters`` or its regular expression matches a parameter."""
        return _matches(parameter, self.freeze_parameters, self.freeze_parameters_regex)

    def trains_name(self, parameter: str) -> bool:
        """Return whether ``--trainable-parameters``, which overrides freezing, or its regular expression matches."""
        return _matches(parameter, self.trainable_parameters, self.trainable_parameters_regex)


def has_name(name: str, target: str) -> bool:
    """Return whether a module has a name, or a full name that ends with it."""
    return name == target or name.endswith("." + target)


def _matches(name: str, prefixes: tuple[str, ...], regex: str | None) -> bool:
    return name.startswith(prefixes) or (regex is not None and re.search(regex, name) is not None)


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(LearningOptions):
    """Trained weights and adapters."""

    adapters: tuple[str, ...] = adapter_option((), "Continue training the LoRA adapter in this directory.", path=True)
    lora_alpha: int = lora_option(32, "Set alpha of the LoRA adapters; their output is scaled by alpha/rank.")
    lora_dropout: float = lora_option(0.05, "Set the dropout probability of adapter inputs.", minimum=0.0, maximum=1.0)
    use_rslora: bool = lora_option(False, "Scale adapters by alpha/sqrt(rank) (rank-stabilized LoRA).")
    use_dora: bool = lora_option(False, "Train magnitudes and directions of weights separately (DoRA).")
    init_weights: InitWeights = lora_option(
        "true", "Initialize new adapters by this method of peft; false initializes both matrices at random."
    )
    adapter_settings: Mapping[str, Any] | None = parameter_option(
        None,
        "Set options of adapters other than LoRA, as JSON with peft's names.",
        needs=("train_type", "|".join(ADAPTER_SETTINGS)),
    )

    def value_problems(self) -> list[str]:
        defaults, problems = ADAPTER_SETTINGS.get(self.train_type, {}), []
        for name, value in (self.adapter_settings or {}).items():
            if name not in defaults:
                known = ", ".join(defaults) or "options such as --lora-rank"
                problems.append(f"--adapter-settings {name}: unknown with --train-type {self.train_type}; use {known}")
            elif type(value) not in (int, type(defaults[name])) or value < 0:
                problems.append(f"--adapter-settings {name}: {value!r} is not a number as {defaults[name]}")
        for name in ("target_regex", "freeze_parameters_regex", "trainable_parameters_regex"):
            try:
                re.compile(getattr(self, name) or "")
            except re.error as error:
                problems.append(f"{flag(name)} {getattr(self, name)}: not a regular expression: {error}")
        return problems


FSDP_WORDS = ("fsdp2", "full_shard", "shard_grad_op", "auto_wrap", "offload")


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Settings):
    """Precision, recomputation and sharding, which determine a rank's memory for a model and its tokens."""

    torch_dtype: DType = memory_option(
        "auto", "Compute in this precision; auto uses the checkpoint's, or float32 on CPU."
    )
    master_weights: Literal["float32", "kahan", "none"] = memory_option(
        "float32", "Keep trained weights in float32, in bfloat16 with Kahan summation, or in bfloat16 only."
    )
    gradient_checkpointing: RecomputedLayers | None = memory_option(
        None, "Recompute activations of all (true), N or as many layers as necessary (auto)."
    )
    memory_budget: Bytes | None = memory_option(
        None, "Keep as many activations as fit into this memory of a device, such as 80GB."
    )
    vit_gradient_checkpointing: bool | None = memory_option(
        None, "Recompute activations of vision and audio towers; default is --gradient-checkpointing."
    )
    deepspeed: str | None = memory_option(
        None, "Use DeepSpeed: zero0 to zero3, zero2_offload, zero3_offload, or a JSON config file."
    )
    fsdp: tuple[str, ...] = memory_option((), "Shard with FSDP2: full_shard or shard_grad_op, optionally with offload.")

    @property
    def plans_recomputation(self) -> bool:
        """True if the number of recomputing layers depends on the micro-batch."""
        value: Any = self.gradient_checkpointing
        return bool(value == "auto")

    def value_problems(self) -> list[str]:
        known = ", ".join(FSDP_WORDS)
        return [f"--fsdp {word}: known are {known}" for word in self.fsdp if word not in FSDP_WORDS]


@dataclass(frozen=True, kw_only=True)
class QuantizationOptions(Settings):
    """Quantization of the base model under adapters (QLoRA, Dettmers et al. 2023, arXiv 2305.14314)."""

    quant_method: Literal["bnb"] | None = memory_option(
        None, "Quantize the base model with this library; bnb is bitsandbytes."
    )
    quant_bits: int | None = memory_option(
        None, "Quantize the base model's linear layers to 4 (QLoRA) or 8 bits.", minimum=4, maximum=8
    )
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = memory_option("nf4", "Store 4-bit weights in this number format.")
    bnb_4bit_use_double_quant: bool = memory_option(True, "Quantize the scales of 4-bit weights too, to 8 bits.")


@dataclass(frozen=True, kw_only=True)
class ExpertOptions(Settings):
    """Expert parallelism."""

    expert_parallel_size: int = memory_option(1, "Distribute the experts of a mixture-of-experts model over N GPUs.")

    @property
    def shares_experts(self) -> bool:
        """True if the processes hold different experts."""
        return self.expert_parallel_size > 1
