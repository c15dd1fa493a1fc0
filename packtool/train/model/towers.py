"""The parts of a model that are frozen and adapted as one: vision tower, aligner, language model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from packtool.config.train import TrainConfig
from packtool.errors import UnsupportedModelError

Part = Literal["vision tower", "aligner", "language model"]


@dataclass(frozen=True)
class Towers:
    """Names of modules, as prefixes of parameter names; what neither of the two claims is language model.

    Args:
        vision: the vision tower, and the audio tower of a model that hears; they may contain the aligner.
        aligner: the projection from vision (or sound) to text.
        unused: what no forward pass uses; trained, ranks would wait for its gradient.
    """

    vision: tuple[str, ...] = ()
    aligner: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def is_unused(self, name: str) -> bool:
        """Whether no forward pass uses a module or parameter."""
        return _is_under(name, self.unused)

    def part_of(self, name: str) -> Part:
        """The part that a module or parameter belongs to."""
        if _is_under(name, self.aligner):
            return "aligner"
        return "vision tower" if _is_under(name, self.vision) else "language model"


_QWEN2_VL = Towers(vision=("model.visual",), aligner=("model.visual.merger",))
_QWEN3_VL = Towers(vision=("model.visual",), aligner=("model.visual.merger", "model.visual.deepstack_merger_list"))
_OMNI = Towers(
    vision=("model.visual", "model.audio_tower"),
    aligner=("model.visual.merger",),
    unused=("model.audio_tower.audio_bos_eos_token",),
)
_QWEN3_OMNI = Towers(
    vision=("model.visual", "model.audio_tower"),
    aligner=("model.visual.merger", "model.visual.merger_list", "model.audio_tower.proj1", "model.audio_tower.proj2"),
)
_BY_MODEL_TYPE = {
    "qwen2_vl": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL,
    "qwen3_5": _QWEN2_VL,
    "qwen3_5_moe": _QWEN2_VL,
    "qwen2_5_omni_thinker": _OMNI,
    "qwen3_omni_moe_thinker": _QWEN3_OMNI,
}


def towers_of(model: nn.Module, model_type: str) -> Towers:
    """Where the parts of a model lie; everything is language model in one of text alone.

    Raises:
        UnsupportedModelError: if a part is not where this version of transformers is expected to have it.
    """
    towers = _BY_MODEL_TYPE.get(model_type, Towers())
    names = {name for name, _ in model.named_modules()}
    for prefix in (*towers.vision, *towers.aligner):
        if prefix not in names:
            raise UnsupportedModelError(
                f"{type(model).__name__} has no module {prefix}: --freeze-vit and --freeze-aligner would miss it",
                "Install a supported version of transformers (see pyproject.toml), or report the model's name.",
            )
    return towers


def frozen_parts(config: TrainConfig) -> frozenset[Part]:
    """The parts that the options keep as they are."""
    flags: dict[Part, bool] = {
        "vision tower": config.freeze_vit,
        "aligner": config.freeze_aligner,
        "language model": config.freeze_llm,
    }
    return frozenset(part for part, frozen in flags.items() if frozen)


def _is_under(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)
