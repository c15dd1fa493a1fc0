"""Plans of evaluations, decided without torch and equal on every rank."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from packtool import storage
from packtool.attention.parallel.axes import Axes
from packtool.cache.local import LocalCopies
from packtool.cache.reader import CacheReader, RelabeledReader, SampleReader, common_splits
from packtool.config.commands import MAX_TOKENS_OPTION, EvalConfig
from packtool.config.train import EvalStrategy, TrainConfig
from packtool.constants import TRAIN_SPLIT, VAL_SPLIT
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, DataError
from packtool.launch.world import World
from packtool.planning.cost import ALL_WEIGHTS
from packtool.planning.dynamic import EvaluationPlan, aligned_lengths, plan_evaluation
from packtool.train.prepare.caches import check_model, refuse_stretched_positions
from packtool.train.prepare.costs import cost_of
from packtool.train.prepare.inputs import Inputs
from packtool.train.prepare.parallelism import axes_of
from packtool.train.prepare.shared_prefixes import find_shared_prefixes
from packtool.train.prepare.trained import TrainedModel


@dataclass(frozen=True, eq=False)
class Validation:
    """The val split of a run's caches; ``samples`` have the targets that ``--loss-scale`` chooses."""

    reader: CacheReader
    samples: SampleReader
    plan: EvaluationPlan


def validation_of(inputs: Inputs, world: World, axes: Axes) -> Validation | None:
    """Plan the evaluation of the val split between steps; None with ``--eval-strategy no``."""
    config, files, reader = inputs.for_training
    if config.eval_strategy == "no":
        return None
    val = CacheReader.open(reader.directories, VAL_SPLIT, reader.copies)
    plan = plan_samples(val, world.data, max_tokens=config.max_tokens_per_micro_batch, alignment=axes.multiple)
    if config.sequence_parallel_ranks == 1:
        shared, _ = find_shared_prefixes(config, files.config, val, capacity=plan.max_tokens)
        if shared is not None:
            plan = dataclasses.replace(plan, trees=shared.trees)
    choices = inputs.target_choices
    return Validation(val, RelabeledReader(val, choices) if any(choices) else val, plan)


@dataclass(frozen=True)
class PreparedEvaluation:
    """An evaluation whose inputs are checked; ``plan`` has the micro-batches of all ranks."""

    config: EvalConfig
    world: World
    trained: TrainedModel
    reader: CacheReader
    plan: EvaluationPlan
    axes: Axes
    notes: tuple[str, ...] = ()


def prepare_evaluation(config: EvalConfig, world: World) -> PreparedEvaluation:
    """Prepare ``packtool eval``: check the model, caches and options, and assign the samples to ranks.

    Every rank gets the same plan. Nothing is written yet, but an unwritable ``--output`` is an error now.
    """
    trained = TrainedModel.find(config.model, config.base_model)
    files = ModelFiles.load(trained.base)
    reader = _open_split(config, trained, files)
    axes = axes_of(config, world, files, reader.index.length)
    plan = plan_samples(
        reader,
        world.data,
        alignment=axes.multiple,
        max_tokens=config.max_tokens_per_micro_batch,
        max_samples=config.max_samples_per_micro_batch,
        limit=config.limit,
    )

    # Samples that begin with the same tokens may share these, which are then computed only once.
    shared, no_sharing_reason = find_shared_prefixes(
        config, files.config, reader, capacity=plan.max_tokens, limit=config.limit
    )
    messages = []
    if shared is not None:
        plan = dataclasses.replace(plan, trees=shared.trees)
        messages.append(shared.line(cost_of(files.config, ALL_WEIGHTS)))
    elif no_sharing_reason is not None:
        messages.append(no_sharing_reason)

    if world.is_first:
        _check_writable(config.output)
    return PreparedEvaluation(config, world, trained, reader, plan, axes, tuple(messages))


def _open_split(config: EvalConfig, trained: TrainedModel, files: ModelFiles) -> CacheReader:
    """Open the split to evaluate, and check that its caches fit the model; by default val, if all caches have it."""
    split: str | None = config.split
    if split is None:
        split = VAL_SPLIT if VAL_SPLIT in common_splits(config.cached_dataset) else TRAIN_SPLIT
    reader = CacheReader.open(config.cached_dataset, split, LocalCopies.of(config))
    for directory, manifest in zip(reader.directories, reader.manifests, strict=True):
        check_model(directory, manifest, files, dataclasses.replace(config, model=trained.base))
    if not len(reader):
        raise DataError(
            f"the {split} split of {', '.join(reader.directories)} holds no samples", "Give another --split."
        )
    refuse_stretched_positions(files.config, int(reader.index.length.max()))
    return reader


def _check_writable(output: str) -> None:
    """Raise an error now, and not after the evaluation, if the file ``--output`` cannot be written."""
    if storage.is_directory(output):
        raise ConfigError(f"--output {output} is a directory", "Give the name of a file in it.")
    storage.make_directory(storage.parent(storage.normalize(output)) or ".")
    storage.AtomicFile(output).discard()  # creates and removes a temporary file


def with_evaluation(config: TrainConfig, reader: CacheReader) -> tuple[TrainConfig, list[str]]:
    """Decide ``--eval-strategy`` and ``--eval-steps`` of a run; return its settings, and notes for the user."""
    eval_steps = config.eval_steps or config.save_steps
    if config.eval_strategy is not None:
        return dataclasses.replace(config, eval_steps=eval_steps), []
    # With --save-strategy best, checkpoints follow evaluations, and not the other way round.
    strategy: EvalStrategy = "steps" if config.save_strategy == "best" else config.save_strategy
    val_splits = [manifest.splits.get(VAL_SPLIT) for manifest in reader.manifests]
    num_val_samples = [0 if split is None else split.rows for split in val_splits]
    if min(num_val_samples) > 0 and strategy != "no":
        config = dataclasses.replace(config, eval_strategy=strategy, eval_steps=eval_steps)
        return config, [_evaluation_line(sum(num_val_samples), strategy, eval_steps)]
    _check_needs_no_evaluation(config)
    notes = []
    if max(num_val_samples) > 0 and strategy != "no":
        notes.append("nothing is evaluated, because only some of the caches have a val split")
    return dataclasses.replace(config, eval_strategy="no"), notes


def _check_needs_no_evaluation(config: TrainConfig) -> None:
    if config.seeks_best or config.early_stop_interval is not None:
        raise ConfigError(
            "the best checkpoint and early stopping need an evaluation, and nothing is evaluated",
            "Give caches with a val split (--val-dataset or --split-dataset-ratio at export), or leave out "
            "--load-best-model-at-end, --save-strategy best and --early-stop-interval.",
        )


def _evaluation_line(num_samples: int, strategy: EvalStrategy, eval_steps: float) -> str:
    """Describe when a val split of ``num_samples`` is evaluated; ``eval_steps`` below 1 is a fraction of the run."""
    if strategy != "steps":
        when = "at the end of every epoch"
    elif eval_steps >= 1:
        when = f"every {eval_steps:,} steps"
    else:
        when = f"every {eval_steps:.1%} of the run"
    return (
        f"the val split ({num_samples:,} samples) is evaluated {when} and at the end: --eval-strategy no turns this off"
    )


def plan_samples(
    reader: CacheReader,
    world: World,
    *,
    max_tokens: int | None = None,
    max_samples: int | None = None,
    limit: int | None = None,
    alignment: int = 1,
) -> EvaluationPlan:
    """Assign samples to micro-batches and ranks to evaluate them.

    Args:
        max_tokens, max_samples: maxima of a micro-batch. A ConfigError if a sample alone has more than ``max_tokens``.
        limit: evaluate only the first ``limit`` samples.
        alignment: each sample is padded to a multiple of this number of tokens.
    """
    lengths = reader.index.length[:limit]
    padded_lengths = aligned_lengths(lengths, alignment)
    max_padded_length = int(padded_lengths.max(initial=0))
    if max_tokens is not None and max_padded_length > max_tokens:
        too_long = np.flatnonzero(padded_lengths > max_tokens)
        first = int(too_long[0])
        raise ConfigError(
            f"{MAX_TOKENS_OPTION} {max_tokens} is a hard limit, and {len(too_long):,} of {len(lengths):,} samples are "
            f"longer: sample {first} ({reader.sample(first).place}) has {int(padded_lengths[first]):,} tokens, the "
            f"longest {max_padded_length:,}",
            f"Raise it to {max_padded_length}, or leave it out.",
        )
    return plan_evaluation(
        lengths, num_ranks=world.size, max_tokens=max_tokens, max_samples=max_samples, alignment=alignment
    )
