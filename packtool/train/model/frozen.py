"""Which parameters learn with ``--train-type full``: parts first, then names, then what is wanted all the same."""

from __future__ import annotations

import re

from torch import nn

from packtool.config.train import TrainConfig
from packtool.encode.families import Towers
from packtool.errors import ConfigError
from packtool.train.model.parameters import whole_size


def freeze(model: nn.Module, towers: Towers, run: TrainConfig) -> None:
    """Set ``requires_grad`` of every parameter.

    Raises:
        ConfigError: if a name matches nothing, or nothing is left to train.
    """
    named = list(model.named_parameters())
    frozen = run.frozen_parts
    _check_names([name for name, _ in named], run)
    budget = int(sum(whole_size(parameter) for _, parameter in named) * run.freeze_parameters_ratio)
    for name, parameter in named:
        budget -= whole_size(parameter)
        is_kept = towers.part_of(name) in frozen or (run.freeze_parameters_ratio > 0 and budget >= 0)
        is_kept = is_kept or run.is_kept(name)
        is_wanted = run.is_wanted(name)
        parameter.requires_grad_((is_wanted or not is_kept) and not towers.is_unused(name))
    if not any(parameter.requires_grad for _, parameter in named):
        raise ConfigError(
            f"nothing is left to train: {', '.join(sorted(frozen)) or 'all parameters'} are frozen, and the model has "
            "no other part",
            "Set one of --freeze-llm, --freeze-vit, --freeze-aligner to false, or name --trainable-parameters.",
        )


def _check_names(names: list[str], run: TrainConfig) -> None:
    problems = []
    for option, prefixes, regex in (
        ("freeze-parameters", run.freeze_parameters, run.freeze_parameters_regex),
        ("trainable-parameters", run.trainable_parameters, run.trainable_parameters_regex),
    ):
        problems += [
            f"--{option} {prefix}: no parameter's name begins so"
            for prefix in prefixes
            if not any(name.startswith(prefix) for name in names)
        ]
        if regex is not None and not any(re.search(regex, name) for name in names):
            problems.append(f"--{option}-regex {regex}: it is found in no parameter's name")
    if problems:
        raise ConfigError("\n".join(problems), f"Parameters have names such as {names[0]} and {names[-1]}.")
