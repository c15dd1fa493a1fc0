"""All rows of an export cut into tasks: the same tasks for any number of processes, machines or interruptions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from packtool.cache.task import Task
from packtool.config.export import ExportConfig
from packtool.constants import TRAIN_SPLIT, VAL_SPLIT
from packtool.rows.source import RowBlocks, ScannedSource, Source

Stretches = tuple[tuple[Source, RowBlocks], ...]

LEAST_SHARD_ROWS = 256
"""Rows of a shard where nothing else is asked for and there are so many."""
_MOST_SHARD_ROWS, _SHARDS = 16384, 64


def make_tasks(scanned: Sequence[ScannedSource], config: ExportConfig) -> list[Task]:
    """Cut all sources into stretches of rows, each of which becomes one shard of every split it has rows for."""
    total = sum(source.num_rows for source in scanned)
    shard_rows = config.rows_per_shard or min(max(-(-total // _SHARDS), LEAST_SHARD_ROWS), _MOST_SHARD_ROWS)
    num_train = sum(source.num_rows for source in scanned if source.spec.split == TRAIN_SPLIT)
    val_rows = _val_rows(num_train, config.split_dataset_ratio, config.seed)
    first = 0  # among the rows of --dataset
    parts: list[tuple[Stretches, tuple[int, ...], list[str]]] = []
    for split, sources in groupby(scanned, key=lambda found: found.spec.split):
        for stretches in _filled([(found.source, found.blocks) for found in sources], shard_rows):
            if split == VAL_SPLIT:
                parts.append((stretches, (), [VAL_SPLIT]))
                continue
            num_rows = sum(blocks.num_rows for _, blocks in stretches)
            low, high = np.searchsorted(val_rows, (first, first + num_rows))
            val = tuple(int(row) for row in val_rows[low:high] - first)
            parts.append((stretches, val, [TRAIN_SPLIT, VAL_SPLIT] if val else [TRAIN_SPLIT]))
            first += num_rows
    num_shards = {split: sum(split in splits for *_, splits in parts) for split in (TRAIN_SPLIT, VAL_SPLIT)}
    next_shard = dict.fromkeys(num_shards, 0)
    tasks: list[Task] = []
    for number, (stretches, val, splits) in enumerate(parts):
        shards = {}
        for split in splits:
            shards[split] = (next_shard[split], _shard_name(next_shard[split], num_shards[split]))
            next_shard[split] += 1
        tasks.append(Task(number, stretches, val, shards))
    return tasks


def _filled(sources: Sequence[tuple[Source, RowBlocks]], shard_rows: int) -> Iterator[Stretches]:
    """Neighbouring blocks of about ``shard_rows`` rows; a stretch goes on in the next source where one ends early."""
    stretches: list[tuple[Source, RowBlocks]] = []
    rows = 0
    for source, blocks in sources:
        if len(blocks) and rows + blocks.num_rows < shard_rows:  # as thousands of small files
            stretches.append((source, blocks))
            rows += blocks.num_rows
            continue
        begin = 0
        for i, count in enumerate(blocks.rows_of_each.tolist()):
            rows += count
            if rows >= shard_rows:
                yield (*stretches, (source, blocks[begin : i + 1]))
                stretches, begin, rows = [], i + 1, 0
        if begin < len(blocks):
            stretches.append((source, blocks[begin:]))
    if stretches:
        yield tuple(stretches)


def _val_rows(total: int, ratio: float, seed: int) -> np.ndarray:
    count = max(round(total * ratio), 1) if ratio and total > 1 else 0
    return np.sort(np.random.default_rng(seed).choice(total, count, replace=False, shuffle=False))


def _shard_name(number: int, total: int) -> str:
    return f"data-{number:05d}-of-{total:05d}.arrow"
