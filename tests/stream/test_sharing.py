"""Packs of a stream whose samples begin alike: each prefix once in a pack, every sample once, resumed at any pack."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtool.constants import MIN_SHARED
from packtool.encode.encoded import EncodedImage, EncodedSample
from packtool.encode.media_spans import MediaTokens
from packtool.encode.model_files import ModelFiles
from packtool.rows.source import SourceSpec
from packtool.stream.packs import IntervalSharing, SampleAmounts, StreamedPack
from packtool.stream.reading import read_stream_state, write_stream_state
from tests.cache.conftest import model as model
from tests.stream.test_packs import CAPACITY, contents, options, stream

NUM_TEXTS, QUESTIONS, NUM_ALONE = 40, 5, 60


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[SourceSpec]:
    """Five questions about each of 40 texts, one after the other, and 60 rows that share nothing."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(NUM_TEXTS):
        text = " ".join(map(str, random.integers(1000, 9999, 25)))
        for question in range(QUESTIONS):
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "read"}]
            turns += [{"role": "user", "content": f"{question}?"}, {"role": "assistant", "content": "x" * question}]
            rows.append({"messages": turns})
    for _ in range(NUM_ALONE):
        single_text = "".join(map(chr, random.integers(97, 122, int(random.integers(5, 150)))))
        rows.append({"messages": [{"role": "user", "content": single_text}, {"role": "assistant", "content": "y"}]})
    path = tmp_path_factory.mktemp("alike") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [SourceSpec(str(path))]


def sharing(model: Path, **options: Any) -> IntervalSharing:
    return IntervalSharing(MediaTokens.of(ModelFiles.load(str(model)).config), **{"min_saving": 0.05} | options)


def tokens_once(pack: StreamedPack) -> int:
    """Tokens of a pack if everything that two samples begin with is there once, whatever was planned."""
    trie: set[bytes] = set()
    for sample in pack.samples:
        ids = np.ascontiguousarray(sample.input_ids, "<i4")
        trie |= {ids[:stop].tobytes() for stop in range(1, len(ids) + 1)}
    return len(trie)


def test_prefixes_occur_once_per_pack(specs: Any, model: Path) -> None:
    stream_options = options(shuffle_buffer_size=1, packing_interval=100)
    packs, unshared = (
        list(stream(specs, model, stream_options, sharing=interval_sharing))
        for interval_sharing in (sharing(model), None)
    )
    names = [name for pack in contents(packs) for name in pack]
    assert Counter(names) == Counter(name for pack in contents(unshared) for name in pack)
    assert len(names) == len(set(names)) == NUM_TEXTS * QUESTIONS + NUM_ALONE
    assert sum(pack.num_whole_tokens for pack in packs) == sum(pack.num_tokens for pack in unshared)
    assert sum(pack.num_tokens for pack in packs) < 0.6 * sum(pack.num_tokens for pack in unshared)
    assert len(packs) < 0.7 * len(unshared)
    for pack in packs:
        assert sum(pack.amounts.targets) < pack.num_targets or not pack.amounts.shared_tokens.any()
        assert tokens_once(pack) <= pack.num_tokens <= CAPACITY
    for pack in unshared:
        assert pack.num_tokens == pack.num_whole_tokens
        assert pack.amounts.targets.sum() == pack.num_targets


def test_intervals_with_small_savings_are_not_shared(specs: Any, model: Path) -> None:
    """An interval of ten rows drawn from all has few that are alike."""
    stream_options = options(packing_interval=10, shuffle_buffer_size=300)
    unshared = contents(list(stream(specs, model, stream_options)))
    assert contents(list(stream(specs, model, stream_options, sharing=sharing(model, min_saving=0.9)))) == unshared
    shared = list(stream(specs, model, stream_options, sharing=sharing(model, min_saving=0.0)))
    assert sum(pack.num_tokens for pack in shared) < sum(pack.num_whole_tokens for pack in shared)


@pytest.mark.parametrize("share", [0.0, 0.4, 0.8])
def test_stream_resumes_exactly_from_any_pack(share: float, specs: Any, model: Path, tmp_path: Path) -> None:
    stream_options = options(packing_interval=60, shuffle_buffer_size=20, num_epochs=2)
    packs = list(stream(specs, model, stream_options, sharing=sharing(model)))
    at = int(share * len(packs))
    write_stream_state(str(tmp_path), 0, packs[at].state)
    state = read_stream_state(str(tmp_path), 0)
    resumed = list(stream(specs, model, stream_options, sharing=sharing(model), start=state))
    assert contents(resumed) == contents(packs[at + 1 :])
    for one, other in zip(resumed, packs[at + 1 :], strict=True):
        assert all(np.array_equal(*columns) for columns in zip(one.amounts, other.amounts, strict=True))


def test_packs_of_a_split_tree_are_adjacent(specs: Any, model: Path) -> None:
    """Five questions a text, in packs that hold a few of them: where an interval has all, one pack after the other."""
    stream_options = options(shuffle_buffer_size=1, packing_interval=400, packing_length=210)
    apart = {}
    for parts in ("any", "together"):
        packs = list(stream(specs, model, stream_options, sharing=sharing(model, parts=parts)))
        of_text: dict[bytes, set[int]] = {}
        for pack_index, pack in enumerate(packs):
            for sample in pack.samples:
                of_text.setdefault(sample.input_ids[:MIN_SHARED].tobytes(), set()).add(pack_index)
        split_trees = [sorted(numbers) for numbers in of_text.values() if len(numbers) > 1]
        assert len(split_trees) > 5
        apart[parts] = [numbers for numbers in split_trees if numbers[-1] - numbers[0] > 4]
        assert Counter(sample.place for pack in packs for sample in pack.samples).most_common(1)[0][1] == 1
    assert len(apart["any"]) > 5
    assert not apart["together"]


def test_amounts_have_the_squares_of_each_picture() -> None:
    ids, picture = np.zeros(16, np.int32), EncodedImage("a.png", None, 1, 1, (1, 1, 40), 8)
    samples = [
        EncodedSample(ids, ids, np.zeros(0, np.int32), num_images * (picture,), None, "rows", 0)
        for num_images in (2, 0)
    ]
    amounts = SampleAmounts.of(samples)
    assert (amounts.patch_squares.tolist(), amounts.picture_squares.tolist()) == ([3200, 0], [1600, 0])


def test_tree_respects_max_rows(specs: Any, model: Path) -> None:
    samples = [sample for pack in stream(specs, model, options()) for sample in pack.samples]
    for max_rows in (None, 2):
        trees = sharing(model, max_rows=max_rows).find_trees(samples, CAPACITY)
        assert trees is not None
        assert np.diff(trees[0].offsets).max() == (max_rows or QUESTIONS)
        assert trees[0].shared_tokens[trees[0].shared_tokens > 0].min() >= MIN_SHARED
        assert SampleAmounts.of(samples, trees).media_tokens.sum() == 0
