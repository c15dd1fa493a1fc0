"""Target tokens of a run that differ from those of the exports, by ``--loss-scale`` or a recipe."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.cache.manifest import Manifest
from packtool.cache.reader import CacheReader
from packtool.cache.views import RelabeledReader
from packtool.config.data import expand_problems
from packtool.config.mixture import Recipe
from packtool.encode.families import family_of
from packtool.encode.loss_scale import Base, is_hybrid_thinking, loss_scale_of, parse_loss_scale
from packtool.encode.model_files import ModelFiles
from packtool.encode.targets import TargetChoice
from packtool.errors import ConfigError, MismatchError
from packtool.train.prepare.check import check_sources, export_command, with_template_of

TargetChoices = tuple[TargetChoice | None, ...]
"""One for each cache of a run; None for the targets of its export."""

_WIDTH: dict[Base, int] = {"last_round": 0, "default": 1, "all": 2}
"""Order of the loss scales by their number of targets."""


def choices_of_targets(
    reader: CacheReader, files: ModelFiles, loss_scale: str | None, recipe: Recipe | None
) -> TargetChoices:
    """The choice of target tokens of each cache, by loss scales.

    Args:
        files: of the model, with the caches' chat template.
        loss_scale: of the run, for sources without one of their own.
        recipe: whose sources are the caches, in their order; None for caches as they are.

    Raises:
        MismatchError: if a choice needs the rows, as rules do that weigh parts of a text.
    """
    scales = [None] * len(reader.directories) if recipe is None else [source.loss_scale for source in recipe.sources]
    choices = []
    for directory, manifest, wanted in zip(reader.directories, reader.manifests, scales, strict=True):
        option = "--loss-scale" if wanted is None or recipe is None else f"its loss_scale in {recipe.place}"
        wanted = loss_scale if wanted is None else wanted
        choices.append(None if wanted is None else _choice(directory, manifest, files, wanted, option))
    return tuple(choices)


def planned_targets(reader: CacheReader, recipe: Recipe | None, model: str | None) -> npt.NDArray[np.integer[Any]]:
    """Target tokens of each sample, (N,), of a run that is only planned; ``model`` is for caches whose own is gone."""
    if recipe is None or not any(source.loss_scale or source.media_limits for source in recipe.sources):
        return reader.index.target_tokens
    # The caches' own first: the other may be one of another size.
    models = (str(reader.manifests[0].identity.spec["model"]), model)
    path = next((each for each in models if each and storage.exists(storage.join(each, "config.json"))), None)
    if path is None:
        raise ConfigError(
            f"{recipe.place}: loss_scale and limits of media need the files of the caches' model, and {models[0]} is "
            "not there",
            "Name the model with --model.",
        )
    files = with_template_of(reader, ModelFiles.load(path))
    check_sources(reader, recipe, files)
    choices = choices_of_targets(reader, files, None, recipe)
    return RelabeledReader(reader, choices).target_tokens() if any(choices) else reader.index.target_tokens


def _choice(directory: str, manifest: Manifest, files: ModelFiles, loss_scale: str, option: str) -> TargetChoice | None:
    """The choice of one cache; ``option`` is the name of ``loss_scale`` for the user."""
    scale = loss_scale_of(loss_scale, is_hybrid_thinking(files))
    there = str(manifest.identity.spec.get("loss_scale", "default"))
    wanted, current = parse_loss_scale(scale), parse_loss_scale(there)
    if current == wanted:
        return None
    by_processor = bool(family_of(files.config).processor_inputs)
    narrows = current.base == "default" and wanted.base == "last_round"
    if _has_parts(manifest, wanted.base):
        problem = (
            f"has rows of which several samples were made: which tokens --loss-scale {scale} trains in each of them, "
            "only the rows can tell"
        )
    elif (current.rules or wanted.rules) and not (current.rules == wanted.rules and narrows):
        problem = (
            f"was exported with --loss-scale {there}: {scale} gives parts of texts other weights, which only the rows "
            "can tell"
        )
    elif by_processor and _WIDTH[wanted.base] > _WIDTH[current.base]:
        problem = (
            f"was exported with --loss-scale {there}: among the tokens that {scale} trains beside those, marks of "
            "pictures cannot be told from text, for the model's own processor wrote them"
        )
    else:
        return TargetChoice.of_config(wanted.base, files.config, among_targets=bool(wanted.rules) or by_processor)
    changes: dict[str, str | None] = {"loss_scale": loss_scale}
    if expand_problems(manifest.identity.spec.get("expand_turns"), loss_scale):
        changes["expand_turns"] = None  # no export of turns has that loss scale; one of whole rows has
    raise MismatchError(
        f"{directory} {problem}",
        f"Leave {option} out, or export into another directory:\n  {export_command(directory, manifest, **changes)}",
    )


def _has_parts(manifest: Manifest, wanted: Base) -> bool:
    """Return whether samples of one row share tokens that only one of them may train."""
    spec = manifest.identity.spec
    has_responses = spec.get("truncation_strategy") != "split" and any(
        split.pieces_added for split in manifest.splits.values()
    )
    return "expand_turns" in spec or (wanted == "all" and has_responses)
