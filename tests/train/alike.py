"""Rows that begin alike, for runs that share prefixes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.train.tiny import TinyWorld, export_rows

NUM_TREES, QUESTIONS = 6, 4


def alike_rows() -> list[dict[str, Any]]:
    """Questions about the same pictures behind a long text, some of whose answers are asked on, and rows of text.

    Rows of a tree are of two channels, and so are an answer and the row that goes on from it; texts are of none.
    """
    rows: list[dict[str, Any]] = []
    for tree in range(NUM_TREES):
        for question_index in range(QUESTIONS):
            question = f"{'context ' * 8}{tree}<image>{'abcdefgh'[: 1 + question_index]}"
            turns = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "xyz"[: 1 + question_index % 2]},
            ]
            rows.append(
                {"messages": turns, "images": [f"pictures/{tree:04d}.png"], "channel": "ab"[question_index % 2]}
            )
        further = [*rows[-1]["messages"], {"role": "user", "content": "?"}, {"role": "assistant", "content": f"{tree}"}]
        rows.append({"messages": further, "images": [f"pictures/{tree:04d}.png"], "channel": "a"})
        single_turns = [{"role": "user", "content": f"{tree}" * 9}, {"role": "assistant", "content": "no"}]
        rows.append({"messages": single_turns, "images": []})
    return rows


def make_alike_world(tiny: TinyWorld, root: Path) -> TinyWorld:
    """The tiny world's model and pictures, with rows that begin alike and their cache."""
    rows = Path(tiny.rows).parent / "alike.json"
    rows.write_text(json.dumps(alike_rows()))
    world = replace(tiny, rows=str(rows), cache=str(root / "alike"))
    export_rows(world, world.cache, max_length=160, split_dataset_ratio=0.0)
    return world
