"""Output of ``packtool inspect --pack``: the samples of a pack, and the trees of those that share prefixes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from packtool.cache.plan_file import read_plan_of
from packtool.cache.reader import CacheReader
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample
from packtool.encode.media_spans import MediaTokens, media_spans
from packtool.errors import ConfigError
from packtool.planning.prefix_trees import NOTHING, Branch, find_branches
from packtool.report.inspect import medium_text, model_of_cache
from packtool.terminal import escape_line


def pack_figures(directory: str, plan: str, pack: int, model: str | None = None) -> dict[str, Any]:
    """A pack of a saved plan: shared prefixes, what each sample adds, and which tokens are trained.

    Args:
        model: directory of the model, which locates media in shared prefixes; by default that of the export. A pack
            without such media needs none.

    Returns:
        ``prefixes`` and ``samples``, each with its tokens in the pack (``start``, ``end``), its first and last
        ``positions`` in the samples, the number of the ``prefix`` before it, and what is ``trained``.

    Raises:
        MismatchError: if the plan belongs to other caches.
        ConfigError: if it has no such pack, or the model cannot be read.
    """
    reader = CacheReader.open([directory])
    saved = read_plan_of(reader, plan)
    num_packs = len(saved.offsets) - 1
    if not 0 <= pack < num_packs:
        raise ConfigError(f"--pack {pack}: the plan has packs 0 to {num_packs - 1}")
    members = slice(int(saved.offsets[pack]), int(saved.offsets[pack + 1]))
    branches = find_branches(saved.lengths[members], None if saved.shared is None else saved.shared[members])
    numbers = saved.samples[members].tolist()
    samples = [reader.sample(number) for number in numbers]
    tokens = None
    if any(branch.num_samples > 1 for branch in branches) and any(sample.media for sample in samples):
        tokens = MediaTokens.of(model_of_cache(reader, model).config)
    prefixes, own = _layout(branches, numbers, samples, tokens)
    return {
        "pack": pack,
        "tokens": sum(branch.num_tokens for branch in branches),
        "tokens_without": sum(sample.length for sample in samples),
        "packing_length": saved.capacity,
        "prefixes": prefixes,
        "samples": own,
    }


def _layout(
    branches: Sequence[Branch], numbers: Sequence[int], samples: Sequence[EncodedSample], tokens: MediaTokens | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Figures of the prefixes, and of what each sample adds, in the order of the pack.

    Args:
        numbers: of the samples in the cache.
        tokens: locate media in a sample; None if no branch has only some of a sample's media.
    """
    prefixes: list[dict[str, Any]] = []
    own: list[dict[str, Any]] = []
    prefix_numbers: dict[int, int | None] = {NOTHING: None}  # by branch
    at = 0
    for number, branch in enumerate(branches):
        members = samples[branch.first : branch.last]
        first = members[0]
        is_trained = np.any([sample.labels[branch.start : branch.stop] != IGNORE_INDEX for sample in members], axis=0)
        trained = at + np.flatnonzero(np.diff(np.concatenate(([0], is_trained, [0]))))
        media = first.media
        if tokens is not None:
            spans = media_spans(first, tokens)
            media = [span.medium for span in spans if branch.start <= span.start < branch.stop]
        figures = {
            "start": at,
            "end": at + branch.num_tokens,
            "positions": [branch.start, branch.stop - 1],
            "prefix": prefix_numbers[branch.parent],
            "trained": trained.reshape(-1, 2).tolist(),
            "media": list(map(medium_text, media)),
        }
        if branch.num_samples > 1:
            prefix_numbers[number] = len(prefixes)
            prefixes.append({"samples": list(numbers[branch.first : branch.last]), **figures})
        else:
            part = "" if first.part is None else str(first.part)
            name = {"sample": numbers[branch.first], "source": first.source, "row": first.row, "part": part}
            own.append({**name, **figures})
        at += branch.num_tokens
    return prefixes, own


def pack_lines(pack: Mapping[str, Any]) -> Iterator[str]:
    """The output of ``packtool inspect --pack``: the samples of the pack; shared prefixes as trees."""
    tokens, capacity, num_whole = pack["tokens"], pack["packing_length"], pack["tokens_without"]
    without = f", instead of {num_whole:,} with every sample whole" if num_whole > tokens else ""
    fill = f"{tokens:,} of {capacity:,} tokens ({tokens / capacity:.2%})"
    yield f"pack {pack['pack']}: {len(pack['samples'])} samples, {fill}{without}"
    parts = sorted([*pack["prefixes"], *pack["samples"]], key=lambda part: part["start"])
    last = {part["prefix"]: part for part in parts}  # part after each prefix
    for part in parts:
        first, stop = part["positions"]
        own = stop - first + 1
        is_prefix = "samples" in part
        if is_prefix:
            num = len(part["samples"])
            name = f"a prefix of {num} samples, {own:,} tokens once instead of {num * own:,}"
        else:
            name = f"sample {part['sample']}: {escape_line(part['source'])}, row {part['row']}"
            name += f", {part['part']}" if part["part"] else ""
            if part["prefix"] is not None:
                name += f", adds {own:,} of its {stop + 1:,} tokens"
        # The tree's lines that lead to this part, and those that continue below it.
        here = below = ""
        ancestor = part
        while ancestor["prefix"] is not None:
            is_last = last[ancestor["prefix"]] is ancestor
            here = (("└─ " if is_last else "├─ ") if not here else "   " if is_last else "│  ") + here
            below = ("   " if is_last else "│  ") + below
            ancestor = pack["prefixes"][ancestor["prefix"]]
        yield f"  {here}[{part['start']:>6}, {part['end']:>6})  positions {first}-{stop}  {name}"
        trained = [f"trained {' '.join(f'{a}-{b}' for a, b in part['trained'])}"] if part["trained"] else []
        if details := [*trained, *part["media"]]:
            yield f"  {below}{'│  ' if is_prefix else '    '}{'   '.join(details)}"
