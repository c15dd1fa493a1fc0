"""Turn blocks of rows into encoded samples, for export's tasks and for streaming."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from packtool import storage
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, StorageError
from packtool.media.opening import MediaProblem, check_allowed
from packtool.rows.forms import RowProblem, to_sample
from packtool.rows.media_policy import NOT_ALLOWED
from packtool.rows.read import read_block
from packtool.rows.sample import Dropped, MediaRef, Sample, guard_row, unexpected_drop
from packtool.rows.source import RowBlock, Source


def samples_of(source: Source, blocks: Iterable[RowBlock], *, may_hold_secrets: bool) -> Iterator[Sample | Dropped]:
    """Yield a sample for every row, in order, or why it is dropped.

    Args:
        may_hold_secrets: False drops rows with a medium whose URL has a user, password or query.

    Raises:
        DataError: if the file is no longer what was scanned.
        StorageError: if it cannot be read.
    """
    for block in blocks:
        for number, row in read_block(source, block):
            if isinstance(row, Dropped):
                yield row
                continue
            try:  # as ``guard_row``, without the cost of a call
                sample = _sample(row, source, number, may_hold_secrets)
            except BaseException as error:
                sample = unexpected_drop(source.label, number, error)
            yield sample


def check_template(model: str, files: ModelFiles, sources: Iterable[tuple[Source, Iterable[RowBlock]]]) -> None:
    """Raise ConfigError if a source's first good row is a conversation, and the model has no chat template."""
    if files.chat_template:
        return
    for source, blocks in sources:
        rows = samples_of(source, islice(blocks, 1), may_hold_secrets=True)
        first = next((row for row in rows if isinstance(row, Sample)), None)
        if first is not None and not first.is_text and first.tokens is None:
            raise ConfigError(
                f"--model {model} has no chat template (base models have none), and {source.label} holds conversations",
                "Give a template with --chat-template FILE.jinja, or take the instruct model; base models are trained "
                'on plain text: rows with "text" alone, or .txt files.',
            )


def encode_samples(group: Sequence[Sample | Dropped], encoder: Encoder) -> Iterator[list[EncodedSample] | Dropped]:
    """Yield the result of each sample, in order.

    Samples are encoded together. After an unexpected error each is encoded by itself, so that only the row at fault is
    dropped.
    """
    samples = [item for item in group if isinstance(item, Sample)]
    together = guard_row("", 0, encoder.encode, samples)
    encoded = (_alone(sample, encoder) for sample in samples) if isinstance(together, Dropped) else iter(together)
    for item in group:
        yield next(encoded) if isinstance(item, Sample) else item


def first_row_error(source: Source, blocks: Iterable[RowBlock]) -> str | None:
    """Return a message if all media in the first block of rows may not be read, for before a long run."""
    items = samples_of(source, islice(blocks, 1), may_hold_secrets=True)
    with_media = [refs for item in items if isinstance(item, Sample) and (refs := _refs(item))]
    refusals = [next(filter(None, map(_refusal, refs)), None) for refs in with_media]
    if not refusals or not all(refusals):
        return None
    return f"{source.label}: the first {len(refusals)} rows with media will be dropped ({NOT_ALLOWED}): {refusals[0]}"


def _refusal(ref: MediaRef) -> str | None:
    try:
        check_allowed(ref)
    except MediaProblem as problem:
        return problem.detail
    except (StorageError, ValueError):  # no path at all: another problem
        return None
    return None


def _alone(sample: Sample, encoder: Encoder) -> list[EncodedSample] | Dropped:
    result = guard_row(sample.source, sample.row, encoder.encode, [sample])
    return result if isinstance(result, Dropped) else result[0]


def _sample(row: dict[str, object], source: Source, number: int, may_hold_secrets: bool) -> Sample | Dropped:
    try:
        sample = to_sample(row, source, number)
    except RowProblem as problem:
        return Dropped(source.label, number, problem.reason, problem.detail)
    for ref in () if may_hold_secrets else _refs(sample):
        if ref.path is not None and "://" in ref.path and (masked := storage.masked(ref.path)) != ref.path:
            detail = f"{masked}: the URL has a user, password or query, which would be kept; export with --media embed"
            return Dropped(source.label, number, "media_secret", detail)
    return sample


def _refs(sample: Sample) -> list[MediaRef]:
    refs = [ref for group in sample.media.values() for ref in group]
    return refs + [frame for ref in refs for frame in ref.frames]
