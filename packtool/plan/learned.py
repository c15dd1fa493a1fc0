"""Which weights of a model a run trains, told from its ``config.json`` and the options: see ``stacks`` for the names.

``train.model.frozen`` and ``train.model.adapters`` decide the same of real parameters, by the same rules of
``LearningOptions``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from packtool.config.adapters import LearningOptions
from packtool.plan.stacks import Stacks, Step

_ADAPTABLE = ("linear", "convolution", "lookup")  # by a regular expression; names and all-linear mean linear modules


@dataclass(frozen=True)
class Learned:
    """What of a step learns.

    Args:
        weights: all of them, through an adapter, or not.
        any: something of it does, were it a bias alone: gradients go back to what it makes.
    """

    weights: Literal["full", "lora", "frozen"] = "frozen"
    any: bool = False


def learned(stacks: Stacks, options: LearningOptions) -> dict[str, Learned]:
    """What learns, by the steps' names; what is not named does not.

    A family that packtool knows nothing of may have other names: where options mean nothing of a model, they count as
    if no names had been given.
    """
    found = _learned(stacks, options)
    if not any(each.any for each in found.values()):
        parts = ("train_type", "lora_rank", "freeze_vit", "freeze_aligner", "freeze_llm")
        found = _learned(stacks, LearningOptions(**{name: getattr(options, name) for name in parts}))
    return found


def _learned(stacks: Stacks, options: LearningOptions) -> dict[str, Learned]:
    steps = [step for step in stacks.steps if step.kind != "attention"]
    if options.train_type == "lora":
        found = {step.name: _adapted(step, options, is_head=step is stacks.head) for step in steps}
    else:
        found = _unfrozen(steps[:-1] if stacks.is_tied else steps, options)
    if stacks.is_tied:
        found[stacks.head.name] = dataclasses.replace(found[stacks.language[0].name])
    return found


def _adapted(step: Step, options: LearningOptions, *, is_head: bool) -> Learned:
    """What ``--train-type lora`` does."""
    if options.is_saved(step.name):
        return Learned("full", True)
    if options.target_regex is not None:
        is_target = step.kind in _ADAPTABLE
    else:
        is_target = step.kind == "linear" and not is_head and step.part not in options.frozen_parts
    if is_target and options.is_target(step.name):
        return Learned("lora", True)
    return Learned("frozen", options.lora_bias == "all" and step.has_bias)


def _unfrozen(steps: Sequence[Step], options: LearningOptions) -> dict[str, Learned]:
    """What ``--train-type full`` does."""
    found: dict[str, Learned] = {}
    budget = int(sum(step.num_weights for step in steps) * options.freeze_parameters_ratio)
    for step in steps:
        budget -= step.num_weights
        is_kept = step.part in options.frozen_parts or (options.freeze_parameters_ratio > 0 and budget >= 0)
        names = (step.weight, f"{step.name}.bias") if step.has_bias else (step.weight,)
        learns = [options.is_wanted(name) or not (is_kept or options.is_kept(name)) for name in names]
        found[step.name] = Learned("full" if learns[0] else "frozen", any(learns))
    return found
