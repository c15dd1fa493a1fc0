"""Padding removed and restored: inverses of each other, with the shapes and prompts of MindSpeed-RL's functions."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from packtool.batch.collate import collate_packs, collate_padded
from packtool.batch.positions import PAD_ID, align_sample, restore_padding
from packtool.constants import IGNORE_INDEX
from tests.batch.reduced import TEXT_MODELS, make_sample, mixed_samples, reduced_spec

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=6)
ALIGNMENTS = st.sampled_from([1, 2, 3, 4, 8])
SIDES = st.sampled_from(["right", "left", "holes"])


class RemovedPadding(NamedTuple):
    """B rows laid end to end, T tokens with the pads that align them; in the order of MindSpeed-RL's function.

    Args:
        input_ids: (1, T), in the precision they came in.
        position_ids: int64 (1, T), from 0 on in every row.
        labels: (1, T), -100 on pads.
        seqlens: int32 (B,), tokens of each row without any padding.
        cu_seqlens: int32 (B + 1,), starts of the rows, pads included, and T at the end.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    seqlens: Tensor
    cu_seqlens: Tensor


def remove_padding(input_ids: Tensor, labels: Tensor, attention_mask: Tensor, *, align_to: int = 1) -> RemovedPadding:
    """Lay the rows of a padded batch end to end in one sequence.

    Args:
        input_ids: int (B, L).
        labels: int (B, L), at the same positions; shift them before if a loss is computed from them.
        attention_mask: (B, L), 1 on tokens and 0 on padding, on either side of the tokens.
        align_to: every row is padded to a multiple of it: 1 for none.
    """
    is_token = attention_mask.bool()
    seqlens = is_token.sum(dim=1)
    aligned_lengths = (seqlens + align_to - 1) // align_to * align_to
    cu_seqlens = torch.cat([aligned_lengths.new_zeros(1), aligned_lengths.cumsum(0)])
    num_packed = int(cu_seqlens[-1])
    # Position in the sequence of each token, from its position in its row.
    index_in_row = is_token.cumsum(dim=1) - 1
    packed_index = (cu_seqlens[:-1, None] + index_in_row)[is_token]
    packed_ids = input_ids.new_full((num_packed,), PAD_ID)
    packed_ids[packed_index] = input_ids[is_token]
    packed_labels = labels.new_full((num_packed,), IGNORE_INDEX)
    packed_labels[packed_index] = labels[is_token]
    row_starts = torch.repeat_interleave(cu_seqlens[:-1], aligned_lengths, output_size=num_packed)
    position_ids = torch.arange(num_packed, device=input_ids.device) - row_starts
    return RemovedPadding(packed_ids[None], position_ids[None], packed_labels[None], seqlens.int(), cu_seqlens.int())


def padded_batch(lengths: list[int], width: int, side: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of tokens without zeros, their labels, and a mask with padding where ``side`` says; padding holds 7777."""
    random = np.random.default_rng(seed)
    mask = np.zeros((len(lengths), width), np.int64)
    for row, length in zip(mask, lengths, strict=True):
        places = {"right": np.arange(length), "left": np.arange(width - length, width)}
        row[places.get(side, np.sort(random.permutation(width)[:length]))] = 1
    ids = np.where(mask == 1, random.integers(1, 90, mask.shape), 7777)
    labels = np.where(random.random(mask.shape) < 0.5, ids, IGNORE_INDEX)
    return torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(mask)


def one_by_one(rows: Tensor, mask: Tensor, width: int, fill: int) -> Tensor:
    """Rows with their padding moved to the right."""
    moved = torch.full((len(rows), width), fill, dtype=rows.dtype)
    for index, (row, is_token) in enumerate(zip(rows, mask.bool(), strict=True)):
        moved[index, : int(is_token.sum())] = row[is_token]
    return moved


@settings(max_examples=60)
@given(lengths=LENGTHS, room=st.integers(0, 3), side=SIDES, align_to=ALIGNMENTS, seed=st.integers(0, 9))
def test_padding_restores_removed_rows(lengths: list[int], room: int, side: str, align_to: int, seed: int) -> None:
    width = max(lengths) + room
    ids, labels, mask = padded_batch(lengths, width, side, seed)
    packed = remove_padding(ids, labels, mask, align_to=align_to)
    place = packed.seqlens, packed.cu_seqlens, width
    assert torch.equal(restore_padding(packed.input_ids, *place, fill=7777), one_by_one(ids, mask, width, 7777))
    assert torch.equal(
        restore_padding(packed.labels, *place, fill=IGNORE_INDEX), one_by_one(labels, mask, width, IGNORE_INDEX)
    )
    if side == "right":
        assert torch.equal(restore_padding(packed.input_ids, *place, fill=7777), ids)


@settings(max_examples=60)
@given(lengths=LENGTHS, side=SIDES, align_to=ALIGNMENTS, seed=st.integers(0, 9))
def test_removing_padding_inverts_restoring(lengths: list[int], side: str, align_to: int, seed: int) -> None:
    """The other way round: from a packed sequence to rows and back."""
    ids, labels, mask = padded_batch(lengths, max(lengths), side, seed)
    packed = remove_padding(ids, labels, mask, align_to=align_to)
    place = packed.seqlens, packed.cu_seqlens, max(lengths)
    rows, row_labels = restore_padding(packed.input_ids, *place), restore_padding(packed.labels, *place)
    right = (torch.arange(max(lengths)) < packed.seqlens[:, None]).long()
    removed_again = remove_padding(rows, row_labels, right, align_to=align_to)
    assert all(torch.equal(one, other) for one, other in zip(packed, removed_again, strict=True))


@settings(max_examples=60)
@given(lengths=LENGTHS, side=SIDES, align_to=ALIGNMENTS, seed=st.integers(0, 9))
def test_padding_is_removed(lengths: list[int], side: str, align_to: int, seed: int) -> None:
    ids, labels, mask = padded_batch(lengths, max(lengths), side, seed)
    packed = remove_padding(ids, labels, mask, align_to=align_to)
    padded = [-(-length // align_to) * align_to for length in lengths]
    assert packed.seqlens.tolist() == lengths
    assert packed.cu_seqlens.tolist() == np.cumsum([0, *padded]).tolist()
    assert packed.seqlens.dtype == packed.cu_seqlens.dtype == torch.int32
    assert packed.input_ids.shape == packed.position_ids.shape == packed.labels.shape == (1, sum(padded))
    assert packed.position_ids[0].tolist() == [place for length in padded for place in range(length)]
    is_pad = torch.cat([torch.arange(wide) >= length for length, wide in zip(lengths, padded, strict=True)])
    assert (packed.input_ids[0][is_pad] == PAD_ID).all()
    assert (packed.labels[0][is_pad] == IGNORE_INDEX).all()
    assert 7777 not in packed.input_ids


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    align_to=ALIGNMENTS,
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_rows_hold_answer_values_after_the_prompt(
    lengths: list[int], align_to: int, seed: int, data: st.DataObject
) -> None:
    """Values of two numbers a position: as in the seed, from position p - 1 on, without the last one."""
    prompts = [data.draw(st.integers(1, length)) for length in lengths]
    packed = remove_padding(*padded_batch(lengths, max(lengths), "right", seed), align_to=align_to)
    values = torch.rand(1, packed.input_ids.shape[1], 2)
    width = max(length - prompt for length, prompt in zip(lengths, prompts, strict=True)) + 1
    rows = restore_padding(values, packed.seqlens, packed.cu_seqlens, width, torch.tensor(prompts), fill=-1.0)
    assert rows.shape == (len(lengths), width, 2)
    for row, length, prompt, start in zip(rows, lengths, prompts, packed.cu_seqlens.tolist(), strict=False):
        answer_values = values[0, start + prompt - 1 : start + length - 1]
        assert torch.equal(row[: length - prompt], answer_values)
        assert (row[length - prompt :] == -1.0).all()


def test_example_of_the_documentation_is_correct() -> None:
    ids = torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0]])
    packed = remove_padding(ids, ids, mask, align_to=2)
    assert packed.input_ids.tolist() == [[1, 2, 3, 0, 4, 5, 6, 7, 8, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2, 3]]
    assert packed.labels.tolist() == [[1, 2, 3, -100, 4, 5, 6, 7, 8, -100]]
    assert packed.seqlens.tolist() == [3, 2, 3]
    assert packed.cu_seqlens.tolist() == [0, 4, 6, 10]
    assert restore_padding(packed.input_ids, packed.seqlens, packed.cu_seqlens, 4).tolist() == ids.tolist()
    prompts = torch.tensor([[1], [2], [2]])  # MindSpeed-RL's shape
    rows = restore_padding(packed.input_ids, packed.seqlens, packed.cu_seqlens, 2, prompts)
    assert rows.tolist() == [[1, 2], [0, 0], [7, 0]]


def test_gradients_reach_tokens_but_not_padding() -> None:
    values = torch.rand(1, 6, requires_grad=True)
    restore_padding(values, torch.tensor([1, 2]), torch.tensor([0, 3, 6]), 4).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1, 0, 0, 1, 1, 0]]


def test_nan_stays_in_its_row() -> None:
    values = torch.tensor([[float("nan"), 1.0, 2.0]])
    rows = restore_padding(values, torch.tensor([1, 2]), torch.tensor([0, 1, 3]), 3)
    assert rows[1].tolist() == [1.0, 2.0, 0.0]
    assert rows[0, 1:].tolist() == [0.0, 0.0]


def test_invalid_inputs_are_refused() -> None:
    ids = torch.ones(2, 3, dtype=torch.int64)
    packed = remove_padding(ids, ids, ids)
    place = packed.seqlens, packed.cu_seqlens
    with pytest.raises(ValueError, match="one packed sequence"):
        restore_padding(ids, *place, 3)
    with pytest.raises(ValueError, match="too short for a row of 3"):
        restore_padding(packed.input_ids, *place, 2)
    for prompts in ([0, 1], [1, 4]):
        with pytest.raises(ValueError, match="a prompt has at least one token"):
            restore_padding(packed.input_ids, *place, 3, torch.tensor(prompts))


@pytest.mark.parametrize("align_to", [1, 4])
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_collated_packs_are_padded_batches_without_their_padding(name: str, align_to: int) -> None:
    """Evaluation lays aligned samples end to end and never pads; it comes to the same."""
    spec, samples = reduced_spec(name), mixed_samples(name)
    padded = collate_padded(samples, spec)
    removed = remove_padding(padded.input_ids, padded.labels, padded.attention_mask, align_to=align_to)
    packed = collate_packs([align_sample(sample, align_to) for sample in samples], spec)
    assert torch.equal(packed.input_ids, removed.input_ids)
    assert torch.equal(packed.labels, removed.labels)
    assert torch.equal(packed.position_ids, removed.position_ids)
    assert torch.equal(packed.cu_seqlens, removed.cu_seqlens)
    assert removed.seqlens.tolist() == [sample.length for sample in samples]


def test_an_aligned_sample_keeps_its_targets_and_weights() -> None:
    plain = make_sample(7, seed=1)
    weighted = dataclasses.replace(plain, loss_scale=np.full(7, 0.5, np.float32))
    aligned = align_sample(weighted, 4)
    assert aligned.length == len(aligned.labels) == 8
    assert aligned.labels[-1] == IGNORE_INDEX
    assert aligned.loss_scale is not None
    assert aligned.loss_scale.tolist() == [0.5] * 7 + [0.0]
    assert align_sample(plain, 4).loss_scale is None
    assert align_sample(plain, 7) is plain
