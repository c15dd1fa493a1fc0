"""The tensors of one micro-batch on their way into a model."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packtool.batch.media_cache import MediaReads
from packtool.batch.micro_batch import Tower
from packtool.batch.shard import SequenceShard
from packtool.batch.spec import InputSpec
from packtool.batch.tower_inputs import Movable, TowerInputs
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample

B = TypeVar("B", bound="Batch")


@dataclass(frozen=True)
class SkippedSample:
    """A sample whose media could not be loaded, left out by ``--on-bad-media skip``.

    Args:
        num_target_tokens: labels that the loss lacks.
        index: its position in the micro-batch.
        sample: its position in the caches; None in a stream.
    """

    source: str
    row: int
    message: str
    num_target_tokens: int
    index: int
    sample: int | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch(Movable):
    """A micro-batch: B rows of T tokens; a packed one has a single row.

    Args:
        input_ids: int64 (B, T).
        labels: int64 (B, T), already shifted: the token that position i predicts, -100 for none.
        position_ids: (4, B, T) as [text, t, h, w] for M-RoPE models, else (B, T); int64, or float32 for fractions.
        media: inputs of the towers, by the name of the model's argument, in the order of their placeholder tokens:
            ``pixel_values`` and ``image_grid_thw``, ``pixel_values_videos`` and ``video_grid_thw``,
            ``input_features`` and ``feature_attention_mask``; ``Family.token_types``, int64 (B, T); and
            ``cross_attention_mask``, uint8 (B, T, pictures, tiles), the tiles that each token sees.
        towers: for each tower that runs, inputs that it would otherwise compute on the device.
        target_positions: int64 (N,), positions of the N labels other than -100 in the flattened micro-batch, ascending.
        loss_weights: float32 (B, T), of each label, shifted like them, or None if all weigh 1.
        channels: of each document or row, a filler's is None; see ``TreeBatch`` for its own.
        num_samples: samples in it, without fillers.
        num_padding: tokens of a filler document that pads the row to a multiple, for compiled layers.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    media: Mapping[str, Tensor]
    towers: Mapping[Tower, TowerInputs]
    target_positions: Tensor
    loss_weights: Tensor | None
    channels: tuple[str | None, ...]
    num_samples: int
    skipped: tuple[SkippedSample, ...] = ()
    num_padding: int = 0
    media_reads: MediaReads = MediaReads()

    @property
    def num_target_tokens(self) -> int:
        """Labels that are not -100."""
        return len(self.target_positions)

    @property
    def is_token(self) -> Tensor:
        """bool (B, T), True for tokens of samples, False for padding and fillers."""
        raise NotImplementedError(f"{type(self).__name__} does not know which of its tokens are padding")

    @property
    def pixel_values(self) -> Tensor | None:
        """(patches, patch_dim) of all pictures, or None."""
        return self.media.get("pixel_values")

    @property
    def image_grid_thw(self) -> Tensor | None:
        """int64 (pictures, 3), or None."""
        return self.media.get("image_grid_thw")

    def documents_of(self, positions: Tensor) -> Tensor:
        """The document or row of each position (n,) of the flattened micro-batch, int64 (n,)."""
        return positions // self.input_ids.shape[1]

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model's forward; without labels, as the loss is packtool's own."""
        inputs = {"input_ids": self.input_ids, "position_ids": self.position_ids, "use_cache": False, **self.media}
        return inputs | {"towers": self.towers} if self.towers else inputs

    def map(self: B, function: Callable[[Tensor], Tensor]) -> B:
        """The same micro-batch with every tensor replaced by the function's result."""
        values: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {name: function(value) for name, value in values.items() if isinstance(value, Tensor)}
        values["media"] = {name: function(value) for name, value in self.media.items()}
        values["towers"] = {name: inputs.map(function) for name, inputs in self.towers.items()}
        return type(self)(**values)


def target_positions(labels: Tensor) -> Tensor:
    """Positions of the flattened labels (B, T) that are not -100, int64 (N,)."""
    return (labels.flatten() != IGNORE_INDEX).nonzero().squeeze(1)


class PictureKeys(NamedTuple):
    """Queries and keys of attention, one document for each picture.

    Args:
        lengths, key_lengths: tokens and keys of each picture.
        queries: int64 (N,), positions of the pictures' tokens in the sequence.
        keys: int64 (M,), for each picture the keys that its tokens see, as indexes into the keys of all documents.
        cu_seqlens, cu_seqlens_k: int32 (pictures + 1,), boundaries of the pictures among ``queries`` and ``keys``.
    """

    lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    queries: Tensor
    keys: Tensor
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor


def _picture_keys(queries: Sequence[Tensor], keys: Sequence[Tensor], device: torch.device) -> PictureKeys:
    """Return the queries and keys of attention, given their indexes for each document of it, int64 (n,) each."""
    lengths, key_lengths = tuple(map(len, queries)), tuple(map(len, keys))
    # Created on the host: creating them on the device would wait for all kernels.
    to_device = partial(Tensor.to, device=device, non_blocking=True)
    return PictureKeys(
        lengths,
        key_lengths,
        queries=to_device(torch.cat(list(queries))),
        keys=to_device(torch.cat(list(keys))),
        cu_seqlens=to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)),
        cu_seqlens_k=to_device(torch.tensor([0, *accumulate(key_lengths)], dtype=torch.int32)),
    )


class CrossPictures:
    """Pictures that the tokens of their sample attend to by cross-attention (Llama 3.2 Vision).

    As in transformers, a token that no picture precedes attends to all tiles of its sample, also to those of padding.

    Args:
        masks: of each document, uint8 (L, pictures, tiles): the tiles that its tokens see.
        positions_per_tile: number of features of a tile.
    """

    def __init__(self, masks: Sequence[npt.NDArray[np.uint8]], positions_per_tile: int) -> None:
        self._positions_per_tile = positions_per_tile
        self._runs: list[tuple[range, npt.NDArray[np.int64]]] = []  # tokens that see the same tiles, and these
        self._keys: dict[torch.device, PictureKeys] = {}
        first_token = first_tile = 0
        for mask in masks:
            rows = mask.reshape(len(mask), mask.shape[1] * mask.shape[2])
            changes = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1)) + 1
            for start, stop in pairwise([0, *changes.tolist(), len(rows)] if rows.shape[1] else []):
                tiles = np.flatnonzero(rows[start] if rows[start].any() else rows[start] == 0)
                self._runs.append((range(first_token + start, first_token + stop), first_tile + tiles))
            first_token += len(rows)
            first_tile += rows.shape[1]

    def keys(self, device: torch.device) -> PictureKeys:
        """Return queries and keys, one document for each run of tokens that see the same tiles; computed once."""
        if device not in self._keys:
            size = self._positions_per_tile
            queries = [torch.arange(tokens.start, tokens.stop) for tokens, _ in self._runs]
            keys = [(torch.from_numpy(tiles)[:, None] * size + torch.arange(size)).flatten() for _, tiles in self._runs]
            self._keys[device] = _picture_keys(queries, keys, device)
        return self._keys[device]


class WholePictures:
    """Pictures of a packed sequence whose tokens see each other in both directions.

    Args:
        spans: start and end of each picture's tokens in the sequence, ascending; none crosses a document's boundary.
        lengths, key_lengths: tokens and keys of each document.
        only_windows: whether only layers with a sliding window see pictures in this way.
    """

    def __init__(
        self,
        spans: Sequence[tuple[int, int]],
        lengths: Sequence[int],
        key_lengths: Sequence[int],
        *,
        only_windows: bool,
    ) -> None:
        self.only_windows = only_windows
        self._spans = spans
        self._ends = list(accumulate(lengths))
        self._key_borders = list(accumulate(key_lengths, initial=0))  # start of each document's keys, and the last end
        self._keys: dict[tuple[int | None, torch.device], PictureKeys] = {}

    def keys(self, window: int | None, device: torch.device) -> PictureKeys:
        """Return queries and keys of the pictures; computed once per window, for all layers of a micro-batch.

        A picture's tokens see all keys of their document up to the picture's end, but only ``window - 1`` before
        themselves.
        """
        if (window, device) not in self._keys:
            self._keys[window, device] = self._compute_keys(window, device)
        return self._keys[window, device]

    def _seen_keys(self, start: int, stop: int, window: int | None) -> Tensor:
        """Return the keys that the tokens from ``start`` to ``stop`` of a picture see, int64 (m,)."""
        document = bisect_left(self._ends, stop)
        first_key, key_stop = self._key_borders[document : document + 2]
        # A document's keys end with those of its own tokens, so all of its tokens have the same distance to theirs.
        distance = key_stop - self._ends[document]
        if window is not None:
            first_key = max(first_key, start + distance - (window - 1))
        return torch.arange(first_key, stop + distance)

    def _compute_keys(self, window: int | None, device: torch.device) -> PictureKeys:
        queries = [torch.arange(start, stop) for start, stop in self._spans]
        keys = [self._seen_keys(start, stop, window) for start, stop in self._spans]
        return _picture_keys(queries, keys, device)


def add_cross_attention_mask(
    documents: Sequence[EncodedSample], media: dict[str, Tensor], spec: InputSpec
) -> CrossPictures:
    """Find the tiles of pictures that each token attends to by cross-attention, as in Llama 3.2 Vision.

    Such a model cuts pictures into tiles. A token sees only pictures of its own document.

    Args:
        media: must have ``aspect_ratio_mask``, (N, 1, tiles), with 1 for the existing tiles of each of N pictures. Gets
            ``cross_attention_mask``, uint8 (1, T, N, tiles), with 1 for the tiles that each token sees.
    """
    from transformers.models.mllama import processing_mllama as processing

    aspect_ratio_mask = media["aspect_ratio_mask"]
    tiles_of_pictures = aspect_ratio_mask.sum(-1).flatten().tolist()
    max_tiles = aspect_ratio_mask.shape[-1]
    num_tokens = sum(document.length for document in documents)
    mask = np.zeros((num_tokens, len(tiles_of_pictures), max_tiles), np.uint8)
    document_masks = []
    first_token = first_picture = 0
    for document in documents:
        # Start and end of the tokens that see each picture of the document.
        token_spans = processing.get_cross_attention_token_mask(document.input_ids.tolist(), spec.pad_ids["image"])
        tokens = slice(first_token, first_token + document.length)
        pictures = slice(first_picture, first_picture + len(token_spans))
        (dense_mask,) = processing.convert_sparse_cross_attention_mask_to_dense(
            [token_spans], [tiles_of_pictures[pictures]], max_num_tiles=max_tiles, length=document.length
        )
        mask[tokens, pictures] = dense_mask
        document_masks.append(mask[tokens, pictures])
        first_token = tokens.stop
        first_picture = pictures.stop
    media["cross_attention_mask"] = torch.from_numpy(mask).unsqueeze(0)
    vision = spec.config.vision_config
    patches_per_tile = (vision.image_size // vision.patch_size) ** 2
    return CrossPictures(document_masks, positions_per_tile=patches_per_tile + 1)  # one more for the class token


def find_whole_pictures(
    input_ids: npt.NDArray[np.int64], spec: InputSpec, lengths: Sequence[int], key_lengths: Sequence[int] | None = None
) -> WholePictures | None:
    """Find the pictures of a packed sequence whose tokens attend to each other in both directions.

    Such a picture is a run of placeholder tokens within one document. Other tokens attend only to earlier tokens.

    Args:
        input_ids: (T,).
        lengths: number of tokens of each document.
        key_lengths: number of attention keys of each document; None if its keys are its own tokens.

    Returns:
        None if the sequence has no pictures, or if the model's pictures attend only to earlier tokens.
    """
    layers = spec.whole_pictures  # "all" or "windows" (those with a sliding window); "" if none
    if not layers:
        return None
    is_picture = np.isin(input_ids, list(spec.pad_ids.values()))
    document_of_token = np.repeat(np.arange(len(lengths)), lengths)
    picture_changes = np.diff(is_picture)
    document_changes = np.diff(document_of_token) != 0
    run_starts = np.flatnonzero(picture_changes | document_changes) + 1
    run_bounds = [0, *run_starts.tolist(), len(input_ids)]
    spans = [(start, stop) for start, stop in pairwise(run_bounds) if is_picture[start]]
    if not spans:
        return None
    return WholePictures(spans, lengths, key_lengths or lengths, only_windows=layers == "windows")


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedBatch(Batch):
    """Documents laid end to end in one sequence, without padding.

    Args:
        cu_seqlens: int32 (S + 1,), starts of the S documents and T at the end.
        lengths: the S lengths on the host.
        pictures: pictures whose tokens see each other in both directions, or that tokens attend to by cross-attention;
            None if there are none.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    pictures: WholePictures | CrossPictures | None = None

    @property
    def index(self) -> Tensor:
        """Position of each token in the sequence, int64 (T,): 0 to T - 1, as no other rank holds a part."""
        return torch.arange(self.input_ids.shape[1], device=self.input_ids.device)

    @property
    def is_token(self) -> Tensor:
        # Fillers come after the samples.
        return self.index[None] < self.cu_seqlens[self.num_samples]

    def documents_of(self, positions: Tensor) -> Tensor:
        return torch.bucketize(positions, self.cu_seqlens[1:].to(positions.dtype), right=True)

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the forward, with boundaries by the names of transformers' attention functions."""
        boundaries = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), self.cu_seqlens)
        longest = dict.fromkeys(("max_length_q", "max_length_k"), max(self.lengths))
        inputs = super().model_inputs() | boundaries | longest | {"document_lengths": self.lengths}
        if isinstance(self.pictures, CrossPictures):
            # The model only needs to know which tokens see pictures: a mask of all features would need gigabytes.
            mask = inputs["cross_attention_mask"].flatten(2).amax(-1)[..., None, None]  # (1, T, 1, 1)
            return inputs | {"cross_pictures": self.pictures, "cross_attention_mask": mask}
        return inputs if self.pictures is None else inputs | {"whole_pictures": self.pictures}


@dataclass(frozen=True, eq=False, kw_only=True)
class TreeTargets(Batch):
    """A micro-batch with each common prefix once, whose labels have the sum of their weights in all samples of it.

    Args:
        channels: the C different channels of the samples, as a document may belong to samples of several.
        target_counts: int64 (C, N), the number of labels of the samples of each channel that each target stands for.
        sample_targets: int64 (2, M), of the M labels of the samples, which targets stand for: the sample's number, and
            the target's index in ``target_positions``.
    """

    target_counts: Tensor
    sample_targets: Tensor

    @property
    def num_target_tokens(self) -> int:
        """Labels of the samples; those of a prefix count once for each sample that begins with it."""
        return self.sample_targets.shape[1]


@dataclass(frozen=True, eq=False, kw_only=True)
class TreeBatch(TreeTargets, PackedBatch):
    """Samples with each common prefix once: the documents are nodes of trees, see ``batch.prefix_tree``.

    Args:
        key_index: int64 (T',), the tokens that each document sees, document after document: those of all nodes from
            the root down to it.
        cu_seqlens_k: int32 (S + 1,), starts of the documents' keys, and T' at the end.
        key_lengths: the S lengths of the documents' keys, on the host.
        parents: of each document, the number of the document that it continues, or ``ROOT``.
        sample_ends: the last document of each sample.
    """

    key_index: Tensor
    cu_seqlens_k: Tensor
    key_lengths: tuple[int, ...]
    parents: tuple[int, ...]
    sample_ends: tuple[int, ...]

    def sample_index(self) -> Tensor:
        """Positions of the samples' tokens, each sample complete, one after the other, int64 (T',)."""
        keys = torch.split(self.key_index, list(self.key_lengths))
        return torch.cat([keys[document] for document in self.sample_ends])

    def model_inputs(self) -> dict[str, Any]:
        return super().model_inputs() | {
            "cu_seq_lens_k": self.cu_seqlens_k,
            "max_length_k": max(self.key_lengths),
            "key_index": self.key_index,
            "key_lengths": self.key_lengths,
            "document_parents": self.parents,
        }


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedBatch(Batch):
    """One rank's part, T tokens, of a packed sequence that several ranks share.

    Args:
        index: int64 (T,), position of each token in the complete sequence.
        lengths: of all documents of the complete sequence, with the padding of sharded ones, fillers last.
    """

    shard: SequenceShard
    index: Tensor
    lengths: tuple[int, ...]

    def documents_of(self, positions: Tensor) -> Tensor:
        """The document of the complete sequence that each position (n,) belongs to, int64 (n,)."""
        # Not created on the device, because the host would wait for all kernels before the copy.
        ends = torch.tensor(self.lengths).cumsum(0).to(positions.device, non_blocking=True)
        return torch.bucketize(self.index[positions], ends, right=True)

    def model_inputs(self) -> dict[str, Any]:
        return super().model_inputs() | {"sequence_shard": self.shard}


@dataclass(frozen=True, eq=False, kw_only=True)
class ShardedTreeBatch(TreeTargets, ShardedBatch):
    """One rank's part of a sequence of samples with each common prefix once: its documents are nodes of trees."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PaddedBatch(Batch):
    """One sample a row, padded on the right.

    Args:
        attention_mask: int64 (B, T), 1 on tokens and 0 on padding.
    """

    attention_mask: Tensor

    @property
    def is_token(self) -> Tensor:
        # Rows of fillers come after those of samples.
        rows = torch.arange(len(self.attention_mask), device=self.attention_mask.device)
        return (self.attention_mask != 0) & (rows < self.num_samples)[:, None]

    def model_inputs(self) -> dict[str, Any]:
        return super().model_inputs() | {"attention_mask": self.attention_mask}
