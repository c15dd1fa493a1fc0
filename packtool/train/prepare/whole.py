"""Whether a checkpoint still is what was written: sizes and checksums of its files, and which of them a run needs.

Nothing else would tell: safetensors and torch read weights whose bytes have changed, and transformers goes on without
the optimizer's states where their file is missing. Sums are made when a checkpoint is finished and compared when a run
goes on from it; the price is reading the files once, some GB a second on several cores.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from packtool.errors import MismatchError, PacktoolError, StorageError

Sums = Mapping[str, tuple[int, int]]
"""Bytes and CRC-32 of files, by their paths inside a checkpoint."""

ONLY_MODEL = "--resume-only-model true takes its weights alone, and begins a new schedule with a new optimizer."

# What a model, a tokenizer or a person needs, and a run that goes on does not read.
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
_PART = 2**26
_NO_SPACE_WORDS = ("No space left on device", "Disk quota exceeded", "File too large")
_TORCH_WORDS = ("PytorchStreamWriter", "unexpected pos", "inline_container")  # torch does not say why a write failed


def sums_of(checkpoint: str) -> dict[str, tuple[int, int]]:
    """Checksums of all files that a run reads which goes on from here."""
    names = [name for name in _files(checkpoint) if not _NOT_READ.fullmatch(name)]
    return {name: (os.path.getsize(os.path.join(checkpoint, name)), crc_of(checkpoint, name)) for name in names}


def crc_of(checkpoint: str, name: str) -> int:
    """CRC-32 of the CRC-32s of a file's parts of 64 MiB, which are read by several threads."""
    path = os.path.join(checkpoint, name)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        parts = threads.map(lambda start: _crc_of_part(path, start), range(0, max(os.path.getsize(path), 1), _PART))
        return zlib.crc32(b"".join(crc.to_bytes(4, "little") for crc in parts))


def _crc_of_part(path: str, start: int) -> int:
    with open(path, "rb") as file:
        file.seek(start)
        return zlib.crc32(file.read(_PART))


def damages(checkpoint: str, sums: Sums, *, only_model: bool = False) -> Iterator[str]:
    """What of a checkpoint is not as it was written, a sentence for each file.

    Args:
        sums: of its files when it was finished; none for those of an older packtool.
        only_model: look at weights alone.
    """
    for name, (size, crc) in sums.items():
        if only_model and not _WEIGHTS.fullmatch(name):
            continue
        path = os.path.join(checkpoint, name)
        if not os.path.isfile(path):
            yield f"{name} is gone"
        elif (found := os.path.getsize(path)) != size:
            yield f"{name} has {found:,} bytes, and had {size:,}"
        elif crc_of(checkpoint, name) != crc:
            yield f"{name} is not what was written: its checksum differs"


def check_resumable(checkpoint: str, rank: int, size: int) -> None:
    """Raise if a run could not go on exactly where a checkpoint stands.

    Args:
        rank: of this process, of ``size``.

    Raises:
        MismatchError: naming what was not saved, as with ``save_only_model``.
    """
    names = _files(checkpoint)
    missing = [what for what, pattern in _NEEDED.items() if not any(pattern.fullmatch(name) for name in names)]
    ranks = [name for name in names if re.fullmatch(r"rng_state_\d+\.pth", name)]
    if len(ranks) == size > 1 and f"rng_state_{rank}.pth" not in ranks:
        missing.append(f"the random states of rank {rank}")
    if missing:
        raise MismatchError(f"{checkpoint} cannot be gone on from: {', '.join(missing)} were not saved", ONLY_MODEL)


_MAKE_ROOM = (
    "Older checkpoints are as they were. Make room, or keep fewer of them with --save-total-limit, and resume with "
    "--resume-from-checkpoint true."
)


@contextlib.contextmanager
def saving(checkpoint: str, remedy: str = _MAKE_ROOM, *, num_bytes: int | None = None) -> Iterator[None]:
    """Around the writing of a checkpoint: a storage error says what is needed, and the incomplete directory is removed.

    Args:
        checkpoint: or another directory that is written.
        remedy: what a user may do.
        num_bytes: about what it will hold, if that is known.

    Raises:
        StorageError: if there is no room, or the directory cannot be written.
    """
    try:
        yield
    except PacktoolError:
        raise
    except Exception as error:
        if not _is_about_storage(error):
            raise
        reason = _write_failure(error, checkpoint, num_bytes)
        shutil.rmtree(checkpoint, ignore_errors=True)
        raise StorageError(f"{checkpoint} could not be written: {reason}", remedy) from error


def _is_about_storage(error: Exception) -> bool:
    """safetensors and torch have errors of their own for what the operating system says."""
    return isinstance(error, OSError) or any(word in str(error) for word in (*_NO_SPACE_WORDS, *_TORCH_WORDS))


def _write_failure(error: Exception, directory: str, num_bytes: int | None) -> str:
    """Why a directory could not be written, with the room that it needs and had.

    Args:
        num_bytes: what the directory needs; None if only what was written is known.
    """
    reason = next((words for words in _NO_SPACE_WORDS if words in str(error)), None)
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    has_limit = limit != resource.RLIM_INFINITY
    if reason is None:
        if isinstance(error, OSError):
            return str(error)  # not about room
        reason = "File too large" if has_limit else "No space left on device"
    if reason == "File too large" and has_limit:
        return f"{reason}: files may have {_megabytes(limit)} at most; raise the limit with ulimit -f unlimited"
    written = sum(os.path.getsize(os.path.join(directory, name)) for name in _files(directory))
    place = os.path.dirname(os.path.abspath(directory))
    needed = f"more than {_megabytes(written)}" if num_bytes is None else f"about {_megabytes(max(num_bytes, written))}"
    room = written + shutil.disk_usage(place).free
    return f"{reason}: it needs {needed}, and {place} had room for {_megabytes(room)} (a quota may allow less)"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


@contextlib.contextmanager
def loading(checkpoint: str, what: str) -> Iterator[None]:
    """Around the reading of a checkpoint whose sums were not noted: what cannot be read is named.

    Raises:
        MismatchError: instead of whatever safetensors, torch or json say.
    """
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
    found = []
    for folder, _, names in os.walk(checkpoint):
        found += [os.path.relpath(os.path.join(folder, name), checkpoint) for name in names]
    return sorted(found)
