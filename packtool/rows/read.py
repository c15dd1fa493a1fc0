"""Scan files for the positions and the form of their rows, and read the rows of one block.

A scan reads each file once and stores a few bytes per block of rows. How rows are stored in a file is the matter of
``text_files`` and ``readers``.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby, islice, repeat, tee
from typing import TYPE_CHECKING, Any

import numpy as np

from packtool import storage
from packtool.config.mixture import Amount, check_drawn
from packtool.errors import ConfigError, DataError
from packtool.rows.forms import RowProblem, check_first_rows, detect, to_sample
from packtool.rows.forms.media import could_hold_media
from packtool.rows.open_files import HashedFile, check_encoding, close_readers, open_text, opened
from packtool.rows.sample import Dropped, MediaRef, Sample, unexpected_drop
from packtool.rows.source import (
    KNOWN_FORMATS,
    NumberedRow,
    RowBlock,
    RowBlocks,
    ScannedSource,
    Source,
    SourceSpec,
    draw_rows,
    first_rows,
    format_of,
)
from packtool.rows.text_files import PARSERS, find_elements, find_lines, find_records, read_head, text_rows

if TYPE_CHECKING:
    from packtool.rows.readers import Reader


def read_block(source: Source, block: RowBlock) -> Iterator[NumberedRow]:
    """Yield (row number, parsed row) in order; a ``Dropped`` in place of a row that cannot be parsed.

    With ``block.picks`` (positions of the drawn rows in the block), a row is repeated for each of its draws.
    """
    is_text = source.kind in PARSERS
    rows = text_rows(source, block) if is_text else opened(source, _open_reader).rows(block)
    if block.picks is None:
        yield from rows
        return
    times_drawn = np.bincount(block.picks).tolist()  # of each row, up to the last one that is drawn
    for num_repeats, row in zip(times_drawn, rows, strict=False):
        yield from repeat(row, num_repeats)


def samples_of(source: Source, blocks: Iterable[RowBlock], *, may_hold_secrets: bool) -> Iterator[Sample | Dropped]:
    """Read blocks of rows, and yield for every row its sample, or the reason why it is dropped, in order.

    Unless ``may_hold_secrets``, rows with a medium whose URL has a user, password or query are dropped.
    """
    for block in blocks:
        for number, row in read_block(source, block):
            if isinstance(row, Dropped):
                yield row
                continue
            try:  # the same as ``guard_row``, without the cost of a call
                sample = _sample(row, source, number, may_hold_secrets)
            except BaseException as error:
                sample = unexpected_drop(source.label, number, error)
            yield sample


def first_samples(source: Source, blocks: Iterable[RowBlock]) -> list[Sample]:
    """Return the samples of a source's first block of rows, without rows that are dropped."""
    rows = samples_of(source, islice(blocks, 1), may_hold_secrets=True)
    return [row for row in rows if isinstance(row, Sample)]


def _sample(row: dict[str, object], source: Source, number: int, may_hold_secrets: bool) -> Sample | Dropped:
    """Turn a row into a sample; drop it if that fails, or if it names a URL with a secret and may not."""
    try:
        sample = to_sample(row, source, number)
    except RowProblem as problem:
        return Dropped(source.label, number, problem.reason, problem.detail)
    if may_hold_secrets:
        return sample
    for ref in media_refs(sample):
        if ref.path is None or "://" not in ref.path:
            continue
        masked_url = storage.masked(ref.path)  # without user, password and query
        if masked_url != ref.path:
            detail = f"{masked_url}: the cache would keep the URL's user, password or query: export with --media embed"
            return Dropped(source.label, number, "media_secret", detail)
    return sample


def media_refs(sample: Sample) -> list[MediaRef]:
    """Return all media of a sample, with the frames of videos that are given as pictures."""
    refs = [ref for group in sample.media.values() for ref in group]
    return refs + [frame for ref in refs for frame in ref.frames]


def _open_reader(source: Source) -> Reader:
    from packtool.rows.readers import READERS  # here, because text files do not need pyarrow

    return READERS[source.kind](source)


_HEAD_BYTES = 4096
# A text with a media placeholder (<image>) contains one of these: < itself, or its escape in JSON.
_PLACEHOLDER_BYTES = (b"<", b"u003")


def scan_sources(
    specs: Sequence[SourceSpec], seed: int, report: Callable[[ScannedSource], None] = lambda scanned: None
) -> list[ScannedSource]:
    """Read files of rows once, to find the positions and the form of their rows and a digest of their content.

    ``report`` is called with each file as soon as it is scanned. If the argument that names files asks for a number of
    rows (``rows.jsonl#1000``), these are then drawn by ``seed``, from all files of the argument together.

    Returns:
        The scanned files, in the order of ``specs``. Invalid lines of a .jsonl file are dropped later, when rows are
        read; other invalid files are a DataError.
    """
    scanned_sources: list[ScannedSource] = []
    for spec in specs:
        with closing(_Scanner(spec)) as scanner:
            blocks = RowBlocks.of(scanner.blocks)  # reads the file to its end, as the digest requires
            scanned = ScannedSource(spec, scanner.detect_form(blocks), scanner.digest(), blocks)
        scanned_sources.append(scanned)
        report(scanned)

    sampled_sources: list[ScannedSource] = []
    for _, sources_of_argument in groupby(scanned_sources, key=lambda scanned: scanned.spec.group):
        sampled_sources += _sampled(list(sources_of_argument), seed)
    return sampled_sources


def scan(spec: SourceSpec, seed: int = 42) -> ScannedSource:
    """Scan one file of rows, as ``scan_sources`` does."""
    return scan_sources([spec], seed)[0]


def follow(spec: SourceSpec) -> tuple[Source, Iterator[RowBlock]]:
    """Open a file of rows for streaming, and read its beginning to detect the form of its rows.

    Returns:
        The source with this form, and an iterator of the positions of all its rows in blocks. The iterator reads the
        file while it advances, so it may raise the errors of ``scan_sources``; it closes the file at its end.
    """
    if spec.is_sampled:
        message = f"--dataset {spec.name}: a sample cannot be drawn from a stream, whose number of rows is unknown"
        raise ConfigError(message, "Remove --streaming true, or the # and the number after it.")
    scanner = _Scanner(spec)
    blocks_for_form, all_blocks = tee(scanner.blocks)  # the first blocks are needed twice

    def blocks_until_closed() -> Iterator[RowBlock]:
        with closing(scanner):
            yield from all_blocks

    try:
        return scanner.detect_form(blocks_for_form), blocks_until_closed()
    except BaseException:
        scanner.close()
        raise


def _sampled(sources: list[ScannedSource], seed: int) -> list[ScannedSource]:
    """Reduce the files of one ``--dataset`` argument to the rows that it asks for; return all rows if it asks for none.

    ``path#1000`` draws 1,000 rows from all of its files together, ``path#20%`` a fifth of them, and ``path#first1000``
    takes the first ones without drawing.
    """
    spec = sources[0].spec  # all files of an argument have the same amount
    if not spec.is_sampled:
        return sources
    num_existing = sum(source.num_rows for source in sources)
    if spec.num_sampled is not None:
        num_rows = spec.num_sampled
    else:
        assert spec.times_sampled is not None, "is_sampled means that one of them is set"
        num_rows = Amount(spec.times_sampled, "epochs").of(num_existing)

    all_blocks = [source.blocks for source in sources]
    if spec.takes_first:
        sampled_blocks = first_rows(all_blocks, num_rows)
    else:
        check_drawn(num_rows, num_existing, f"--dataset {storage.masked(spec.name)}")
        sampled_blocks = draw_rows(all_blocks, num_rows, (seed, spec.group))
    return [replace(source, blocks=blocks) for source, blocks in zip(sources, sampled_blocks, strict=True)]


def _existing_source(spec: SourceSpec) -> Source:
    """Return the source of a file that must exist, without the form of its rows."""
    state, file_format = storage.find(spec.path), format_of(spec.path)
    if state is None or file_format is None:
        label = storage.masked(spec.path)
        if file_format is None and state is not None:
            raise DataError(f"--dataset {label}: unknown file format", f"Supported are {KNOWN_FORMATS}.")
        if storage.is_directory(spec.path):
            raise DataError(f"--dataset {label} is a directory", "Pass the files in it.")
        raise DataError(f"--dataset {label}: there is no such file", "Check the path.")
    kind, compression = file_format
    values = {**vars(spec), "columns": ()}  # set when the form of the rows is detected
    return Source(**values, kind=kind, compression=compression, size=state.size, modified=state.modified)


class _Scanner:
    """A file scanned for ``blocks``, an iterator that reads it as it advances, and then for the form of its rows."""

    def __init__(self, spec: SourceSpec) -> None:
        self._spec = spec
        self._source = _existing_source(spec)
        self._file: HashedFile | None = None  # only for text files
        self._head = b""  # the beginning of a text file, until the form of its rows is detected
        if self._source.kind in PARSERS:
            self._open_text()
            return
        # The reader of a binary file finds the blocks and hashes the content.
        with closing(_open_reader(self._source)) as reader:
            self.blocks = iter(RowBlocks.of(reader.blocks()))
            self._digest = reader.digest()

    def _open_text(self) -> None:
        """Open a text file; the blocks are found, and the content is hashed, while they are iterated."""
        self._text = open_text(self._source.path, self._source.compression)
        self._file = HashedFile(self._text, self._source.label)
        try:
            self._head = read_head(self._file)
            if self._source.kind == "json" and _has_lines(self._source, self._head):
                self._source = self._source.replaced(kind="jsonl")  # many tools write lines and call the file .json
            check_encoding(self._source.label, self._head)
            self.blocks = self._find_blocks(self._file)
        except BaseException:
            self.close()
            raise

    def _find_blocks(self, file: HashedFile) -> Iterator[RowBlock]:
        """Return the blocks of a text file; reads the header of a table, which the source gets."""
        source = self._source
        if source.kind in ("csv", "tsv"):
            header, blocks = find_records(source.label, file, source.kind, source.max_row_bytes)
            self._source = source.replaced(header=header)
            return blocks
        if source.kind == "json":
            return find_elements(source.label, file, source.max_row_bytes)
        return find_lines(file, source.max_row_bytes)

    def digest(self) -> str:
        """Return the digest of the content. All blocks must have been iterated."""
        return self._digest if self._file is None else self._file.digest

    def detect_form(self, blocks: Iterable[RowBlock]) -> Source:
        """Detect the form of the rows: which columns hold their conversation, text or tokens.

        The form is detected from the first of ``blocks`` with a row that can be parsed; later blocks are not taken from
        the iterator.

        Returns:
            The source with form and columns, or unchanged if no row can be parsed.
        """
        source = self._source
        if source.kind == "txt":
            example_row = {"text": ""}  # every line becomes such a row
            form, columns = detect([example_row], named=(), formatting=None, where=source.label)
            return source.replaced(form=form, columns=columns)
        try:
            for block in blocks:
                is_in_memory = block.stop <= len(self._head)
                if is_in_memory:
                    text = self._head[block.start : block.stop]
                    may_have_placeholders = any(part in text for part in _PLACEHOLDER_BYTES)
                    numbered_rows = PARSERS[source.kind](source, block, text)
                else:
                    may_have_placeholders = True
                    numbered_rows = read_block(source, block)
                rows = [row for _, row in numbered_rows if isinstance(row, dict)]
                if rows:
                    return self._source_with_form(rows, may_have_placeholders)
            return source
        finally:
            self._head = b""  # frees its memory
            close_readers()  # of this process; workers open their own

    def _source_with_form(self, rows: Sequence[Mapping[str, Any]], may_have_placeholders: bool) -> Source:
        """Return the source with the form of its first rows, after a check of rows that may have media placeholders."""
        form, columns = detect(rows, self._spec.columns, self._spec.formatting, self._source.label)
        holds_media = any(could_hold_media(row, columns) for row in rows)
        source = self._source.replaced(form=form, columns=columns, holds_media=holds_media)
        if may_have_placeholders:
            check_first_rows(rows, source)
        return source

    def close(self) -> None:
        if self._file is not None:
            self._text.close()


def _has_lines(source: Source, head: bytes) -> bool:
    """Return whether a .json file has one object per line; raise DataError if it is a single object."""
    start = head[:_HEAD_BYTES].removeprefix(codecs.BOM_UTF8).lstrip()
    if start.partition(b"\n")[0].strip() == b"{":
        message = f"{source.label}: the file is one JSON object; it must be one array of rows, or one object per line"
        raise DataError(message, "Write the array of rows inside this object to a file of its own.")
    return start.startswith(b"{")
