"""All rows of an export cut into tasks: the same tasks for any number of processes, machines or interruptions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from packtool.cache.task import Task
from packtool.config.export import ExportConfig
from packtool.constants import TRAIN_SPLIT, VAL_SPLIT
from packtool.rows.source import Blocks, ScannedSource, Source

_LEAST_SHARD_ROWS, _MOST_SHARD_ROWS, _SHARDS = 256, 16384, 64


def make_tasks(scanned: Sequence[ScannedSource], config: ExportConfig) -> list[Task]:
    """Cut all sources into stretches of rows, each of which becomes one shard of every split it has rows for."""
    total = sum(source.num_rows for source in scanned)
    shard_rows = config.rows_per_shard or min(max(-(-total // _SHARDS), _LEAST_SHARD_ROWS), _MOST_SHARD_ROWS)
    num_train = sum(source.num_rows for source in scanned if source.spec.split == TRAIN_SPLIT)
    val_rows = _val_rows(num_train, config.split_dataset_ratio, config.seed)
    first = 0  # among the rows of --dataset
    parts: list[tuple[Source, Blocks, tuple[int, ...], list[str]]] = []
    for found in scanned:
        for blocks in _stretches(found.blocks, shard_rows):
            if found.spec.split == VAL_SPLIT:
                parts.append((found.source, blocks, (), [VAL_SPLIT]))
                continue
            low, high = np.searchsorted(val_rows, (first, first + blocks.num_rows))
            val = tuple(int(row) for row in val_rows[low:high] - first)
            parts.append((found.source, blocks, val, [TRAIN_SPLIT, VAL_SPLIT] if val else [TRAIN_SPLIT]))
            first += blocks.num_rows
    num_shards = {split: sum(split in splits for *_, splits in parts) for split in (TRAIN_SPLIT, VAL_SPLIT)}
    next_shard = dict.fromkeys(num_shards, 0)
    tasks: list[Task] = []
    for number, (source, blocks, val, splits) in enumerate(parts):
        shards = {}
        for split in splits:
            shards[split] = (next_shard[split], _shard_name(next_shard[split], num_shards[split]))
            next_shard[split] += 1
        tasks.append(Task(number, source, blocks, val, shards))
    return tasks


def _stretches(blocks: Blocks, shard_rows: int) -> list[Blocks]:
    """Neighbouring blocks, each stretch of about ``shard_rows`` rows."""
    stretches: list[Blocks] = []
    begin = rows = 0
    for i, count in enumerate(blocks.rows_of_each.tolist()):
        rows += count
        if rows >= shard_rows:
            stretches.append(blocks[begin : i + 1])
            begin, rows = i + 1, 0
    return [*stretches, blocks[begin:]] if begin < len(blocks) else stretches


def _val_rows(total: int, ratio: float, seed: int) -> np.ndarray:
    count = max(round(total * ratio), 1) if ratio and total > 1 else 0
    return np.sort(np.random.default_rng(seed).choice(total, count, replace=False, shuffle=False))


def _shard_name(number: int, total: int) -> str:
    return f"data-{number:05d}-of-{total:05d}.arrow"
