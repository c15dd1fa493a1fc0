"""Form of rows that another tool has tokenized: ``input_ids`` and related columns.

Targets are given by ``labels`` (the token itself, or -100), by ``completion_mask`` and ``assistant_masks``, or by the
``loss_mask`` of NeMo and Megatron; without these columns every token is a target, as in pretraining. ``attention_mask``
is 0 for padding. A row may be a pack of several samples; ``_boundaries`` reads the columns that say where they begin.

In this module, L is the number of tokens of the row with padding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sized
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.constants import IGNORE_INDEX
from packtool.rows.forms.columns import TOKEN_COLUMNS, Columns, Fields, RowProblem, shown
from packtool.rows.forms.media import MEDIA_KINDS, InlineMedia, is_measured
from packtool.rows.forms.messages import MAX_LOSS_SCALE, RowForm
from packtool.rows.sample import PreparedTokens

TOKENS = "tokens"
"""Value of ``formatting`` with which tokens are used if a row has both tokens and text."""

_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
_TARGET_MASKS = ("completion_mask", "assistant_masks")
# Names of columns in which other tools store sample boundaries in ways that are not supported.
_UNSUPPORTED_BOUNDARIES = re.compile(
    r"cu_?seq|seq(uence)?_?len|seq_?(start|idx)|segment|boundar|packing|(doc|sequence)\w*_ids?$"
)
_SUPPORTED_BOUNDARIES = "seq_lengths, cu_seqlens, seq_start_id, a numbered attention_mask, position_ids"


def _fits(columns: Columns, formatting: str | None) -> bool:
    return formatting in (None, TOKENS) and columns.find("input_ids") is not None


def _read_tokens(fields: Fields, _: InlineMedia) -> PreparedTokens:
    """Read a row that another tool has tokenized: its tokens without padding, their targets and their loss weights.

    A row may be a pack of several samples. Columns have a value for each of the L tokens of the row, padding included.
    RowProblem if they contradict each other.
    """
    ids = _column(fields, "input_ids", None)
    if ids is None or not len(ids):
        raise RowProblem("empty_tokens", "'input_ids' is empty")
    mask = _column(fields, "attention_mask", len(ids), takes_bools=True)
    is_token = np.ones(len(ids), bool) if mask is None else _kept_by_mask(mask)  # not padding, (L,)
    boundaries = _boundaries(fields, mask, is_token)  # each sample's first token, by the column that says so
    kept = _without_single_tokens(boundaries, is_token)  # (L,)
    is_first = _check_boundaries(boundaries, kept)  # each sample's first token, on which all columns agree, (L,)
    trained = _target_mask(fields, ids, is_first)  # targets, (L,), or None
    weights = _weights(fields, len(ids))  # (L,), or None
    starts = np.flatnonzero(_starts_sample(is_first, kept))  # of the samples, as indexes into the kept tokens
    _check_padding(kept, starts)
    return PreparedTokens(
        ids=ids[kept],
        trained=None if trained is None else trained[kept],
        weights=None if weights is None else weights[kept],
        starts=starts,
        channels=_channels(fields, is_first, kept),
        measured=_measured_media(fields),
    )


def _kept_by_mask(mask: _Ints) -> _Bools:
    """Return which tokens are not padding, bool (L,), by ``attention_mask``, int64 (L,)."""
    if mask.min() < 0:
        detail = f"'attention_mask' contains {mask.min()}; it must be 0 for padding, and 1 or more for tokens"
        raise RowProblem("invalid_tokens", detail)
    kept: _Bools = mask != 0
    if not kept.any():
        raise RowProblem("empty_tokens", "all tokens are padding: 'attention_mask' is 0 everywhere")
    return kept


def _measured_media(fields: Fields) -> dict[str, list[Mapping[str, Any]]]:
    """Return the sizes that packtool measured, for each medium in the row's columns by kind; {} if it has none."""
    measured: dict[str, list[Mapping[str, Any]]] = {}
    for kind in MEDIA_KINDS:
        media = fields.get(f"{kind}s")
        if isinstance(media, list):
            measured[kind] = [each if isinstance(each, Mapping) and is_measured(each) else {} for each in media]
    return measured


def _check_padding(kept: _Bools, starts: _Ints) -> None:
    """Raise RowProblem for padding (tokens that are not ``kept``, bool (L,)) inside a sample.

    ``starts`` are the first tokens of the samples, as indexes into the kept tokens.
    """
    kept_indices = np.flatnonzero(kept)
    after_padding = np.flatnonzero(np.diff(kept_indices) > 1) + 1
    inside_samples = np.setdiff1d(after_padding, starts)
    if len(inside_samples):
        token = int(kept_indices[inside_samples[0] - 1]) + 1
        raise RowProblem("invalid_tokens", f"'attention_mask' is 0 at token {token:,}, in the middle of a sample")


def _boundaries(fields: Fields, mask: _Ints | None, kept: _Bools) -> dict[str, _Bools]:
    """Find where the samples of a row begin, in every column that says so: several may, in different ways.

    Args:
        mask: ``attention_mask``, int64 (L,); None if the row has none. It may number the samples: [1, 1, 2, 2, 2, 0].
        kept: true for tokens that are not padding, bool (L,).

    Returns:
        The mask of the samples' first tokens, bool (L,), by the name of the column; a row without such a column is a
        single sample, with the name "".
    """
    length = len(kept)
    kept_indices = np.flatnonzero(kept)
    starts = _listed_starts(fields, length)
    if mask is not None and mask.max() > 1:  # it has the number of each token's sample, instead of 1
        no_sample = -1  # before the first token
        is_new_number = np.diff(mask[kept], prepend=no_sample) != 0
        starts["attention_mask"] = kept_indices[is_new_number]

    restarts = _position_restarts(fields, kept_indices, length)
    if len(restarts) > 1:  # else the positions are those of a single sample
        starts["position_ids"] = restarts

    if not starts:
        _refuse_unsupported_boundaries(fields)
        starts[""] = kept_indices[:1]
    return {name: _mask_at(indices, length) for name, indices in starts.items()}


def _listed_starts(fields: Fields, length: int) -> dict[str, _Ints]:
    """Return the first tokens of all samples, by column, for each column that lists them or the samples' lengths."""
    starts = {}
    for name in ("seq_lengths", "cu_seqlens", "seq_start_id"):
        values = _column(fields, name, None)
        if values is not None and len(values):
            starts[name] = _sample_starts(name, values, length)
    return starts


def _sample_starts(name: str, values: _Ints, length: int) -> _Ints:
    """Return the first tokens of all samples of a row from a column that lists these or the samples' lengths.

    Samples of 3 and 2 tokens are ``seq_lengths`` [3, 2], ``cu_seqlens`` [0, 3, 5] or ``seq_start_id`` [0, 3], and the
    result is [0, 3]. ``name`` is the name of the column, ``length`` the number of tokens of the row.
    """
    edges = values  # of cu_seqlens
    if name == "seq_lengths":
        edges = np.cumsum([0, *values])
    elif name == "seq_start_id":
        edges = np.append(values, length)
    # max() catches sums of huge numbers that overflowed.
    is_ascending = (np.diff(edges) >= 0).all() and edges.max() <= length
    if edges[0] != 0 or edges[-1] != length or not is_ascending:
        detail = f"{name!r} must increase from 0 to {length:,}, the number of tokens in the row"
        if name == "seq_lengths":
            detail = f"the sum of {name!r} is {sum(values.tolist()):,}, but the row has {length:,} tokens"
        raise RowProblem("invalid_tokens", detail)
    return edges[edges < length]


def _position_restarts(fields: Fields, kept_indices: _Ints, length: int) -> _Ints:
    """Return the indexes of the first kept token, and of kept tokens at which ``position_ids`` restart at 0.

    ``position_ids`` have the shape (L,) or (axes, L), with 1, 3 or 4 axes: text; t, h, w; or text, t, h, w.
    """
    value: Any = fields.parsed("position_ids")
    if value is None:
        return kept_indices[:1]
    positions = np.atleast_2d(np.squeeze(_as_array(value)))  # some rows have further axes of size 1
    is_table_of_numbers = positions.dtype.kind in "iuf" and positions.ndim == 2
    if not is_table_of_numbers or len(positions) not in (1, 3, 4) or positions.shape[1] != length:
        detail = f"'position_ids' is {shown(value)}, not one number for each of {length:,} tokens, or 3 or 4 such lists"
        raise RowProblem("invalid_tokens", detail)
    positions = positions[:, kept_indices]
    if len(positions) == 3:  # t, h, w: only the first token of a sample is 0 on all of them
        is_restart = (positions == 0).all(0)
    else:
        text_positions = positions[0]
        is_restart = text_positions == 0
        _check_steps_of_1(text_positions, is_restart, kept_indices)
    is_restart[0] = True  # the first sample may begin with other positions
    return kept_indices[is_restart]


def _check_steps_of_1(positions: npt.NDArray[Any], is_restart: _Bools, token_numbers: _Ints) -> None:
    """Raise RowProblem unless text positions increase by 1 between restarts; arrays of all kept tokens, (K,) each."""
    steps = np.diff(positions.astype(np.float64))
    jumps = np.flatnonzero(~is_restart[1:] & (steps != 1)) + 1
    if len(jumps):
        i = int(jumps[0])
        detail = f"'position_ids' change from {positions[i - 1]:g} to {positions[i]:g} at token {token_numbers[i]:,}"
        raise RowProblem("unknown_boundaries", f"{detail}; they must start at 0 and increase by 1 in each sample")


def _mask_at(indices: _Ints, length: int) -> _Bools:
    mask = np.zeros(length, bool)
    mask[indices] = True
    return mask


def _check_boundaries(boundaries: Mapping[str, _Bools], kept: _Bools) -> _Bools:
    """Check that the boundaries of all columns agree for the tokens to keep; return those of the first column."""
    (reference_name, is_first), *other_columns = boundaries.items()
    starts_sample = _starts_sample(is_first, kept)  # columns may count padding differently, so compare only kept tokens
    for name, is_first_by_other in other_columns:
        differences = np.flatnonzero(starts_sample != _starts_sample(is_first_by_other, kept))
        if len(differences):
            token = int(np.flatnonzero(kept)[differences[0]])
            detail = f"{reference_name!r} and {name!r} disagree on whether a sample begins at token {token:,}"
            raise RowProblem("unknown_boundaries", detail)
    return is_first


def _starts_sample(is_first: _Bools, kept: _Bools) -> _Bools:
    """Return which of the K kept tokens are the first kept ones of their sample, bool (K,)."""
    sample_numbers = np.cumsum(is_first)[kept]  # from 1
    return np.diff(sample_numbers, prepend=0) != 0


def _without_single_tokens(boundaries: Mapping[str, _Bools], kept: _Bools) -> _Bools:
    """Return ``kept`` without samples of one token, with which some tools pad packs; all if nothing else is left."""
    is_in_longer_sample = np.ones(len(kept), bool)
    for is_first in boundaries.values():
        is_last = np.append(is_first[1:], True)
        is_in_longer_sample &= ~(is_first & is_last)
    remaining = kept & is_in_longer_sample
    return remaining if remaining.any() else kept


def _refuse_unsupported_boundaries(fields: Fields) -> None:
    """Raise RowProblem for a row that may be a pack, because a column with an unsupported name may have boundaries."""
    supported = set(chain.from_iterable(map(fields.names, TOKEN_COLUMNS)))
    for key, value in fields.row.items():
        has_several = isinstance(value, Sized) and not isinstance(value, (str, bytes)) and len(value) > 1
        if has_several and key not in supported and _UNSUPPORTED_BOUNDARIES.search(key.lower()):
            detail = (
                f"{key!r} may contain the sample boundaries of a pack, but is not supported; name it with --columns as "
                f"one of {_SUPPORTED_BOUNDARIES}, or remove it from the rows"
            )
            raise RowProblem("unknown_boundaries", detail)


def _channels(fields: Fields, is_first: _Bools, kept: _Bools) -> tuple[str | None, ...] | None:
    """Return the channels of the samples of a pack that have a kept token; None if ``channel`` is not a list."""
    channels = fields.get("channel")
    if not isinstance(channels, list):
        return None
    num_samples = int(is_first.sum())
    if len(channels) != num_samples:
        raise RowProblem("invalid_tokens", f"'channel' has {len(channels):,} values for {num_samples:,} samples")
    kept_samples = np.unique(np.cumsum(is_first)[kept]) - 1  # indexes of the samples
    return tuple(None if channels[i] is None else str(channels[i]) for i in kept_samples)


def _target_mask(fields: Fields, ids: _Ints, is_first: _Bools) -> _Bools | None:
    """Return which tokens are targets, bool (L,): those that ``labels`` and all columns with masks mark.

    None if the row has no such column, so that all tokens are targets. ``ids`` are the L tokens of the row, and
    ``is_first``, bool (L,), is true for the first token of each sample.
    """
    length = len(ids)
    labels = _column(fields, "labels", length)  # the token itself, or -100 where it is no target
    possible_masks = [_mask(fields, name, length) for name in _TARGET_MASKS]
    possible_masks.append(_nemo_mask(fields, is_first))
    masks = [mask for mask in possible_masks if mask is not None]
    if labels is None and not masks:
        return None
    trained = np.ones(length, bool)
    if labels is not None:
        trained = labels != IGNORE_INDEX
        _check_labels(ids, labels, trained)
    for mask in masks:
        trained &= mask != 0
    return trained


def _nemo_mask(fields: Fields, is_first: _Bools) -> _Ints | None:
    """Return the targets from NeMo's ``loss_mask``, (L,), which marks the token before each one; None without it."""
    if "loss_mask" in chain.from_iterable(map(fields.names, _TARGET_MASKS)):
        return None
    is_before_target = _mask(fields, "loss_mask", len(is_first))
    if is_before_target is None:
        return None
    if fields.get("seq_start_id") is None:
        detail = (
            "'loss_mask' may mark each target or, as in NeMo, the token before it; pass --columns "
            "completion_mask=loss_mask if it marks the targets, or --columns loss_mask= to ignore it"
        )
        raise RowProblem("unknown_loss_mask", detail)
    return np.append(0, is_before_target[:-1]) * ~is_first


def _mask(fields: Fields, name: str, length: int) -> _Ints | None:
    """Return a column of zeros and ones, int64 (L,); None if the row does not have it."""
    mask = _column(fields, name, length, takes_bools=True)
    if mask is None:
        return None
    invalid = np.flatnonzero((mask != 0) & (mask != 1))
    if len(invalid):
        token = int(invalid[0])
        raise RowProblem("invalid_tokens", f"{name!r} is {mask[token]} at token {token:,}; it must be 0 or 1")
    return mask


def _check_labels(ids: _Ints, labels: _Ints, trained: npt.NDArray[np.bool_]) -> None:
    """Raise RowProblem unless every label where ``trained`` is true is its own token; all arrays are (L,)."""
    differences = np.flatnonzero(trained & (labels != ids))
    if not len(differences):
        return
    has_label = trained[:-1]  # of all tokens but the last, which has no next token
    next_tokens = ids[1:][has_label]
    if has_label.any() and (labels[:-1][has_label] == next_tokens).all():
        detail = "each label is the next token, so the labels are already shifted"
        detail = f"{detail}; each label must be at its own token, because the loss shifts them"
        raise RowProblem("labels_shifted", detail)
    token = int(differences[0])
    detail = (
        f"the label of token {token:,} is {labels[token]}; it must be the token itself ({ids[token]}) or {IGNORE_INDEX}"
    )
    raise RowProblem("labels_differ", detail)


def _weights(fields: Fields, length: int) -> npt.NDArray[np.float32] | None:
    """Return the loss weights in ``loss_scale``, float32 (L,); None if all are 1 or the row has none."""
    value = fields.parsed("loss_scale")
    if value is None:
        return None
    weights = _as_array(value)
    is_numbers = weights.shape == (length,) and weights.dtype.kind in "iuf" and not _has_bools(value)
    if not is_numbers or not ((weights >= 0) & (weights <= MAX_LOSS_SCALE)).all():
        detail = (
            f"'loss_scale' is {shown(value)}, not a number from 0 to {MAX_LOSS_SCALE:,} for each of {length:,} tokens"
        )
        raise RowProblem("invalid_tokens", detail)
    return None if (weights == 1).all() else weights.astype(np.float32)


def _column(fields: Fields, name: str, length: int | None, *, takes_bools: bool = False) -> _Ints | None:
    """Return a column as int64, None if it is missing; ``length`` None allows any, ``takes_bools`` true and false."""
    value: Any = fields.parsed(name)
    if value is None:
        return None
    column = _as_array(value)
    if column.shape == (0,) and column.dtype != object:
        column = column.astype(np.int64)
    if column.ndim != 1 or column.dtype.kind not in "iub" or not (takes_bools or not _has_bools(value)):
        raise RowProblem("invalid_tokens", f"{name!r} is {shown(value)}, not a list of integers")
    if length is not None and len(column) != length:
        raise RowProblem("invalid_tokens", f"{name!r} has {len(column):,} values for {length:,} tokens")
    return column.astype(np.int64)


def _as_array(value: Any) -> npt.NDArray[Any]:
    """Convert nested lists to an array; lists that differ in length to an empty array of objects."""
    try:
        return np.asarray(value)
    except ValueError:
        return np.zeros(0, object)


def _has_bools(values: Any) -> bool:
    """Return whether values contain true or false, which numpy converts to 1 and 0."""
    return values.dtype.kind == "b" if isinstance(values, np.ndarray) else bool in set(map(type, values))


PREPARED = RowForm(
    "prepared",
    "input_ids, optionally labels, attention_mask, position_ids: rows that another tool has tokenized",
    _fits,
    _read_tokens,
)
