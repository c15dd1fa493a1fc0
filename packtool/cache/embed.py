"""``--media embed``: the encoded files' bytes go into the shards, so that training reads nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from packtool import storage
from packtool.encode.encoded import EncodedSample
from packtool.errors import MediaError
from packtool.media.opening import MediaProblem, open_medium
from packtool.rows.rights import MediaRights
from packtool.rows.sample import MediaRef

# Rows are handed on once so much has been read: a batch of long videos must not fill the memory.
_BYTES_AT_ONCE = 64 << 20


def embedded(samples: Sequence[EncodedSample], rights: MediaRights) -> Iterator[list[EncodedSample]]:
    """The samples with their media's bytes, in groups of bounded size; paths stay, for messages.

    Args:
        rights: of the rows that the samples were.

    Raises:
        MediaError, StorageError: if a file that was measured a moment ago cannot be read.
    """
    group: list[EncodedSample] = []
    size = 0
    for sample in samples:
        group.append(
            replace(
                sample,
                images=tuple(
                    replace(image, path=_shown(image.path), data=_bytes(image.path, image.data, rights))
                    for image in sample.images
                ),
                audios=tuple(
                    replace(audio, path=_shown(audio.path), data=_bytes(audio.path, audio.data, rights))
                    for audio in sample.audios
                ),
                videos=tuple(
                    replace(
                        video,
                        path=_shown(video.path),
                        data=None if video.frames else _bytes(video.path, video.data, rights),
                        frames=tuple((_shown(path), _bytes(path, data, rights)) for path, data in video.frames),
                    )
                    for video in sample.videos
                ),
            )
        )
        size += _size(group[-1])
        if size > _BYTES_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _shown(path: str | None) -> str | None:
    return None if path is None else storage.masked(path)


def _bytes(path: str | None, data: bytes | None, rights: MediaRights) -> bytes:
    if data is not None:
        return data
    try:
        with open_medium(MediaRef(path, rights=rights), storage.ROWS_BLOCK) as file:
            return file.read()
    except MediaProblem as problem:
        raise MediaError(
            f"{problem.detail} ({problem.reason})",
            "A moment ago it could be measured: see that nobody changes the files, and run the same command again.",
        ) from problem


def _size(sample: EncodedSample) -> int:
    files = [image.data for image in sample.images]
    files += [audio.data for audio in sample.audios]
    files += [video.data for video in sample.videos]
    files += [data for video in sample.videos for _, data in video.frames]
    return sum(len(data) for data in files if data is not None)
