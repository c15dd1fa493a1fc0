"""One pass over each source that finds where its rows lie, so that any stretch of them can be read alone.

Nothing is kept of the rows but one entry for each block of them; a source of any size needs a few bytes a block.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby, islice
from typing import NamedTuple

from packtool import storage
from packtool.config.mixture import Amount, check_drawn
from packtool.errors import ConfigError, DataError
from packtool.rows.file_formats import KNOWN_FORMATS, format_of
from packtool.rows.forms import check_first_rows
from packtool.rows.forms.known import detect
from packtool.rows.forms.marks import could_hold_media
from packtool.rows.json_array import find_elements
from packtool.rows.lines import CHUNK_BYTES, find_lines
from packtool.rows.opened import Hashed, close_readers, open_text
from packtool.rows.read import parse_block, read_block
from packtool.rows.records import find_records
from packtool.rows.sampling import draw_rows
from packtool.rows.source import NumberedRow, RowBlock, RowBlocks, ScannedSource, Source, SourceSpec

_FIRST_BYTES = 4096
_FIRST_BLOCKS = 4
# Of a text in which a mark of a medium (<image>) may stand, as it is or as JSON may spell it.
_OF_MARKS = (b"<", b"u003")


def scan_sources(
    specs: Sequence[SourceSpec], seed: int, found_one: Callable[[ScannedSource], None] = lambda found: None
) -> list[ScannedSource]:
    """Scan all sources, and draw the samples that were asked for.

    Args:
        seed: of the samples.
        found_one: told of each source as it is found, before samples are drawn.

    Raises:
        DataError: if one is missing, broken or of no known kind or form.
        StorageError: if one cannot be read.
    """
    scanned = []
    for spec in specs:
        scanned.append(_scan(spec))
        found_one(scanned[-1])
    sampled: list[ScannedSource] = []
    for _, members in groupby(scanned, key=lambda found: found.spec.group):
        sampled += _sampled(list(members), seed)
    return sampled


def scan(spec: SourceSpec, seed: int = 42) -> ScannedSource:
    """Find the rows of one source, and draw its sample if one was asked for.

    Raises:
        DataError: if it is missing, broken (a broken line of a .jsonl costs that row only) or of no known kind or form.
        StorageError: if it cannot be read.
    """
    return scan_sources([spec], seed)[0]


def follow(spec: SourceSpec) -> tuple[Source, Iterator[RowBlock]]:
    """A source and its blocks as they are found, front to back, with only the first of them read at once.

    Raises:
        ConfigError: if a sample of it is asked for, which needs to know all rows.
        DataError, StorageError: as ``scan``; while blocks are taken, too.
    """
    if spec.is_sampled:
        raise ConfigError(
            f"--dataset {spec.name}: a sample can only be drawn of rows that were counted",
            "Leave out --streaming true, or the number behind #.",
        )
    finder = _Finder.of(_source(spec))
    source = finder.source
    try:
        first = list(islice(finder.blocks, _FIRST_BLOCKS))
        source = _with_form(spec, source, first, finder.take_head())
    except BaseException:
        finder.close()
        raise
    return source, finder.then_close(first)


def _sampled(members: list[ScannedSource], seed: int) -> list[ScannedSource]:
    """Sources of one argument, with its sample drawn from all of them together."""
    spec = members[0].spec
    if not spec.is_sampled:
        return members
    num_there = sum(found.num_rows for found in members)
    num_rows = spec.num_sampled
    if num_rows is None:
        assert spec.times_sampled is not None, "one of them says how many"
        num_rows = Amount(spec.times_sampled, "epochs").of(num_there)
    check_drawn(num_rows, num_there, f"--dataset {storage.masked(spec.name)}")
    drawn = draw_rows([found.blocks for found in members], num_rows, (seed, spec.group))
    return [replace(found, blocks=blocks) for found, blocks in zip(members, drawn, strict=True)]


def _scan(spec: SourceSpec) -> ScannedSource:
    source = _source(spec)
    finder = _Finder.of(source)
    with closing(finder):
        blocks, source = RowBlocks.of(finder.blocks), finder.source
        digest = finder.digest()
    source = _with_form(spec, source, blocks, finder.take_head())
    return ScannedSource(spec, source, source.size, source.modified, digest, blocks)


def _source(spec: SourceSpec) -> Source:
    state = storage.find(spec.path)
    found = format_of(spec.path)
    if state is None or found is None:
        shown = storage.masked(spec.path)
        if found is None and state is not None:
            raise DataError(f"--dataset {shown}: its name says no kind of rows", f"Known are {KNOWN_FORMATS}.")
        if storage.is_directory(spec.path):
            raise DataError(f"--dataset {shown} is a directory", "Give the files in it.")
        raise DataError(f"--dataset {shown}: there is no such file", "Check the path.")
    kind, compression = found
    return Source(
        path=spec.path,
        kind=kind,
        compression=compression,
        size=state.size,
        modified=state.modified,
        split=spec.split,
        tags=spec.tags,
        media_root=spec.media_root,
        system=spec.system,
        loss_scale=spec.loss_scale,
        media_access=spec.media_access,
        max_media_bytes=spec.max_media_bytes,
        max_media_failures=spec.max_media_failures,
        max_row_bytes=spec.max_row_bytes,
    )


def _holds_lines(source: Source, head: bytes) -> bool:
    start = head[:_FIRST_BYTES].removeprefix(codecs.BOM_UTF8).lstrip()
    if start.partition(b"\n")[0].strip() == b"{":
        raise DataError(
            f"{source.label}: a .json file must hold one array of rows, or one object a line, and this is one object",
            "Take the array of rows out of it.",
        )
    return start.startswith(b"{")


class _Finder(NamedTuple):
    """A file whose rows are being found.

    Args:
        source: with what the file's head says.
        blocks: as they are found.
        digest: of the content, once all blocks are.
        take_head: the text that it begins with, as far as that is at hand; once.
        close: lets go of the file.
    """

    source: Source
    blocks: Iterator[RowBlock]
    digest: Callable[[], str]
    take_head: Callable[[], bytes]
    close: Callable[[], None]

    @classmethod
    def of(cls, source: Source) -> _Finder:
        if source.kind == "megatron":
            from packtool.rows.megatron import find_documents  # here, because text needs no numbers

            digest, rows = find_documents(source)
            return cls(source, rows, lambda: digest, bytes, lambda: None)
        if source.kind == "tar":
            from packtool.rows.tars import find_packs

            digest, rows = find_packs(source)
            return cls(source, rows, lambda: digest, bytes, lambda: None)
        if source.kind in ("parquet", "arrow"):
            from packtool.rows.tables import find_table_rows  # here, because text needs no pyarrow

            digest, rows = find_table_rows(source)
            return cls(source, rows, lambda: digest, bytes, lambda: None)
        file = open_text(source.path, source.compression)
        hashed = Hashed(file, source.label)
        try:
            # Many tools write one object a line and call it .json.
            if source.kind == "json" and _holds_lines(source, hashed.peek(CHUNK_BYTES)):
                source = source.read_as(kind="jsonl")
            if source.kind in ("csv", "tsv"):
                header, found = find_records(source.label, hashed, source.kind, source.max_row_bytes)
                source = source.read_as(header=header)
            else:
                find = find_elements if source.kind == "json" else find_lines
                found = find(source.label, hashed, source.max_row_bytes)
        except BaseException:
            file.close()
            raise
        return cls(source, found, lambda: hashed.digest, hashed.take_head, file.close)

    def then_close(self, first: list[RowBlock]) -> Iterator[RowBlock]:
        """The first blocks, which were taken already, and all others."""
        try:
            yield from first
            yield from self.blocks
        finally:
            self.close()


def _with_form(spec: SourceSpec, source: Source, blocks: Iterable[RowBlock], head: bytes) -> Source:
    """The source with what its first rows that can be parsed tell; as it is if none can.

    Args:
        head: the text that the file begins with: what lies in it is not read again.
    """
    if source.kind == "txt":
        form = detect([{"text": ""}], (), None, source.label)
        return source.read_as(form=form.form, columns=form.columns)
    for block in blocks:
        text = head[block.start : block.stop] if block.stop <= len(head) else None
        found = _read_apart(source, block) if text is None else parse_block(source, block, text)
        rows = [row for _, row in found if isinstance(row, dict)]
        if rows:
            form = detect(rows, spec.columns, spec.formatting, source.label)
            holds_media = any(could_hold_media(row, form.columns) for row in rows)
            source = source.read_as(form=form.form, columns=form.columns, holds_media=holds_media)
            if text is None or any(part in text for part in _OF_MARKS):
                check_first_rows(rows, source)
            return source
    return source


def _read_apart(source: Source, block: RowBlock) -> list[NumberedRow]:
    try:
        return list(read_block(source, block))
    finally:
        close_readers()  # workers have their own
