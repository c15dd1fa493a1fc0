"""Output of ``packtool inspect`` for a training run: trained samples, samples of a step, and steps of a sample."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from packtool import storage
from packtool.cache.manifest import Manifest
from packtool.errors import ConfigError, MismatchError
from packtool.planning.epoch import EpochPlan
from packtool.planning.ledger import SourceLedger
from packtool.report.drawing import plural
from packtool.report.tables import Figures, aligned, fill_in
from packtool.terminal import escape_line
from packtool.train.prepare.checkpoint import finished_checkpoints, is_checkpoint, read_run_state, run_directory
from packtool.train.prepare.history import Replay, Segment, has_history, read_ledger, replay_segment, segments_of
from packtool.train.prepare.output_dir import HISTORY

_MAX_COMPANIONS = 20  # listed samples that share a pack with the inspected one


def is_run(directory: str) -> bool:
    """Check whether a directory is that of a run or a checkpoint, rather than a cache."""
    is_directory, has_history_folder = map(os.path.isdir, (directory, os.path.join(directory, HISTORY)))
    return is_directory and (has_history_folder or is_checkpoint(directory) or bool(finished_checkpoints(directory)))


def trained_figures(directory: str) -> dict[str, Any]:
    """Count the samples and tokens of each cache that a run has trained up to a checkpoint.

    ``directory`` is that of a checkpoint, or of the run for its newest checkpoint. The counts are in the checkpoint's
    ledger; raise a MismatchError if it has none.
    """
    checkpoint = _newest_checkpoint(directory)
    ledger = read_ledger(checkpoint)
    state = read_run_state(checkpoint)
    if ledger is None:
        cause = "the run was streamed" if state.streaming else "it was written by an older packtool"
        advice = "Only checkpoints of runs on caches, by a newer packtool, have a ledger."
        raise MismatchError(f"{checkpoint} has no ledger of trained samples: {cause}", advice)

    sources = [_source_figures(source, is_in_run=True) for source in ledger.sources]
    sources += [_source_figures(source, is_in_run=False) for source in ledger.retired]  # which the run no longer trains
    return {
        "checkpoint": checkpoint,
        "step": state.step,
        "epoch": state.epoch,
        "step_in_epoch": state.step_in_epoch,
        "saved_at": _time(state.saved_at),
        "data_since_step": state.data_since,
        "sources": sources,
        "tokens": sum(source["tokens"] for source in sources),
        "target_tokens": sum(source["target_tokens"] for source in sources),
        "starts": _starts_before(run_directory(checkpoint), state.step),
    }


def _newest_checkpoint(directory: str) -> str:
    """Return the newest finished checkpoint of a run, or ``directory`` if that is a checkpoint."""
    if not os.path.isdir(directory):
        raise ConfigError(f"{directory}: no such directory")
    checkpoints = [directory] if is_checkpoint(directory) else finished_checkpoints(directory)
    if not checkpoints:
        advice = (
            "Give the --output-dir of a run (with --add-version, a numbered folder in it), or one of its checkpoints."
        )
        raise MismatchError(f"{directory} has no finished checkpoint, which records the trained samples", advice)
    return checkpoints[-1]


def _starts_before(output_dir: str, step: int) -> list[dict[str, Any]]:
    """Return figures of the start of a run, and of every resume before a step."""
    segments = segments_of(output_dir) if has_history(output_dir) else []
    return [
        {
            "after_step": segment.first,
            "began": _time(segment.began),
            "world_size": segment.assignments[-1].world_size,
            "num_steps": segment.num_steps,
            "data_changed": segment.changed_at == segment.first,
            "caches": [cache_directory for cache_directory, _, _ in segment.caches],
        }
        for segment, _ in segments
        if segment.first < step
    ]


def _source_figures(source: SourceLedger, *, is_in_run: bool) -> dict[str, Any]:
    """Return the figures of a cache; ``is_in_run``: False for one that the run no longer trains."""
    return {
        "directory": source.directory,
        "fingerprint": source.fingerprint,
        "is_in_the_run": is_in_run,
        "num_samples": source.num,
        "num_trained": source.trained.num_rows,
        "num_times_trained": source.num_samples,
        "num_trained_in_epoch": source.epoch.num_rows,
        "tokens": source.tokens,
        "target_tokens": source.target_tokens,
        "epochs": source.num_samples / source.num if source.num else 0.0,
        "num_skipped": len(source.skipped),
        "skipped": np.unique(source.skipped).tolist(),
    }


_SOURCE_HEADING = (
    *("cache", "samples", "trained", "this epoch", "times trained"),
    *("epochs", "tokens", "target tokens", "skipped"),
)
_SOURCE_CELLS = (
    *("{cache}", "{num_samples:,}", "{num_trained:,}", "{num_trained_in_epoch:,}", "{num_times_trained:,}"),
    *("{epochs:.2f}", "{tokens:,}", "{target_tokens:,}", "{num_skipped:,}"),
)


def trained_lines(figures: Figures) -> Iterator[str]:
    """Yield the output of ``packtool inspect --trained``."""
    epoch = figures["epoch"]
    position = f"in epoch {epoch + 1:,}" if figures["step_in_epoch"] else f"at the end of epoch {epoch:,}"
    tokens = f"{figures['tokens']:,} tokens, {figures['target_tokens']:,} target tokens"
    yield f"trained up to step {figures['step']:,} ({figures['saved_at']}), {position}: {tokens}"
    rows: list[tuple[str, ...]] = [_SOURCE_HEADING]
    for source in figures["sources"]:
        cache = source["directory"] + ("" if source["is_in_the_run"] else " (removed from the run)")
        rows.append(fill_in(_SOURCE_CELLS, {**source, "cache": cache}))
    yield from aligned(rows, "lr")
    for start in figures["starts"]:
        event = f"resumed after step {start['after_step']:,}" if start["after_step"] else "started"
        data = ", with changed data: " + ", ".join(start["caches"]) if start["data_changed"] else ""
        yield f"{start['began']}  {event}, {plural(start['world_size'], 'data-parallel rank')}{data}"


def step_figures(output_dir: str, step: int, model: str | None = None) -> dict[str, Any]:
    """Plan a step of a run again; return its samples by rank, micro-batch and pack.

    ``output_dir`` may be a checkpoint. ``step`` counts from 1, as in the log. ``model`` is the model's present
    directory; None if it has not moved.
    """
    output_dir = run_directory(output_dir)
    segments = segments_of(output_dir)
    replay = _replay_step(output_dir, segments, step, model)
    step_index = step - 1
    span = replay.timeline.span_at(step_index)  # the steps of one plan
    plan = span.plan
    plan_step = step_index - span.first_step
    samples = plan.samples_of(plan_step, plan_step + 1)  # numbers across all caches of the run
    return {
        "step": step,
        "epoch": span.epoch,
        "step_in_epoch": plan_step,
        "is_trained": step <= _num_trained_steps(segments),
        "num_samples": len(samples),
        "tokens": int(replay.reader.index.length[samples].sum()),
        "target_tokens": plan.steps.target_tokens(plan_step),
        "ranks": [_rank_figures(replay, plan, plan_step, rank) for rank in range(plan.steps.world_size)],
    }


def _replay_step(output_dir: str, segments: Sequence[tuple[Segment, int]], step: int, model: str | None) -> Replay:
    """Plan again the segment of a run that trains a step, 1-based; of ``segments``, each with the step after it."""
    begun = [(segment, stop) for segment, stop in segments if segment.first < step]
    segment, stop = begun[-1] if begun else segments[0]
    if step > segment.num_steps:
        raise ConfigError(f"--step {step}: the run has steps 1 to {segment.num_steps}")
    return replay_segment(output_dir, segment, stop, model)


def _num_trained_steps(segments: Sequence[tuple[Segment, int]]) -> int:
    _, step_after_last_segment = segments[-1]
    return step_after_last_segment


def _rank_figures(replay: Replay, plan: EpochPlan, plan_step: int, rank: int) -> dict[str, Any]:
    """Return the samples that a rank trains in a step, by micro-batch and pack."""
    micro_batches = []
    for micro_batch in range(plan.steps.num_micro_batches(plan_step)):
        packs = plan.samples(plan_step, rank, micro_batch)
        micro_batches.append([[_sample_figures(replay, position) for position in pack.tolist()] for pack in packs])
    return {"rank": rank, "micro_batches": micro_batches}


def _sample_figures(replay: Replay, position: int) -> dict[str, Any]:
    """Return origin, length and number of media of a sample; ``position``: its number across all caches of the run."""
    cache, position_in_cache = replay.reader.cache_of(position)
    sample = replay.reader.sample(position)
    return {
        "cache": replay.reader.directories[cache],
        "sample": position_in_cache,
        "source": sample.source,
        "row": sample.row,
        "part": "" if sample.part is None else str(sample.part),
        "channel": sample.channel,
        "tokens": sample.length,
        "target_tokens": int(replay.timeline.inputs.targets[position]),
        "media": len(sample.media),
    }


def step_lines(figures: Figures) -> Iterator[str]:
    """Yield the output of ``packtool inspect --step``."""
    pending = "" if figures["is_trained"] else ", not trained yet"
    tokens = f"{figures['tokens']:,} tokens, {figures['target_tokens']:,} target tokens"
    position = f"step {figures['step']:,}, epoch {figures['epoch'] + 1:,}{pending}"
    yield f"{position}: {figures['num_samples']:,} samples, {tokens}"
    for rank in figures["ranks"]:
        for number, packs in enumerate(rank["micro_batches"], start=1):
            empty = "" if packs else ": empty"
            yield f"rank {rank['rank']}, micro-batch {number} of {len(rank['micro_batches'])}{empty}"
            for pack in packs:
                yield f"  pack of {len(pack)} samples, {sum(sample['tokens'] for sample in pack):,} tokens"
                yield from ("    " + line for line in _sample_lines(pack))


def _sample_lines(samples: Sequence[Figures]) -> list[str]:
    rows = []
    for sample in samples:
        tokens = f"{sample['tokens']:,} tokens", f"{sample['target_tokens']:,} target tokens"
        origin = f"row {sample['row']} of {sample['source']}" + (f", {sample['part']}" if sample["part"] else "")
        rows.append((sample["cache"], f"--row {sample['sample']}", *tokens, origin))
    return aligned(rows, "lrrrl")


def row_figures(output_dir: str, cache: str | None, row: int, model: str | None = None) -> dict[str, Any]:
    """Find the steps of a run that trained a sample, number ``row`` of its cache, by planning them again.

    A segment is the steps between two starts or resumes of the run. ``cache`` may be None for a run with only one
    cache, and ``model`` if the model is still in its directory.
    """
    run_dir = run_directory(output_dir)
    segments = segments_of(run_dir)
    fingerprint, directory = _cache_of_row(run_dir, cache, row, [segment for segment, _ in segments])

    sample_figures: dict[str, Any] = {"cache": directory, "sample": row}  # if it was never planned
    occurrences: list[dict[str, Any]] = []
    for segment, stop_step in segments:
        trains_cache = any(trained == fingerprint for _, trained, _ in segment.caches)
        has_steps = segment.first < stop_step
        if not (trains_cache and has_steps):
            continue
        replay = replay_segment(run_dir, segment, stop_step, model)
        for position in replay.positions_of(fingerprint, row):
            if "source" not in sample_figures:
                sample_figures = _sample_figures(replay, position)
            occurrences += _occurrences(replay, position)
    return {
        **sample_figures,
        "run": run_dir,
        "times": sorted(occurrences, key=lambda occurrence: int(occurrence["step"])),
        "num_skipped": _count_skips(run_dir, fingerprint, row),
        "until_step": _num_trained_steps(segments),
    }


def _count_skips(output_dir: str, fingerprint: str, row: int) -> int:
    """Count how often the run skipped a sample of a cache, up to its newest checkpoint."""
    checkpoints = finished_checkpoints(output_dir)
    ledger = read_ledger(checkpoints[-1]) if checkpoints else None
    sources = () if ledger is None else (*ledger.sources, *ledger.retired)
    return sum(int((source.skipped == row).sum()) for source in sources if source.fingerprint == fingerprint)


def _cache_of_row(output_dir: str, cache: str | None, row: int, segments: Sequence[Segment]) -> tuple[str, str]:
    """Return fingerprint and directory of the cache of a run that has sample ``row``.

    ``cache`` is its present directory; None for the only cache of the run. Raise a ConfigError if the run has not
    trained it in its present version, or if it has no such sample.
    """
    directories: dict[str, str] = {}  # by fingerprint
    sizes: dict[str, int] = {}
    for segment in segments:
        for directory, fingerprint, num_samples in segment.caches:
            directories[fingerprint] = directory
            sizes[fingerprint] = num_samples

    if cache is not None:
        fingerprint = Manifest.read(storage.normalize(cache)).fingerprint
    elif len(directories) == 1:
        fingerprint = next(iter(directories))
    else:
        problem = f"--row {row}: {output_dir} has trained several caches: {', '.join(directories.values())}"
        raise ConfigError(problem, f"Name one of them: packtool inspect CACHE --row {row} --run {output_dir}.")

    if fingerprint not in directories:
        version = f"the present version of the cache {cache} ({fingerprint})"
        raise ConfigError(f"--run {output_dir} has not trained {version}")
    if row >= sizes[fingerprint]:
        raise ConfigError(f"--row {row}: {directories[fingerprint]} has samples 0 to {sizes[fingerprint] - 1}")
    return fingerprint, directories[fingerprint]


def _occurrences(replay: Replay, position: int) -> list[dict[str, Any]]:
    return [_occurrence_figures(replay, position, *location) for location in replay.occurrences(position)]


def _occurrence_figures(
    replay: Replay, position: int, step_index: int, epoch: int, rank: int, micro_batch: int, pack: int
) -> dict[str, Any]:
    """Return figures of a step that trained a sample, and of its companions: the other samples of its pack.

    Without packs, and with Skrull, companions are the other samples of its micro-batch. ``position`` is the number of
    the sample across all caches, ``step_index`` counts the steps of the run from 0.
    """
    span = replay.timeline.span_at(step_index)  # the steps of one plan
    plan = span.plan
    plan_step = step_index - span.first_step
    uses_skrull = plan.placement is not None
    if plan.summary.options.packing and not uses_skrull:
        packs = [plan.packs.pack(pack)]
    else:
        packs = list(plan.samples(plan_step, rank, micro_batch))

    companions: list[int] = []
    for pack_samples in packs:
        companions += [sample for sample in pack_samples.tolist() if sample != position]
    listed = companions[:_MAX_COMPANIONS]
    return {
        "step": step_index + 1,
        "epoch": epoch,
        "rank": rank,
        "micro_batch": micro_batch,
        "num_companions": len(companions),
        "companions": [_sample_figures(replay, companion) for companion in listed],
        "num_samples_of_step": len(plan.samples_of(plan_step, plan_step + 1)),
    }


def row_lines(figures: Figures) -> Iterator[str]:
    """Yield the output of ``packtool inspect --row`` for a run."""
    run = escape_line(figures["run"])
    occurrences = figures["times"]
    warning = ""
    if figures["num_skipped"]:
        warning = f"; skipped {plural(figures['num_skipped'], 'time')}, because its media could not be loaded"
    num_steps = plural(figures["until_step"], "step")
    yield f"planned {plural(len(occurrences), 'time')} in the {num_steps} that {run} has trained{warning}"
    for occurrence in occurrences:
        yield f"{_occurrence_text(occurrence)}: packtool inspect {run} --step {occurrence['step']}"
        yield from ("  " + line for line in _sample_lines(occurrence["companions"]))
        num_unlisted = occurrence["num_companions"] - len(occurrence["companions"])
        if num_unlisted:
            yield f"  and {num_unlisted:,} more"


def _occurrence_text(occurrence: Figures) -> str:
    """Describe a step in which a sample was trained, and its place in the step."""
    num_samples = plural(occurrence["num_samples_of_step"], "sample")
    num_others = plural(occurrence["num_companions"], "other sample")
    return (
        f"step {occurrence['step']:,} ({num_samples}), epoch {occurrence['epoch'] + 1:,}, "
        f"rank {occurrence['rank']}, micro-batch {occurrence['micro_batch'] + 1}, packed with {num_others}"
    )


def _time(seconds: float) -> str:
    """Return a Unix time as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
