"""What the samples of a run cost its model, as it is trained, on the devices that there are."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.cache.reader import SplitIndex
from packtool.config.adapters import LearningOptions
from packtool.config.parallel import SequenceParallelType
from packtool.config.train import TrainConfig
from packtool.plan.balance import Costs
from packtool.plan.cost import CostModel, Learning, Learns
from packtool.plan.options import PlanOptions
from packtool.plan.towers import TowerWork
from packtool.simulate.cost import Machine
from packtool.simulate.hardware import Hardware
from packtool.simulate.model_sizes import MODEL_PRESETS, ModelSizes


def learning_of(options: LearningOptions) -> Learning:
    """Which parts of a model a run trains. Adapters are taken to be on all linear modules of these."""
    how: Learns = options.train_type
    return Learning(
        language="frozen" if options.freeze_llm else how,
        towers="frozen" if options.freeze_vit else how,
        aligner="frozen" if options.freeze_aligner else how,
        lora_rank=options.lora_rank,
    )


@dataclass(frozen=True)
class RunCosts:
    """FLOPs of a run.

    Args:
        model: that its model needs: what MFU counts.
        hardware: with activations that are computed again: what HFU counts.
    """

    model: CostModel
    hardware: CostModel

    @classmethod
    def of(cls, config: TrainConfig, model: Mapping[str, Any]) -> RunCosts:
        """The FLOPs of a model by what a run trains and computes again."""
        learning = learning_of(config)
        recomputes, in_towers = bool(config.gradient_checkpointing), config.vit_gradient_checkpointing
        again = dataclasses.replace(
            learning,
            recomputes_language=recomputes,
            recomputes_towers=recomputes if in_towers is None else in_towers,
        )
        return cls(cost_of(model, learning), cost_of(model, again))


def cost_of(model: Mapping[str, Any], learning: Learning) -> CostModel:
    """FLOPs of a model; of one of 8 billion weights where its ``config.json`` does not tell the sizes."""
    try:
        return CostModel.of_config(model, learning)
    except (KeyError, TypeError, ValueError):
        return CostModel.of_8b()


def tower_work(cost: CostModel, index: SplitIndex) -> TowerWork:
    """What the media of a cache's samples cost."""
    flops = cost.towers(index.vision_tokens, index.patch_squares, index.audio_tokens)
    return TowerWork(np.rint(flops).astype(np.int64), index.num_images + index.num_videos)


def sample_costs(cost: CostModel, index: SplitIndex, target_tokens: npt.NDArray[np.integer[Any]]) -> Costs:
    """FLOPs of each sample of a cache alone, (N,)."""
    squares = np.square(index.length, dtype=np.int64)
    return cost(index.length, squares, target_tokens, tower_work(cost, index).flops)


def with_model(
    options: PlanOptions,
    model: Mapping[str, Any],
    learning: Learning,
    hardware: Hardware,
    way: SequenceParallelType = "auto",
) -> PlanOptions:
    """The options with a model's FLOPs, and for Skrull the speed of devices and links, for that model.

    Args:
        model: its ``config.json``.
        learning: which parts learn.
        hardware: that is planned for.
        way: how processes share rows; what ``auto`` is here depends on model and hardware alone, so that every machine
            plans alike (``simulate.exchanges``).
    """
    options = dataclasses.replace(options, cost=cost_of(model, learning))
    if options.skrull is None:
        return options
    try:
        sizes = ModelSizes.of_config(model)
    except (KeyError, TypeError, ValueError):
        sizes = ModelSizes.of_config(MODEL_PRESETS["8b"])
    sequence_parallel_size = options.skrull.sequence_parallel_size
    machine = Machine(sizes=sizes, hardware=hardware, world_size=sequence_parallel_size, way=way)
    return dataclasses.replace(
        options, skrull=dataclasses.replace(options.skrull, times=machine.step_time(sequence_parallel_size))
    )
