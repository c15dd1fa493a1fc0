"""What ``packtool inspect --pack`` shows: the samples of a pack, and the trees of those that share prefixes."""

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
from packtool.report.inspect import all_media, medium_text, model_of_cache
from packtool.visible import visible_line


def pack_figures(directory: str, plan: str, pack: int, model: str | None = None) -> dict[str, Any]:
    """A pack of a saved plan: prefixes that samples share, what each sample adds, and what is trained of both.

    Args:
        model: directory of the model, which tells where media lie; the one of the export by default. A pack that shares
            no media is shown without.

    Returns:
        ``prefixes`` and ``samples`` with their places in the pack (``start``, ``end``), their first and last
        ``positions`` in the samples themselves, and the place among ``prefixes`` of the one that they go on from.

    Raises:
        MismatchError: if the plan belongs to other caches.
        ConfigError: if it has no such pack, or the model cannot be read.
    """
    reader = CacheReader.open([directory])
    saved = read_plan_of(reader, plan)
    num_packs = len(saved.offsets) - 1
    if not 0 <= pack < num_packs:
        raise ConfigError(f"--pack {pack}: the plan has packs 0 to {num_packs - 1}")
    here = slice(int(saved.offsets[pack]), int(saved.offsets[pack + 1]))
    shared = None if saved.shared is None else saved.shared[here]
    branches = find_branches(saved.lengths[here], shared)
    positions = saved.samples[here].tolist()
    samples = [reader.sample(position) for position in positions]
    tokens = None
    if any(branch.num_samples > 1 for branch in branches) and any(map(all_media, samples)):
        tokens = MediaTokens.of(model_of_cache(reader, model).config)
    prefixes, own = _laid_out(branches, positions, samples, tokens)
    return {
        "pack": pack,
        "tokens": sum(branch.num_tokens for branch in branches),
        "tokens_without": sum(sample.length for sample in samples),
        "packing_length": saved.capacity,
        "prefixes": prefixes,
        "samples": own,
    }


def _laid_out(
    branches: Sequence[Branch], positions: Sequence[int], samples: Sequence[EncodedSample], tokens: MediaTokens | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What several samples have, and what each has of its own, in the order in which they lie in the pack.

    Args:
        positions: of the samples in the cache.
        tokens: by which media are found; None where no branch has but a part of a sample's media.
    """
    prefixes: list[dict[str, Any]] = []
    own: list[dict[str, Any]] = []
    places: dict[int, int | None] = {NOTHING: None}  # among the prefixes, of branches
    at = 0
    for number, branch in enumerate(branches):
        members = samples[branch.first : branch.last]
        is_trained = np.any([sample.labels[branch.start : branch.stop] != IGNORE_INDEX for sample in members], axis=0)
        trained = at + np.flatnonzero(np.diff(np.concatenate(([0], is_trained, [0]))))
        figures = {
            "start": at,
            "end": at + branch.num_tokens,
            "positions": [branch.start, branch.stop - 1],
            "prefix": places[branch.parent],
            "trained": trained.reshape(-1, 2).tolist(),
            "media": _media_texts(members[0], branch, tokens),
        }
        if branch.num_samples > 1:
            places[number] = len(prefixes)
            prefixes.append({"samples": list(positions[branch.first : branch.last]), **figures})
        else:
            sample = members[0]
            name = {"sample": positions[branch.first], "source": sample.source, "row": sample.row}
            name["part"] = "" if sample.part is None else str(sample.part)
            own.append({**name, **figures})
        at += branch.num_tokens
    return prefixes, own


def _media_texts(sample: EncodedSample, branch: Branch, tokens: MediaTokens | None) -> list[str]:
    media = all_media(sample)
    if tokens is not None:
        places = media_spans(sample, tokens)
        media = [span.medium for span in places if branch.start <= span.start < branch.stop]
    return [medium_text(medium) for medium in media]


def pack_lines(pack: Mapping[str, Any]) -> Iterator[str]:
    """A pack for a terminal: its samples below one another, and those that share a prefix as branches of a tree."""
    tokens, capacity, whole = pack["tokens"], pack["packing_length"], pack["tokens_without"]
    without = f", instead of {whole:,} with every sample whole" if whole > tokens else ""
    yield f"pack {pack['pack']}: {len(pack['samples'])} samples, {tokens:,} of {capacity:,} tokens " + (
        f"({tokens / capacity:.2%}){without}"
    )
    parts = sorted([*pack["prefixes"], *pack["samples"]], key=lambda part: part["start"])
    last = {part["prefix"]: part for part in parts}
    for part in parts:
        first, stop = part["positions"]
        own = stop - first + 1
        if "samples" in part:
            num = len(part["samples"])
            name = f"a prefix of {num} samples, {own:,} tokens once instead of {num * own:,}"
        else:
            name = f"sample {part['sample']}: {visible_line(part['source'])}, row {part['row']}"
            name += f", {part['part']}" if part["part"] else ""
            if part["prefix"] is not None:
                name += f", adds {own:,} of its {stop + 1:,} tokens"
        here, below = _guides(part, pack["prefixes"], last)
        yield f"  {here}[{part['start']:>6}, {part['end']:>6})  positions {first}-{stop}  {name}"
        trained = [f"trained {' '.join(f'{a}-{b}' for a, b in part['trained'])}"] if part["trained"] else []
        if told := [*trained, *part["media"]]:
            yield f"  {below}{'│  ' if 'samples' in part else '    '}{'   '.join(told)}"


def _guides(
    part: Mapping[str, Any], prefixes: Sequence[Mapping[str, Any]], last: Mapping[int | None, Mapping[str, Any]]
) -> tuple[str, str]:
    """The lines of a tree that lead to a part of it, and those that go on beside what stands below the part.

    Args:
        last: of the parts that go on from each prefix.
    """
    here = below = ""
    while part["prefix"] is not None:
        is_last = last[part["prefix"]] is part
        here = (("└─ " if is_last else "├─ ") if not here else "   " if is_last else "│  ") + here
        below = ("   " if is_last else "│  ") + below
        part = prefixes[part["prefix"]]
    return here, below
