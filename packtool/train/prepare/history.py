"""The history of a run, the ledger of each checkpoint, and steps planned again from these.

OUTPUT_DIR/history/
    run.json                    a segment for each time: options, caches, assignment of packs, fingerprints
    mix-120.yaml                recipe of --mix, with absolute paths, of the segment that starts after step 120
    ledger-120.npz              ledger of all samples trained before a change of the data after step 120
    rows-<fingerprint>.npz      file and row of each sample of a cache

A plan is a pure function of options and caches, so the history is enough to plan any step again.
``packtool_ledger.npz`` in a checkpoint, and ``ledger-120.npz``, are archives of numpy arrays, megabytes for 100M
samples: ``told`` is JSON with names, totals and the last change of the data; ``0.before.0``, ``0.epoch.0``, ... are
bit planes of counts (``planning.ledger``) of the first cache, ``0.skipped`` its rows that could not be loaded. Caches
that were removed from the run come last.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.cache.evaluation_file import plain_json
from packtool.cache.manifest import Manifest
from packtool.cache.origins import read_origins
from packtool.cache.plan_file import read_plan
from packtool.cache.reader import CacheReader
from packtool.config.settings import load_json
from packtool.config.train import TrainConfig
from packtool.constants import VERSION
from packtool.errors import ConfigError, MismatchError, PacktoolError
from packtool.planning.ledger import DataChange, Ledger, RowCounts, SourceLedger
from packtool.train.prepare.caches import portable_recipe
from packtool.train.prepare.checkpoint import finished_checkpoints, read_run_state
from packtool.train.prepare.opening import open_to_train
from packtool.train.prepare.output_dir import HISTORY, METRICS_NAME
from packtool.train.prepare.result import non_default_options
from packtool.train.prepare.timeline import Timeline

_RUN = "run.json"
LEDGER_NAME = "packtool_ledger.npz"
_TOTALS = ("directory", "fingerprint", "num", "num_samples", "tokens", "target_tokens")
_Arrays = dict[str, npt.NDArray[Any]]
# Options of resuming, which do not change steps.
_NOT_KEPT = ("resume_from_checkpoint", "resume_only_model", "overwrite_output_dir", "add_version", "dry_run")
_PATHS = ("model", "plan", "hardware", "mix")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The steps of a run between two starts or resumptions.

    Args:
        first: its first step, 0-based.
        began: seconds since 1970.
        num_steps: of the whole run, as planned at this start.
        config: options other than defaults, with absolute paths; ``--mix`` names the history's copy.
        caches: directory, fingerprint and number of samples of each.
        assignments: as ``RunState`` has them, at least one.
        changed_at: step after which the data last changed; None if they never did.
        plan, steps: fingerprints of the first epoch with these data.
    """

    first: int
    num_steps: int
    config: Mapping[str, Any]
    caches: tuple[tuple[str, str, int], ...]
    assignments: tuple[tuple[int, int, int, int], ...]
    changed_at: int | None
    plan: str
    steps: str
    began: float = field(default_factory=time.time)
    version: str = VERSION

    @property
    def train_config(self) -> TrainConfig:
        """The settings of the run; MismatchError if this version of packtool lacks one of its options."""
        values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in self.config.items()}
        try:
            return TrainConfig(**values)
        except TypeError as error:
            raise MismatchError(
                f"the run was trained with packtool {self.version}, which had other options: {error}",
                f"Inspect it with that version; this is {VERSION}.",
            ) from error


def recorded_options(config: TrainConfig) -> dict[str, Any]:
    """The options of a run for its history and checkpoints: those other than defaults, as JSON values."""
    kept: dict[str, Any] = {}
    for name, value in non_default_options(config).items():
        if name in _NOT_KEPT:
            continue
        if name in _PATHS and os.path.exists(value):
            value = storage.absolute(value)
        if name == "cached_dataset":
            value = [storage.absolute(directory) for directory in value]
        kept[name] = plain_json(dict(value) if isinstance(value, Mapping) else value)
    return kept


def read_history(output_dir: str) -> list[Segment]:
    """Read the segments of a run, in order; MismatchError if there is no history, or its file is damaged."""
    if not os.path.isdir(output_dir):
        raise ConfigError(f"{output_dir}: there is no such directory")
    folder = os.path.join(output_dir, HISTORY)
    path = os.path.join(folder, _RUN)
    if not os.path.exists(path):
        older = finished_checkpoints(output_dir)
        raise MismatchError(
            f"{output_dir} has no history of its steps: "
            + (
                "it was trained by an older packtool, or from streamed rows"
                if older
                else "no run on caches was started there"
            ),
            "Give the --output-dir of a run; with --add-version, one of its numbered folders.",
        )
    try:
        with open(path, encoding="utf-8") as file:
            raw = load_json(file.read())["segments"]
        for each in raw:
            each |= {name: tuple(map(tuple, each[name])) for name in ("caches", "assignments")}
            if "mix" in each["config"]:
                each["config"]["mix"] = os.path.join(folder, each["config"]["mix"])
        return [Segment(**each) for each in raw]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MismatchError(f"{path} cannot be read: {error!r}", "Restore the file from a copy of the run.") from error


def has_history(output_dir: str) -> bool:
    """Return whether an output directory has a history."""
    return os.path.exists(os.path.join(output_dir, HISTORY, _RUN))


def history_of(checkpoint: str) -> str:
    """The folder with the history of a checkpoint's run."""
    return os.path.join(os.path.dirname(os.path.abspath(checkpoint)), HISTORY)


def origins_path(history: str, fingerprint: str) -> str:
    """The file of a history that records the rows of the samples of a cache."""
    return os.path.join(history, f"rows-{fingerprint}.npz")


def ledger_name(step: int) -> str:
    """Name of the file, in a history, with the ledger at a change of the data after ``step`` steps."""
    return f"ledger-{step}.npz"


def write_ledger(directory: str, ledger: Ledger, name: str = LEDGER_NAME) -> None:
    """Write a ledger into a checkpoint or another directory, in the format that the module describes."""
    arrays: _Arrays = {}
    totals: list[dict[str, Any]] = []
    for number, source in enumerate((*ledger.sources, *ledger.retired)):
        arrays |= _planes(f"{number}.before", source.before) | _planes(f"{number}.epoch", source.epoch)
        arrays[f"{number}.skipped"] = source.skipped
        totals.append({field: getattr(source, field) for field in _TOTALS})
    num_sources = len(ledger.sources)
    header = {
        "step": ledger.step,
        "epoch": ledger.epoch,
        "sources": totals[:num_sources],
        "retired": totals[num_sources:],
        "change": None,
    }
    if ledger.stage is not None:
        header["stage"] = ledger.stage
    if (change := ledger.change) is not None:
        header["change"] = [change.step, change.epoch, *(() if change.stage is None else (change.stage,))]
        for kind, counts in (("left", change.left), ("trained", change.trained)):
            for number, each in enumerate(counts):
                arrays |= _planes(f"{number}.{kind}", each)
    arrays["told"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    sink = io.BytesIO()
    np.savez_compressed(sink, **arrays)  # type: ignore[arg-type]
    storage.publish(os.path.join(directory, name), sink.getvalue())


def read_ledger(directory: str, name: str = LEDGER_NAME) -> Ledger | None:
    """Read the ledger of a checkpoint, None without one; MismatchError if it is damaged."""
    path = os.path.join(directory, name)
    if not os.path.exists(path):
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            header = load_json(arrays["told"].tobytes())
            sources = []
            for number, fields in enumerate([*header["sources"], *header["retired"]]):
                size = fields.pop("num")
                before, epoch = (
                    RowCounts(size, _read_planes(arrays, f"{number}.{kind}")) for kind in ("before", "epoch")
                )
                skipped = arrays[f"{number}.skipped"]
                sources.append(SourceLedger(before=before, epoch=epoch, skipped=skipped, **fields))
            num_sources = len(header["sources"])
            change = None
            if header["change"] is not None:
                sizes = [source.num for source in sources[:num_sources]]
                left, trained = (
                    tuple(RowCounts(size, _read_planes(arrays, f"{n}.{kind}")) for n, size in enumerate(sizes))
                    for kind in ("left", "trained")
                )
                step, epoch, *stage = header["change"]
                change = DataChange(step, epoch, left, tuple(stage[0]) if stage else None, trained if stage else ())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MismatchError(f"{path} cannot be read: {error}", "Give another checkpoint.") from error
    return Ledger(
        step=header["step"],
        epoch=header["epoch"],
        sources=tuple(sources[:num_sources]),
        retired=tuple(sources[num_sources:]),
        change=change,
        stage=None if header.get("stage") is None else tuple(header["stage"]),
    )


def _planes(name: str, counts: RowCounts) -> _Arrays:
    """The bit planes of counts, by their names in a ledger file: ``name.0``, ``name.1``, ..."""
    return {f"{name}.{bit}": plane for bit, plane in enumerate(counts.planes)}


def _read_planes(arrays: Any, name: str) -> tuple[npt.NDArray[np.uint8], ...]:
    """The bit planes that ``_planes`` has written under ``name``; any number of them."""
    bits = itertools.takewhile(lambda bit: f"{name}.{bit}" in arrays, itertools.count())
    return tuple(arrays[f"{name}.{bit}"] for bit in bits)


Skipped = Sequence[tuple[int, int]]
"""Samples that were left out: the step, 0-based, and the sample's position in the caches."""


class RunRecord:
    """Writer of the history and the ledgers of a run, on its first rank.

    Args:
        ledger: of all samples trained before this start.
        segment: to add to the history.
        checkpoint: that the run resumes from, if any.

    Attributes:
        ledger: of the steps up to the last checkpoint.
    """

    def __init__(self, ledger: Ledger, timeline: Timeline, segment: Segment, checkpoint: str | None) -> None:
        self.ledger, self._checkpoint = ledger, checkpoint
        self._timeline, self._segment = timeline, segment

    def begin(self, output_dir: str) -> None:
        """Write the history before the first step, without segments whose steps a resumed run trains again."""
        folder, segment = os.path.join(output_dir, HISTORY), self._segment
        storage.make_directory(folder)
        before: list[Segment] = []
        if self._checkpoint is not None:
            origin = os.path.dirname(os.path.abspath(self._checkpoint))
            if has_history(origin):
                before = [each for each in read_history(origin) if each.first < segment.first]
                if os.path.realpath(origin) != os.path.realpath(output_dir):
                    shutil.copytree(os.path.join(origin, HISTORY), folder, dirs_exist_ok=True)
        if (mix := segment.config.get("mix")) is not None:
            name = f"mix-{segment.first}.yaml"
            storage.publish(os.path.join(folder, name), portable_recipe(mix))
            segment = dataclasses.replace(segment, config={**segment.config, "mix": name})
        segments = {"segments": [dataclasses.asdict(each) for each in (*before, segment)]}
        storage.publish(os.path.join(folder, _RUN), (json.dumps(segments, indent=1) + "\n").encode())
        if self.ledger.change is not None:
            write_ledger(folder, self.ledger, ledger_name(self.ledger.change.step))

    def save(self, checkpoint: str, step: int, skipped: Skipped = (), left_out: Sequence[int] = ()) -> None:
        """Write the ledger into a checkpoint after ``step`` steps.

        Args:
            skipped: samples that all ranks skipped since the last checkpoint.
            left_out: steps since then that changed no weight.
        """
        # The rows of local caches are recorded, to match samples after a cache was removed. Those of remote caches are
        # read only when they are needed, because reading them copies all shards.
        reader, history = self._timeline.inputs.for_training[2], history_of(checkpoint)
        for cache, (directory, manifest) in enumerate(zip(reader.directories, reader.manifests, strict=True)):
            path = origins_path(history, manifest.fingerprint)
            if not storage.is_remote(directory) and not os.path.exists(path):
                storage.make_directory(history)
                read_origins(reader, cache).write(path)
        self.ledger = ledger_after(self.ledger, self._timeline, step, skipped, left_out)
        write_ledger(checkpoint, self.ledger)


def ledger_after(
    ledger: Ledger, timeline: Timeline, step: int, skipped: Skipped = (), left_out: Sequence[int] = ()
) -> Ledger:
    """The ledger after ``step`` steps of a timeline; ``skipped`` and ``left_out`` as for ``RunRecord.save``."""
    lengths, targets = timeline.inputs.lengths, timeline.inputs.targets
    while True:
        stretch = timeline.stretch(ledger.step)
        while ledger.epoch < stretch.epoch:
            ledger = ledger.in_next_epoch()
        if ledger.step >= step:
            return dataclasses.replace(ledger, stage=timeline.stage_of(ledger.step))
        plan, first = stretch.plan, stretch.first
        here = range(ledger.step, min(stretch.stop, step))
        of_left_out = [plan.samples_of(each - first, each - first + 1) for each in left_out if each in here]
        positions = [position for at, position in skipped if at in here and at not in left_out]
        untrained = np.concatenate([np.array(positions, np.int64), *of_left_out])
        ledger = ledger.plus(plan, range(here.start - first, here.stop - first), lengths, targets, untrained)


def ledger_of_plan(timeline: Timeline, step: int) -> Ledger:
    """The ledger after ``step`` steps, for a checkpoint of an older packtool without one; no sample is skipped."""
    inputs, (epoch, done) = timeline.inputs, timeline.locate(step)
    reader = inputs.for_training[2]
    lengths, targets = inputs.lengths, inputs.targets
    planned = np.bincount(timeline.first.full_packs.samples, minlength=len(lengths)) > 0

    def count_samples(number: int) -> npt.NDArray[np.int64]:
        """Occurrences of each sample in an epoch, (N,)."""
        return np.asarray(planned if inputs.mixture is None else inputs.epoch_counts(number), np.int64)

    before, in_epoch = np.zeros((2, len(lengths)), np.int64)
    for number in range(epoch):
        before += count_samples(number)
    if done:
        remaining = timeline.stretch(step).plan.packs_from(done).samples
        in_epoch = count_samples(epoch) - np.bincount(remaining, minlength=len(lengths))
    parts = (np.split(each, reader.offsets[1:-1]) for each in (before, in_epoch, lengths, targets))
    sources = []
    for source, earlier, current, length, target in zip(begin_ledger(reader).sources, *parts, strict=True):
        counts = earlier + current
        sources.append(
            dataclasses.replace(
                source,
                before=RowCounts.of(earlier),
                epoch=RowCounts.of(current),
                num_samples=int(counts.sum()),
                tokens=int((counts * length).sum()),
                target_tokens=int((counts * target).sum()),
            )
        )
    return Ledger(step=step, epoch=epoch, sources=tuple(sources))


def begin_ledger(reader: CacheReader) -> Ledger:
    """The ledger of a run before its first step."""
    caches = zip(reader.directories, reader.manifests, np.diff(reader.offsets).tolist(), strict=True)
    sources = (SourceLedger.begin(storage.absolute(name), m.fingerprint, num) for name, m, num in caches)
    return Ledger(sources=tuple(sources))


@dataclass(frozen=True, eq=False)
class Replay:
    """A segment of a run, planned again.

    Args:
        stop: the first step after the segment, or the first that was not trained.
        timeline: its steps, numbered as in the run.
    """

    segment: Segment
    stop: int
    timeline: Timeline

    @property
    def reader(self) -> CacheReader:
        """The reader of its caches."""
        return self.timeline.inputs.for_training[2]

    def occurrences(self, position: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield step, epoch, rank, micro-batch and pack of the epoch's plan of each time that a sample was trained."""
        step = self.segment.first
        while step < self.stop:
            stretch = self.timeline.stretch(step)
            plan, stop = stretch.plan, min(stretch.stop, self.stop)
            for at in np.flatnonzero(plan.packs.samples == position):
                pack = int(np.searchsorted(plan.packs.offsets, at, side="right")) - 1
                number, rank, micro_batch = map(int, plan.steps.locations()[pack])
                if step <= stretch.first + number < stop:
                    yield stretch.first + number, stretch.epoch, rank, micro_batch, pack
            step = stop


def segments_of(output_dir: str) -> list[tuple[Segment, int]]:
    """The segments of a run, each with the first step after it; after the last, that is the number of trained steps."""
    segments = read_history(output_dir)
    # Log and checkpoints tell how many steps were trained.
    steps = [read_run_state(checkpoint).step for checkpoint in finished_checkpoints(output_dir)]
    path = os.path.join(output_dir, METRICS_NAME)
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            steps += [load_json(line)["step"] for line in file if line.endswith("\n")]
    stops = [*(segment.first for segment in segments[1:]), max([*steps, segments[-1].first])]
    return list(zip(segments, stops, strict=True))


def replay_segment(output_dir: str, segment: Segment, stop: int, model: str | None = None) -> Replay:
    """Plan a segment of a run again, and check that its fingerprints are the same.

    Args:
        stop: the first step that is not replayed.
        model: directory of its model, if that has moved.
    """
    _check_unchanged(segment)
    config = segment.train_config
    changes = {"resume_from_checkpoint": None, "data_change": "refuse", "cache_dir": None, "output_dir": output_dir}
    try:
        inputs = open_to_train(dataclasses.replace(config, **changes, model=model or config.model))  # type: ignore[arg-type]
    except ConfigError as error:
        if model is not None:
            raise
        raise ConfigError(
            f"the model of this run, {config.model}, cannot be read here: {error.message}",
            "Give its new directory: --model DIR.",
        ) from error
    change = None
    if segment.changed_at is not None:
        name = ledger_name(segment.changed_at)
        ledger = read_ledger(os.path.join(output_dir, HISTORY), name)
        if ledger is None or ledger.change is None:
            raise MismatchError(
                f"{output_dir}/{HISTORY} lacks {name}, the samples left at a change of data", "Restore it."
            )
        change = ledger.change
    state = inputs.state(segment.assignments[-1][1:])
    if (state.plan, state.steps) != (segment.plan, segment.steps):
        if config.plan is not None:
            raise MismatchError(
                f"{config.plan}, the --plan of {output_dir}, has changed since training: the fingerprint of "
                f"its packs was {segment.plan} and is {state.plan}",
                "Restore the original file: the samples of the run's steps are read from it.",
            )
        raise MismatchError(
            f"the steps of {output_dir} cannot be planned again: packtool {segment.version} planned different steps "
            "for the same options and caches",
            f"Inspect the run with that version{', on the same kind of hardware' if state.schedule else ''}.",
        )
    return Replay(segment, stop, Timeline.of(inputs, segment.assignments, change))


def _check_unchanged(segment: Segment) -> None:
    """Raise a MismatchError if a cache or the ``--plan`` of a segment is missing, or a cache has changed."""
    for directory, fingerprint, _ in segment.caches:
        try:
            current = Manifest.read(directory).fingerprint
        except MismatchError as error:
            raise MismatchError(
                f"the cache {directory} of this run is missing: {error.message}", "Restore it in that place."
            ) from error
        if current != fingerprint:
            raise MismatchError(
                f"the cache {directory} has changed since training: its fingerprint was {fingerprint} and is {current}",
                "Export it again with the original settings: steps can be planned again only from the same cache.",
            )
    if (plan := segment.train_config.plan) is not None:
        try:
            read_plan(plan)
        except PacktoolError as error:
            raise MismatchError(
                f"the --plan of this run is missing: {error.message}", "Restore it in that place."
            ) from error
