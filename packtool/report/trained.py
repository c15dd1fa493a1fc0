"""Output of ``packtool inspect`` for a run: trained samples, the samples of a step, and the steps of a sample."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from packtool import storage
from packtool.cache.manifest import Manifest
from packtool.errors import ConfigError, MismatchError
from packtool.planning.ledger import SourceLedger
from packtool.report.drawing import plural
from packtool.report.tables import aligned
from packtool.terminal import escape_line
from packtool.train.prepare.checkpoint import finished_checkpoints, is_checkpoint, read_run_state, run_directory
from packtool.train.prepare.history import Replay, has_history, read_ledger, replay_segment, segments_of

_MAX_COMPANIONS = 20


def is_run(directory: str) -> bool:
    """Check whether a directory is a run's or a checkpoint, not a cache."""
    return os.path.isdir(directory) and (
        has_history(directory) or is_checkpoint(directory) or bool(finished_checkpoints(directory))
    )


def trained_figures(directory: str) -> dict[str, Any]:
    """Count what a run has trained until its newest checkpoint.

    Args:
        directory: of the run, or of the checkpoint until which to count.

    Raises:
        ConfigError: if there is no such directory.
        MismatchError: if there is no finished checkpoint, or it has no ledger.
    """
    if not os.path.isdir(directory):
        raise ConfigError(f"{directory}: there is no such directory")
    checkpoint = directory if is_checkpoint(directory) else next(iter(finished_checkpoints(directory)[::-1]), None)
    if checkpoint is None:
        raise MismatchError(
            f"{directory} has no finished checkpoint, which would tell what was trained until then",
            "Give the --output-dir of a run, or one of its checkpoints; of --add-version, one of its numbered folders.",
        )
    ledger, state = read_ledger(checkpoint), read_run_state(checkpoint)
    if ledger is None:
        raise MismatchError(
            f"{checkpoint} keeps no ledger of what was trained: "
            + ("a stream has no rows that it could name" if state.streaming else "it is of an older packtool"),
            "Runs on caches keep one.",
        )
    sources = [_source_figures(source, is_in_run=True) for source in ledger.sources]
    sources += [_source_figures(source, is_in_run=False) for source in ledger.retired]
    output_dir = run_directory(checkpoint)
    segments = segments_of(output_dir) if has_history(output_dir) else []
    starts = [
        {
            "after_step": segment.first,
            "began": _time(segment.began),
            "world_size": segment.assignments[-1][1],
            "num_steps": segment.num_steps,
            "data_changed": segment.changed_at == segment.first,
            "caches": [directory for directory, _, _ in segment.caches],
        }
        for segment, _ in segments
        if segment.first < state.step
    ]
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
        "starts": starts,
    }


def _source_figures(source: SourceLedger, *, is_in_run: bool) -> dict[str, Any]:
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


def trained_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """The output of ``packtool inspect --trained``."""
    epoch = figures["epoch"]
    position = f"in epoch {epoch + 1:,}" if figures["step_in_epoch"] else f"at the end of epoch {epoch:,}"
    yield (
        f"trained until step {figures['step']:,} ({figures['saved_at']}), {position}: {figures['tokens']:,} tokens, "
        f"{figures['target_tokens']:,} targets"
    )
    rows = [("cache", "samples", "trained", "this epoch", "times", "epochs", "tokens", "targets", "skipped")]
    for source in figures["sources"]:
        cache = source["directory"] + ("" if source["is_in_the_run"] else " (no longer)")
        samples = ("num_samples", "num_trained", "num_trained_in_epoch", "num_times_trained")
        tokens = ("tokens", "target_tokens", "num_skipped")
        counts = [f"{source[name]:,}" for name in samples + tokens]
        rows.append((cache, *counts[: len(samples)], f"{source['epochs']:.2f}", *counts[len(samples) :]))
    yield from aligned(rows, "lr")
    for start in figures["starts"]:
        event = f"went on after step {start['after_step']:,}" if start["after_step"] else "began"
        data = ", with other data: " + ", ".join(start["caches"]) if start["data_changed"] else ""
        ranks = f"{start['world_size']} data-parallel rank{'s' if start['world_size'] > 1 else ''}"
        yield f"{start['began']}  {event}, {ranks}{data}"


def step_figures(output_dir: str, step: int, model: str | None = None) -> dict[str, Any]:
    """The samples of a step of a run, by rank, micro-batch and pack.

    Args:
        output_dir: of the run, or one of its checkpoints.
        step: 1-based, as in the log.
        model: directory of the run's model, if it has moved.

    Raises:
        ConfigError: if the run has no such step.
        MismatchError: if it has no history, or its caches have changed.
    """
    output_dir = run_directory(output_dir)
    segments = segments_of(output_dir)
    segment, stop = next(each for each in reversed(segments) if each[0].first < step or each is segments[0])
    if step > segment.num_steps:
        raise ConfigError(f"--step {step}: the run has steps 1 to {segment.num_steps}")
    replay = replay_segment(output_dir, segment, stop, model)
    stretch = replay.timeline.stretch(step - 1)
    plan, number = stretch.plan, step - 1 - stretch.first
    ranks = [
        {
            "rank": rank,
            "micro_batches": [
                [_sample_figures(replay, pack.tolist()) for pack in plan.samples(number, rank, micro_batch)]
                for micro_batch in range(plan.steps.num_micro_batches(number))
            ],
        }
        for rank in range(plan.steps.world_size)
    ]
    samples = plan.samples_of(number, number + 1)
    return {
        "step": step,
        "epoch": stretch.epoch,
        "step_in_epoch": number,
        "is_trained": step <= segments[-1][1],
        "num_samples": len(samples),
        "tokens": int(replay.reader.index.length[samples].sum()),
        "target_tokens": plan.steps.target_tokens(number),
        "ranks": ranks,
    }


def _sample_figures(replay: Replay, positions: Sequence[int]) -> list[dict[str, Any]]:
    """Figures of the samples at these positions in the run's caches."""
    figures = []
    for position in positions:
        cache, row = replay.reader.cache_of(position)
        sample = replay.reader.sample(position)
        figures.append(
            {
                "cache": replay.reader.directories[cache],
                "sample": row,
                "source": sample.source,
                "row": sample.row,
                "part": "" if sample.part is None else str(sample.part),
                "channel": sample.channel,
                "tokens": sample.length,
                "target_tokens": int(replay.timeline.inputs.targets[position]),
                "media": len(sample.media),
            }
        )
    return figures


def step_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """The output of ``packtool inspect --step``."""
    pending = "" if figures["is_trained"] else ", not trained yet"
    yield (
        f"step {figures['step']:,}, epoch {figures['epoch'] + 1:,}{pending}: {figures['num_samples']:,} samples, "
        f"{figures['tokens']:,} tokens, {figures['target_tokens']:,} targets"
    )
    for rank in figures["ranks"]:
        for number, packs in enumerate(rank["micro_batches"], start=1):
            empty = "" if packs else ": empty"
            yield f"rank {rank['rank']}, micro-batch {number} of {len(rank['micro_batches'])}{empty}"
            for pack in packs:
                yield f"  pack of {len(pack)} samples, {sum(sample['tokens'] for sample in pack):,} tokens"
                yield from ("    " + line for line in _sample_lines(pack))


def _sample_lines(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        (
            sample["cache"],
            f"--row {sample['sample']}",
            f"{sample['tokens']:,} tokens",
            f"{sample['target_tokens']:,} targets",
            f"row {sample['row']} of {sample['source']}" + (f", {sample['part']}" if sample["part"] else ""),
        )
        for sample in samples
    ]
    return aligned(rows, "lrrrl")


def row_figures(output_dir: str, cache: str | None, row: int, model: str | None = None) -> dict[str, Any]:
    """Find the steps of a run that trained a sample.

    Args:
        output_dir: of the run, or one of its checkpoints.
        cache: directory of the sample's cache; None if the run has one cache.
        row: the sample's number in the train split.
        model: directory of the run's model, if it has moved.

    Raises:
        ConfigError: if there is no such sample, or the run never had the cache.
        MismatchError: if the run has no history, or its caches have changed.
    """
    output_dir = run_directory(output_dir)
    segments = segments_of(output_dir)
    known = {fingerprint: (directory, num) for each, _ in segments for directory, fingerprint, num in each.caches}
    if cache is None:
        if len(known) > 1:
            caches = ", ".join(directory for directory, _ in known.values())
            raise ConfigError(
                f"--row {row}: {output_dir} has trained several caches: {caches}",
                f"packtool inspect CACHE --row {row} --run {output_dir} says of which.",
            )
        fingerprint = next(iter(known))
    else:
        fingerprint = Manifest.read(storage.normalize(cache)).fingerprint
    if fingerprint not in known:
        raise ConfigError(f"--run {output_dir} has not trained the cache {cache}, as it is now ({fingerprint})")
    directory, num_samples = known[fingerprint]
    if row >= num_samples:
        raise ConfigError(f"--row {row}: {directory} has samples 0 to {num_samples - 1}")
    times: list[dict[str, Any]] = []
    sample: dict[str, Any] | None = None
    for segment, stop in segments:
        fingerprints = [each for _, each, _ in segment.caches]
        if fingerprint not in fingerprints or stop <= segment.first:
            continue
        replay = replay_segment(output_dir, segment, stop, model)
        # A cache may be listed more than once.
        copies = [number for number, each in enumerate(fingerprints) if each == fingerprint]
        positions = [row + int(replay.reader.offsets[number]) for number in copies]
        sample = sample or _sample_figures(replay, positions[:1])[0]
        in_segment = [_occurrence(replay, each, *place) for each in positions for place in replay.occurrences(each)]
        times += sorted(in_segment, key=lambda each: int(each["step"]))
    checkpoints = finished_checkpoints(output_dir)
    ledger = read_ledger(checkpoints[-1]) if checkpoints else None
    sources = () if ledger is None else (*ledger.sources, *ledger.retired)
    return {
        **(sample or {"cache": directory, "sample": row}),
        "run": output_dir,
        "times": times,
        "num_skipped": sum(int((each.skipped == row).sum()) for each in sources if each.fingerprint == fingerprint),
        "until_step": segments[-1][1],
    }


def _occurrence(
    replay: Replay, position: int, step: int, epoch: int, rank: int, micro_batch: int, pack: int
) -> dict[str, Any]:
    """A step in which a sample was trained, and the samples that shared its pack."""
    stretch = replay.timeline.stretch(step)
    plan, number = stretch.plan, step - stretch.first
    # Without packing, and where Skrull splits packs, the samples of the micro-batch are meant.
    has_packs = plan.placement is None and plan.summary.options.packing
    packs = [plan.packs.pack(pack)] if has_packs else list(plan.samples(number, rank, micro_batch))
    companions = [each for pack in packs for each in pack.tolist() if each != position]
    return {
        "step": step + 1,
        "epoch": epoch,
        "rank": rank,
        "micro_batch": micro_batch,
        "num_companions": len(companions),
        "companions": _sample_figures(replay, companions[:_MAX_COMPANIONS]),
        "num_samples_of_step": len(plan.samples_of(number, number + 1)),
    }


def row_lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """The output of ``packtool inspect --row`` for a run."""
    times, run = figures["times"], escape_line(figures["run"])
    steps, skipped = plural(figures["until_step"], "step"), plural(figures["num_skipped"], "time")
    left_out = f"; left out {skipped}, for it could not be loaded" if figures["num_skipped"] else ""
    yield f"planned {plural(len(times), 'time')} in the {steps} that {run} has trained{left_out}"
    for each in times:
        others, samples = plural(each["num_companions"], "other"), plural(each["num_samples_of_step"], "sample")
        yield (
            f"step {each['step']:,}, epoch {each['epoch'] + 1:,}, rank {each['rank']}, micro-batch "
            f"{each['micro_batch'] + 1}, with {others} of {samples} of the step: "
            f"packtool inspect {run} --step {each['step']}"
        )
        yield from ("  " + line for line in _sample_lines(each["companions"]))
        if each["num_companions"] > len(each["companions"]):
            yield f"  and {each['num_companions'] - len(each['companions']):,} more"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
