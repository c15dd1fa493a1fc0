"""What a checkpoint says of the run it belongs to, and whether another run may continue from it.

OUTPUT_DIR/checkpoint-120/
    model or adapter, config          written by transformers and peft
    optimizer, scheduler, RNG states  written by transformers
    tokenizer and processor files     copies of the model's
    packtool_state.json               written last: without it the checkpoint is unfinished
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
from dataclasses import dataclass

from packtool.errors import ConfigError, MismatchError

STATE_NAME = "packtool_state.json"
PREFIX = "checkpoint-"

# All that a tokenizer or processor is saved as; weights, configs and adapters are the checkpoint's own.
_PROCESSOR_FILE = re.compile(
    r"(tokenizer|special_tokens_map|added_tokens|vocab|merges|chat_template|preprocessor_config|processor_config"
    r"|video_preprocessor_config|spiece|sentencepiece)[^/]*\.(json|jinja|txt|model)"
)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything that must be the same for a resumed run to train exactly what is left.

    Args:
        plan: fingerprint of the first epoch's packs.
        steps: fingerprint of how they are dealt to steps and ranks.
        dealings: [first step, world size, gradient accumulation, batch size] of each time that packs were dealt anew,
            because a resumed run had other processes.
        cache: fingerprint of the caches.
        seed: of the plans of all epochs.
        step: optimizer steps done.
        epoch, step_in_epoch: the same, as the place where training goes on.
        schedule: what decides how Skrull deals; empty without it.
        streaming: what decides the packs of a stream; empty for a run on caches.
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
    dealings: tuple[tuple[int, int, int, int], ...] = ()
    streaming: str = ""
    loss_scale: str = ""
    loss_reduction: str = "token"
    schedule: str = ""
    step: int = 0
    epoch: int = 0
    step_in_epoch: int = 0
    saved_at: float = 0.0

    @property
    def dealing(self) -> tuple[int, int, int]:
        """World size, gradient accumulation and batch size: what a step's packs are dealt to."""
        return self.world_size, self.gradient_accumulation_steps, self.per_device_train_batch_size

    def is_dealt_anew_after(self, other: RunState) -> bool:
        """Whether what a checkpoint with that state left is to be dealt to another number of processes."""
        return not self.streaming and self.world_size != other.world_size

    def check_continues(self, checkpoint: str, other: RunState) -> None:
        """Raise unless a run with this state may go on from a checkpoint with that one.

        With another world size the packs must be the same, but not the steps: they are dealt anew.

        Raises:
            MismatchError: naming every difference.
        """
        place = {"step", "epoch", "step_in_epoch", "saved_at", "dealings"}
        if self.is_dealt_anew_after(other):
            place |= {"steps", "world_size", "gradient_accumulation_steps", "per_device_train_batch_size"}
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        different = [name for name in mine if name not in place and mine[name] != theirs[name]]
        # Plan and steps follow from the rest: alone they would say little, beside another difference nothing.
        told = [name for name in different if name not in ("plan", "steps")]
        different = told or different
        if different:
            lines = "\n".join(f"  - {name}: {theirs[name]} there, {mine[name]} now" for name in different)
            raise MismatchError(
                f"{checkpoint} belongs to a run that trains something else:\n{lines}",
                "Resume with the settings of that run, or train anew in another --output-dir.",
            )


def read_state(checkpoint: str) -> RunState:
    """The state of a finished checkpoint.

    Raises:
        MismatchError: if it is none of packtool's, or was not finished.
    """
    path = os.path.join(checkpoint, STATE_NAME)
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
            values["dealings"] = tuple(tuple(dealing) for dealing in values.get("dealings", ()))
            return RunState(**values)
    except (OSError, ValueError, TypeError) as error:
        raise MismatchError(
            f"{checkpoint} is no finished checkpoint of packtool: {STATE_NAME} cannot be read ({error})",
            "Give another one to --resume-from-checkpoint, or true for the newest finished one.",
        ) from error


def write_state(checkpoint: str, state: RunState) -> None:
    """Declare a checkpoint finished."""
    path = os.path.join(checkpoint, STATE_NAME)
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(state), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


def discard_state(checkpoint: str) -> None:
    """Declare a checkpoint unfinished, before anything of it is overwritten or deleted."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(checkpoint, STATE_NAME))


def find_checkpoint(resume_from: str | None, output_dir: str) -> str | None:
    """The checkpoint that ``--resume-from-checkpoint`` means; None for a run from the beginning.

    Args:
        resume_from: None, ``true``, ``false`` or a directory.
        output_dir: where ``true`` looks for the newest finished one.

    Raises:
        ConfigError: if there is none.
    """
    if resume_from is None or resume_from.lower() == "false":
        return None
    if resume_from.lower() != "true":
        if not os.path.isdir(resume_from):
            raise ConfigError(f"--resume-from-checkpoint {resume_from}: there is no such directory")
        return resume_from.rstrip("/")
    if checkpoints := finished_checkpoints(output_dir):
        return checkpoints[-1]
    raise ConfigError(
        f"--resume-from-checkpoint true: there is no finished checkpoint in {output_dir}",
        "Leave the option out to train from the beginning.",
    )


def finished_checkpoints(output_dir: str) -> list[str]:
    """The finished checkpoints in a directory, the newest last.

    By the time they were saved, not by their steps: an earlier, longer run may have left some there. The time is the
    one in their state, for that of the files changes when they are copied.
    """
    names = os.listdir(output_dir) if os.path.isdir(output_dir) else []
    directories = [os.path.join(output_dir, name) for name in names if re.fullmatch(PREFIX + r"\d+", name)]
    finished = [directory for directory in directories if os.path.exists(os.path.join(directory, STATE_NAME))]
    return sorted(finished, key=lambda directory: (read_state(directory).saved_at, read_state(directory).step))


def remove_oldest(output_dir: str, limit: int | None, last_good: int | None = None) -> None:
    """Keep the newest ``limit`` finished checkpoints.

    Args:
        last_good: step after which weights may be no numbers: the newest checkpoint up to there stays, too.
    """
    finished = finished_checkpoints(output_dir)
    good = [checkpoint for checkpoint in finished if last_good is not None and read_state(checkpoint).step <= last_good]
    for checkpoint in finished[:-limit] if limit else []:
        if checkpoint in good[-1:]:
            continue
        discard_state(checkpoint)
        shutil.rmtree(checkpoint)


def copy_processor(model_directory: str, checkpoint: str) -> None:
    """Copy tokenizer and processor files, byte for byte, so that a checkpoint loads like the model it came from."""
    for name in sorted(os.listdir(model_directory)):
        if _PROCESSOR_FILE.fullmatch(name):
            shutil.copyfile(os.path.join(model_directory, name), os.path.join(checkpoint, name))
