"""Rows that another tool has tokenized: ``input_ids`` and their other columns.

Labels are ``labels`` (the token itself, or -100), ``completion_mask`` and ``assistant_masks``, or the ``loss_mask`` of
NeMo and Megatron; without any of them every token is a target, as in pretraining. ``attention_mask`` is 0 for padding.
A row may be a pack of several samples, whose starts are in the columns of ``_boundaries``.
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
"""The ``formatting`` that prefers tokens if a row also has their text."""

_Ints = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]
_MASKS = ("completion_mask", "assistant_masks")
# Columns of other tools for the starts of samples in a pack that are not supported.
_UNREAD_BOUNDARIES = re.compile(
    r"cu_?seq|seq(uence)?_?len|seq_?(start|idx)|segment|boundar|packing|(doc|sequence)\w*_ids?$"
)
_READ_BOUNDARIES = "seq_lengths, cu_seqlens, seq_start_id, a numbered attention_mask, position_ids"


def _fits(columns: Columns, formatting: str | None) -> bool:
    return formatting in (None, TOKENS) and columns.find("input_ids") is not None


def _read_tokens(fields: Fields, inline: InlineMedia) -> PreparedTokens:
    ids = _column(fields, "input_ids", None)
    if ids is None or not len(ids):
        raise RowProblem("empty_tokens", "there is no token in 'input_ids'")
    mask = _column(fields, "attention_mask", len(ids), takes_bools=True)
    if mask is not None and mask.min() < 0:
        detail = f"'attention_mask' has {mask.min()}; it must be 0 for padding, else 1 or more"
        raise RowProblem("invalid_tokens", detail)
    kept = np.ones(len(ids), bool) if mask is None else mask != 0
    if not kept.any():
        raise RowProblem("empty_tokens", "all of its tokens are padding: 'attention_mask' is 0 everywhere")
    begins, kept = _split(_boundaries(fields, mask, kept), kept)
    trained, weights = _trained(fields, ids, begins), _weights(fields, len(ids))
    # After padding before a sample, the next token is the sample's first.
    number = np.cumsum(begins)[kept]
    starts = np.flatnonzero(np.diff(number, prepend=number[0] - 1))
    holes = np.flatnonzero(np.diff(np.flatnonzero(kept)) > 1) + 1
    if len(inside := np.setdiff1d(holes, starts)):
        at = int(np.flatnonzero(kept)[inside[0] - 1]) + 1
        raise RowProblem("invalid_tokens", f"'attention_mask' is 0 at token {at:,}, in the middle of a sample")
    return PreparedTokens(
        ids=ids[kept],
        trained=None if trained is None else trained[kept],
        weights=None if weights is None else weights[kept],
        starts=starts,
        channels=_channels(fields, number[starts] - 1, int(begins.sum())),
        # Sizes that packtool wrote into the row; empty for other media.
        measured={
            kind: [medium if isinstance(medium, Mapping) and is_measured(medium) else {} for medium in media]
            for kind in MEDIA_KINDS
            if isinstance(media := fields.get(f"{kind}s"), list)
        },
    )


def _boundaries(fields: Fields, mask: _Ints | None, kept: _Bools) -> dict[str, _Bools]:
    """Return the first tokens of a row's samples, bool (L,), by each column that has them.

    Args:
        mask: the row's ``attention_mask``, int64 (L,).
        kept: bool (L,), False where it is 0.
    """
    length = len(kept)
    boundaries: dict[str, _Bools] = {}
    for name in ("seq_lengths", "cu_seqlens", "seq_start_id"):
        values = _column(fields, name, None)
        if values is None or not len(values):
            continue
        edges = np.cumsum([0, *values]) if name == "seq_lengths" else values
        edges = np.append(edges, length) if name == "seq_start_id" else edges
        # Sums of huge numbers overflow.
        if edges[0] != 0 or edges[-1] != length or edges.max() > length or (np.diff(edges) < 0).any():
            detail = f"{name!r} must lead from 0 up to the {length:,} tokens of the row"
            if name == "seq_lengths":
                detail = f"{name!r} tells of {sum(values.tolist()):,} tokens, and the row has {length:,}"
            raise RowProblem("invalid_tokens", detail)
        boundaries[name] = np.isin(np.arange(length), edges)
    tokens = np.flatnonzero(kept)
    if mask is not None and mask.max() > 1:
        boundaries["attention_mask"] = _mask_of(tokens[np.diff(mask[kept], prepend=-1) != 0], length)
    starts = _restarts(fields, tokens, length)
    if len(starts) > 1:
        boundaries["position_ids"] = _mask_of(starts, length)
    if not boundaries:
        _refuse_unread(fields)
    return boundaries


def _restarts(fields: Fields, tokens: _Ints, length: int) -> _Ints:
    """Return the tokens at which ``position_ids`` restart, int64.

    They are (L,), or (axes, L) with 1 axis, 4 (text, t, h, w) or 3 (t, h, w): only a sample's first token has 0 in all.

    Args:
        tokens: positions of the tokens that are not padding, ascending.
    """
    value: Any = fields.parsed("position_ids")
    if value is None:
        return tokens[:1]
    axes = _as_array(value)
    axes = np.atleast_2d(np.squeeze(axes)) if axes.dtype != object else np.zeros((0, 0), object)
    if axes.dtype.kind not in "iuf" or axes.ndim != 2 or len(axes) not in (1, 3, 4) or axes.shape[1] != length:
        detail = f"'position_ids' is {shown(value)}, not a number for each of {length:,} tokens, or 3 or 4 such lists"
        raise RowProblem("invalid_tokens", detail)
    axes = axes[:, tokens]
    if len(axes) == 3:
        restarts = (axes == 0).all(0)
    else:
        steps = np.diff(axes[0].astype(np.float64))
        restarts = np.append(True, axes[0, 1:] == 0)
        if len(jumps := np.flatnonzero(~restarts[1:] & (steps != 1))):
            at = int(jumps[0])
            detail = f"'position_ids' go from {axes[0, at]:g} to {axes[0, at + 1]:g} at token {tokens[at + 1]:,}"
            raise RowProblem("unknown_boundaries", f"{detail}: samples begin at 0, and go on by 1")
    restarts[0] = True
    return tokens[restarts]


def _mask_of(tokens: _Ints, length: int) -> _Bools:
    mask = np.zeros(length, bool)
    mask[tokens] = True
    return mask


def _split(boundaries: Mapping[str, _Bools], kept: _Bools) -> tuple[_Bools, _Bools]:
    """Return the first tokens of samples and the tokens that belong to samples, bool (L,) each.

    Args:
        boundaries: by column; all must agree.
    """
    if not boundaries:
        return _mask_of(np.flatnonzero(kept)[:1], len(kept)), kept
    # A sample of one token has nothing to predict; some tools pad packs with such samples.
    alone = np.any([begins & np.append(begins[1:], True) for begins in boundaries.values()], axis=0)
    kept = kept & ~alone if (kept & ~alone).any() else kept
    (first, begins), *others = boundaries.items()
    changes = np.diff(np.cumsum(begins)[kept]) != 0
    for name, other in others:
        if len(wrong := np.flatnonzero(changes != (np.diff(np.cumsum(other)[kept]) != 0))):
            at = int(np.flatnonzero(kept)[wrong[0] + 1])
            detail = f"{first!r} and {name!r} disagree on whether a sample begins at token {at:,}"
            raise RowProblem("unknown_boundaries", detail)
    return begins, kept


def _refuse_unread(fields: Fields) -> None:
    """Raise RowProblem for a row that may be a pack, with boundaries in a column that is not supported."""
    read = set(chain.from_iterable(map(fields.names, TOKEN_COLUMNS)))
    for key, value in fields.row.items():
        is_many = isinstance(value, Sized) and not isinstance(value, (str, bytes)) and len(value) > 1
        if is_many and key not in read and _UNREAD_BOUNDARIES.search(key.lower()):
            detail = (
                f"{key!r} may say where the samples of a pack begin, and is not read: name it as one of "
                f"{_READ_BOUNDARIES} with --columns, or take it out of the rows"
            )
            raise RowProblem("unknown_boundaries", detail)


def _channels(fields: Fields, numbers: _Ints, count: int) -> tuple[str | None, ...] | None:
    """Return the channel of each sample if a pack has a list of them, else None.

    Args:
        numbers: of the kept samples, among all ``count`` of the pack.
    """
    channels = fields.get("channel")
    if not isinstance(channels, list):
        return None
    if len(channels) != count:
        raise RowProblem("invalid_tokens", f"'channel' has {len(channels):,} values for {count:,} samples")
    return tuple(None if channels[i] is None else str(channels[i]) for i in numbers)


def _trained(fields: Fields, ids: _Ints, begins: _Bools) -> _Bools | None:
    """Return true for targets, bool (L,); None if no column marks them."""
    labels = _column(fields, "labels", len(ids))
    masks = [mask for name in _MASKS if (mask := _mask(fields, name, len(ids))) is not None]
    if "loss_mask" not in chain.from_iterable(map(fields.names, _MASKS)):
        next_tokens = _mask(fields, "loss_mask", len(ids))
        if next_tokens is not None and fields.get("seq_start_id") is None:
            detail = (
                "'loss_mask' may stand at a target or, as NeMo's, before it: name it with --columns "
                "completion_mask=loss_mask if it stands at the target, or leave it out with --columns loss_mask="
            )
            raise RowProblem("unknown_loss_mask", detail)
        if next_tokens is not None:
            masks.append(np.append(0, next_tokens[:-1]) * ~begins)
    if labels is None and not masks:
        return None
    trained = np.ones(len(ids), bool)
    if labels is not None:
        trained = labels != IGNORE_INDEX
        _check_labels(ids, labels, trained)
    for mask in masks:
        trained &= mask != 0
    return trained


def _mask(fields: Fields, name: str, length: int) -> _Ints | None:
    mask = _column(fields, name, length, takes_bools=True)
    if mask is not None and len(wrong := np.flatnonzero((mask != 0) & (mask != 1))):
        at = int(wrong[0])
        raise RowProblem("invalid_tokens", f"{name!r} is {mask[at]} at token {at:,}; it must be 0 or 1")
    return mask


def _check_labels(ids: _Ints, labels: _Ints, trained: npt.NDArray[np.bool_]) -> None:
    wrong = np.flatnonzero(trained & (labels != ids))
    if not len(wrong):
        return
    has_label = trained[:-1]
    if has_label.any() and (labels[:-1][has_label] == ids[1:][has_label]).all():
        detail = "each label is the next token, so the labels are shifted already"
        raise RowProblem("labels_shifted", f"{detail}; here a label stands at its own token and the loss shifts")
    at = int(wrong[0])
    detail = f"token {at:,} is {ids[at]} and its label {labels[at]}, which is neither the token nor {IGNORE_INDEX}"
    raise RowProblem("labels_differ", detail)


def _weights(fields: Fields, length: int) -> npt.NDArray[np.float32] | None:
    value = fields.parsed("loss_scale")
    if value is None:
        return None
    weights = _as_array(value)
    is_numbers = weights.shape == (length,) and weights.dtype.kind in "iuf" and not _has_bools(value)
    if not is_numbers or not ((weights >= 0) & (weights <= MAX_LOSS_SCALE)).all():
        known = f"a number from 0 to {MAX_LOSS_SCALE:,} for each of {length:,} tokens"
        raise RowProblem("invalid_tokens", f"'loss_scale' must be {known}, and is {shown(value)}")
    return None if (weights == 1).all() else weights.astype(np.float32)


def _column(fields: Fields, name: str, length: int | None, *, takes_bools: bool = False) -> _Ints | None:
    """Return a column of integers, int64, of ``length`` if given; None if the row has no such column."""
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
    """Return nested lists as an array; one of objects without elements if lists differ in length."""
    try:
        return np.asarray(value)
    except ValueError:
        return np.zeros(0, object)


def _has_bools(values: Any) -> bool:
    """Return whether true or false is among numbers: numpy would read them as 1 and 0."""
    return values.dtype.kind == "b" if isinstance(values, np.ndarray) else bool in set(map(type, values))


PREPARED = RowForm(
    "prepared",
    "input_ids, perhaps labels, attention_mask, position_ids: tokens that another tool has made",
    _fits,
    _read_tokens,
)
