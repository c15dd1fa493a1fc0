"""The history of a run, the ledger of each checkpoint, and steps planned again from these.

OUTPUT_DIR/history/
    run.json                    a segment for each time: options, caches, assignment of packs, fingerprints
    mix-120.yaml                recipe of --mix, with absolute paths, of the segment that starts after step 120
    ledger-120.npz              ledger of all samples trained before a change of the data after step 120
    rows-<fingerprint>.npz      file and row of each sample of a cache
    losses-0.npz                mean loss of each sample in the first epoch, see ``sample_losses``

A plan is a pure function of options and caches, so the history is enough to plan any step again.
``packtool_ledger.npz`` in a checkpoint, and ``ledger-120.npz``, are archives of numpy arrays, megabytes for 100M
samples: ``told`` is JSON with names, totals and the last change of the data; ``0.before.0``, ``0.epoch.0``, ... are
bit planes of counts (``planning.ledger``) of the first cache, ``0.skipped`` its rows that could not be loaded. Caches
that were removed from the run come last.
"""

from __future__ import annotations

import dataclasses
import io
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
from packtool.cache.origins import DAMAGE_ERRORS, read_origins
from packtool.cache.plan_file import read_plan
from packtool.cache.reader import CacheReader
from packtool.config.settings import load_json
from packtool.config.train import TrainConfig
from packtool.constants import VERSION
from packtool.errors import ConfigError, MismatchError, PacktoolError
from packtool.planning.ledger import DataChange, Ledger, RowCounts, SourceLedger
from packtool.train.prepare.caches import portable_recipe
from packtool.train.prepare.checkpoint import Assignment, finished_checkpoints, read_run_state
from packtool.train.prepare.inputs import Inputs
from packtool.train.prepare.opening import open_to_train
from packtool.train.prepare.output_dir import HISTORY, METRICS_NAME
from packtool.train.prepare.result import non_default_options
from packtool.train.prepare.sample_losses import LossRecord, discard_later_losses
from packtool.train.prepare.timeline import EpochSpan, Timeline

_RUN = "run.json"
LEDGER_NAME = "packtool_ledger.npz"
_TOTALS = ("directory", "fingerprint", "num", "num_samples", "tokens", "target_tokens")
_HEADER = "told"  # the name in the file
_Arrays = dict[str, npt.NDArray[Any]]
# Options of resuming, which do not change steps.
_NOT_RECORDED = (
    *("locked", "resume_from_checkpoint", "resume_only_model", "overwrite_output_dir", "add_version", "dry_run"),
)
_PATH_OPTIONS = ("model", "plan", "hardware", "mix")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The steps of a run between two starts or resumptions.

    Args:
        first: its first step, 0-based.
        began: seconds since 1970.
        num_steps: of the whole run, as planned at this start.
        config: options other than defaults, with absolute paths; ``--mix`` names the history's copy.
        caches: directory, fingerprint and number of samples of each.
        assignments: of packs since the data last changed, at least one.
        changed_at: step after which the data last changed; None if they never did.
        plan, steps: fingerprints of the first epoch with these data.
    """

    first: int
    num_steps: int
    config: Mapping[str, Any]
    caches: tuple[tuple[str, str, int], ...]
    assignments: tuple[Assignment, ...]
    changed_at: int | None
    plan: str
    steps: str
    began: float = field(default_factory=time.time)
    version: str = VERSION


def train_config_of(recorded: Mapping[str, Any], version: str) -> TrainConfig:
    """The settings of a run from ``recorded_options``; MismatchError if this version of packtool lacks one."""
    options: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in recorded.items()}
    try:
        return TrainConfig(**options)
    except TypeError as error:
        raise MismatchError(
            f"the run was trained with packtool {version}, which had other options: {error}",
            f"Inspect it with that version; this is {VERSION}.",
        ) from error


def recorded_options(config: TrainConfig) -> dict[str, Any]:
    """The options of a run for its history and checkpoints: those other than defaults, as JSON values."""
    recorded: dict[str, Any] = {}
    for name, value in non_default_options(config).items():
        if name in _NOT_RECORDED:
            continue
        if name in _PATH_OPTIONS and os.path.exists(value):
            value = storage.absolute(value)
        if name == "cached_dataset":
            value = [storage.absolute(directory) for directory in value]
        recorded[name] = plain_json(dict(value) if isinstance(value, Mapping) else value)
    return recorded


def read_history(output_dir: str) -> list[Segment]:
    """Read the segments of a run, in order; MismatchError if there is no history, or its file is damaged."""
    if not os.path.isdir(output_dir):
        raise ConfigError(f"{output_dir}: there is no such directory")
    path = os.path.join(output_dir, HISTORY, _RUN)
    if not os.path.exists(path):
        reason = "no run on caches was started there"
        if finished_checkpoints(output_dir):
            reason = "it was trained by an older packtool, or from streamed rows"
        raise MismatchError(
            f"{output_dir} has no history of its steps: {reason}",
            "Give the --output-dir of a run; with --add-version, one of its numbered folders.",
        )
    try:
        return _read_segments(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MismatchError(f"{path} cannot be read: {error!r}", "Restore the file from a copy of the run.") from error


def _read_segments(path: str) -> list[Segment]:
    """Read the segments in the file of a history; any error if it is damaged."""
    with open(path, encoding="utf-8") as file:
        segments = load_json(file.read())["segments"]
    for fields in segments:
        # JSON has lists in place of tuples, and the recipe's name without its folder.
        fields["caches"] = tuple(map(tuple, fields["caches"]))
        fields["assignments"] = tuple(Assignment(*each) for each in fields["assignments"])
        if "mix" in fields["config"]:
            fields["config"]["mix"] = os.path.join(os.path.dirname(path), fields["config"]["mix"])
    return [Segment(**fields) for fields in segments]


def has_history(output_dir: str) -> bool:
    """Return whether an output directory has a history."""
    return os.path.exists(os.path.join(output_dir, HISTORY, _RUN))


def history_directory(checkpoint: str) -> str:
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
    for number, source in enumerate((*ledger.sources, *ledger.retired)):
        arrays |= _bit_planes(f"{number}.before", source.before)
        arrays |= _bit_planes(f"{number}.epoch", source.epoch)
        arrays[f"{number}.skipped"] = source.skipped
    if ledger.change is not None:
        for number, counts in enumerate(ledger.change.left):
            arrays |= _bit_planes(f"{number}.left", counts)
        for number, counts in enumerate(ledger.change.trained):
            arrays |= _bit_planes(f"{number}.trained", counts)
    arrays[_HEADER] = np.frombuffer(json.dumps(_ledger_header(ledger)).encode(), np.uint8)
    archive = io.BytesIO()
    np.savez_compressed(archive, **arrays)  # type: ignore[arg-type]
    storage.publish(os.path.join(directory, name), archive.getvalue())


def _ledger_header(ledger: Ledger) -> dict[str, Any]:
    """The values of a ledger that are no arrays, as JSON values."""
    header: dict[str, Any] = {
        "step": ledger.step,
        "epoch": ledger.epoch,
        "sources": [_totals(source) for source in ledger.sources],
        "retired": [_totals(source) for source in ledger.retired],
        "change": None,
    }
    if ledger.stage is not None:
        header["stage"] = ledger.stage
    change = ledger.change
    if change is not None:
        header["change"] = [change.step, change.epoch]
        if change.stage is not None:
            header["change"].append(change.stage)
    return header


def _totals(source: SourceLedger) -> dict[str, Any]:
    """The name, size and totals of a cache in a ledger."""
    return {field: getattr(source, field) for field in _TOTALS}


def read_ledger(directory: str, name: str = LEDGER_NAME) -> Ledger | None:
    """Read the ledger of a checkpoint, None without one; MismatchError if it is damaged."""
    path = os.path.join(directory, name)
    if not os.path.exists(path):
        return None
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return _ledger_of(arrays)
    except DAMAGE_ERRORS as error:
        raise MismatchError(f"{path} cannot be read: {error}", "Give another checkpoint.") from error


def _ledger_of(arrays: Any) -> Ledger:
    """The ledger in the arrays of its file."""
    header = load_json(arrays[_HEADER].tobytes())
    num_sources = len(header["sources"])
    all_sources = _read_sources([*header["sources"], *header["retired"]], arrays)
    sources, retired = all_sources[:num_sources], all_sources[num_sources:]
    change = None
    if header["change"] is not None:
        change = _read_change(header["change"], arrays, [source.num for source in sources])
    return Ledger(
        step=header["step"],
        epoch=header["epoch"],
        sources=tuple(sources),
        retired=tuple(retired),
        change=change,
        stage=None if header.get("stage") is None else tuple(header["stage"]),
    )


def _read_sources(totals: Sequence[dict[str, Any]], arrays: Any) -> list[SourceLedger]:
    """The caches in a ledger file, from their ``_totals`` and the arrays of the file."""
    sources = []
    for number, fields in enumerate(totals):
        num_samples = fields.pop("num")
        before = _read_counts(arrays, f"{number}.before", num_samples)
        in_epoch = _read_counts(arrays, f"{number}.epoch", num_samples)
        skipped = arrays[f"{number}.skipped"]
        sources.append(SourceLedger(before=before, epoch=in_epoch, skipped=skipped, **fields))
    return sources


def _read_change(change: list[Any], arrays: Any, sizes: list[int]) -> DataChange:
    """The change of the data in a ledger file, from its ``_ledger_header``; ``sizes`` of the caches are in samples."""
    step, epoch, *stages = change
    left = tuple(_read_counts(arrays, f"{number}.left", size) for number, size in enumerate(sizes))
    if not stages:
        return DataChange(step, epoch, left)
    trained = tuple(_read_counts(arrays, f"{number}.trained", size) for number, size in enumerate(sizes))
    return DataChange(step, epoch, left, stage=tuple(stages[0]), trained=trained)


def _bit_planes(name: str, counts: RowCounts) -> _Arrays:
    """The bit planes of counts, by their names in a ledger file: ``name.0``, ``name.1``, ..."""
    return {f"{name}.{bit}": plane for bit, plane in enumerate(counts.planes)}


def _read_counts(arrays: Any, name: str, num_samples: int) -> RowCounts:
    """The counts whose bit planes ``_bit_planes`` has written under ``name``."""
    planes: list[npt.NDArray[np.uint8]] = []
    while (key := f"{name}.{len(planes)}") in arrays:
        planes.append(arrays[key])
    return RowCounts(num_samples, tuple(planes))


Skipped = Sequence[tuple[int, int]]
"""Samples that could not be loaded: the step, 0-based, and the sample's position in the caches."""


class RunRecord:
    """Writer of the history and the ledgers of a run, on its first rank.

    Args:
        ledger: of all samples trained before this start; the attribute includes steps up to the last checkpoint.
        checkpoint: that the run resumes from, if any.
    """

    def __init__(self, ledger: Ledger, timeline: Timeline, segment: Segment, checkpoint: str | None) -> None:
        self.ledger, self._checkpoint = ledger, checkpoint
        self._timeline, self._segment = timeline, segment
        self.losses: LossRecord

    def begin(self, output_dir: str) -> None:
        """Write the history before the first step; a resumed run replaces segments that it trains again."""
        folder = os.path.join(output_dir, HISTORY)
        storage.make_directory(folder)
        segments = self._copy_earlier_segments(output_dir)
        segments.append(_with_recipe_copy(self._segment, folder))
        content = {"segments": [dataclasses.asdict(each) for each in segments]}
        storage.publish(os.path.join(folder, _RUN), (json.dumps(content, indent=1) + "\n").encode())
        if self.ledger.change is not None:
            write_ledger(folder, self.ledger, ledger_name(self.ledger.change.step))
        discard_later_losses(folder, None if self._checkpoint is None else read_ledger(self._checkpoint))
        self.losses = LossRecord(folder, self._timeline)

    def _copy_earlier_segments(self, output_dir: str) -> list[Segment]:
        """Return the segments before this one, and copy their history if it is that of another output directory."""
        if self._checkpoint is None:
            return []
        resumed_dir = os.path.dirname(os.path.abspath(self._checkpoint))
        if not has_history(resumed_dir):
            return []
        segments = [each for each in read_history(resumed_dir) if each.first < self._segment.first]
        if os.path.realpath(resumed_dir) != os.path.realpath(output_dir):
            folder = os.path.join(output_dir, HISTORY)
            shutil.copytree(os.path.join(resumed_dir, HISTORY), folder, dirs_exist_ok=True)
        return segments

    def save(self, checkpoint: str, step: int, skipped: Skipped = (), left_out: Sequence[int] = ()) -> None:
        """Write the ledger after ``step`` steps into a checkpoint; arguments are as for ``ledger_after``."""
        # The rows of local caches are recorded, to match samples after a cache was removed. Those of remote caches are
        # read only when they are needed, because reading them copies all shards.
        reader, history = self._timeline.inputs.for_training.reader, history_directory(checkpoint)
        for cache, (directory, manifest) in enumerate(zip(reader.directories, reader.manifests, strict=True)):
            path = origins_path(history, manifest.fingerprint)
            if not storage.is_remote(directory) and not os.path.exists(path):
                storage.make_directory(history)
                read_origins(reader, cache).write(path)
        self.ledger = ledger_after(self.ledger, self._timeline, step, skipped, left_out)
        write_ledger(checkpoint, self.ledger)
        self.losses.write()


def _with_recipe_copy(segment: Segment, folder: str) -> Segment:
    """Copy the recipe of a segment into the history ``folder``, as the user may change the file."""
    recipe_path = segment.config.get("mix")
    if recipe_path is None:
        return segment
    name = f"mix-{segment.first}.yaml"
    storage.publish(os.path.join(folder, name), portable_recipe(recipe_path))
    return dataclasses.replace(segment, config={**segment.config, "mix": name})


def ledger_after(
    ledger: Ledger, timeline: Timeline, step: int, skipped: Skipped = (), left_out: Sequence[int] = ()
) -> Ledger:
    """Count the steps up to ``step``, except ``skipped`` samples and the steps ``left_out``; return the new ledger."""
    inputs = timeline.inputs
    while ledger.step < step:
        span = timeline.span_at(ledger.step)
        ledger = _in_epoch(ledger, span.epoch)
        steps = range(ledger.step, min(span.stop_step, step))
        plan_steps = range(steps.start - span.first_step, steps.stop - span.first_step)
        untrained = _untrained_samples(span, steps, skipped, left_out)
        ledger = ledger.plus(span.plan, plan_steps, inputs.lengths, inputs.targets, untrained)
    next_epoch, _ = timeline.locate(ledger.step)
    return dataclasses.replace(_in_epoch(ledger, next_epoch), stage=timeline.stage_of(ledger.step))


def _in_epoch(ledger: Ledger, epoch: int) -> Ledger:
    """The ledger at the begin of ``epoch``, which is its own or a later one."""
    while ledger.epoch < epoch:
        ledger = ledger.in_next_epoch()
    return ledger


def _untrained_samples(
    span: EpochSpan, steps: range, skipped: Skipped, left_out: Sequence[int]
) -> npt.NDArray[np.int64]:
    """Positions, in the caches, of the samples of these steps of an epoch that were planned and not trained, (K,)."""
    skipped_samples = [sample for number, sample in skipped if number in steps and number not in left_out]
    untrained = [np.array(skipped_samples, np.int64)]
    for number in left_out:
        if number in steps:
            plan_step = number - span.first_step
            untrained.append(span.plan.samples_of(plan_step, plan_step + 1))
    return np.concatenate(untrained)


def ledger_of_plan(timeline: Timeline, step: int) -> Ledger:
    """Make the ledger of a run after ``step`` steps from its plan, for checkpoints of old versions that have none.

    A ledger has training counts of the samples of each cache. All planned samples count as trained.
    """
    inputs = timeline.inputs
    reader = inputs.for_training.reader
    before_epoch, in_epoch = _planned_counts(timeline, step)  # of the samples of all caches, (N,)
    training_counts = before_epoch + in_epoch
    sources = []
    for number, untrained_source in enumerate(begin_ledger(reader).sources):
        of_cache = slice(reader.offsets[number], reader.offsets[number + 1])
        cache_counts = training_counts[of_cache]
        source = dataclasses.replace(
            untrained_source,
            before=RowCounts.of(before_epoch[of_cache]),
            epoch=RowCounts.of(in_epoch[of_cache]),
            num_samples=int(cache_counts.sum()),
            tokens=int((cache_counts * inputs.lengths[of_cache]).sum()),
            target_tokens=int((cache_counts * inputs.targets[of_cache]).sum()),
        )
        sources.append(source)
    current_epoch, _ = timeline.locate(step)
    return Ledger(step=step, epoch=current_epoch, sources=tuple(sources))


def _planned_counts(timeline: Timeline, step: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Count how often the plan trains each of N samples in the first ``step`` steps of a run.

    Returns two arrays (N,): counts of earlier epochs, and of the epoch that step ``step`` belongs to.
    """
    num_samples = len(timeline.inputs.lengths)
    current_epoch, num_steps_done = timeline.locate(step)  # steps since packs were assigned
    before_epoch = np.zeros(num_samples, np.int64)
    for epoch in range(current_epoch):
        before_epoch += _counts_of_full_epoch(timeline, epoch)
    if num_steps_done == 0:
        return before_epoch, np.zeros(num_samples, np.int64)

    remaining_samples = timeline.span_at(step).plan.packs_from(num_steps_done).samples
    num_remaining = np.bincount(remaining_samples, minlength=num_samples)
    return before_epoch, _counts_of_full_epoch(timeline, current_epoch) - num_remaining


def _counts_of_full_epoch(timeline: Timeline, epoch: int) -> npt.NDArray[np.int64]:
    """Count how often an epoch trains each sample, (N,)."""
    inputs = timeline.inputs
    if inputs.mixture is not None:
        return inputs.epoch_counts(epoch)
    counts = np.zeros(len(inputs.lengths), np.int64)
    counts[timeline.first_plan.full_packs.samples] = 1  # without a mixture, every epoch has the same samples
    return counts


def begin_ledger(reader: CacheReader) -> Ledger:
    """The ledger of a run before its first step."""
    caches = zip(reader.directories, reader.manifests, np.diff(reader.offsets).tolist(), strict=True)
    sources = [SourceLedger.begin(storage.absolute(name), manifest.fingerprint, num) for name, manifest, num in caches]
    return Ledger(sources=tuple(sources))


@dataclass(frozen=True, eq=False)
class Replay:
    """A segment of a run, planned again; ``stop`` is the first step after it, or the first that was not trained."""

    segment: Segment
    stop: int
    timeline: Timeline

    @property
    def reader(self) -> CacheReader:
        return self.timeline.inputs.for_training.reader

    def positions_of(self, fingerprint: str, row: int) -> list[int]:
        """Return the positions of sample ``row`` of a cache, one for each time that the run names the cache."""
        starts = zip(self.segment.caches, self.reader.offsets.tolist(), strict=False)  # the last offset is the end
        return [start + row for (_, cache_fingerprint, _), start in starts if cache_fingerprint == fingerprint]

    def occurrences(self, position: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield step, epoch, rank, micro-batch and pack of the epoch's plan of each time that a sample was trained."""
        start = self.segment.first
        while start < self.stop:
            span = self.timeline.span_at(start)
            plan, stop = span.plan, min(span.stop_step, self.stop)
            for index in np.flatnonzero(plan.packs.samples == position):
                pack = int(np.searchsorted(plan.packs.offsets, index, side="right")) - 1
                plan_step, rank, micro_batch = map(int, plan.steps.locations()[pack])
                step = span.first_step + plan_step
                if start <= step < stop:
                    yield step, span.epoch, rank, micro_batch, pack
            start = stop


def segments_of(output_dir: str) -> list[tuple[Segment, int]]:
    """The segments of a run, each with the first step after it; after the last, that is the number of trained steps."""
    segments = read_history(output_dir)
    # The last segment has trained as many steps as the log and the checkpoints record.
    recorded_steps = [segments[-1].first]
    recorded_steps += [read_run_state(checkpoint).step for checkpoint in finished_checkpoints(output_dir)]
    path = os.path.join(output_dir, METRICS_NAME)
    if os.path.exists(path):
        with open(path, encoding="utf-8") as file:
            recorded_steps += [load_json(line)["step"] for line in file if line.endswith("\n")]
    stops = [*(segment.first for segment in segments[1:]), max(recorded_steps)]
    return list(zip(segments, stops, strict=True))


def replay_segment(output_dir: str, segment: Segment, stop: int, model: str | None = None) -> Replay:
    """Plan steps of an earlier run again, to find out which samples they trained.

    Args:
        segment: the steps between two starts of the run, with the options of that time.
        stop: the first step after it, or the first that was not trained.
        model: directory of the model, if it was moved since.

    Raises:
        MismatchError: if caches or ``--plan`` are missing or have changed, or if the plan differs from that of the run.
    """
    _check_files(segment)
    recorded_config = train_config_of(segment.config, segment.version)
    config = dataclasses.replace(
        recorded_config,
        output_dir=output_dir,
        model=recorded_config.model if model is None else model,
        cache_dir=None,
        # A change of the data is read from the history below, and not from a checkpoint.
        resume_from_checkpoint=None,
        data_change="refuse",
    )
    try:
        inputs = open_to_train(config)
    except ConfigError as error:
        if model is not None:
            raise
        raise ConfigError(
            f"the model of this run, {config.model}, cannot be read here: {error.message}",
            "Give its new directory: --model DIR.",
        ) from error
    data_change = _read_data_change(output_dir, segment)
    _check_same_plan(output_dir, segment, inputs)
    timeline = Timeline.of(inputs, segment.assignments, data_change)
    return Replay(segment, stop, timeline)


def _read_data_change(output_dir: str, segment: Segment) -> DataChange | None:
    """The last change of the data before a segment; None without any, MismatchError if its record is missing."""
    if segment.changed_at is None:
        return None
    name = ledger_name(segment.changed_at)
    ledger = read_ledger(os.path.join(output_dir, HISTORY), name)
    if ledger is None or ledger.change is None:
        raise MismatchError(f"{output_dir}/{HISTORY} lacks {name}, the samples left at a change of data", "Restore it.")
    return ledger.change


def _check_same_plan(output_dir: str, segment: Segment, inputs: Inputs) -> None:
    """Check by fingerprints that ``inputs`` give the packs and steps that the run in ``output_dir`` trained.

    ``segment`` records steps of the run and their fingerprints. Raises a MismatchError if they differ.
    """
    last_assignment = segment.assignments[-1]  # earlier ones are of segments before it
    planned_now = inputs.state(last_assignment.batch_shape)
    if planned_now.plan == segment.plan and planned_now.steps == segment.steps:
        return

    plan_path = segment.config.get("plan")
    if plan_path is not None:
        raise MismatchError(
            f"{plan_path}, the --plan of {output_dir}, has changed since training: the fingerprint of "
            f"its packs was {segment.plan} and is {planned_now.plan}",
            "Restore the original file: the samples of the run's steps are read from it.",
        )
    # A schedule, such as that of Skrull, may depend on the hardware.
    same_hardware = ", on the same kind of hardware" if planned_now.schedule else ""
    raise MismatchError(
        f"the steps of {output_dir} cannot be planned again: packtool {segment.version} planned different steps "
        "for the same options and caches",
        f"Inspect the run with that version{same_hardware}.",
    )


def _check_files(segment: Segment) -> None:
    """Check that the caches and the ``--plan`` of a segment of a run exist, and that the caches are unchanged.

    Raises a MismatchError otherwise.
    """
    for directory, recorded_fingerprint, _ in segment.caches:
        try:
            fingerprint = Manifest.read(directory).fingerprint
        except MismatchError as error:
            raise MismatchError(
                f"the cache {directory} of this run is missing: {error.message}", "Restore it in that place."
            ) from error
        if fingerprint != recorded_fingerprint:
            raise MismatchError(
                f"the cache {directory} has changed since training: its fingerprint was {recorded_fingerprint} and is "
                f"{fingerprint}",
                "Export it again with the original settings: steps can be planned again only from the same cache.",
            )

    plan_path = segment.config.get("plan")
    if plan_path is None:
        return
    try:
        read_plan(plan_path)
    except PacktoolError as error:
        raise MismatchError(
            f"the --plan of this run is missing: {error.message}", "Restore it in that place."
        ) from error
