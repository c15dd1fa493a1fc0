"""``--media embed``: the encoded files' bytes go into the shards, so that training reads nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from packtool import storage
from packtool.encode.encoded import EncodedSample
from packtool.media.opening import MediaProblem, open_medium
from packtool.rows.rights import MediaRights
from packtool.rows.sample import Dropped, MediaRef

# Rows are handed on once so much has been read: a batch of long videos must not fill the memory.
_BYTES_AT_ONCE = 64 << 20


def embedded(
    rows: Sequence[list[EncodedSample]], rights_of: Mapping[str, MediaRights], lose: Callable[[Dropped], None]
) -> Iterator[list[list[EncodedSample]]]:
    """Rows with the bytes of their samples' media, in groups of bounded size; paths stay, for messages.

    Args:
        rows: the samples of each.
        rights_of: what the rows of a source may reach, by the source's label.
        lose: told of a row with a medium that cannot be read although it was measured a moment ago.

    Raises:
        StorageError: if a store is down for everything.
    """
    group: list[list[EncodedSample]] = []
    size = 0
    for row in rows:
        try:
            group.append([_with_bytes(sample, rights_of[sample.source]) for sample in row])
        except MediaProblem as problem:
            lose(Dropped(row[0].source, row[0].row, problem.reason, problem.detail))
            continue
        size += sum(map(_size, group[-1]))
        if size > _BYTES_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _with_bytes(sample: EncodedSample, rights: MediaRights) -> EncodedSample:
    return replace(
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


def _shown(path: str | None) -> str | None:
    return None if path is None else storage.masked(path)


def _bytes(path: str | None, data: bytes | None, rights: MediaRights) -> bytes:
    if data is not None:
        return data
    with open_medium(MediaRef(path, rights=rights), storage.ROWS_BLOCK) as file:
        return file.read()


def _size(sample: EncodedSample) -> int:
    files = [image.data for image in sample.images]
    files += [audio.data for audio in sample.audios]
    files += [video.data for video in sample.videos]
    files += [data for video in sample.videos for _, data in video.frames]
    return sum(len(data) for data in files if data is not None)
