"""``path#1000`` takes as many rows as asked for, each alike likely, and the same ones every time."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.errors import ConfigError
from packtool.rows import source
from packtool.rows.read import scan, scan_sources
from packtool.rows.source import RowBlock, RowBlocks, ScannedSource, SourceSpec, draw_rows
from tests.rows.conftest import rows_of


def blocks_of(sizes: list[int]) -> RowBlocks:
    ends = np.cumsum([0, *sizes]).tolist()
    return RowBlocks.of(RowBlock(a, b, a, b - a) for a, b in pairwise(ends))


@given(
    st.lists(st.lists(st.integers(1, 64), max_size=9), min_size=1, max_size=4),
    st.integers(1, 700),
    st.integers(0, 9),
    st.sampled_from([1, 2, 4096]),
    st.sampled_from([10**9, 1]),
)
@settings(max_examples=100)
def test_requested_number_of_rows_is_drawn(
    sizes: list[list[int]], count: int, seed: int, chunk: int, max_hypergeometric: int
) -> None:
    sources = [blocks_of(source_sizes) for source_sizes in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "_BLOCKS_PER_DRAW", chunk)
        patch.setattr(source, "_MAX_HYPERGEOMETRIC", max_hypergeometric)
        picks = draw_rows(sources, count, (seed, 0))
        same_picks = draw_rows(sources, count, (seed, 0))
    assert picks == same_picks
    total = sum(map(sum, sizes))
    if not total:
        assert picks == sources
        return
    assert sum(blocks.num_rows for blocks in picks) == count
    num_picks: Counter[tuple[int, int]] = Counter()
    for i, blocks in enumerate(picks):
        for block in blocks:
            assert block.picks is not None
            assert list(block.picks) == sorted(block.picks)
            assert len(block.picks) == block.num_rows > 0
            assert block.picks[-1] < block.stop - block.start
            num_picks.update((i, block.first_row + position) for position in block.picks)
    times = set(num_picks.values()) | ({0} if len(num_picks) < total else set())
    assert times <= {count // total, count // total + 1}


def test_every_row_is_equally_likely() -> None:
    sources = [blocks_of([1, 64]), blocks_of([35])]
    hits = np.zeros(100)
    for seed in range(2000):
        for base, blocks in zip((0, 65), draw_rows(sources, 10, (seed, 0)), strict=True):
            for block in blocks:
                hits[[base + block.first_row + position for position in block.picks or ()]] += 1
    assert hits.sum() == 20_000
    assert abs(hits - 200).max() < 5 * np.sqrt(200)


def test_slices_keep_their_picks() -> None:
    (blocks,) = draw_rows([blocks_of([5, 5, 5, 5])], 7, (1, 0))
    parts = [blocks[:1], blocks[1:3], blocks[3:], blocks[9:]]
    assert [block for part in parts for block in part] == list(blocks)
    assert sum(part.num_rows for part in parts) == 7


def test_sampling_a_million_rows_needs_little_memory() -> None:
    blocks = blocks_of([64] * 15_625)
    (picked,) = draw_rows([blocks], 500_000, (1, 0))
    assert picked.num_rows == 500_000
    assert picked._picks is not None
    assert picked._picks.nbytes == 1_000_000
    assert blocks._columns.nbytes == 500_000


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.txt"])
def test_picked_rows_are_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("\n".join(f'{{"text": "{i}"}}\n' for i in range(300)))
    everything = rows_of(scan(SourceSpec(str(path))))
    picked_rows = rows_of(scan(SourceSpec(str(path), num_sampled=100)))
    assert len(picked_rows) == 100
    assert len({row_number for row_number, _ in picked_rows}) == 100
    assert all(item in everything for item in picked_rows)
    more = Counter(row_number for row_number, _ in rows_of(scan(SourceSpec(str(path), num_sampled=650))))
    assert set(more) == {row_number for row_number, _ in everything}
    assert set(more.values()) == {2, 3}
    assert rows_of(scan(SourceSpec(str(path), num_sampled=100), seed=1)) != picked_rows


def test_sampling_memory_does_not_depend_on_the_rows(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("a\n" * 100)
    for amount in ({"num_sampled": 10**11}, {"times_sampled": 1e30}, {"num_sampled": 10**30}):
        with pytest.raises(ConfigError, match="samples of 100; at most 10,000,000 can be drawn"):
            scan(SourceSpec(str(tmp_path / "rows.txt"), **amount))


def test_files_of_one_argument_are_sampled_together(tmp_path: Path) -> None:
    specs = []
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("a\n" * 100)
        specs.append(SourceSpec(str(tmp_path / f"{i}.txt"), group=i // 3, num_sampled=50 if i < 3 else None))
    message: list[ScannedSource] = []
    counts = [result.num_rows for result in scan_sources(specs, 42, message.append)]
    assert sum(counts[:3]) == 50
    assert counts[3] == 100
    assert all(0 < count < 50 for count in counts[:3])
    assert [(result.source.path, result.num_rows) for result in message] == [(spec.path, 100) for spec in specs]
