"""Files that record what a run has trained: its history, and the ledger of each checkpoint.

OUTPUT_DIR/history/
    run.json                    a segment for each time: options, caches, assignment of packs, fingerprints
    mix-120.yaml                the recipe of --mix as it was then, with absolute paths, of the segment behind step 120
    ledger-120.npz              what was trained before step 121, where the data changed there
    rows-<fingerprint>.npz      which file and row each sample of a cache was made of

The history is enough to plan any step again. ``packtool_ledger.npz`` in a checkpoint, and ``ledger-120.npz``, are
archives of numpy arrays, megabytes for 100M samples: ``told`` is JSON with names, totals and the last change of the
data; ``0.before.0``, ``0.epoch.0``, ... are planes of bits (``planning.ledger``) of the first cache, ``0.skipped`` its
rows that could not be loaded. Caches that the run no longer has come last.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool import storage
from packtool.cache.evaluation_file import plain_json
from packtool.cache.origins import read_origins
from packtool.cache.reader import CacheReader
from packtool.config.settings import load_json
from packtool.config.train import TrainConfig
from packtool.constants import VERSION
from packtool.errors import ConfigError, MismatchError
from packtool.planning.ledger import DataChange, Ledger, RowCounts, SourceLedger
from packtool.train.prepare.checkpoint import finished_checkpoints
from packtool.train.prepare.mixtures import portable_recipe
from packtool.train.prepare.output_dir import HISTORY
from packtool.train.prepare.result import non_default_options

_RUN = "run.json"
LEDGER_NAME = "packtool_ledger.npz"
_TOTALS = ("num_samples", "tokens", "target_tokens")
_Arrays = dict[str, npt.NDArray[Any]]
# How a run resumes does not change its steps.
_NOT_KEPT = ("resume_from_checkpoint", "resume_only_model", "overwrite_output_dir", "add_version", "dry_run")
_PATHS = ("model", "plan", "hardware", "mix")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The steps of a run from one start, or resumption, to the next.

    Args:
        first: its first step, 0-based.
        began: seconds since 1970.
        num_steps: of the run as planned then.
        config: options other than defaults, with absolute paths; that of ``--mix`` is the history's copy.
        caches: directory, fingerprint and number of samples of each.
        assignments: as ``RunState`` has them, at least one.
        changed_at: step after which the data last changed; None if they never did.
        plan, steps: fingerprints of the first epoch with these data.
        version: of packtool.
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
        """The options of the run; MismatchError if this version of packtool has other ones."""
        values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in self.config.items()}
        try:
            return TrainConfig(**values)
        except TypeError as error:
            raise MismatchError(
                f"the run was made by packtool {self.version}, which had other options: {error}",
                f"Look at it with that version; this is {VERSION}.",
            ) from error


def options_kept(config: TrainConfig) -> dict[str, Any]:
    """The options of a run that a history or a checkpoint records: those other than defaults, as JSON has them."""
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
    """The segments of a run, the first one first.

    Raises:
        ConfigError: if there is no such directory.
        MismatchError: if it holds no run, or one of an older packtool; or if the file is damaged.
    """
    if not os.path.isdir(output_dir):
        raise ConfigError(f"{output_dir}: there is no such directory")
    folder = os.path.join(output_dir, HISTORY)
    path = os.path.join(folder, _RUN)
    if not os.path.exists(path):
        older = finished_checkpoints(output_dir)
        raise MismatchError(
            f"{output_dir} keeps no history of its steps: "
            + ("an older packtool trained it, or it was streamed" if older else "no run on caches began there"),
            "Give the --output-dir of a run; of --add-version, one of its numbered folders.",
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
        raise MismatchError(f"{path} cannot be read: {error!r}", "Copy it again.") from error


def begin_segment(output_dir: str, segment: Segment, checkpoint: str | None) -> None:
    """Add a segment to the history, without those whose steps a run that resumes from a checkpoint trains again."""
    folder = os.path.join(output_dir, HISTORY)
    storage.make_directory(folder)
    before: list[Segment] = []
    if checkpoint is not None:
        origin = os.path.dirname(os.path.abspath(checkpoint))
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
    """The file of a history that has the ledger of a change of the data after so many steps."""
    return f"ledger-{step}.npz"


def keep_origins(reader: CacheReader, history: str) -> None:
    """Record the rows of the samples of local caches, so that samples can be matched when these are gone.

    Those of remote caches are read when they are needed: it would copy all of their shards at once.
    """
    for cache, (directory, manifest) in enumerate(zip(reader.directories, reader.manifests, strict=True)):
        path = origins_path(history, manifest.fingerprint)
        if not storage.is_remote(directory) and not os.path.exists(path):
            storage.make_directory(history)
            read_origins(reader, cache).write(path)


def write_ledger(directory: str, ledger: Ledger, name: str = LEDGER_NAME) -> None:
    """Write a ledger into a checkpoint, or another directory."""
    arrays: _Arrays = {}
    header = {
        "step": ledger.step,
        "epoch": ledger.epoch,
        "sources": [_put(arrays, number, source) for number, source in enumerate(ledger.sources)],
        "retired": [_put(arrays, len(ledger.sources) + n, source) for n, source in enumerate(ledger.retired)],
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
            listed = [*header["sources"], *header["retired"]]
            sources = tuple(_take(arrays, number, source) for number, source in enumerate(listed))
            num = len(header["sources"])
            change = None
            if header["change"] is not None:
                sizes = [source.num for source in sources[:num]]
                left, trained = (
                    tuple(RowCounts(size, _read_planes(arrays, f"{n}.{what}")) for n, size in enumerate(sizes))
                    for what in ("left", "trained")
                )
                step, epoch, *stage = header["change"]
                change = DataChange(step, epoch, left, _stage(*stage), trained if stage else ())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise MismatchError(f"{path} cannot be read: {error}", "Give another checkpoint.") from error
    return Ledger(
        step=header["step"],
        epoch=header["epoch"],
        sources=sources[:num],
        retired=sources[num:],
        change=change,
        stage=_stage(header.get("stage")),
    )


def _stage(stage: list[int] | None = None) -> tuple[int, int] | None:
    return None if stage is None else (stage[0], stage[1])


def _put(arrays: _Arrays, number: int, source: SourceLedger) -> dict[str, Any]:
    arrays |= _planes(f"{number}.before", source.before) | _planes(f"{number}.epoch", source.epoch)
    arrays[f"{number}.skipped"] = source.skipped
    totals = {name: getattr(source, name) for name in _TOTALS}
    return {"directory": source.directory, "fingerprint": source.fingerprint, "num": source.num, **totals}


def _take(arrays: Any, number: int, fields: dict[str, Any]) -> SourceLedger:
    num = fields.pop("num")
    return SourceLedger(
        before=RowCounts(num, _read_planes(arrays, f"{number}.before")),
        epoch=RowCounts(num, _read_planes(arrays, f"{number}.epoch")),
        skipped=arrays[f"{number}.skipped"],
        **fields,
    )


def _planes(name: str, counts: RowCounts) -> _Arrays:
    return {f"{name}.{bit}": plane for bit, plane in enumerate(counts.planes)}


def _read_planes(arrays: Any, name: str) -> tuple[npt.NDArray[np.uint8], ...]:
    bits = itertools.takewhile(lambda bit: f"{name}.{bit}" in arrays, itertools.count())
    return tuple(arrays[f"{name}.{bit}"] for bit in bits)
