"""Which rows a rank reads, and that a place in them is found again."""

from __future__ import annotations

import csv
import gzip
import json
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packtool.errors import ConfigError
from packtool.rows.read import read_block
from packtool.rows.source import SourceSpec
from packtool.stream.reading import StreamBlock, StreamPosition, blocks_of_rank


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[SourceSpec]:
    """1,300 rows in ten files of six kinds, one of them much larger than the others and one empty."""
    folder = tmp_path_factory.mktemp("rows")
    num_rows = 0

    def rows(count: int) -> list[dict[str, str]]:
        nonlocal num_rows
        num_rows += count
        return [{"query": f"{i}", "response": "r" * (i % 50)} for i in range(num_rows - count, num_rows)]

    def lines(rows: list[dict[str, str]]) -> str:
        return "".join(json.dumps(row) + "\n" for row in rows)

    for name, count in (("a", 700), ("b", 65), ("c", 64), ("d", 1), ("e", 130), ("f", 0)):
        (folder / f"{name}.jsonl").write_text(lines(rows(count)))
    (folder / "g.json").write_text(json.dumps(rows(100)))
    with gzip.GzipFile(folder / "h.jsonl.gz", "wb", mtime=0) as file:
        file.write(lines(rows(80)).encode())
    with open(folder / "i.csv", "w", newline="") as text:
        writer = csv.DictWriter(text, ["query", "response"])
        writer.writeheader()
        writer.writerows(rows(90))
    pq.write_table(pa.Table.from_pylist(rows(70)), folder / "j.parquet")
    assert num_rows == 1300
    return [SourceSpec(str(path)) for path in sorted(folder.iterdir())]


def blocks_of(specs: list[SourceSpec], **settings: Any) -> list[StreamBlock]:
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "num_epochs": 1, "seed": 1, "shuffle": True}
    return list(blocks_of_rank(specs, **options | settings))


def row_numbers(blocks: list[StreamBlock]) -> list[int]:
    rows = [row for placed in blocks for _, row in read_block(placed.source, placed.block)]
    return [int(row["query"]) for row in rows if isinstance(row, dict)]


@pytest.mark.smoke
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_is_read_once_by_one_rank_in_every_epoch(
    specs: list[SourceSpec], world_size: int, shuffle: bool
) -> None:
    ranks = [
        blocks_of(specs, rank=rank, world_size=world_size, num_epochs=2, shuffle=shuffle) for rank in range(world_size)
    ]
    for epoch in (0, 1):
        block_numbers = [row_numbers([block for block in blocks if block.position.epoch == epoch]) for blocks in ranks]
        assert sorted(chain.from_iterable(block_numbers)) == list(range(1300))
        assert all(block_numbers), "every rank has rows"
    assert max(map(len, ranks)) - min(map(len, ranks)) <= 1


def test_order_depends_on_the_seed(specs: list[SourceSpec]) -> None:
    first_seed, second_seed = (row_numbers(blocks_of(specs, seed=seed)) for seed in (1, 2))
    assert first_seed == row_numbers(blocks_of(specs, seed=1))
    assert first_seed != second_seed
    two_epochs = row_numbers(blocks_of(specs, num_epochs=2))
    assert two_epochs[:1300] == first_seed
    assert two_epochs[1300:] != first_seed
    assert row_numbers(blocks_of(specs, shuffle=False)) == list(range(1300))


def test_a_large_file_is_read_among_the_small_ones(specs: list[SourceSpec]) -> None:
    """Were files read one after the other, 700 rows in a row would come of one file."""
    order = row_numbers(blocks_of(specs))
    half = sorted(order[:650])
    from_large = sum(row_number < 700 for row_number in half)
    assert 200 < from_large < 500


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_position_can_be_resumed(specs: list[SourceSpec], shuffle: bool) -> None:
    settings: dict[str, Any] = {"rank": 1, "world_size": 2, "num_epochs": 2, "shuffle": shuffle}
    blocks = blocks_of(specs, **settings)
    all_numbers = row_numbers(blocks)
    for i in range(0, len(blocks), 3):
        place = StreamPosition(**json.loads(json.dumps(vars(blocks[i].position))))
        resumed = row_numbers(blocks_of(specs, **settings, start=place))
        assert resumed == all_numbers[len(all_numbers) - len(resumed) :]
        assert resumed == row_numbers(blocks[i:])


def test_sampled_rows_are_refused(specs: list[SourceSpec]) -> None:
    with pytest.raises(ConfigError, match="Remove --streaming true"):
        blocks_of([SourceSpec(specs[0].path, name="a.jsonl#5", num_sampled=5)])
