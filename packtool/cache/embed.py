"""``--media embed``: the encoded files' bytes go into the shards, so that training reads nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from packtool import storage
from packtool.encode.encoded import EncodedSample

# Rows are handed on once so much has been read: a batch of long videos must not fill the memory.
_BYTES_AT_ONCE = 64 << 20


def embedded(samples: Sequence[EncodedSample]) -> Iterator[list[EncodedSample]]:
    """The samples with their media's bytes, in groups of bounded size; paths stay, for messages.

    Raises:
        StorageError: if a file that was measured a moment ago cannot be read.
    """
    group: list[EncodedSample] = []
    size = 0
    for sample in samples:
        group.append(
            replace(
                sample,
                images=tuple(
                    replace(image, path=_shown(image.path), data=_bytes(image.path, image.data))
                    for image in sample.images
                ),
                audios=tuple(
                    replace(audio, path=_shown(audio.path), data=_bytes(audio.path, audio.data))
                    for audio in sample.audios
                ),
                videos=tuple(
                    replace(
                        video,
                        path=_shown(video.path),
                        data=None if video.frames else _bytes(video.path, video.data),
                        frames=tuple((_shown(path), _bytes(path, data)) for path, data in video.frames),
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


def _bytes(path: str | None, data: bytes | None) -> bytes:
    if data is not None:
        return data
    assert path is not None, "a medium is a path or bytes"
    return storage.read_bytes(path)


def _size(sample: EncodedSample) -> int:
    files = [image.data for image in sample.images]
    files += [audio.data for audio in sample.audios]
    files += [video.data for video in sample.videos]
    files += [data for video in sample.videos for _, data in video.frames]
    return sum(len(data) for data in files if data is not None)
