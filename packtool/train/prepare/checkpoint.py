"""Checkpoints: their state, whether a run may resume from them, and whether their files are intact.

OUTPUT_DIR/checkpoint-120/
    model or adapter, config          written by transformers and peft
    optimizer, scheduler, RNG states  written by transformers
    tokenizer and processor files     copies of the model's
    packtool_state.json               written last: without it the checkpoint is unfinished

Sizes and checksums of files are recorded when a checkpoint is finished, and compared before a run resumes from it:
safetensors and torch read changed bytes without an error, and transformers resumes without a missing optimizer state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import resource
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

from packtool.config.plan import PlanConfig
from packtool.config.settings import load_json
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, MismatchError, PacktoolError, StorageError

Checksums = Mapping[str, tuple[int, int]]
"""Size in bytes and CRC-32 of files, by their paths inside a checkpoint."""

NEWEST = "true"
"""The value of ``--resume-from-checkpoint`` that names the newest intact checkpoint."""

ONLY_MODEL = "--resume-only-model true loads only its weights, and starts with a new optimizer and schedule."

# Files that a resumed run does not read.
_NOT_READ = re.compile(
    r"(tokenizer|special_tokens_map|added_tokens|vocab|merges|chat_template|preprocessor_config|processor_config"
    r"|video_preprocessor_config|spiece|sentencepiece|generation_config|README|training_args)[^/]*"
    r"|packtool_state\.json(\.part)?"
)
_WEIGHTS = re.compile(r"(model|adapter|pytorch_model|master_weights)[^/]*(/.*)?|global_step.*")
_NEEDED = {
    "the optimizer's states": re.compile(r"optimizer[^/]*(\.pt|\.bin|/.*)|global_step.*"),
    "the schedule": re.compile(r"scheduler\.pt|global_step.*"),
    "the random states": re.compile(r"rng_state.*\.pth"),
    "the Trainer's state": re.compile(r"trainer_state\.json"),
}
_CRC_BLOCK_BYTES = 2**26
_NO_SPACE_WORDS = ("No space left on device", "Disk quota exceeded", "File too large")
_TORCH_WORDS = ("PytorchStreamWriter", "unexpected pos", "inline_container")  # torch does not say why a write failed


def checksums_of(checkpoint: str) -> dict[str, tuple[int, int]]:
    """Size and checksum of each file that a resumed run reads."""
    names = [name for name in _files(checkpoint) if not _NOT_READ.fullmatch(name)]
    return {name: (os.path.getsize(os.path.join(checkpoint, name)), crc_of(checkpoint, name)) for name in names}


def crc_of(checkpoint: str, name: str) -> int:
    """CRC-32 of the CRC-32s of a file's 64 MiB blocks, which several threads read."""
    path = os.path.join(checkpoint, name)

    def crc_of_block(start: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(start)
            return zlib.crc32(file.read(_CRC_BLOCK_BYTES)).to_bytes(4, "little")

    starts = range(0, max(os.path.getsize(path), 1), _CRC_BLOCK_BYTES)  # an empty file has one empty block
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return zlib.crc32(b"".join(threads.map(crc_of_block, starts)))


def find_damage(checkpoint: str, checksums: Checksums, *, only_model: bool = False) -> Iterator[str]:
    """Yield a sentence for each missing or changed file of a checkpoint, by the ``checksums`` of the finished one."""
    for name, (size, crc) in checksums.items():
        if only_model and not _WEIGHTS.fullmatch(name):
            continue
        path = os.path.join(checkpoint, name)
        if not os.path.isfile(path):
            yield f"{name} is missing"
        elif (num_bytes := os.path.getsize(path)) != size:
            yield f"{name} has {num_bytes:,} bytes instead of {size:,}"
        elif crc_of(checkpoint, name) != crc:
            yield f"{name} has changed: its checksum differs"


def check_resumable(checkpoint: str, rank: int, world_size: int) -> None:
    """Raise a MismatchError if a rank lacks files to resume exactly, as in checkpoints of ``--save-only-model``."""
    names = _files(checkpoint)
    missing = [what for what, pattern in _NEEDED.items() if not any(pattern.fullmatch(name) for name in names)]
    rng_files = [name for name in names if re.fullmatch(r"rng_state_\d+\.pth", name)]
    if len(rng_files) == world_size > 1 and f"rng_state_{rank}.pth" not in rng_files:
        missing.append(f"the random states of rank {rank}")
    if missing:
        raise MismatchError(f"{checkpoint} cannot be resumed from: it lacks {', '.join(missing)}", ONLY_MODEL)


_MAKE_ROOM = (
    "Older checkpoints are unchanged. Free some space, or keep fewer checkpoints with --save-total-limit, and resume "
    "with --resume-from-checkpoint true."
)


@contextlib.contextmanager
def saving(checkpoint: str, remedy: str = _MAKE_ROOM, *, num_bytes: int | None = None) -> Iterator[None]:
    """Turn errors of writing a directory, of about ``num_bytes``, into a StorageError, and remove the directory."""
    try:
        yield
    except PacktoolError:
        raise
    except Exception as error:
        # safetensors and torch have their own classes for errors of the file system.
        if not isinstance(error, OSError) and not any(word in str(error) for word in (*_NO_SPACE_WORDS, *_TORCH_WORDS)):
            raise
        reason = _write_failure(error, checkpoint, num_bytes)
        shutil.rmtree(checkpoint, ignore_errors=True)
        raise StorageError(f"{checkpoint} could not be written: {reason}", remedy) from error


def _write_failure(error: Exception, directory: str, num_bytes: int | None) -> str:
    """The reason why a directory could not be written, with needed and free space; arguments as for ``saving``."""
    reason = next((words for words in _NO_SPACE_WORDS if words in str(error)), None)
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    has_limit = limit != resource.RLIM_INFINITY
    if reason is None:
        if isinstance(error, OSError):
            return str(error)  # not about space
        reason = "File too large" if has_limit else "No space left on device"
    if reason == "File too large" and has_limit:
        return f"{reason}: files may have {_megabytes(limit)} at most; raise the limit with ulimit -f unlimited"
    written = sum(os.path.getsize(os.path.join(directory, name)) for name in _files(directory))
    parent = os.path.dirname(os.path.abspath(directory))
    needed = f"more than {_megabytes(written)}" if num_bytes is None else f"about {_megabytes(max(num_bytes, written))}"
    free = written + shutil.disk_usage(parent).free  # the unfinished directory will be removed
    return f"{reason}: it needs {needed}, and {parent} had {_megabytes(free)} free (a quota may allow less)"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


@contextlib.contextmanager
def loading(checkpoint: str, what: str) -> Iterator[None]:
    """Turn any error of reading a checkpoint into a MismatchError that says ``what`` could not be read."""
    try:
        yield
    except (PacktoolError, KeyboardInterrupt, MemoryError):
        raise
    except Exception as error:
        raise MismatchError(
            f"{what} of {checkpoint} cannot be read: {type(error).__name__}: {str(error)[:300]}",
            "Give another checkpoint to --resume-from-checkpoint.",
        ) from error


def _files(checkpoint: str) -> list[str]:
    paths = (os.path.join(folder, name) for folder, _, names in os.walk(checkpoint) for name in names)
    return sorted(os.path.relpath(path, checkpoint) for path in paths)


STATE_NAME = "packtool_state.json"
_ASSIGNMENTS = "dealings"  # in the file, as the first checkpoints had it
PREFIX = "checkpoint-"
# Not by the fields' names: a state's plan, schedule and streaming are other things than the options called so.
_FROM_OPTIONS = ("seed", "train_type", "packing", "per_device_train_batch_size", "master_weights", "shares_experts")

FROM_DATA = frozenset(("cache", "plan", "steps", "max_length", "packing_length", "shares_prefixes", "learning"))
"""Fields of a state that follow from the caches; with ``--data-change allow`` they may differ."""

# Files of tokenizer and processor; weights, configs and adapters are the checkpoint's own.
_PROCESSOR_FILE = re.compile(
    r"(tokenizer|special_tokens_map|added_tokens|vocab|merges|chat_template|preprocessor_config|processor_config"
    r"|video_preprocessor_config|spiece|sentencepiece)[^/]*\.(json|jinja|txt|model)"
)


class BatchShape(NamedTuple):
    """Data-parallel ranks, and micro-batches of each, that the packs of an optimizer step are assigned to."""

    world_size: int
    gradient_accumulation_steps: int
    batch_size: int

    @classmethod
    def of(cls, config: PlanConfig | TrainConfig, num_ranks: int) -> BatchShape:
        """The shape with ``num_ranks`` data-parallel ranks; ``--packs-per-step`` overrides the accumulation steps."""
        batch_size, packs_per_step = config.per_device_train_batch_size, config.packs_per_step
        if packs_per_step is None:
            return cls(num_ranks, config.gradient_accumulation_steps, batch_size)
        accumulation_steps, remainder = divmod(packs_per_step, num_ranks * batch_size)
        if remainder:
            ranks = "1 data-parallel rank" if num_ranks == 1 else f"{num_ranks} data-parallel ranks"
            raise ConfigError(
                f"--packs-per-step {packs_per_step} cannot be divided among {ranks} with micro-batches of {batch_size}",
                f"Give a multiple of {num_ranks * batch_size}, or another --per-device-train-batch-size or number of "
                "GPUs.",
            )
        return cls(num_ranks, accumulation_steps, batch_size)


class Assignment(NamedTuple):
    """An assignment of packs to steps and ranks, which may change when a run is resumed."""

    first_step: int  # of the run, 0-based
    world_size: int  # the other fields are those of ``BatchShape``
    gradient_accumulation_steps: int
    batch_size: int

    @classmethod
    def of(cls, first_step: int, batch_shape: BatchShape) -> Assignment:
        return cls(first_step, *batch_shape)

    @property
    def batch_shape(self) -> BatchShape:
        return BatchShape(self.world_size, self.gradient_accumulation_steps, self.batch_size)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The settings and position of a run, saved in each checkpoint; a resumed run must have the same settings.

    Args:
        plan: fingerprint of the first epoch's packs.
        steps: fingerprint of how they are assigned to steps and ranks.
        assignments: in their order; empty for a single one from step 0.
        data_since: the first step, 0-based, with the current data; 0 if they never changed.
        step: optimizer steps done.
        schedule: settings by which Skrull assigns packs, or ``--samples-per-step``; empty without them.
        learning: the trained parts of the model, if they decide how packs are assigned.
        shares_experts: True if ranks hold different experts.
        streaming: settings that decide the packs of a stream; empty for a run on caches.
        saved_at: seconds since 1970.
    """

    plan: str
    cache: str
    seed: int
    train_type: str
    packing: bool
    max_length: int
    packing_length: int
    world_size: int
    gradient_accumulation_steps: int
    per_device_train_batch_size: int
    steps: str = ""
    assignments: tuple[Assignment, ...] = ()
    streaming: str = ""
    loss_scale: str = ""
    loss_reduction: str = "token"
    shares_prefixes: bool = False
    schedule: str = ""
    learning: str = ""
    master_weights: str = "float32"
    shares_experts: bool = False
    data_since: int = 0
    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    saved_at: float = 0.0

    @classmethod
    def of(cls, config: TrainConfig, **fields: Any) -> RunState:
        """The state of a run before its first step: ``fields``, and the options that states record."""
        return cls(**{name: getattr(config, name) for name in _FROM_OPTIONS}, **fields)

    @property
    def batch_shape(self) -> BatchShape:
        return BatchShape(self.world_size, self.gradient_accumulation_steps, self.per_device_train_batch_size)

    @property
    def all_assignments(self) -> tuple[Assignment, ...]:
        """``assignments``, including a single one from step 0."""
        return self.assignments or (Assignment.of(0, self.batch_shape),)

    def with_assignments(self, assignments: tuple[Assignment, ...], data_changed_at: int) -> RunState:
        """This state with ``all_assignments`` since step ``data_changed_at``, the first one with the current data."""
        is_default = len(assignments) == 1 and data_changed_at == 0
        return dataclasses.replace(self, assignments=() if is_default else assignments, data_since=data_changed_at)

    def needs_reassignment(self, saved: RunState) -> bool:
        """Return whether packs must be assigned to ranks again, because the ``saved`` run had another number."""
        return not self.streaming and self.world_size != saved.world_size

    def has_same_data(self, saved: RunState) -> bool:
        """Return whether the caches and the packs of the first epoch are those of the ``saved`` run."""
        return self.cache == saved.cache and self.plan == saved.plan

    def check_continues(
        self,
        checkpoint: str,
        saved: RunState,
        *,
        data_may_change: bool = False,
        cache_differences: Sequence[str] = (),
    ) -> None:
        """Check that a run with this state may resume from a checkpoint; raise a MismatchError with every difference.

        Args:
            saved: the state of the run in the checkpoint.
            data_may_change: allow that fields in ``FROM_DATA``, which depend on the training data, differ.
            cache_differences: lines for the error if the caches differ.
        """
        different_fields = self._different_fields(saved, data_may_change=data_may_change)
        if not different_fields:
            return

        # The fingerprints "plan" and "steps" follow from the other fields, which explain the difference better.
        causes = [name for name in different_fields if name not in ("plan", "steps")]
        lines = [f"{checkpoint} belongs to a run with other data or settings:"]
        lines += [self._difference_line(name, saved) for name in causes or different_fields]
        if not causes:
            lines.append(
                "    These depend on packing options, --plan and the mixture (--mix, or an amount after # of a "
                "cache); with stages, also on --max-steps and --num-train-epochs"
            )
        if "cache" in causes:
            lines += [f"    {line}" for line in cache_differences]

        remedy = "Resume with the settings of that run, or start a new run in another --output-dir."
        if FROM_DATA.issuperset(different_fields):
            remedy += " Or add --data-change allow: the rest of the epoch is planned again with the changed data."
        raise MismatchError("\n".join(lines), remedy)

    def _difference_line(self, name: str, saved: RunState) -> str:
        """Describe the difference of a field, for errors; an empty text is shown as "none"."""
        old, new = getattr(saved, name), getattr(self, name)
        return f"  - {name}: {'none' if old == '' else old} in the checkpoint, {'none' if new == '' else new} now"

    def _different_fields(self, saved: RunState, *, data_may_change: bool) -> list[str]:
        """Names of the fields that must be equal to resume from a ``saved`` state, and are not."""
        ignored = {"step", "epoch", "step_in_epoch", "saved_at", "assignments", "data_since"}
        if data_may_change:
            ignored |= FROM_DATA
        if self.needs_reassignment(saved):
            ignored |= {"steps", "world_size", "gradient_accumulation_steps", "per_device_train_batch_size"}
        names = [each.name for each in dataclasses.fields(self) if each.name not in ignored]
        different = [name for name in names if getattr(self, name) != getattr(saved, name)]
        if "steps" not in different:  # other trained parts ("learning") matter only if they change the steps
            different = [name for name in different if name != "learning"]
        return different


def read_run_state(checkpoint: str) -> RunState:
    """Read the state of a finished checkpoint; MismatchError for any other directory."""
    return read_state_with_checksums(checkpoint)[0]


def read_state_with_checksums(checkpoint: str) -> tuple[RunState, Checksums]:
    """Read the state of a finished checkpoint, and the checksums of its files; MismatchError as ``read_run_state``."""
    path = os.path.join(checkpoint, STATE_NAME)
    try:
        with open(path, encoding="utf-8") as file:
            values = load_json(file.read())
        if (digest := values.pop("digest", None)) is not None and digest != _digest(values):
            raise ValueError("its checksum differs")
        values.pop("options", None)
        checksums = {str(name): (int(size), int(crc)) for name, (size, crc) in values.pop("files", {}).items()}
        values["assignments"] = tuple(Assignment(*each) for each in values.pop(_ASSIGNMENTS, ()))
        return RunState(**values), checksums
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise MismatchError(
            f"{checkpoint} is not a finished checkpoint of packtool: {STATE_NAME} cannot be read ({error})",
            "Give another checkpoint to --resume-from-checkpoint, or true for the newest finished one.",
        ) from error


def read_options(checkpoint: str) -> dict[str, Any] | None:
    """Read the options of the run of a finished checkpoint; None if an older packtool wrote it."""
    with open(os.path.join(checkpoint, STATE_NAME), encoding="utf-8") as file:
        options: dict[str, Any] | None = load_json(file.read()).get("options")
    return options


def write_run_state(checkpoint: str, state: RunState, options: Mapping[str, Any] | None = None) -> None:
    """Mark a checkpoint as finished; ``options`` are those of the run without defaults, as JSON has them."""
    values = {**dataclasses.asdict(state), "files": checksums_of(checkpoint), "options": options}
    values[_ASSIGNMENTS] = values.pop("assignments")
    values["digest"] = _digest(values)
    path = os.path.join(checkpoint, STATE_NAME)
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(values, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def discard_run_state(checkpoint: str) -> None:
    """Mark a checkpoint as unfinished, before its files are overwritten or deleted."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(checkpoint, STATE_NAME))


def find_checkpoint(
    resume_from: str | None, output_dir: str, *, only_model: bool = False
) -> tuple[str | None, list[str]]:
    """Find the checkpoint that ``--resume-from-checkpoint`` names, and check that its files are intact.

    Args:
        resume_from: None, ``true`` (the newest intact checkpoint in ``output_dir``), ``false`` or a directory.
        only_model: check only the files that loading the weights needs.

    Returns:
        its directory, or None to begin a new run; and warnings on newer checkpoints that are damaged.
    """
    if resume_from is None or resume_from.lower() == "false":
        return None, []
    if resume_from.lower() == NEWEST:
        return _find_newest_checkpoint(output_dir, only_model=only_model)
    if not os.path.isdir(resume_from):
        raise ConfigError(f"--resume-from-checkpoint {resume_from}: there is no such directory")
    damage = _describe_damage(resume_from, only_model=only_model)
    if damage:
        remedy = f"Give another checkpoint. If its weights are intact, {ONLY_MODEL}"
        raise MismatchError(f"{resume_from} is damaged: {damage}", remedy)
    return resume_from.rstrip("/"), []


def _find_newest_checkpoint(output_dir: str, *, only_model: bool) -> tuple[str, list[str]]:
    """Find the newest intact checkpoint; also return warnings on those that were skipped."""
    problems = list(_state_problems(output_dir))
    for checkpoint in reversed(finished_checkpoints(output_dir)):
        damage = _describe_damage(checkpoint, only_model=only_model)
        if damage:
            problems.append(f"{checkpoint} is damaged: {damage}")
            continue
        warnings = [f"skipped: {problem}" for problem in problems]
        if warnings:
            warnings.append(f"the newest intact checkpoint is {checkpoint}")
        return checkpoint, warnings
    raise ConfigError(
        "\n  - ".join([f"--resume-from-checkpoint true: there is no finished checkpoint in {output_dir}", *problems]),
        "Leave the option out to train from the beginning.",
    )


def _state_problems(output_dir: str) -> Iterator[str]:
    """Yield a sentence for each checkpoint in a directory without a readable state."""
    for checkpoint in _checkpoints(output_dir):
        if not os.path.exists(os.path.join(checkpoint, STATE_NAME)):
            yield f"{checkpoint} is unfinished: it has no {STATE_NAME}"
        elif _saved_at(checkpoint) is None:
            yield f"{checkpoint} is damaged: its {STATE_NAME} cannot be read"


def _describe_damage(checkpoint: str, *, only_model: bool) -> str:
    """Sentences on missing and changed files of a checkpoint; empty if it is intact."""
    _, checksums = read_state_with_checksums(checkpoint)
    return "; ".join(find_damage(checkpoint, checksums, only_model=only_model))


def _checkpoints(output_dir: str) -> list[str]:
    names = sorted(os.listdir(output_dir)) if os.path.isdir(output_dir) else []
    return [os.path.join(output_dir, name) for name in names if re.fullmatch(PREFIX + r"\d+", name)]


def _saved_at(checkpoint: str) -> tuple[float, int] | None:
    """Time of saving, in seconds since 1970, and step of a checkpoint; None if its state cannot be read."""
    try:
        state = read_run_state(checkpoint)
    except MismatchError:
        return None
    return state.saved_at, state.step


def is_checkpoint(directory: str) -> bool:
    """Return whether a directory has a checkpoint's name, ``checkpoint-STEP``."""
    return os.path.basename(os.path.abspath(directory)).startswith(PREFIX)


def run_directory(directory: str) -> str:
    """The output directory of a run, from itself or from one of its checkpoints."""
    return os.path.dirname(os.path.abspath(directory)) if is_checkpoint(directory) else directory


def finished_checkpoints(output_dir: str) -> list[str]:
    """The finished checkpoints in a directory, the newest last; without those whose state is damaged."""
    # By the saved time: an earlier run may have trained more steps, and copying a file changes its time.
    saved = [(_saved_at(checkpoint), checkpoint) for checkpoint in _checkpoints(output_dir)]
    return [checkpoint for _, checkpoint in sorted((at, name) for at, name in saved if at is not None)]


def remove_oldest(output_dir: str, limit: int | None, *, last_good: int | None = None, keep: str | None = None) -> None:
    """Delete all but the newest ``limit`` finished checkpoints, ``keep``, and the newest one up to ``last_good``."""
    finished = finished_checkpoints(output_dir)
    good = [name for name in finished if last_good is not None and read_run_state(name).step <= last_good]
    kept = {os.path.abspath(checkpoint) for checkpoint in (*good[-1:], *([keep] if keep is not None else []))}
    for checkpoint in finished[:-limit] if limit else []:
        if os.path.abspath(checkpoint) in kept:
            continue
        discard_run_state(checkpoint)
        shutil.rmtree(checkpoint)


def copy_processor(model_directory: str, checkpoint: str, chat_template: str = "") -> None:
    """Copy files of tokenizer and processor into a checkpoint; a chat template replaces the model's own."""
    for name in sorted(os.listdir(model_directory)):
        if _PROCESSOR_FILE.fullmatch(name):
            shutil.copyfile(os.path.join(model_directory, name), os.path.join(checkpoint, name))
    if chat_template:
        with open(os.path.join(checkpoint, "chat_template.jinja"), "w", encoding="utf-8") as file:
            file.write(chat_template)


def steps_planned(checkpoint: str) -> int:
    """The number of steps that the run of a checkpoint was planned with."""
    with open(os.path.join(checkpoint, "trainer_state.json"), encoding="utf-8") as file:
        return int(load_json(file.read())["max_steps"])
