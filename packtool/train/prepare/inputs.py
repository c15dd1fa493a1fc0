"""What options and caches decide of a run, wherever it begins."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.cache.plan_file import read_plan
from packtool.cache.reader import CacheReader
from packtool.cache.views import ChosenTargets, MixedSamples, SampleReader
from packtool.config.mixture import Recipe
from packtool.config.train import TrainConfig
from packtool.encode.model_files import ModelFiles
from packtool.simulate.run import read_hardware
from packtool.train.prepare.check import check_plan, check_sources, open_caches, packs_of, with_template_of
from packtool.train.prepare.checkpoint import RunState
from packtool.train.prepare.costs import tower_work, with_model
from packtool.train.prepare.evaluation import with_evaluation
from packtool.train.prepare.mixtures import named_sources
from packtool.train.prepare.planner import Assignment, Planner, plan_options
from packtool.train.prepare.shared_prefixes import shared_in_packs, shared_of_plan
from packtool.train.prepare.staged import planner_of
from packtool.train.prepare.targets import TargetChoices, choices_of_targets


@dataclass(frozen=True, eq=False)
class Basis:
    """What options and caches decide, wherever a run begins.

    Args:
        config: its settings, with those that were left open decided.
        samples: with their labels as ``--loss-scale``, or that of their source, chooses them.
        choices: of these labels.
        notes: remarks for the user.
    """

    config: TrainConfig
    files: ModelFiles
    reader: CacheReader
    samples: SampleReader
    choices: TargetChoices
    planner: Planner
    notes: tuple[str, ...]

    @classmethod
    def of(cls, config: TrainConfig) -> Basis:
        """Check that tokenizer, caches and options fit.

        Raises:
            ConfigError, DataError, MismatchError: naming what does not fit, and what to do.
        """
        files = ModelFiles.load(config.model)
        directories, recipe = named_sources(config)
        if config.mix is not None:
            config = dataclasses.replace(config, cached_dataset=directories)
        reader = open_caches(directories, config, files)
        config, evaluated = with_evaluation(config, reader)
        files = with_template_of(reader, files)
        if recipe is not None:
            check_sources(reader, recipe, files)
        choices = choices_of_targets(reader, files, config.loss_scale, recipe)
        samples: SampleReader = reader
        targets = reader.index.target_tokens
        if any(choices):
            samples = chosen = ChosenTargets(reader, choices)
            targets = chosen.target_tokens()
        planner, not_shared = _planner(config, files, reader, targets, recipe)
        if (mixture := planner.mixture) is not None:
            samples = MixedSamples(
                samples,
                mixture.offsets,
                mixture.names,
                mixture.loss_weights,
                keeps_channels=config.enable_channel_loss,
            )
        notes = (*not_shared, *_access_notes(config, reader), *evaluated)
        return cls(config, files, reader, samples, choices, planner, notes)

    def state(self, assignment: Assignment) -> RunState:
        """The state of a run whose packs are assigned so, before its first step."""
        return _state(self.config, self.planner, assignment, self.reader.fingerprint)


def _access_notes(config: TrainConfig, reader: CacheReader) -> list[str]:
    """Said before the first step, for the one sample with a web address may come after hours."""
    for manifest in reader.manifests:
        far = any('"media_access": "any"' in source.settings for source in manifest.sources)
        kept = manifest.identity.spec["media"] == "reference" and any(s.media_tokens for s in manifest.splits.values())
        if far and kept and config.media_access != "any":
            return [
                "a cache was exported with --media-access any: if its rows name web addresses, training needs it, too"
            ]
    return []


def _planner(
    config: TrainConfig,
    files: ModelFiles,
    reader: CacheReader,
    targets: npt.NDArray[np.integer[Any]],
    recipe: Recipe | None,
) -> tuple[Planner, list[str]]:
    """The planner of a run, and what is to be said of prefixes that it does not share."""
    saved = read_plan(config.plan) if config.plan is not None else None
    if saved is not None:
        check_plan(saved, config, reader)
    max_length = config.max_length or max(manifest.max_length for manifest in reader.manifests)
    options = plan_options(config, max_length=max_length, world_size=1)
    options = with_model(options, files.config, config, read_hardware(config.hardware), config.sequence_parallel_type)
    if saved is not None:
        options = dataclasses.replace(options, max_length=saved.info.max_length, packing_length=saved.info.capacity)
    assert options.cost is not None
    packs, told = packs_of(saved) if saved is not None else None, None
    if saved is not None and packs is not None:
        shared = shared_of_plan(packs, saved.info.parts, files.config, reader)
    else:
        shared, told = shared_in_packs(config, options, files.config, reader)
    towers = tower_work(options.cost, reader.index) if shared is None else shared.towers(options.cost, targets)
    planner = planner_of(config, options, reader, targets, towers, recipe, packs, shared)
    return planner, [] if told is None else [told]


def _state(config: TrainConfig, planner: Planner, assignment: Assignment, cache: str) -> RunState:
    plan, steps = planner.fingerprints(assignment)
    world_size, _, _ = assignment
    return RunState.of(
        config,
        plan=plan,
        steps=steps,
        cache=cache,
        max_length=planner.options.max_length,
        packing_length=planner.options.packing_length,
        world_size=world_size,
        loss_scale=config.loss_scale or "",
        loss_reduction=config.loss_reduction,
        shares_prefixes=planner.shared is not None,
        schedule=_schedule_of(planner),
        learning=config.learning_words,
    )


def _schedule_of(planner: Planner) -> str:
    """What decides the steps but packs, batch size and accumulation, in one line."""
    skrull, num_samples = planner.options.skrull, planner.options.samples_per_step
    if skrull is None:
        return "" if num_samples is None else f"{num_samples} samples a step"
    # "a row", where a sequence is meant: checkpoints hold this text, and are compared with it to the letter.
    shared = f"skrull, buckets of {skrull.bucket_size} tokens, a row on {skrull.sequence_parallel_size}"
    return f"{shared}, for {skrull.times.device}"
