"""Scan sources for the positions of their rows, and read the rows of one block.

Scanning reads each file once and keeps one entry for each block: a few bytes a block for a source of any size.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby, islice, repeat
from typing import TYPE_CHECKING

import numpy as np

from packtool import storage
from packtool.config.mixture import Amount, check_drawn
from packtool.errors import ConfigError, DataError
from packtool.rows.forms import check_first_rows, detect
from packtool.rows.forms.media import could_hold_media
from packtool.rows.open_files import HashedFile, close_readers, open_text, opened
from packtool.rows.source import NumberedRow, RowBlock, RowBlocks, ScannedSource, Source, SourceSpec, draw_rows
from packtool.rows.sources import KNOWN_FORMATS, format_of
from packtool.rows.text_files import CHUNK_BYTES, PARSERS, find_elements, find_lines, find_records, text_rows

if TYPE_CHECKING:
    from packtool.rows.readers import Reader


def read_block(source: Source, block: RowBlock) -> Iterator[NumberedRow]:
    """Yield (row number, parsed row) in order, or a ``Dropped`` for a row that cannot be parsed.

    A row that was drawn several times is repeated.

    Raises:
        DataError: if the file has changed since it was scanned.
        StorageError: if it cannot be read.
    """
    rows = text_rows(source, block) if source.kind in PARSERS else opened(source, _open_reader).rows(block)
    if block.picks is None:
        yield from rows
        return
    for count, row in zip(np.bincount(block.picks).tolist(), rows, strict=False):
        yield from repeat(row, count)


def _open_reader(source: Source) -> Reader:
    from packtool.rows.readers import READERS  # here, because text needs no pyarrow

    return READERS[source.kind](source)


_HEAD_BYTES = 4096
# Parts of a text that may have a mark of a medium (<image>), as it is or as JSON may escape it.
_PARTS_OF_MARKS = (b"<", b"u003")


def scan_sources(
    specs: Sequence[SourceSpec], seed: int, report: Callable[[ScannedSource], None] = lambda scanned: None
) -> list[ScannedSource]:
    """Scan all sources, and draw the requested samples of their rows.

    Args:
        seed: of the samples.
        report: called with each source after its scan, before rows are drawn.

    Raises:
        DataError: if a source is missing, broken (a broken line of a .jsonl costs only that row) or of unknown kind or
            form.
        StorageError: if one cannot be read.
    """
    scanned = []
    for spec in specs:
        with closing(_Scanner(spec)) as scanner:
            blocks = RowBlocks.of(scanner.blocks)
            digest = scanner.digest()
        scanned.append(ScannedSource(spec, scanner.detect_form(blocks), digest, blocks))
        report(scanned[-1])
    sampled: list[ScannedSource] = []
    for _, members in groupby(scanned, key=lambda source: source.spec.group):
        sampled += _sampled(list(members), seed)
    return sampled


def scan(spec: SourceSpec, seed: int = 42) -> ScannedSource:
    """Scan one source, and draw a sample of its rows if requested; raises as ``scan_sources``."""
    return scan_sources([spec], seed)[0]


def follow(spec: SourceSpec) -> tuple[Source, Iterator[RowBlock]]:
    """Return a source and its blocks in order; the file is read up to the first block with usable rows, then lazily.

    Raises:
        ConfigError: if a sample is requested, which needs the number of rows.
        DataError, StorageError: as ``scan_sources``, also while the blocks are iterated.
    """
    if spec.is_sampled:
        raise ConfigError(
            f"--dataset {spec.name}: a sample can only be drawn of rows that were counted",
            "Leave out --streaming true, or the number behind #.",
        )
    scanner = _Scanner(spec)
    first: list[RowBlock] = []

    def until_detected() -> Iterator[RowBlock]:
        yield from tuple(first)
        for block in scanner.blocks:
            first.append(block)
            yield block

    def blocks() -> Iterator[RowBlock]:
        with closing(scanner):
            yield from first
            yield from scanner.blocks

    try:
        first += islice(scanner.blocks, 1)  # reads the file's head
        return scanner.detect_form(until_detected()), blocks()
    except BaseException:
        scanner.close()
        raise


def _sampled(members: list[ScannedSource], seed: int) -> list[ScannedSource]:
    """Draw the sample of one argument from all of its sources together."""
    spec = members[0].spec
    if not spec.is_sampled:
        return members
    total = sum(source.num_rows for source in members)
    num_rows = spec.num_sampled
    if num_rows is None:
        assert spec.times_sampled is not None, "is_sampled means that one of them is set"
        num_rows = Amount(spec.times_sampled, "epochs").of(total)
    check_drawn(num_rows, total, f"--dataset {storage.masked(spec.name)}")
    drawn = draw_rows([source.blocks for source in members], num_rows, (seed, spec.group))
    return [replace(source, blocks=blocks) for source, blocks in zip(members, drawn, strict=True)]


def _existing_source(spec: SourceSpec) -> Source:
    """Return the source of a file that must exist, without the form of its rows."""
    state, file_format = storage.find(spec.path), format_of(spec.path)
    if state is None or file_format is None:
        shown = storage.masked(spec.path)
        if file_format is None and state is not None:
            raise DataError(f"--dataset {shown}: its name says no kind of rows", f"Known are {KNOWN_FORMATS}.")
        if storage.is_directory(spec.path):
            raise DataError(f"--dataset {shown} is a directory", "Give the files in it.")
        raise DataError(f"--dataset {shown}: there is no such file", "Check the path.")
    kind, compression = file_format
    known = {**vars(spec), "columns": ()}  # found with the form of its rows
    return Source(**known, kind=kind, compression=compression, size=state.size, modified=state.modified)


class _Scanner:
    """A file that is scanned for blocks of rows.

    Attributes:
        blocks: found while they are iterated.
    """

    def __init__(self, spec: SourceSpec) -> None:
        source = self._source = _existing_source(spec)
        self._spec = spec
        self._file: HashedFile | None = None
        if source.kind not in PARSERS:
            with closing(_open_reader(source)) as reader:
                self.blocks = iter(RowBlocks.of(reader.blocks()))
                self._digest = reader.digest()
            return
        self._text = open_text(source.path, source.compression)
        file = self._file = HashedFile(self._text, source.label)
        try:
            # Many tools write one object per line and call it .json.
            if source.kind == "json" and _has_lines(source, file.peek(CHUNK_BYTES)):
                self._source = source = source.replaced(kind="jsonl")
            if source.kind in ("csv", "tsv"):
                header, self.blocks = find_records(source.label, file, source.kind, source.max_row_bytes)
                self._source = source.replaced(header=header)
            else:
                find_blocks = find_elements if source.kind == "json" else find_lines
                self.blocks = find_blocks(source.label, file, source.max_row_bytes)
        except BaseException:
            self.close()
            raise

    def digest(self) -> str:
        """Return the digest of the content, after all blocks have been iterated."""
        return self._digest if self._file is None else self._file.digest

    def detect_form(self, blocks: Iterable[RowBlock]) -> Source:
        """Return the source with the form of the first block that has rows; without form if none has.

        Args:
            blocks: of the file, the first of which was found before, so that the file's head is in memory.
        """
        source = self._source
        if source.kind == "txt":
            form, columns = detect([{"text": ""}], (), None, source.label)
            return source.replaced(form=form, columns=columns)
        head = b"" if self._file is None else self._file.take_head()
        try:
            for block in blocks:
                if text := head[block.start : block.stop] if block.stop <= len(head) else b"":
                    numbered = PARSERS[source.kind](source, block, text)
                else:
                    numbered = read_block(source, block)
                if rows := [row for _, row in numbered if isinstance(row, dict)]:
                    form, columns = detect(rows, self._spec.columns, self._spec.formatting, source.label)
                    holds_media = any(could_hold_media(row, columns) for row in rows)
                    source = source.replaced(form=form, columns=columns, holds_media=holds_media)
                    if not text or any(part in text for part in _PARTS_OF_MARKS):
                        check_first_rows(rows, source)
                    return source
            return source
        finally:
            close_readers()  # workers have their own

    def close(self) -> None:
        if self._file is not None:
            self._text.close()


def _has_lines(source: Source, head: bytes) -> bool:
    start = head[:_HEAD_BYTES].removeprefix(codecs.BOM_UTF8).lstrip()
    if start.partition(b"\n")[0].strip() == b"{":
        raise DataError(
            f"{source.label}: a .json file must hold one array of rows, or one object a line, and this is one object",
            "Take the array of rows out of it.",
        )
    return start.startswith(b"{")
