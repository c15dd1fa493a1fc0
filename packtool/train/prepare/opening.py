"""Opening of the inputs of a plan: caches, their targets, model and options."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.cache.local import LocalCopies
from packtool.cache.manifest import Manifest
from packtool.cache.plan_file import SavedPlan, read_plan
from packtool.cache.reader import CacheReader, RelabeledReader
from packtool.config.data import expand_problems
from packtool.config.mixture import Recipe
from packtool.config.plan import PlanConfig
from packtool.config.settings import part_of
from packtool.config.train import TrainConfig
from packtool.constants import TRAIN_NEWLINE
from packtool.encode.families import family_of
from packtool.encode.loss_scale import Base, LossScale, loss_scale_of, parse_loss_scale
from packtool.encode.model_files import ModelFiles
from packtool.encode.targets import TargetChoice
from packtool.errors import ConfigError, MismatchError
from packtool.planning.cost import MODEL_PRESETS
from packtool.planning.options import PlanOptions, SkrullOptions
from packtool.simulate.hardware import read_hardware
from packtool.simulate.run import read_lengths
from packtool.train.prepare.caches import (
    check_plan,
    check_sources,
    export_command,
    named_sources,
    open_caches,
    with_cache_template,
)
from packtool.train.prepare.costs import with_costs
from packtool.train.prepare.evaluation import with_evaluation
from packtool.train.prepare.inputs import Inputs, TargetChoices

_BASES_BY_TARGETS: tuple[Base, ...] = ("last_round", "default", "all")
"""The bases of loss scales, from the fewest to the most targets."""


def choices_of_targets(
    reader: CacheReader, files: ModelFiles, loss_scale: str | None, recipe: Recipe | None
) -> TargetChoices:
    """The targets of each cache by the recipe's loss scale, or else ``loss_scale``; None for those of its export."""
    choices = []
    for number, (directory, manifest) in enumerate(zip(reader.directories, reader.manifests, strict=True)):
        scale, setting = loss_scale, "--loss-scale"
        if recipe is not None and recipe.sources[number].loss_scale is not None:
            scale, setting = recipe.sources[number].loss_scale, f"its loss_scale in {recipe.place}"
        choices.append(None if scale is None else _target_choice(directory, manifest, files, scale, setting))
    return tuple(choices)


def planned_targets(reader: CacheReader, recipe: Recipe | None, model: str | None) -> npt.NDArray[np.integer[Any]]:
    """Target tokens of each sample, (N,); reads ``model`` if the model of the caches' export does not exist."""
    if recipe is None or not any(source.loss_scale or source.media_limits for source in recipe.sources):
        return reader.index.target_tokens
    # The caches' own first: the other may be one of another size.
    models = (str(reader.manifests[0].identity.spec["model"]), model)
    path = next((each for each in models if each and _has_config(each)), None)
    if path is None:
        raise ConfigError(
            f"{recipe.place}: loss_scale and limits of media need the files of the caches' model, and {models[0]} "
            "does not exist",
            "Give the directory of the model with --model.",
        )
    files = with_cache_template(reader, ModelFiles.load(path))
    check_sources(reader, recipe, files)
    return _target_tokens(reader, choices_of_targets(reader, files, None, recipe))


def _has_config(model: str) -> bool:
    return storage.exists(storage.join(model, "config.json"))


def _target_tokens(reader: CacheReader, choices: TargetChoices) -> npt.NDArray[np.integer[Any]]:
    """Target tokens of each sample, (N,), by the choices of each cache."""
    return RelabeledReader(reader, choices).target_tokens() if any(choices) else reader.index.target_tokens


def _target_choice(
    directory: str, manifest: Manifest, files: ModelFiles, loss_scale: str, setting: str
) -> TargetChoice | None:
    """Return the target tokens of a cache for a loss scale, named ``setting`` in errors; None if the export's."""
    model_scale = loss_scale_of(loss_scale, files.is_hybrid_thinking)  # with the rules that the model needs
    if parse_loss_scale(model_scale) == parse_loss_scale(_exported_scale(manifest)):
        return None
    processor_writes_text = bool(family_of(files.config).processor_inputs)
    problem = _target_problem(manifest, model_scale, processor_writes_text=processor_writes_text)
    if problem is not None:
        command = _export_command_with_scale(directory, manifest, loss_scale)
        raise MismatchError(
            f"{directory} {problem}", f"Leave {setting} out, or export into another directory:\n  {command}"
        )
    base, rules = parse_loss_scale(model_scale)
    only_exported_targets = bool(rules) or processor_writes_text
    return TargetChoice.of_config(base, files.config, among_targets=only_exported_targets)


def _export_command_with_scale(directory: str, manifest: Manifest, loss_scale: str) -> str:
    """The command that exports a cache again with another loss scale, which may exclude its ``--expand-turns``."""
    changes: dict[str, str | None] = {"loss_scale": loss_scale}
    if expand_problems(manifest.identity.spec.get("expand_turns"), loss_scale):
        changes["expand_turns"] = None  # leaves the option out
    return export_command(directory, manifest, **changes)


def _exported_scale(manifest: Manifest) -> str:
    """The loss scale that a cache was exported with."""
    return str(manifest.identity.spec.get("loss_scale", "default"))


def _target_problem(manifest: Manifest, scale: str, *, processor_writes_text: bool) -> str | None:
    """Return the reason why a cache cannot be trained with another loss scale than that of its export; None if it can.

    A loss scale says which tokens are targets, and with which weights. A cache has the tokens and the targets of its
    export, but not the texts. ``processor_writes_text``: the model's own processor made the tokens.
    """
    exported_scale = _exported_scale(manifest)
    requested, exported = parse_loss_scale(scale), parse_loss_scale(exported_scale)
    if _trains_shared_tokens(manifest, requested.base):
        return (
            f"has several samples of one row, and the tokens that --loss-scale {scale} trains in each of them "
            "cannot be told without the rows"
        )
    if _may_weight_other_parts(requested, exported):
        return (
            f"was exported with --loss-scale {exported_scale}: the parts of texts that {scale} weights differently "
            "cannot be told without the rows"
        )
    if processor_writes_text and _trains_more(requested.base, exported.base):
        return (
            f"was exported with --loss-scale {exported_scale}: among the tokens that {scale} trains in addition, "
            "placeholders of media cannot be told from text, because the model's own processor wrote them"
        )
    return None


def _trains_more(requested: Base, exported: Base) -> bool:
    return _BASES_BY_TARGETS.index(requested) > _BASES_BY_TARGETS.index(exported)


def _may_weight_other_parts(requested: LossScale, exported: LossScale) -> bool:
    """Return whether a loss scale may weight other parts of a text than the export did."""
    if not requested.rules and not exported.rules:
        return False
    if requested.rules != exported.rules or TRAIN_NEWLINE in exported.rules:
        return True  # turns in a cache end before the line breaks that TRAIN_NEWLINE trains
    # With equal rules, targets can still be limited to the last turn.
    return exported.base != "default" or requested.base != "last_round"


def _trains_shared_tokens(manifest: Manifest, base: Base) -> bool:
    """Return whether samples of one row may share tokens that only one of them may train."""
    spec = manifest.identity.spec
    has_split_rows = any(split.pieces_added for split in manifest.splits.values())
    has_samples_by_response = has_split_rows and spec.get("truncation_strategy") != "split"
    return "expand_turns" in spec or (base == "all" and has_samples_by_response)


def open_to_train(config: TrainConfig, preview_inputs: Inputs | None = None) -> Inputs:
    """Open the caches of a training run, check that they fit its model and options, and prepare its plans.

    ``preview_inputs`` are those of ``packtool plan``, if it ran before: plans that are the same are not made again.
    """
    files = ModelFiles.load(config.model)
    directories, recipe = named_sources(config)  # a recipe tells how to mix several caches
    if config.mix is not None:  # the recipe names the caches
        config = dataclasses.replace(config, cached_dataset=directories)
    reader = open_caches(directories, config, files)
    config, evaluation_messages = with_evaluation(config, reader)
    files = with_cache_template(reader, files)
    if recipe is not None:
        check_sources(reader, recipe, files)

    target_choices = choices_of_targets(reader, files, config.loss_scale, recipe)
    saved_plan = _fitting_plan(config, reader)  # of --plan
    inputs = _make_inputs(
        config,
        _training_options(config, reader, saved_plan),
        reader,
        recipe,
        files,
        lengths=reader.index.length,
        targets=_target_tokens(reader, target_choices),
        target_choices=target_choices,
        saved_plan=saved_plan,
        notes=(*_web_media_warning(config, reader), *evaluation_messages),
    )
    return inputs.prepared() if preview_inputs is None else inputs.prepared_with(preview_inputs)


def _fitting_plan(config: TrainConfig, reader: CacheReader) -> SavedPlan | None:
    """Read the plan of ``--plan``, and raise unless it fits the run; None without the option."""
    saved_plan = None if config.plan is None else read_plan(config.plan)
    if saved_plan is not None:
        check_plan(saved_plan, config, reader)
    return saved_plan


def _training_options(config: TrainConfig, reader: CacheReader, saved_plan: SavedPlan | None) -> PlanOptions:
    """The options of the planner for a training run, whose ``--plan`` sets the lengths of samples and packs."""
    max_length = config.max_length or max(manifest.max_length for manifest in reader.manifests)
    options = plan_options(config, max_length=max_length, world_size=1)  # each plan sets its number of ranks
    if saved_plan is None:
        return options
    return dataclasses.replace(options, max_length=saved_plan.max_length, packing_length=saved_plan.capacity)


def _web_media_warning(config: TrainConfig, reader: CacheReader) -> list[str]:
    """A warning if training may need media by web addresses, maybe after hours, and must not load them; else empty."""
    if config.media_access == "any" or not any(map(_may_have_web_media, reader.manifests)):
        return []
    return ["a cache was exported with --media-access any: if its rows have web addresses, training needs it too"]


def _may_have_web_media(manifest: Manifest) -> bool:
    """Return whether a cache may refer to media by web addresses."""
    allows_web = any('"media_access": "any"' in source.settings for source in manifest.sources)
    has_media = any(split.media_tokens for split in manifest.splits.values())
    return allows_web and has_media and manifest.identity.spec["media"] == "reference"


def open_to_plan(config: PlanConfig, sweep_length: int | None = None) -> Inputs:
    """Open the caches, or the file of lengths, of ``packtool plan``; ``sweep_length`` replaces its packs' length."""
    directories, recipe = named_sources(config)
    reader = CacheReader.open(directories, copies=LocalCopies.of(config)) if directories else None
    if reader is not None:
        lengths: npt.NDArray[np.integer[Any]] = reader.index.length
        targets = planned_targets(reader, recipe, config.model)
        default_length = max(manifest.max_length for manifest in reader.manifests)
    else:
        lengths = targets = read_lengths(str(config.lengths))  # every token is a target
        default_length = sweep_length or config.packing_length or int(lengths.max(initial=1))
    files = _planned_model_files(config, reader)
    options = _preview_options(config, default_length, sweep_length)
    if recipe is not None and recipe.stages and config.sweep is not None:
        raise ConfigError(f"--sweep cannot be combined with the stages of {recipe.place}", "Plan without --sweep.")
    return _make_inputs(config, options, reader, recipe, files, lengths=lengths, targets=targets)


def _preview_options(config: PlanConfig, default_length: int, sweep_length: int | None) -> PlanOptions:
    """The options of the planner for ``packtool plan``; ``default_length`` is for a missing ``--max-length``."""
    max_length = config.max_length or default_length
    packing_length = sweep_length or config.packing_length
    # Samples longer than a pack are left out. With --max-length, they are an error as in training, except in a sweep.
    leaves_out_longer = config.max_length is None or sweep_length is not None
    if packing_length is not None and leaves_out_longer:
        max_length = min(max_length, packing_length)
    num_data_ranks = config.world_size // config.sequence_parallel_ranks
    options = plan_options(config, max_length=max_length, world_size=num_data_ranks)
    return dataclasses.replace(options, packing_length=packing_length or max_length)


def _planned_model_files(config: PlanConfig, reader: CacheReader | None) -> ModelFiles | None:
    """The files of ``--model``, or of the model of the caches' export if it still exists; None without either."""
    model = config.model
    if model is None and reader is not None:
        exported_model = str(reader.manifests[0].identity.spec["model"])
        if _has_config(exported_model):
            model = exported_model
    return None if model is None else ModelFiles.load(model)


def _make_inputs(
    config: PlanConfig | TrainConfig,
    options: PlanOptions,
    reader: CacheReader | None,
    recipe: Recipe | None,
    files: ModelFiles | None,
    **fields: Any,
) -> Inputs:
    """Make the ``Inputs`` of plans, with the costs of the model, or of an 8B model if ``files`` is None.

    ``reader`` is None for a file of lengths. ``fields`` are further ones of ``Inputs``.
    """
    model_config = MODEL_PRESETS["8b"] if files is None else files.config
    hardware = read_hardware(config.hardware)
    return Inputs(
        config=config,
        options=with_costs(options, model_config, config, hardware, config.sequence_parallel_type),
        reader=reader,
        media_tokens=None if reader is None else reader.index.media_tokens,
        recipe=recipe,
        model=model_config,
        files=files,
        sequence_parallel_size=config.sequence_parallel_ranks,
        **fields,
    )


def plan_options(config: PlanConfig | TrainConfig, *, max_length: int, world_size: int) -> PlanOptions:
    """Select the options of the planner from those of a command.

    Args:
        max_length: maximum tokens of a sample; also of a pack without ``--packing-length``.
        world_size: number of data-parallel ranks; ranks that share a sequence count as one.
    """
    skrull_options = None
    if config.schedule == "skrull":
        if config.bucket_tokens is None:
            remedy = "Give a number of tokens, as in --bucket-size 8192."
            raise ConfigError("--bucket-size auto is decided by packtool train, and not known here.", remedy)
        num_sharing = config.sequence_parallel_ranks  # ranks that share a sequence
        skrull_options = SkrullOptions(
            bucket_size=config.bucket_tokens,
            sequence_parallel_size=num_sharing,
            alignment=2 * num_sharing,  # zigzag gives each rank an early and a late part of a sharded sequence
        )
    return part_of(  # takes all other options from the fields of ``config`` with the same names
        PlanOptions,
        config,
        max_length=max_length,
        packing_length=config.packing_length or max_length,
        world_size=world_size,
        skrull=skrull_options,
    )
