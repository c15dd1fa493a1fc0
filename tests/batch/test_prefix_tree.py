"""Trees of samples that begin alike: nothing is lost, nothing is shared that differs, and no medium is cut."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.batch.prefix_tree import ROOT, Node, find_tree, key_index, slice_sample
from packtool.encode.encoded import EncodedImage, EncodedSample
from packtool.encode.prefix_hashes import prefix_hashes
from packtool.planning.packing import pack
from packtool.planning.prefix_trees import Prefixes, plan_trees
from tests.batch.reduced import IMAGE_PAD, VISION_END, VISION_START, reduced_spec, samples_with_prefixes

TEXT, SEES = reduced_spec("qwen3"), reduced_spec("qwen3_vl")


def sample(ids: list[int], is_target: list[bool] | None = None, channel: str | None = None) -> EncodedSample:
    """Text."""
    tokens = np.array(ids, np.int32)
    labels = np.where(np.array(is_target or [False] * len(ids), bool), tokens, -100).astype(np.int32)
    return EncodedSample(tokens, labels, np.zeros(0, np.int32), (), channel, "s", 0)


def picture(name: str, num_tokens: int) -> EncodedImage:
    return EncodedImage(name, None, 8, 8 * num_tokens, (1, 2, 2 * num_tokens), num_tokens)


def with_pictures(words: list[int | EncodedImage]) -> EncodedSample:
    """Words and pictures between their marks."""
    ids: list[int] = []
    for word in words:
        ids += [word] if isinstance(word, int) else [VISION_START, *[IMAGE_PAD] * word.num_tokens, VISION_END]
    images = tuple(word for word in words if isinstance(word, EncodedImage))
    return dataclasses.replace(sample(ids), images=images)


def shape(nodes: list[Node]) -> list[tuple[tuple[int, ...], int, int, int]]:
    return [(node.samples, node.start, node.stop, node.parent) for node in nodes]


def path(nodes: list[Node], sample_index: int) -> list[Node]:
    """The nodes of a sample, in order."""
    return [node for node in nodes if sample_index in node.samples]


def test_tree_of_two_levels_and_a_single_sample() -> None:
    rows = [[1, 2, 3, 4, 5], [9, 9], [1, 2, 3, 4, 6, 7], [1, 2, 8]]
    assert shape(find_tree([sample(row) for row in rows], TEXT, min_shared=1)) == [
        ((0, 2, 3), 0, 2, ROOT),
        ((0, 2), 2, 4, 0),
        ((0,), 4, 5, 1),
        ((2,), 4, 6, 1),
        ((3,), 2, 3, 0),
        ((1,), 0, 2, ROOT),
    ]


def test_a_prefix_that_is_too_short_is_not_shared() -> None:
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 7], [1, 8], [1, 2, 3, 4, 5, 6]]
    assert shape(find_tree([sample(row) for row in rows], TEXT, min_shared=4)) == [
        ((0, 1, 4), 0, 4, ROOT),
        ((0, 4), 4, 5, 0),
        ((4,), 5, 6, 1),
        ((1,), 4, 5, 0),
        ((2,), 0, 2, ROOT),
        ((3,), 0, 2, ROOT),
    ]


def test_equal_samples_share_a_node_and_shorter_ones_end_inside() -> None:
    rows = [[1, 2, 3], [1, 2, 3], [1, 2], [1, 2, 3, 4]]
    nodes = find_tree([sample(row) for row in rows], TEXT, min_shared=1)
    assert shape(nodes) == [((0, 1, 2, 3), 0, 2, ROOT), ((0, 1, 3), 2, 3, 0), ((3,), 3, 4, 1)]


def test_equal_samples_that_are_too_short_stay_apart() -> None:
    nodes = find_tree([sample([1, 2, 3])] * 2, TEXT, min_shared=4)
    assert shape(nodes) == [((0,), 0, 3, ROOT), ((1,), 0, 3, ROOT)]


def test_prefix_with_two_successors_ends_one_token_earlier() -> None:
    trained = [False, False, True]
    pair = [sample([1, 2, 3], trained), sample([1, 2, 4], trained), sample([1, 2, 4, 5], [*trained, False])]
    assert shape(find_tree(pair, TEXT, min_shared=1)) == [
        ((0, 1, 2), 0, 1, ROOT),
        ((0,), 1, 3, 0),
        ((1, 2), 1, 3, 0),
        ((2,), 3, 4, 2),
    ]
    one_target = [pair[0], sample([1, 2, 4])]
    assert find_tree(one_target, TEXT, min_shared=1)[0].stop == 2


def test_samples_of_two_channels_share_prefixes() -> None:
    rows = [sample([1, 2, 3], channel="a"), sample([1, 2, 4], channel="b"), sample([1, 2, 3], channel=None)]
    assert shape(find_tree(rows, TEXT, min_shared=1)) == [((0, 1, 2), 0, 2, ROOT), ((0, 2), 2, 3, 0), ((1,), 2, 3, 0)]
    assert find_tree([], TEXT, min_shared=1) == []


def test_prefixes_do_not_split_images() -> None:
    small, large, same_size = picture("a", 2), picture("b", 4), picture("c", 2)
    question = with_pictures([5, small, 6, 7])
    for other, stop in [
        (with_pictures([5, small, 6, 8]), 6),
        (with_pictures([5, small, 9]), 5),
        (with_pictures([5, large, 6, 7]), 1),
        (with_pictures([5, same_size, 6, 7]), 1),
        (with_pictures([5, VISION_START, 6, VISION_END]), 1),
    ]:
        nodes = find_tree([question, other], SEES, min_shared=1)
        assert nodes[0] == Node((0, 1), 0, stop, ROOT)
        parts = [slice_sample([question, other][node.samples[0]], node.start, node.stop, SEES) for node in nodes]
        assert [part.images for part in parts] == [
            (small,) if stop > 1 else (),
            () if stop > 1 else (small,),
            () if stop > 1 else other.images,
        ]


def test_image_is_shared_if_the_text_after_it_is_trained() -> None:
    """Its closing mark predicts both words, so each has a mark of its own; but not the picture."""
    samples = [with_pictures([5, picture("a", 4), word]) for word in (6, 7)]
    samples = [dataclasses.replace(one, labels=one.input_ids) for one in samples]
    nodes = find_tree(samples, SEES, min_shared=1)
    assert shape(nodes) == [((0, 1), 0, 6, ROOT), ((0,), 6, 8, 0), ((1,), 6, 8, 0)]


def test_images_with_equal_bytes_are_equal() -> None:
    one, same, another = (
        dataclasses.replace(picture("a", 2), path=None, data=bytes(data)) for data in (b"12", b"12", b"13")
    )
    rows = [with_pictures([one, 1]), with_pictures([same, 2]), with_pictures([another, 3])]
    assert shape(find_tree(rows, SEES, min_shared=1))[0] == ((0, 1), 0, 4, ROOT)


@settings(max_examples=200)
@given(
    rows=st.lists(st.lists(st.tuples(st.integers(1, 3), st.booleans()), min_size=1, max_size=8), max_size=8),
    min_shared=st.integers(1, 6),
)
def test_tree_has_every_token_and_label_of_every_sample(rows: list[list[tuple[int, bool]]], min_shared: int) -> None:
    samples = [sample([token for token, _ in row], [target for _, target in row]) for row in rows]
    nodes = find_tree(samples, TEXT, min_shared=min_shared)
    for sample_index, full_sample in enumerate(samples):
        branch = path(nodes, sample_index)
        assert [node.start for node in branch] == [0, *(node.stop for node in branch[:-1])]
        assert branch[-1].stop == full_sample.length
        for node, before in zip(branch, [None, *branch], strict=False):
            assert node.parent == (ROOT if before is None else nodes.index(before))
            first_sample = samples[node.samples[0]]
            assert (
                first_sample.input_ids[node.start : node.stop].tolist()
                == full_sample.input_ids[node.start : node.stop].tolist()
            )
    for node in nodes:
        assert len(node.samples) == 1 or node.stop >= min_shared
        for place in range(node.start + 1, node.stop + 1):
            labels = {
                int(label) for sample_index in node.samples for label in samples[sample_index].labels[place : place + 1]
            }
            assert len(labels - {-100}) <= 1
    if min_shared == 1 and not any(target for row in rows for _, target in row):
        distinct = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
        assert sum(node.length for node in nodes) == len(distinct)


words = st.one_of(st.integers(1, 3), st.sampled_from([picture("a", 2), picture("b", 2), picture("c", 5)]))


@settings(max_examples=200)
@given(
    rows=st.lists(st.lists(words, min_size=1, max_size=6), min_size=1, max_size=8),
    min_shared=st.integers(1, 6),
    capacity=st.integers(60, 150),
    data=st.data(),
)
def test_no_group_is_longer_than_planned(
    rows: list[list[int | EncodedImage]], min_shared: int, capacity: int, data: st.DataObject
) -> None:
    """What hashes tell the planner is found in the tokens, whatever is trained and wherever turns end."""
    samples = []
    for row in rows:
        picture_sample = with_pictures(row)
        size = picture_sample.length
        is_target = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
        borders = np.array(sorted(data.draw(st.sets(st.integers(1, size)))), np.int32)
        labels = np.where(is_target & (picture_sample.input_ids < IMAGE_PAD), picture_sample.input_ids, -100).astype(
            np.int32
        )
        samples.append(dataclasses.replace(picture_sample, labels=labels, borders=borders))
    counts, hashes = prefix_hashes(samples, SEES.media_tokens, longer_than=min_shared)
    prefixes = Prefixes(np.cumsum([0, *counts]), hashes.lengths, hashes.hashes)
    lengths = np.array([one.length for one in samples])
    trees = plan_trees(lengths, prefixes, capacity=capacity, min_shared=min_shared)
    plan = trees.expand(pack(trees.sums_per_group(trees.new_tokens(lengths)), capacity, seed=0), lengths)
    for pack_index, tokens in enumerate(plan.tokens_per_pack().tolist()):
        nodes = find_tree([samples[i] for i in plan.pack(pack_index)], SEES, min_shared=min_shared)
        assert sum(node.length for node in nodes) <= tokens <= capacity


@pytest.mark.parametrize("name", ["qwen3", "qwen3_vl"])
def test_common_test_samples_form_a_tree_of_several_levels(name: str) -> None:
    samples = samples_with_prefixes(name)
    nodes = find_tree(samples, reduced_spec(name), min_shared=1)
    depths = [0]
    for node in nodes[1:]:
        depths.append(0 if node.parent == ROOT else 1 + depths[node.parent])
    assert max(depths) >= 2
    assert sum(node.length for node in nodes) < 0.7 * sum(sample.length for sample in samples)


def test_keys_include_all_ancestor_nodes() -> None:
    index, lengths = key_index([ROOT, 0, 0, ROOT, 2], [2, 1, 2, 1, 1])
    assert lengths == (2, 3, 4, 1, 5)
    assert index.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5, 0, 1, 3, 4, 6]
    assert key_index([], [])[1] == ()
