"""What a run was made of, each time that it began or went on: enough to plan any of its steps anew.

OUTPUT_DIR/history/
    run.json                    a segment for each time: options, caches, assignment of packs, fingerprints
    mix-120.yaml                the recipe of --mix as it was then, with absolute paths, of the segment behind step 120
    ledger-120.npz              what was trained before step 121, where the data changed there
    rows-<fingerprint>.npz      which file and row each sample of a cache was made of
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packtool import storage
from packtool.cache.evaluation_file import plain_json
from packtool.config.settings import load_json
from packtool.config.train import TrainConfig
from packtool.constants import VERSION
from packtool.errors import ConfigError, MismatchError
from packtool.train.prepare.checkpoint import finished_checkpoints
from packtool.train.prepare.data_change import HISTORY
from packtool.train.prepare.mixtures import recipe_of_anywhere
from packtool.train.prepare.result import options_given

_RUN = "run.json"
# Where and how a run goes on says nothing about what its steps hold.
_NOT_KEPT = ("resume_from_checkpoint", "resume_only_model", "overwrite_output_dir", "add_version", "dry_run")
_PATHS = ("model", "plan", "hardware", "mix")


@dataclass(frozen=True, kw_only=True)
class Segment:
    """The steps from one start of a run to the next.

    Args:
        first: step that it begins after: 0 for a new run.
        began: seconds since 1970.
        num_steps: of the whole run, as it was planned then.
        config: options that are not their defaults; paths are absolute, that of ``--mix`` is the history's copy.
        caches: directory, fingerprint and number of samples of each.
        assignments: as ``RunState`` has them, at least one.
        changed_at: step after which the data last changed; None where they never did.
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
        """The options of the run.

        Raises:
            MismatchError: if another packtool had other ones.
        """
        values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in self.config.items()}
        try:
            return TrainConfig(**values)
        except TypeError as error:
            raise MismatchError(
                f"the run was made by packtool {self.version}, which had other options: {error}",
                f"Look at it with that version; this is {VERSION}.",
            ) from error


def options_kept(config: TrainConfig) -> dict[str, Any]:
    """The options of a run that are not their defaults, as JSON has them."""
    kept: dict[str, Any] = {}
    for name, value in options_given(config).items():
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
    """Write down that a run begins, or goes on from a checkpoint; segments of steps that it trains anew are dropped.

    Raises:
        StorageError: if it cannot be written.
    """
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
        storage.publish(os.path.join(folder, name), recipe_of_anywhere(mix))
        segment = dataclasses.replace(segment, config={**segment.config, "mix": name})
    told = {"segments": [dataclasses.asdict(each) for each in (*before, segment)]}
    storage.publish(os.path.join(folder, _RUN), (json.dumps(told, indent=1) + "\n").encode())


def has_history(output_dir: str) -> bool:
    """Whether a directory is that of a run which keeps a history."""
    return os.path.exists(os.path.join(output_dir, HISTORY, _RUN))
