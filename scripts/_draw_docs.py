"""The pictures of docs/how-it-works.md (a plan of packtool's packer, a mask, positions, a ring) and of
docs/shared-prefixes.md (a tree)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from _picture import COLOURS as BY_NAME
from _picture import Word, svg_picture

from packtool.config.packing import PackOptions
from packtool.planning.packing import pack
from packtool.planning.prefix_branches import Branch, find_branches
from packtool.planning.prefix_trees import NOTHING
from packtool.report.drawing import Box

COLOURS = [BY_NAME[f"c{number}"] for number in range(5)]
EMPTY, INK, PAPER = (BY_NAME[name] for name in ("line", "ink", "panel"))
LENGTHS = (900, 620, 410, 380, 300, 280, 240, 180, 150, 120, 90, 60)
CAPACITY = 1000


def box(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> Box:
    """A rectangle with a hint, and a pixel free behind and below it."""
    return Box(x, y, max(width - 1, 0.5), max(height - 1, 0.5), colour, title)


def word(x: float, y: float, text: str, anchor: str = "start", size: int = 13, colour: str = INK) -> Word:
    """A line of text whose baseline is at y."""
    return Word(x, y, text, colour, anchor, size)


def packing() -> Iterator[Box | Word]:
    """Padded rows on the left, packs on the right, to one scale."""
    lengths = np.array(LENGTHS, np.int32)
    plan = pack(lengths, CAPACITY, PackOptions(shuffle=False), seed=0, epoch=0)
    scale, tall, top = 0.3, 18, 44
    yield word(20, 26, f"padded: {len(LENGTHS)} rows, {lengths.sum() / len(LENGTHS) / lengths.max():.0%} used")
    for row, length in enumerate(LENGTHS):
        y = top + row * tall
        yield box(20, y, length * scale, tall, COLOURS[row % len(COLOURS)], f"a sample of {length} tokens")
        yield box(20 + length * scale, y, (max(LENGTHS) - length) * scale, tall, EMPTY, "padding")
    left = 60 + max(LENGTHS) * scale
    num_packs = len(plan.offsets) - 1
    yield word(left, 26, f"packed: {num_packs} rows of {CAPACITY}, {lengths.sum() / num_packs / CAPACITY:.0%} used")
    for number in range(num_packs):
        x, y = left, top + number * tall
        for sample in plan.samples[plan.offsets[number] : plan.offsets[number + 1]]:
            length = LENGTHS[sample]
            yield box(x, y, length * scale, tall, COLOURS[sample % len(COLOURS)], f"a sample of {length} tokens")
            x += length * scale
        yield box(x, y, left + CAPACITY * scale - x, tall, EMPTY, "room that is left")


def mask(lengths: Sequence[int] = (5, 3, 7), cell: int = 20) -> Iterator[Box | Word]:
    """What each token of a pack attends to."""
    total = sum(lengths)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    for query in range(total):
        for key in range(total):
            seen = owners[query] == owners[key] and key <= query
            yield box(60 + key * cell, 40 + query * cell, cell, cell, COLOURS[owners[query]] if seen else EMPTY)
    yield word(60, 28, "keys")
    yield word(52, 52, "queries", "end", 11)
    ends = np.cumsum([0, *lengths]).tolist()
    yield word(60, 62 + total * cell, f"cu_seqlens = {ends}")


def positions(lengths: Sequence[int] = (5, 3, 7), cell: int = 34) -> Iterator[Box | Word]:
    """Tokens of a pack, their positions, and labels that stop at each sample's end."""
    names = ("token", "position", "its label")
    for line, name in enumerate(names):
        yield word(90, 48 + line * 40, name, "end")
    at = 0
    for sample, length in enumerate(lengths):
        for position in range(length):
            x = 100 + at * cell
            letter = "ABC"[sample]
            following = f"{letter}{position + 1}" if position + 1 < length else "none"
            for line, text in enumerate((f"{letter}{position}", str(position), following)):
                colour = EMPTY if text == "none" else COLOURS[sample]
                yield box(x, 28 + line * 40, cell, 30, colour)
                yield word(x + cell / 2, 48 + line * 40, text, "middle", 12, INK if text == "none" else PAPER)
            at += 1


def ring(num_ranks: int = 4) -> Iterator[Box | Word]:
    """Which rank holds which chunks of a sample, and how much causal attention each of them is."""
    num_chunks, wide, cell = 2 * num_ranks, 60, 26
    owners = [chunk if chunk < num_ranks else num_chunks - 1 - chunk for chunk in range(num_chunks)]
    for chunk, rank in enumerate(owners):
        yield box(40 + chunk * wide, 36, wide, 34, COLOURS[rank], f"chunk {chunk} of rank {rank}")
        yield word(40 + (chunk + 0.5) * wide, 58, f"rank {rank}", "middle", 12, PAPER)
    yield word(40, 26, f"one sample in {num_chunks} chunks")
    yield word(40, 104, "work of each chunk: squares of its attention")
    for chunk, rank in enumerate(owners):
        for key in range(chunk + 1):
            yield box(40 + chunk * wide, 120 + (num_chunks - 1 - key) * cell, wide, cell, COLOURS[rank])
    work = {rank: sum(chunk + 0.5 for chunk, owner in enumerate(owners) if owner == rank) for rank in range(num_ranks)}
    told = ", ".join(f"rank {rank}: {amount:g}" for rank, amount in work.items())
    yield word(40, 146 + num_chunks * cell, f"squares in all: {told}")


def tree() -> Iterator[Box | Word]:
    """Rows that begin alike, what is laid out of them, the keys of each branch, and the mask that this comes to."""
    new, shared, names = np.array([7, 4, 1]), np.array([0, 4, 6]), "PABCD"
    branches = find_branches(new, shared)
    colours = dict(zip(branches, COLOURS, strict=False))
    # Of each token: its branch, its position, and what stands in its box.
    tokens = [
        (branch, place, f"{name}{place}")
        for branch, name in zip(branches, names, strict=True)
        for place in range(branch.start, branch.stop)
    ]
    num_whole, cell = int((new + shared).sum()), 30
    yield word(20, 26, f"{len(new)} rows of {num_whole} tokens, as a tree")
    for branch, place, text in tokens:
        tall = branch.num_samples * cell
        x, y = 20 + place * cell, 38 + branch.first_sample * cell
        yield box(x, y, cell, tall, colours[branch], f"in {branch.num_samples} rows")
        yield word(x + cell / 2, y + tall / 2 + 4, text, "middle", 12, PAPER)
    left = 370
    yield word(left, 26, f"laid out once: {len(tokens)} tokens")
    for at, (branch, place, text) in enumerate(tokens):
        x = left + at * cell
        for line, told in enumerate((text, str(place), str(branch.num_samples))):
            yield box(x, 38 + line * cell, cell, cell, colours[branch] if line == 0 else EMPTY)
            yield word(x + cell / 2, 58 + line * cell, told, "middle", 12, PAPER if line == 0 else INK)
    for line, told in enumerate(("token", "position", "in rows")):
        yield word(left - 8, 58 + line * cell, told, "end", 12)
    yield word(20, 176, "what each token attends to")
    for query, (branch, _, _) in enumerate(tokens):
        above = _above(branch, branches)
        for key, (other, _, _) in enumerate(tokens):
            seen = other in above and key <= query
            yield box(52 + key * 22, 208 + query * 22, 22, 22, colours[other] if seen else EMPTY)
    for at, (_, _, text) in enumerate(tokens):
        yield word(63 + at * 22, 202, text, "middle", 10)
        yield word(46, 223 + at * 22, text, "end", 10)
    yield word(left, 176, "keys that are gathered for each branch")
    yield word(left, 194, "underlined: its queries, at the end", size=11)
    for line, branch in enumerate(branches):
        for place, (other, _, text) in enumerate(token for token in tokens if token[0] in _above(branch, branches)):
            x, y = left + place * cell, 208 + line * (cell + 12)
            yield box(x, y, cell, cell, colours[other])
            yield word(x + cell / 2, y + 20, text, "middle", 12, PAPER)
            if other is branch:
                yield box(x, y + cell + 1, cell, 4, INK, "a query, too")
    queries = [0, *np.cumsum([branch.num_tokens for branch in branches]).tolist()]
    keys = [0, *np.cumsum([branch.stop for branch in branches]).tolist()]
    yield word(left, 446, f"cu_seqlens_q = {queries}", size=12)
    yield word(left, 466, f"cu_seqlens_k = {keys}", size=12)


def _above(branch: Branch, branches: Sequence[Branch]) -> list[Branch]:
    """A branch and all that it goes on from."""
    return [branch] if branch.parent == NOTHING else [*_above(branches[branch.parent], branches), branch]


def pictures() -> dict[str, str]:
    """Each picture's name and SVG."""
    return {
        "packing": svg_picture(680, 56 + 18 * len(LENGTHS), "samples in padded rows and in packs", packing()),
        "mask": svg_picture(420, 400, "what each token of a pack attends to", mask()),
        "positions": svg_picture(640, 160, "positions and labels of a pack", positions()),
        "tree": svg_picture(750, 486, "rows that begin alike as a tree, its positions, keys and mask", tree()),
        "ring": svg_picture(560, 380, "a sample in chunks on four ranks", ring()),
    }
