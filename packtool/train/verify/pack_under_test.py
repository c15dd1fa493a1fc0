"""Samples in one packed sequence and each alone, to be compared: on one rank, or on all ranks that share it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.batch.batch import Batch, PackedBatch, ShardedBatch, TreeBatch
from packtool.batch.collate import collate_packs, collate_tree
from packtool.batch.collate_shard import collate_shard, with_own_media
from packtool.batch.media import load_processed
from packtool.batch.prefix_tree import ROOT, Node, find_tree, stretch_of
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedSample
from packtool.encode.media_spans import sounds_in_order
from packtool.planning.skrull import SHARDED
from packtool.train.model.loss import sum_of_losses, takes_logits_to_keep
from packtool.train.model.memory import CHECKED_POSITIONS

_UNCHANGED = -1
"""Marks a token that keeps its value."""

_TOLERANCES = {
    torch.float32: {"isolation": 1e-5, "logits": 1e-4, "loss": 1e-5, "gradients": 2e-3},
    torch.float16: {"isolation": 2e-3, "logits": 1e-2, "loss": 3e-3, "gradients": 5e-2},
    torch.bfloat16: {"isolation": 1e-2, "logits": 5e-2, "loss": 2e-2, "gradients": 2e-1},
}


def tolerances(dtype: torch.dtype) -> Mapping[str, float]:
    """Return the largest errors that rounding explains, for weights or an autocast of this type.

    ``isolation`` and ``logits`` are relative to the largest logit and ``loss`` to the mean loss (at least 1 each);
    ``gradients`` is the norm of the difference relative to the norm of the same parameter's gradient.
    """
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.float32])


class PackUnderTest:
    """Samples in one packed sequence and each alone, on the model's device.

    Args:
        model: bare or in an adapter.
        samples: at least two.
        dtype: of the model's computation.
        parallel: ranks that share the sequence and all call the same methods; each computes every sample alone.
        some_local: place two of three samples on one rank alone, as Skrull does.
        min_shared: minimum tokens of a shared prefix that is computed once; None shares nothing.
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
        self.model, self.samples, self.spec, self.dtype = model, list(samples), spec, dtype
        self.parallel, self.some_local, self.min_shared = parallel, some_local, min_shared
        self.tolerances = tolerances(dtype)
        alone = [collate_packs([sample], spec).to(device) for sample in self.samples]
        self.alone = [without_boundaries(batch) for batch in alone]
        self.batch: PackedBatch | ShardedBatch
        numbers = range(len(self.samples))
        self.nodes = [Node((number,), 0, self.samples[number].length, ROOT) for number in numbers]
        if min_shared is not None:
            assert parallel is None, "sequences that ranks share have no trees"
            self.batch = collate_tree(self.samples, spec, min_shared=min_shared).to(device)
            if isinstance(self.batch, TreeBatch):  # otherwise no prefix is shared, and samples keep their order
                self.nodes = find_tree(self.samples, spec, min_shared=min_shared)
        elif parallel is None:
            self.batch = collate_packs(self.samples, spec).to(device)
        else:
            # Two neighbours are local to one rank: they could leak, too.
            size = parallel.split.size
            self.placement = [number // 3 % size if some_local and number % 3 else SHARDED for number in numbers]
            self.batch = collate_shard(self.samples, spec, parallel.split, self.placement).to(device)
        self.lengths = [sample.length for sample in self.samples]
        # Padding after a sample and filler documents after the last one belong to no sample.
        self.starts = [0, *np.cumsum(self.batch.lengths).tolist()][: len(self.nodes)]
        self.num_targets = max(sum(batch.num_target_tokens for batch in alone), 1)

    @property
    def is_tree(self) -> bool:
        """True if some samples share a prefix that is computed once."""
        return any(node.is_shared for node in self.nodes)

    @property
    def num_shared_tokens(self) -> int:
        """Tokens that are saved by sharing prefixes."""
        return sum(self.lengths) - sum(node.length for node in self.nodes)

    def first(self, max_samples: int) -> PackUnderTest:
        """Return a pack of the first samples; of a tree, samples with a shared prefix come first."""
        if len(self.samples) <= max_samples:
            return self
        sharing = {number for node in self.nodes if node.is_shared for number in node.samples}
        numbers = sorted(range(len(self.samples)), key=lambda number: bool(sharing) and number not in sharing)
        return PackUnderTest(
            self.model,
            [self.samples[number] for number in numbers[:max_samples]],
            self.spec,
            self.dtype,
            self.parallel,
            some_local=self.some_local,
            min_shared=self.min_shared,
        )

    def name(self, number: int) -> str:
        """Return the sample's name in messages."""
        sample = self.samples[number]
        return f"sample {number} ({sample.source}, row {sample.row})"

    def node_name(self, node: Node) -> str:
        """Return the name of a node in messages: of a sample, or of a shared prefix."""
        if not node.is_shared:
            return self.name(node.samples[0])
        return f"what {len(node.samples)} samples begin with, {self.name(node.samples[0])} among them,"

    def packed_logits(self, batch: PackedBatch | ShardedBatch) -> list[Tensor]:
        """Return each sample's logits at its checked positions, float32 (P, vocabulary), on every rank."""
        checked, rows = [_positions(length) for length in self.lengths], []
        nodes = list(zip(self.starts, self.nodes, strict=True))
        for number, positions in enumerate(checked):
            own = [torch.arange(start, start + node.length) for start, node in nodes if number in node.samples]
            rows.append(torch.cat(own)[positions])  # in the whole sequence
        num_positions = [len(positions) for positions in checked]
        if self.parallel is None:
            return list(torch.split(_logits(self.model, batch, torch.cat(rows)), num_positions))
        # Each rank computes the logits of its own tokens; all ranks get all of them.
        slots = {position: slot for slot, position in enumerate(batch.index.tolist())}
        mine = [(number, slots[row]) for number, row in enumerate(torch.cat(rows).tolist()) if row in slots]
        # All ranks run the model, even without a checked position of their own.
        logits = _logits(self.model, batch, torch.tensor([slot for _, slot in mine] or [0]))
        all_logits = logits.new_zeros((sum(num_positions), logits.shape[1]))
        if mine:
            all_logits[torch.tensor([number for number, _ in mine])] = logits
        return list(torch.split(self.parallel.sum(all_logits.to(batch.input_ids.device)).cpu(), num_positions))

    def logits_alone(self, number: int, changed: Node | None = None) -> Tensor:
        """Return logits of one sample at its checked positions, (positions, vocabulary), computed alone.

        Args:
            changed: a node of the sample, which is changed as in ``with_change``.
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
        """Return a batch's part of the pack's mean loss, 0-d; of a sequence that ranks share, this rank's part."""
        return sum_of_losses(self.model, batch) / self.num_targets

    def packed_loss(self) -> float:
        """Return the pack's mean loss."""
        loss = self.loss(self.batch)
        return float(loss if self.parallel is None else self.parallel.sum(loss))

    def subtract_packed_gradients(self) -> None:
        """Subtract the gradients of the pack's loss from the model's gradients, which are the same on all ranks."""
        if self.parallel is None:
            torch.autograd.backward(-self.loss(self.batch))
            return
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.parallel.split.size
        torch.autograd.backward(-self.loss(self.batch))
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                total = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(total, group=self.parallel.group)
                parameter.grad = total

    def with_change(self, changed: Node) -> PackedBatch | ShardedBatch:
        """Return the pack with other tokens and media in one node, and everything else unchanged."""
        number = self.nodes.index(changed)
        start = self.starts[number]
        others = torch.full((sum(self.batch.lengths),), _UNCHANGED)
        others[start : start + changed.length] = self._other_tokens(changed)
        ids = self.batch.input_ids.clone()
        local = others.to(ids.device)[self.batch.index]
        ids[0] = torch.where(local == _UNCHANGED, ids[0], local)
        parts: Sequence[EncodedSample] = self.samples
        if self.parallel is not None:
            parts = with_own_media(parts, self.placement, self.spec, self.parallel.split)
        elif self.min_shared is not None:
            parts = [stretch_of(parts[node.samples[0]], node.start, node.stop, self.spec) for node in self.nodes]
        return dataclasses.replace(self.batch, input_ids=ids, media=self._flipped(self.batch.media, parts, number))

    def _other_tokens(self, node: Node) -> Tensor:
        """Return the changed tokens of a node, int64 (L,): each becomes the next larger text token of the pack."""
        # Special tokens that the configuration names, such as placeholders of media.
        settings = self.spec.config.to_dict().items()
        special = [token for name, token in settings if name.endswith(("_token_id", "_token_index"))]
        kept = torch.tensor(sorted({token for token in special if isinstance(token, int)}))
        tokens = torch.from_numpy(np.concatenate([sample.input_ids for sample in self.samples], dtype=np.int64))
        known = torch.unique(tokens[~torch.isin(tokens, kept)])
        if len(known) == 1:
            known = torch.unique(torch.cat([known, torch.where(known > 0, known - 1, known + 1)]))
        own = torch.from_numpy(self.samples[node.samples[0]].input_ids[node.start : node.stop].astype(np.int64))
        words = own[~torch.isin(own, kept)]
        own[~torch.isin(own, kept)] = known[(torch.searchsorted(known, words) + 1) % len(known)]
        return own

    def _flipped(self, media: Mapping[str, Tensor], parts: Sequence[EncodedSample], number: int) -> dict[str, Tensor]:
        """Return the towers' inputs with the media of one of several consecutive parts negated."""
        flipped = {}
        for name, tensor in media.items():
            shapes = [_shape(part, name, self.spec) for part in parts]
            known = [shape for shape in shapes if shape]
            # Samples lie one after the other along the first axis, or as patches in one long row.
            has_rows = not known or sum(shape[0] for shape in known) == len(tensor) or len(known[0]) == 1
            axis = 0 if has_rows else tensor.ndim - 1
            counts = [shape[axis] if shape else 0 for shape in shapes]
            start = sum(counts[:number])
            signs = torch.ones(tensor.shape[axis], device=tensor.device)
            signs[start : start + counts[number]] = -1
            signs = signs.to(tensor.dtype).reshape([-1 if i == axis else 1 for i in range(tensor.ndim)])
            flipped[name] = tensor * signs if sum(counts) else tensor
        return flipped


def without_boundaries(batch: PackedBatch) -> Batch:
    """Return a batch of one sample as transformers expects it, without the boundaries of packing."""
    return Batch(**{field.name: getattr(batch, field.name) for field in dataclasses.fields(Batch)})


def _positions(length: int) -> Tensor:
    """Return the checked positions of a sample, int64 (P,): its first, where leaks are largest, and some to its end."""
    if length <= CHECKED_POSITIONS:
        return torch.arange(length)
    half = CHECKED_POSITIONS // 2
    return torch.cat([torch.arange(half), torch.linspace(half, length - 1, half).long()])


def _logits(model: nn.Module, batch: Batch, positions: Tensor) -> Tensor:
    """Return logits at some positions, float32 (P, vocabulary), on the host."""
    inputs = batch.model_inputs()
    positions = positions.to(batch.input_ids.device)
    if takes_logits_to_keep(model):
        logits = model(**inputs, logits_to_keep=positions).logits[0]
    else:
        logits = model(**inputs).logits[0, positions]
    return logits.float().cpu()


def _shape(sample: EncodedSample, name: str, spec: InputSpec) -> tuple[int, ...]:
    """Return the shape, or its first axis, of a sample's part of a tower input; empty for inputs such as grids."""
    if name == "pixel_values" and spec.family.processor_inputs:
        processed = load_processed([sample], spec)  # only the processor knows how many tiles a picture has
        return tuple(processed[name].shape) if processed else ()
    if name == "pixel_values":
        grids = [image.grid for image in sample.images]
        grids += [video.grid for video in sample.videos if spec.family.videos_as_pictures]
        return (sum(map(math.prod, grids)),)
    if name == "pixel_values_videos":
        return (sum(math.prod(video.grid) for video in sample.videos),)
    return (len(sounds_in_order(sample, spec.media_tokens)),) if name == "input_features" else ()
