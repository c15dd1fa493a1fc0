"""Which weights learn, and through which adapters. Names and meanings are ms-swift's."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from packtool.config.panels import Panel
from packtool.config.settings import YES_OR_NO, Synonyms, flag, option

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
_FULL_ONLY = (
    "freeze_parameters",
    "freeze_parameters_regex",
    "freeze_parameters_ratio",
    "trainable_parameters",
    "trainable_parameters_regex",
)
_NAMES = ("lora_bias", "target_modules", "target_regex", "modules_to_save", *_FULL_ONLY)


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
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


def adapter_problems(options: AdapterOptions) -> list[str]:
    """Options of what learns that contradict each other."""
    found = []
    for name in ("target_regex", "freeze_parameters_regex", "trainable_parameters_regex"):
        try:
            re.compile(getattr(options, name) or "")
        except re.error as error:
            found.append(f"{flag(name)} {getattr(options, name)}: no regular expression: {error}")
    if options.train_type == "lora":
        found += [f"{flag(name)} goes with --train-type full" for name in _FULL_ONLY if getattr(options, name)]
    else:
        needs_lora = ("adapters", "modules_to_save", "target_regex", "use_dora", "use_rslora")
        found += [f"{flag(name)} goes with --train-type lora" for name in needs_lora if getattr(options, name)]
    if options.lora_dropout >= 1.0:
        found.append(f"--lora-dropout {options.lora_dropout:g} drops all that adapters are given: give less than 1")
    if len(options.adapters) > 1:
        found.append("--adapters: one adapter is trained at a time; give a single directory")
    if options.adapters and options.init_weights != "true":
        found.append(f"--init-weights {options.init_weights} begins new adapters, and --adapters goes on from one")
    is_revived = options.trainable_parameters or options.trainable_parameters_regex or options.target_regex
    if options.freeze_vit and options.freeze_aligner and options.freeze_llm and not is_revived:
        found.append("--freeze-vit, --freeze-aligner and --freeze-llm together leave nothing to train")
    return found
