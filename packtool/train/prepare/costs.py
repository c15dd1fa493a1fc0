"""What the samples of a run cost its model, as it is trained, on the devices that there are."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.cache.reader import SplitIndex
from packtool.config.adapters import AdapterOptions, LearningOptions
from packtool.config.parallel import SequenceParallelType
from packtool.config.train import TrainConfig
from packtool.config.yaml_values import load_json
from packtool.plan.balance import Costs
from packtool.plan.cost import CostModel
from packtool.plan.options import PlanOptions
from packtool.plan.towers import TowerWork
from packtool.simulate.cost import Machine
from packtool.simulate.hardware import Hardware
from packtool.simulate.model_sizes import MODEL_PRESETS, ModelSizes
from packtool.train.prepare.recompute import CHUNK_LOGITS
from packtool.train.prepare.trained import ADAPTER_FILE


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
        recomputes, in_towers = bool(config.gradient_checkpointing), config.vit_gradient_checkpointing
        whole = model.get("thinker_config") or model
        vocabulary = (whole.get("text_config") or whole).get("vocab_size") or 0
        again = cost_of(
            model,
            config,
            recomputes_language=recomputes,
            recomputes_towers=recomputes if in_towers is None else in_towers,
            # A pack of few targets may have a single chunk, which is not made again, and hardly costs anything.
            recomputes_head=config.packing_length is None or config.packing_length * vocabulary > CHUNK_LOGITS,
        )
        return cls(cost_of(model, config), again)


def cost_of(model: Mapping[str, Any], learning: LearningOptions, **recomputes: bool) -> CostModel:
    """FLOPs of a model; of one of 8 billion weights where its ``config.json`` does not tell the sizes.

    Args:
        model: its ``config.json``.
        learning: which weights learn.
        recomputes: as for ``CostModel.of_config``.
    """
    try:
        return CostModel.of_config(model, _of_adapter(learning), **recomputes)
    except (KeyError, TypeError, ValueError):
        return CostModel.of_8b()


def _of_adapter(options: LearningOptions) -> LearningOptions:
    """The options of a run; where it goes on from an adapter, with the modules that this one is on.

    One that cannot be read is refused where it is loaded.
    """
    if not isinstance(options, AdapterOptions) or not options.adapters:
        return options
    try:
        with open(os.path.join(options.adapters[0], ADAPTER_FILE), encoding="utf-8") as file:
            told = load_json(file.read())
        targets = told["target_modules"]
        if not isinstance(targets, str):
            targets = rf"(?:.*\.)?(?:{'|'.join(map(re.escape, targets))})"
        saved, rank, bias = tuple(told.get("modules_to_save") or ()), int(told["r"]), told.get("bias", "none")
    except (OSError, ValueError, KeyError, TypeError):
        return options
    return dataclasses.replace(options, target_regex=targets, modules_to_save=saved, lora_rank=rank, lora_bias=bias)


def tower_work(cost: CostModel, index: SplitIndex) -> TowerWork:
    """What the media of a cache's samples cost."""
    flops = cost.towers(index.vision_tokens, index.patch_squares, index.audio_tokens)
    return TowerWork(np.rint(flops).astype(np.int64), index.num_images + index.num_videos + index.num_audios)


def sample_costs(cost: CostModel, index: SplitIndex, target_tokens: npt.NDArray[np.integer[Any]]) -> Costs:
    """FLOPs of each sample of a cache alone, (N,)."""
    return cost(index.length, cost.attention(index.length), target_tokens, tower_work(cost, index).flops)


def with_model(
    options: PlanOptions,
    model: Mapping[str, Any],
    learning: LearningOptions,
    hardware: Hardware,
    way: SequenceParallelType = "auto",
) -> PlanOptions:
    """The options with a model's FLOPs, and for Skrull the speed of devices and links, for that model.

    Args:
        model: its ``config.json``.
        learning: which weights learn.
        hardware: that is planned for.
        way: how processes share sequences; what ``auto`` is here depends on model and hardware alone, so that every
            machine plans alike (``simulate.exchanges``).
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
