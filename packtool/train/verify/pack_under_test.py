"""Samples in one packed sequence and each alone, for ``verify_checks``: on one rank, or on all that share it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.batch.batch import Batch, PackedBatch, ShardedBatch, TreeBatch
from packtool.batch.collate import collate_packs, collate_tree
from packtool.batch.collate_shard import collate_shard, with_own_media
from packtool.batch.prefix_tree import ROOT, Node, find_tree, stretch_of
from packtool.batch.processed import load_processed
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedSample
from packtool.encode.media_spans import sounds_in_order
from packtool.planning.skrull import SHARDED
from packtool.train.model.loss import losses_of_head, sum_of_losses, takes_logits_to_keep
from packtool.train.model.memory import CHECKED_POSITIONS

_AS_BEFORE = -1
"""Stands for a token that is not changed."""


@dataclass(frozen=True)
class Tolerances:
    """Largest errors that rounding explains.

    Args:
        isolation, logits: in units of the largest logit (at least 1).
        loss: in units of the mean loss (at least 1).
        gradients: norm of the difference, in units of the norm of the same parameter's gradient.
    """

    isolation: float
    logits: float
    loss: float
    gradients: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> Tolerances:
        """Tolerances for weights, or an autocast, of this type."""
        if dtype == torch.bfloat16:
            return cls(isolation=1e-2, logits=5e-2, loss=2e-2, gradients=2e-1)
        if dtype == torch.float16:
            return cls(isolation=2e-3, logits=1e-2, loss=3e-3, gradients=5e-2)
        return cls(isolation=1e-5, logits=1e-4, loss=1e-5, gradients=2e-3)


class PackUnderTest:
    """Samples in one packed sequence and each alone, on the model's device.

    Args:
        model: bare or in an adapter.
        samples: at least two.
        spec: the model as collation sees it.
        dtype: that the model computes in.
        parallel: ranks that share the sequence, all of which do the same; each computes every sample alone.
        some_local: two of three samples are one rank's alone, as with Skrull.
        min_shared: tokens that a prefix must have to be computed once; None has all samples whole.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: Sequence[EncodedSample],
        spec: InputSpec,
        dtype: torch.dtype,
        parallel: SequenceParallel | None = None,
        *,
        some_local: bool = False,
        min_shared: int | None = None,
    ) -> None:
        device = next(model.parameters()).device
        self.model = model
        self.dtype = dtype
        self.samples = list(samples)
        self.spec = spec
        self.parallel = parallel
        self.some_local = some_local
        self.min_shared = min_shared
        self.tolerances = Tolerances.of(dtype)
        alone = [collate_packs([sample], spec).to(device) for sample in self.samples]
        self.alone = [as_transformers_has_it(batch) for batch in alone]
        self.batch: PackedBatch | ShardedBatch
        numbers = range(len(self.samples))
        self.nodes = [Node((number,), 0, self.samples[number].length, ROOT) for number in numbers]
        if min_shared is not None:
            assert parallel is None, "rows that ranks share have no trees"
            self.batch = collate_tree(self.samples, spec, min_shared=min_shared).to(device)
            if isinstance(self.batch, TreeBatch):  # else samples lie in their order
                self.nodes = find_tree(self.samples, spec, min_shared=min_shared)
        elif parallel is None:
            self.batch = collate_packs(self.samples, spec).to(device)
        else:
            # Two next to each other are local to one rank: they could leak, too.
            size = parallel.cut.size
            self.places = [number // 3 % size if some_local and number % 3 else SHARDED for number in numbers]
            self.batch = collate_shard(self.samples, spec, parallel.cut, self.places).to(device)
        self.label_logits_only = takes_logits_to_keep(model)
        self.lengths = [sample.length for sample in self.samples]
        # Padding behind a sample, and a filler document behind the last one, are nobody's.
        self.starts = [0, *np.cumsum(self.batch.lengths).tolist()][: len(self.nodes)]
        self.num_targets = max(sum(batch.num_target_tokens for batch in alone), 1)

    @property
    def is_tree(self) -> bool:
        """Whether some samples share a prefix that is there once."""
        return any(node.is_shared for node in self.nodes)

    @property
    def num_shared_tokens(self) -> int:
        """Tokens of the samples that are not computed again."""
        return sum(self.lengths) - sum(node.length for node in self.nodes)

    def first(self, most: int) -> PackUnderTest:
        """A pack of its first samples; of a tree, of those that share something."""
        if len(self.samples) <= most:
            return self
        sharing = {number for node in self.nodes if node.is_shared for number in node.samples}
        numbers = sorted(range(len(self.samples)), key=lambda number: bool(sharing) and number not in sharing)
        return PackUnderTest(
            self.model,
            [self.samples[number] for number in numbers[:most]],
            self.spec,
            self.dtype,
            self.parallel,
            some_local=self.some_local,
            min_shared=self.min_shared,
        )

    def name(self, number: int) -> str:
        """A sample of the pack, as a person finds it."""
        sample = self.samples[number]
        return f"sample {number} ({sample.source}, row {sample.row})"

    def node_name(self, node: Node) -> str:
        """A sample's own tokens, or what several begin with, as a person finds them."""
        if not node.is_shared:
            return self.name(node.samples[0])
        return f"what {len(node.samples)} samples begin with, {self.name(node.samples[0])} among them,"

    def packed_logits(self, batch: PackedBatch | ShardedBatch) -> list[Tensor]:
        """Logits at some positions of every sample: float32 (P, vocabulary) each; the same on all ranks."""
        found = [_positions(length) for length in self.lengths]
        rows = torch.cat([self._places(number)[positions] for number, positions in enumerate(found)])
        shared = self.parallel is not None
        logits = self._shared_logits(batch, rows) if shared else _logits(self.model, batch, rows)
        return list(torch.split(logits, [len(positions) for positions in found]))

    def _places(self, number: int) -> Tensor:
        """int64 (L,): where each token of a sample lies in the whole row."""
        nodes = zip(self.starts, self.nodes, strict=True)
        return torch.cat([torch.arange(start, start + node.length) for start, node in nodes if number in node.samples])

    def _shared_logits(self, batch: PackedBatch | ShardedBatch, rows: Tensor) -> Tensor:
        """Each rank computes those of its own tokens; every rank has all of them."""
        assert self.parallel is not None, "somebody shares the sequence"
        slots = {position: slot for slot, position in enumerate(batch.index.tolist())}
        mine = [(number, slots[row]) for number, row in enumerate(rows.tolist()) if row in slots]
        # All ranks run the model, whether or not a position of theirs is asked for.
        logits = _logits(self.model, batch, torch.tensor([slot for _, slot in mine] or [0]))
        whole = logits.new_zeros((len(rows), logits.shape[1]))
        if mine:
            whole[torch.tensor([number for number, _ in mine])] = logits
        return self.parallel.sum(whole.to(batch.input_ids.device)).cpu()

    def logits_alone(self, number: int, changed: Node | None = None) -> Tensor:
        """Logits of one sample at its checked positions, (positions, vocabulary), computed alone.

        Args:
            changed: a node of the sample, in whose place it has what ``with_change`` puts there.
        """
        batch = self.alone[number]
        if changed is not None:
            sample, own = self.samples[number], [node for node in self.nodes if number in node.samples]
            ids = batch.input_ids.clone()
            ids[0, changed.start : changed.stop] = self._other_tokens(changed).to(ids.device)
            parts = [stretch_of(sample, node.start, node.stop, self.spec) for node in own]
            media = self._flipped(batch.media, parts, own.index(changed))
            batch = dataclasses.replace(batch, input_ids=ids, media=media)
        return _logits(self.model, batch, _positions(self.lengths[number]))

    def loss(self, batch: Batch) -> Tensor:
        """A batch's share of the pack's mean loss, 0-d; of a sequence that ranks share, this rank's part."""
        return batch_loss(self.model, batch, label_logits_only=self.label_logits_only) / self.num_targets

    def packed_loss(self) -> float:
        """The pack's mean loss."""
        loss = self.loss(self.batch)
        return float(loss if self.parallel is None else self.parallel.sum(loss))

    def take_packed_gradients(self) -> None:
        """Take the gradients of the pack's loss away from those that the model has, which all ranks have alike."""
        if self.parallel is None:
            torch.autograd.backward(-self.loss(self.batch))
            return
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.parallel.cut.size
        torch.autograd.backward(-self.loss(self.batch))
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(total, group=self.parallel.group)
                parameter.grad = total

    def with_change(self, changed: Node) -> PackedBatch | ShardedBatch:
        """The pack with other tokens and media in the place of a node; all that is not in it stays as it is."""
        number = self.nodes.index(changed)
        start = self.starts[number]
        others = torch.full((sum(self.batch.lengths),), _AS_BEFORE)
        others[start : start + changed.length] = self._other_tokens(changed)
        ids = self.batch.input_ids.clone()
        held = others.to(ids.device)[self.batch.index]
        ids[0] = torch.where(held == _AS_BEFORE, ids[0], held)
        parts: Sequence[EncodedSample] = self.samples
        if self.parallel is not None:
            parts = with_own_media(parts, self.places, self.spec, self.parallel.cut)
        elif self.min_shared is not None:
            parts = [stretch_of(parts[node.samples[0]], node.start, node.stop, self.spec) for node in self.nodes]
        return dataclasses.replace(self.batch, input_ids=ids, media=self._flipped(self.batch.media, parts, number))

    def _other_tokens(self, node: Node) -> Tensor:
        """What ``with_change`` puts in the place of a node's tokens, int64 (L,)."""
        kept = torch.tensor(sorted(_token_ids(self.spec.config)))
        whole = torch.from_numpy(np.concatenate([sample.input_ids for sample in self.samples], dtype=np.int64))
        # Every token becomes the next larger one of the pack: tokens that the model knows, and none of the media's.
        known = torch.unique(whole[~torch.isin(whole, kept)])
        if len(known) == 1:
            known = torch.unique(torch.cat([known, torch.where(known > 0, known - 1, known + 1)]))
        own = torch.from_numpy(self.samples[node.samples[0]].input_ids[node.start : node.stop].astype(np.int64))
        words = own[~torch.isin(own, kept)]
        own[~torch.isin(own, kept)] = known[(torch.searchsorted(known, words) + 1) % len(known)]
        return own

    def _flipped(self, media: Mapping[str, Tensor], parts: Sequence[EncodedSample], number: int) -> dict[str, Tensor]:
        """What towers take of some stretches, end to end, with the media of one of them negated."""
        found = {}
        for name, tensor in media.items():
            shapes = [_shape(part, name, self.spec) for part in parts]
            axis = _axis_of_parts(tensor, shapes)
            counts = [shape[axis] if shape else 0 for shape in shapes]
            start = sum(counts[:number])
            signs = torch.ones(tensor.shape[axis], device=tensor.device)
            signs[start : start + counts[number]] = -1
            signs = signs.to(tensor.dtype).reshape([-1 if i == axis else 1 for i in range(tensor.ndim)])
            found[name] = tensor * signs if sum(counts) else tensor
        return found


def batch_loss(model: nn.Module, batch: Batch, *, label_logits_only: bool) -> Tensor:
    """The sum of a batch's losses, 0-d, as the step makes it: a check never holds more logits than the step."""
    with losses_of_head(model) as head_loss:
        if head_loss is not None:
            return head_loss.losses(model, batch).sum(batch.loss_weights)
    return sum_of_losses(model, batch, label_logits_only=label_logits_only)


def as_transformers_has_it(batch: PackedBatch) -> Batch:
    """A batch of one sample as if packing had never been thought of."""
    return Batch(**{field.name: getattr(batch, field.name) for field in dataclasses.fields(Batch)})


def _positions(length: int) -> Tensor:
    """int64 (P,) of a sample: its first ones, where a leak is largest, and others up to its end."""
    if length <= CHECKED_POSITIONS:
        return torch.arange(length)
    half = CHECKED_POSITIONS // 2
    return torch.cat([torch.arange(half), torch.linspace(half, length - 1, half).long()])


def _logits(model: nn.Module, batch: Batch, positions: Tensor) -> Tensor:
    """float32 (P, vocabulary), on the host."""
    inputs = batch.model_inputs()
    positions = positions.to(batch.input_ids.device)
    if takes_logits_to_keep(model):
        logits = model(**inputs, logits_to_keep=positions).logits[0]
    else:
        logits = model(**inputs).logits[0, positions]
    return logits.float().cpu()


def _shape(sample: EncodedSample, name: str, spec: InputSpec) -> tuple[int, ...]:
    """The shape of a sample's part of what a tower takes, or the first of it; empty for what says where they are."""
    if name == "pixel_values" and spec.family.processor_inputs:
        made = load_processed([sample], spec)  # which alone knows how many tiles a picture has
        return tuple(made[name].shape) if made else ()
    if name == "pixel_values":
        grids = [image.grid for image in sample.images]
        grids += [video.grid for video in sample.videos if spec.family.videos_as_pictures]
        return (sum(map(math.prod, grids)),)
    if name == "pixel_values_videos":
        return (sum(math.prod(video.grid) for video in sample.videos),)
    return (len(sounds_in_order(sample, spec.media_tokens)),) if name == "input_features" else ()


def _axis_of_parts(tensor: Tensor, shapes: Sequence[tuple[int, ...]]) -> int:
    """Where what a tower takes of several samples lies side by side: in rows, or as patches in one long row."""
    there = [shape for shape in shapes if shape]
    rows = sum(shape[0] for shape in there)
    return 0 if not there or rows == len(tensor) or len(there[0]) == 1 else tensor.ndim - 1


def _token_ids(config: Any) -> set[int]:
    """Tokens that a configuration names: they open, close and stand for media."""
    return {
        value
        for name, value in config.to_dict().items()
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    }
