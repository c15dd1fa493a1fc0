"""The rows of one block.

One pass over each source that finds where its rows lie, so that any stretch of them can be read alone.

Nothing is kept of the rows but one entry for each block of them; a source of any size needs a few bytes a block.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby, islice, repeat
from typing import Any, NamedTuple

from packtool import storage
from packtool.config.mixture import Amount, check_drawn
from packtool.errors import ConfigError, DataError
from packtool.rows.forms import check_first_rows
from packtool.rows.forms.known import detect
from packtool.rows.forms.media import could_hold_media
from packtool.rows.json_array import elements_of, find_elements
from packtool.rows.lines import (
    CHUNK_BYTES,
    block_text,
    find_lines,
    find_records,
    numbered_lines,
    read_records,
    read_texts,
    too_large,
)
from packtool.rows.opened import Hashed, close_readers, open_text
from packtool.rows.parsing import JsonProblem, parse_json
from packtool.rows.sample import Dropped, held, unexpected
from packtool.rows.source import (
    FileFormat,
    NumberedRow,
    RowBlock,
    RowBlocks,
    ScannedSource,
    Source,
    SourceSpec,
    draw_rows,
)
from packtool.rows.sources import KNOWN_FORMATS, format_of


def read_block(source: Source, block: RowBlock) -> Iterator[NumberedRow]:
    """(row number, parsed row) of each row, in order; a row that cannot be parsed comes as ``Dropped``.

    A row that was picked several times comes several times.

    Raises:
        DataError: if the file is no longer what was scanned.
        StorageError: if it cannot be read.
    """
    if source.kind in _PARSE:
        rows = parse_block(source, block, block_text(source, block))
    elif source.kind == "megatron":
        from packtool.rows.megatron import read_documents

        rows = read_documents(source, block)
    elif source.kind == "tar":
        from packtool.rows.tars import read_packs

        rows = read_packs(source, block)
    else:
        from packtool.rows.tables import read_table_rows  # here, because text needs no pyarrow

        rows = read_table_rows(source, block)
    if block.picks is None:
        yield from rows
        return
    times = [0] * (block.picks[-1] + 1)
    for position in block.picks:
        times[position] += 1
    for count, row in zip(times, rows, strict=False):
        yield from repeat(row, count)


def parse_block(source: Source, block: RowBlock, data: bytes | None) -> Iterator[NumberedRow]:
    """All rows of a block of text, as ``read_block``.

    Args:
        data: its bytes; None for one row that is too large to be held.
    """
    return _PARSE[source.kind](source, block, data)


def _array(source: Source, block: RowBlock, data: bytes | None) -> Iterator[NumberedRow]:
    if data is None:
        yield block.first_row, too_large(source, block.first_row)
        return
    try:
        values = parse_json(b"[" + data.strip() + b"]")
    except JsonProblem:  # of one of them; which one shows when each is read alone
        values = ()
    if len(values) == block.num_rows and len(data) <= source.max_row_bytes:
        for number, value in enumerate(values, block.first_row):
            yield number, _object(source, number, value)
        return
    for number, text in enumerate(elements_of(source, data), block.first_row):
        yield number, held(source.label, number, _parsed, source, number, text)


def _lines(source: Source, block: RowBlock, data: bytes | None) -> Iterator[NumberedRow]:
    for number, line in numbered_lines(source, block, data):
        try:  # as ``held`` does, without the price of a call
            row = _parsed(source, number, line)
        except BaseException as error:
            row = unexpected(source.label, number, error)
        yield number, row


def _parsed(source: Source, number: int, text: bytes | None) -> dict[str, Any] | Dropped:
    if text is None:
        return too_large(source, number)
    try:
        return _object(source, number, parse_json(text))
    except JsonProblem as problem:
        return Dropped(source.label, number, problem.reason, problem.detail)


def _object(source: Source, row: int, value: Any) -> dict[str, Any] | Dropped:
    if isinstance(value, dict):
        return value
    return Dropped(source.label, row, "invalid_row", f"a {type(value).__name__}, not an object")


_PARSE: dict[FileFormat, Callable[[Source, RowBlock, bytes | None], Iterator[NumberedRow]]] = {
    "json": _array,
    "jsonl": _lines,
    "csv": read_records,
    "tsv": read_records,
    "txt": read_texts,
}


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
