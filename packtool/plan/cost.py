"""What a pack costs to train, in floating-point operations, from the model's own ``config.json``.

Equal tokens are not equal work: attention looks back over each sample, so its work grows with the square of the
sample's length, and pictures pass through a tower of their own, where every patch looks at all patches of its frame.
A pack costs

    per_token * tokens + per_square * sum(len^2) + per_target_token * targets                        language model
    + per_vision_token * vision tokens + per_patch_square * sum(patches of a frame ^2)               vision tower
    + per_audio_token * audio tokens                                                                 audio tower

with two operations for each multiply-add of the parts in ``stacks``. Forward counts once. Backward counts once more
for the gradients of what a product takes, where anything before it learns, and once more for the gradients of its
weights, where these learn. So a frozen tower costs its forward pass, and with adapters no weight of the model has a
gradient. Attention's backward is 2.5 times its forward: flash kernels make the scores again (Dao 2023,
"FlashAttention-2", section 4.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packtool.plan.stacks import Stack, Stacks

Learns = Literal["full", "lora", "frozen"]
"""How a part learns: all its weights, through adapters, or not."""

_ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Which parts of a model learn, and what is computed twice to save memory.

    Args:
        language, towers, aligner: how each learns; the towers are those of pictures and sounds.
        lora_rank: of the adapters, which all linear modules of parts that learn through them have.
        recomputes_language, recomputes_towers: layers run forward once more before they go backward.
    """

    language: Learns = "full"
    towers: Learns = "full"
    aligner: Learns = "full"
    lora_rank: int = 8
    recomputes_language: bool = False
    recomputes_towers: bool = False

    @property
    def words(self) -> str:
        """How each part learns, for people."""
        return f"language model {self.language}, towers {self.towers}, aligner {self.aligner}"


@dataclass(frozen=True)
class CostModel:
    """FLOPs of forward and backward.

    Args:
        per_token: of each token, in the layers of the language model.
        per_square: of each unit of sum(len^2): causal attention, so half of the full square.
        per_target_token: of each label: the head, for logits are made only where a label is.
        per_vision_token: of each token of a picture or video, in the tower that made it, and in what leads from there
            to the language model.
        per_patch_square: of each unit of the sum over frames of (patches of the frame)^2.
        per_audio_token: of each token of a sound.
    """

    per_token: float
    per_square: float
    per_target_token: float = 0.0
    per_vision_token: float = 0.0
    per_patch_square: float = 0.0
    per_audio_token: float = 0.0

    def __call__(
        self,
        tokens: npt.NDArray[np.integer[Any]],
        squares: npt.NDArray[np.integer[Any]],
        target_tokens: npt.NDArray[np.integer[Any]] | int = 0,
        tower_flops: npt.NDArray[Any] | float = 0,
    ) -> npt.NDArray[np.float64]:
        """FLOPs of packs (or samples); arguments and result of one shape. ``tower_flops`` are those of ``towers``."""
        cost: npt.NDArray[np.float64] = tokens * self.per_token + squares * self.per_square
        return cost + np.asarray(target_tokens) * self.per_target_token + tower_flops

    def towers(
        self,
        vision_tokens: npt.NDArray[Any],
        patch_squares: npt.NDArray[Any],
        audio_tokens: npt.NDArray[np.integer[Any]] | int = 0,
    ) -> npt.NDArray[np.float64]:
        """FLOPs of the towers for media of packs, samples or pictures; all are of any shape, and of the same.

        Args:
            vision_tokens: of pictures and videos.
            patch_squares: sum over their frames of (patches of the frame)^2.
            audio_tokens: of sounds, those of videos among them.
        """
        cost: npt.NDArray[np.float64] = vision_tokens * self.per_vision_token + patch_squares * self.per_patch_square
        return cost + np.asarray(audio_tokens) * self.per_audio_token

    @classmethod
    def of_8b(cls) -> CostModel:
        """A dense model of 8 billion weights with the sizes of Qwen3-8B: a stand-in where no model is named."""
        sizes = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
        return cls.of_config({**sizes, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936})

    @classmethod
    def of_config(cls, config: Mapping[str, Any], learning: Learning | None = None) -> CostModel:
        """Read the widths off a ``config.json``, see ``stacks``.

        Args:
            learning: which parts learn; by default all weights, and nothing is computed twice.

        Raises:
            KeyError: if the configuration names no hidden size or number of layers.
        """
        how, stacks = learning or Learning(), Stacks.of_config(config)
        tower, again = how.towers != "frozen", how.recomputes_towers
        below = tower or how.aligner != "frozen"
        rank = how.lora_rank
        vision = _trained(stacks.vision, how.towers, below=False, rank=rank, recomputes=again)
        audio = _trained(stacks.audio, how.towers, below=False, rank=rank, recomputes=again)
        aligner = _trained(stacks.aligner, how.aligner, below=tower, rank=rank, recomputes=False)
        audio_aligner = _trained(stacks.audio_aligner, how.aligner, below=tower, rank=rank, recomputes=False)
        sees = stacks.vision.rest > 0
        language = _trained(
            stacks.language, how.language, below=below and sees, rank=rank, recomputes=how.recomputes_language
        )
        return cls(
            per_token=language[0],
            per_square=language[1],
            per_target_token=2 * stacks.head * (3 if how.language == "full" else 2),
            per_vision_token=vision[0] + aligner[0],
            per_patch_square=vision[1],
            per_audio_token=audio[0] + audio_aligner[0],
        )


def _trained(stack: Stack, how: Learns, *, below: bool, rank: int, recomputes: bool) -> tuple[float, float]:
    """FLOPs of a part for each unit, and for each unit of its squares.

    Args:
        below: whether anything learns that comes before the part.
    """
    whole, goes_back = float(how == "full"), below or how != "frozen"
    again = float(recomputes and goes_back)
    first = 1 + again + whole + float(below or (how == "full" and stack.embeds))
    rest = 1 + again + whole + float(goes_back)
    products = stack.embed * (1 + whole) + stack.convolutions * (1 + 2 * whole)
    products += stack.first * first + stack.rest * rest
    if how == "lora":
        products += rank * stack.widths * (3 + again)
    attention = 1 + again + _ATTENTION_BACKWARD * goes_back
    return 2 * products + attention * stack.local, attention * stack.per_square
