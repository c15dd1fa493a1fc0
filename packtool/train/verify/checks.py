"""Checks that packed samples give the same outputs as unpacked ones.

Isolation is the strictest check: the pack keeps its shape, so other samples' logits should not differ in the last bit.
The other checks compare with each sample alone in transformers' own layers; such outputs differ by rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.register import original_attention
from packtool.attention.support import refuse_leaky_inputs
from packtool.batch.batch import Batch, PackedBatch, ShardedBatch, TreeTargets
from packtool.batch.collate import collate_packs, collate_tree
from packtool.batch.collate_shard import collate_shard, with_rank_media
from packtool.batch.dataset import sample_media_error
from packtool.batch.media import load_processed
from packtool.batch.micro_batch import Tower
from packtool.batch.prefix_tree import ROOT, Node, find_tree, slice_sample
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedSample
from packtool.encode.media_spans import sounds_in_order
from packtool.errors import MismatchError
from packtool.planning.skrull import SHARDED
from packtool.progress import Progress
from packtool.train.model.load import resolve_dtype
from packtool.train.model.loss import base_model, sum_of_losses, takes_logits_to_keep
from packtool.train.model.memory import CHECKED_POSITIONS, MAX_CHECKED_SAMPLES
from packtool.train.model.trainable import without_dropout
from packtool.train.prepare.parallelism import zero_stage
from packtool.train.prepare.run import Run

_UNCHANGED = -1
"""Marks a token that keeps its value."""

_TOLERANCES = {
    torch.float32: {"isolation": 1e-5, "logits": 1e-4, "loss": 1e-5, "gradients": 2e-3},
    torch.float16: {"isolation": 2e-3, "logits": 1e-2, "loss": 3e-3, "gradients": 5e-2},
    torch.bfloat16: {"isolation": 1e-2, "logits": 5e-2, "loss": 2e-2, "gradients": 2e-1},
}
_MAX_TOKENS = 4096
_MAX_CHANGES = 2
_MIN_GRADIENT = 1e-3
"""Minimum norm that a gradient's error is divided by, as a fraction of the largest gradient norm."""


def tolerances(dtype: torch.dtype) -> Mapping[str, float]:
    """Return the maximum error of each check that rounding explains in a computation of this type.

    Errors of ``isolation`` and ``logits`` are relative to the largest logit, of ``loss`` to the mean loss (at least 1
    each), and of ``gradients`` to the norm of the parameter's gradient.
    """
    return _TOLERANCES.get(dtype, _TOLERANCES[torch.float32])


class PackUnderTest:
    """Samples as one pack and as one batch for each sample, on the model's device.

    Args:
        model: possibly with adapters.
        samples: at least two.
        parallel: the ranks over which the pack is split; all of them call the same methods.
        has_unsplit: with ``parallel``, two of three samples are computed on one rank each, and only the others split.
        min_shared: minimum tokens of a shared prefix that is computed once; None shares no prefix.
    """

    def __init__(
        self,
        model: nn.Module,
        samples: Sequence[EncodedSample],
        spec: InputSpec,
        dtype: torch.dtype,
        parallel: SequenceParallel | None = None,
        *,
        has_unsplit: bool = False,
        min_shared: int | None = None,
    ) -> None:
        self.model, self.spec, self.dtype, self.parallel = model, spec, dtype, parallel
        self.has_unsplit, self.min_shared = has_unsplit, min_shared
        self.samples = list(samples)
        self.tolerances = tolerances(dtype)
        self.lengths = [sample.length for sample in self.samples]
        device = next(model.parameters()).device
        self.batches_alone = [collate_alone(sample, spec).to(device) for sample in self.samples]
        self.num_targets = max(sum(batch.num_target_tokens for batch in self.batches_alone), 1)  # divides losses
        self.placement = [] if parallel is None else self._place_samples(parallel.split.size)
        self.batch = self._collate().to(device)  # the pack, or this rank's tokens of it
        self.nodes = self._find_nodes()

    @property
    def node_starts(self) -> list[int]:
        """Start of each node: nodes are the first documents of the pack, in this order; padding documents come last."""
        return [0, *np.cumsum(self.batch.lengths).tolist()][: len(self.nodes)]

    def _find_nodes(self) -> list[Node]:
        """Return the parts of the pack: shared prefixes and the rest of each sample, or entire samples."""
        if isinstance(self.batch, TreeTargets) and self.min_shared is not None:
            return find_tree(self.samples, self.spec, min_shared=self.min_shared)
        return [Node((number,), 0, length, ROOT) for number, length in enumerate(self.lengths)]

    def _place_samples(self, num_ranks: int) -> list[int]:
        """Return the rank that computes each sample, or ``SHARDED``; pairs on a rank could leak into each other."""
        placement = [SHARDED] * len(self.samples)
        for number in range(len(self.samples)):
            if self.has_unsplit and number % 3 != 0:
                placement[number] = number // 3 % num_ranks
        return placement

    def _collate(self) -> PackedBatch | ShardedBatch:
        """Collate the samples as one pack, with prefixes computed once if some of them share any."""
        if self.parallel is not None:
            split, min_shared = self.parallel.split, self.min_shared
            return collate_shard(self.samples, self.spec, split, self.placement, min_shared=min_shared)
        if self.min_shared is not None:
            return collate_tree(self.samples, self.spec, min_shared=self.min_shared)
        return collate_packs(self.samples, self.spec)

    @property
    def is_tree(self) -> bool:
        """True if some samples share a prefix that is computed once."""
        return any(node.is_shared for node in self.nodes)

    @property
    def num_shared_tokens(self) -> int:
        """Tokens saved by sharing prefixes."""
        return sum(self.lengths) - sum(node.length for node in self.nodes)

    def limited_to(self, max_samples: int) -> PackUnderTest:
        """Return a pack of at most ``max_samples`` samples, preferring those with a shared prefix."""
        if len(self.samples) <= max_samples:
            return self
        shared = {number for node in self.nodes if node.is_shared for number in node.samples}
        numbers = sorted(range(len(self.samples)), key=lambda number: bool(shared) and number not in shared)
        samples = [self.samples[number] for number in numbers[:max_samples]]
        has_unsplit, min_shared = self.has_unsplit, self.min_shared
        return PackUnderTest(
            self.model, samples, self.spec, self.dtype, self.parallel, has_unsplit=has_unsplit, min_shared=min_shared
        )

    def name(self, number: int) -> str:
        """Return the name of a sample in messages."""
        sample = self.samples[number]
        return f"sample {number} ({sample.source}, row {sample.row})"

    def node_name(self, node: Node) -> str:
        """Return the name of a sample or of a shared prefix in messages."""
        if not node.is_shared:
            return self.name(node.samples[0])
        return f"the prefix that {len(node.samples)} samples share, such as {self.name(node.samples[0])},"

    def packed_logits(self, batch: PackedBatch | ShardedBatch) -> list[Tensor]:
        """Return each sample's logits at its checked positions, float32 (P, vocabulary) on the CPU, on every rank."""
        positions_by_sample = self._checked_positions_in_pack()
        positions = torch.cat(positions_by_sample)
        counts = [len(each) for each in positions_by_sample]
        if self.parallel is None:
            return list(torch.split(_compute_logits(self.model, batch, positions), counts))
        # Each rank computes the logits of its local tokens; the sum over ranks has all of them.
        local_logits = self._local_logits(batch, positions)
        all_logits = self.parallel.sum(local_logits.to(batch.input_ids.device)).cpu()
        return list(torch.split(all_logits, counts))

    def _checked_positions_in_pack(self) -> list[Tensor]:
        """Return the checked positions of each sample in the packed sequence, int64 (P,) each."""
        positions_by_sample = []
        for number, length in enumerate(self.lengths):
            # A sample's tokens are those of its nodes: its prefixes, if any, and the tokens that it adds.
            nodes = zip(self.node_starts, self.nodes, strict=True)
            ranges = [torch.arange(start, start + node.length) for start, node in nodes if number in node.samples]
            positions_by_sample.append(torch.cat(ranges)[_checked_positions(length)])
        return positions_by_sample

    def _local_logits(self, batch: PackedBatch | ShardedBatch, positions: Tensor) -> Tensor:
        """Compute the logits at ``positions`` (P,) of the pack that this rank has, (P, vocabulary); zeros at others."""
        local_index = {position: index for index, position in enumerate(batch.index.tolist())}
        is_local = [position in local_index for position in positions.tolist()]
        local_positions = [local_index[position] for position in positions.tolist() if position in local_index]
        # Ranks without a checked position run the model, too: its forward pass communicates.
        local_logits = _compute_logits(self.model, batch, torch.tensor(local_positions or [0]))
        logits = local_logits.new_zeros((len(positions), local_logits.shape[1]))
        if local_positions:
            logits[torch.tensor(is_local)] = local_logits
        return logits

    def logits_alone(self, number: int, changed: Node | None = None) -> Tensor:
        """Return logits of an unpacked sample at its checked positions, float32 (P, vocabulary) on the CPU.

        ``changed`` is a node of the sample to change first, in the same way as ``with_change``.
        """
        batch = self.batches_alone[number]
        if changed is not None:
            ids = batch.input_ids.clone()
            ids[0, changed.start : changed.stop] = self._changed_tokens(changed).to(ids.device)
            nodes = [node for node in self.nodes if number in node.samples]
            media = self._negate_media(batch.media, self._slices(nodes), nodes.index(changed))
            batch = dataclasses.replace(batch, input_ids=ids, media=media)
        return _compute_logits(self.model, batch, _checked_positions(self.lengths[number]))

    def loss(self, batch: Batch) -> Tensor:
        """Return the sum of a batch's losses (on this rank) divided by the targets of the whole pack, 0-d."""
        return sum_of_losses(self.model, batch) / self.num_targets

    def packed_loss(self) -> float:
        loss = self.loss(self.batch)
        return float(loss if self.parallel is None else self.parallel.sum(loss))

    def subtract_packed_gradients(self) -> None:
        """Subtract the gradients of the pack's loss from the model's gradients, which must be equal on all ranks."""
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

    def with_change(self, node: Node) -> PackedBatch | ShardedBatch:
        """Return the pack with changed tokens and media in one node, and everything else unchanged."""
        number = self.nodes.index(node)
        start = self.node_starts[number]
        pack_tokens = torch.full((sum(self.batch.lengths),), _UNCHANGED)
        pack_tokens[start : start + node.length] = self._changed_tokens(node)
        ids = self.batch.input_ids.clone()
        rank_tokens = pack_tokens.to(ids.device)[self.batch.index]
        ids[0] = torch.where(rank_tokens == _UNCHANGED, ids[0], rank_tokens)
        slices = self._slices(self.nodes)
        if self.parallel is not None:
            placement = [SHARDED] * len(slices) if self.is_tree else self.placement
            slices = with_rank_media(slices, placement, self.spec, self.parallel.split)
        media = self._negate_media(self.batch.media, slices, number)
        return dataclasses.replace(self.batch, input_ids=ids, media=media)

    def _slices(self, nodes: Sequence[Node]) -> list[EncodedSample]:
        """Return the tokens and media of each node as a sample."""
        return [slice_sample(self.samples[node.samples[0]], node.start, node.stop, self.spec) for node in nodes]

    def _changed_tokens(self, node: Node) -> Tensor:
        """Return changed tokens for a node, int64 (L,): each text token becomes the next larger one in the pack."""
        # Special tokens, such as placeholders of media, are kept.
        settings = self.spec.config.to_dict().items()
        special = [token for name, token in settings if name.endswith(("_token_id", "_token_index"))]
        special_ids = torch.tensor(sorted({token for token in special if isinstance(token, int)}))
        pack_tokens = torch.from_numpy(np.concatenate([sample.input_ids for sample in self.samples], dtype=np.int64))
        text_ids = torch.unique(pack_tokens[~torch.isin(pack_tokens, special_ids)])
        if len(text_ids) == 1:
            text_ids = torch.unique(torch.cat([text_ids, torch.where(text_ids > 0, text_ids - 1, text_ids + 1)]))
        sample_ids = self.spec.model_ids(self.samples[node.samples[0]].input_ids)
        tokens = torch.from_numpy(sample_ids[node.start : node.stop].astype(np.int64))
        is_text = ~torch.isin(tokens, special_ids)
        next_numbers = (torch.searchsorted(text_ids, tokens[is_text]) + 1) % len(text_ids)
        tokens[is_text] = text_ids[next_numbers]
        return tokens

    def _negate_media(
        self, media: Mapping[str, Tensor], slices: Sequence[EncodedSample], number: int
    ) -> dict[str, Tensor]:
        """Return inputs of towers with the media of ``slices[number]`` negated; slices are in the order of media."""
        negated = dict(media)
        for name, tensor in media.items():
            shapes = [_tower_input_shape(each, name, self.spec, has_tiles="tiles" in media) for each in slices]
            known = [shape for shape in shapes if shape]
            # Media are concatenated along the first axis, or along the last one as patches in one long row.
            is_first = not known or sum(shape[0] for shape in known) == len(tensor) or len(known[0]) == 1
            axis = 0 if is_first else tensor.ndim - 1
            sizes = [shape[axis] if shape else 0 for shape in shapes]
            if sizes[number]:
                negated[name] = tensor.clone()
                negated[name].narrow(axis, sum(sizes[:number]), sizes[number]).neg_()
        return negated


def collate_alone(sample: EncodedSample, spec: InputSpec) -> Batch:
    """Return a batch of one sample without the sample boundaries that only packed attention accepts."""
    # With cross-attention, a sample without pictures would attend to a blank one.
    towers = frozenset[Tower]() if spec.family.cross_attention else None
    batch = collate_packs([sample], spec, towers)
    return Batch(**{field.name: getattr(batch, field.name) for field in dataclasses.fields(Batch)})


def _checked_positions(length: int) -> Tensor:
    """Return the checked positions of a sample, int64 (P,): its first ones, where leaks are largest, and later ones."""
    if length <= CHECKED_POSITIONS:
        return torch.arange(length)
    half = CHECKED_POSITIONS // 2
    return torch.cat([torch.arange(half), torch.linspace(half, length - 1, half).long()])


def _compute_logits(model: nn.Module, batch: Batch, positions: Tensor) -> Tensor:
    """Run the model; return logits at some positions, float32 (P, vocabulary) on the CPU."""
    inputs = batch.model_inputs()
    positions = positions.to(batch.input_ids.device)
    if takes_logits_to_keep(model):
        logits = model(**inputs, logits_to_keep=positions).logits[0]
    else:
        logits = model(**inputs).logits[0, positions]
    return logits.float().cpu()


def _tower_input_shape(sample: EncodedSample, name: str, spec: InputSpec, *, has_tiles: bool) -> tuple[int, ...]:
    """Return the shape (or its first axis) of a sample's part of a tower input; () for other inputs such as grids."""
    if name == "pixel_values" and has_tiles:  # the batch has the tiles of all media
        return (sum([image.grid[0] for image in sample.images] + [video.grid[0] for video in sample.videos]),)
    if name == "pixel_values" and spec.family.processor_inputs:
        # Only the processor knows how many tiles a picture has.
        single_kinds = [dataclasses.replace(sample, videos=()), dataclasses.replace(sample, images=())]
        processed = load_processed(single_kinds, spec)
        return tuple(processed[name].shape) if processed else ()
    if name == "pixel_values":
        grids = [image.grid for image in sample.images]
        grids += [video.grid for video in sample.videos if spec.family.videos_as_pictures]
        return (sum(map(math.prod, grids)),)
    if name == "pixel_values_videos":
        return (sum(math.prod(video.grid) for video in sample.videos),)
    return (len(sounds_in_order(sample, spec.media_tokens)),) if name == "input_features" else ()


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Args:
        name: ``isolation``, ``prefixes``, ``logits``, ``loss`` or ``gradients``; ``losses`` or ``weights`` of a
            trajectory.
        allowed: the largest error that rounding explains.
        where: description of the sample, node or parameter with the largest error, for messages.
    """

    name: str
    error: float
    allowed: float
    where: str

    @property
    def passed(self) -> bool:
        """True if the error is allowed; NaN never is."""
        return self.error <= self.allowed

    @property
    def excess(self) -> float:
        """The error relative to the allowed one; infinite for NaN."""
        return math.inf if math.isnan(self.error) else self.error / self.allowed

    def sentence(self) -> str:
        """Describe the failed check in a sentence."""
        size = f"{self.error:.2g}, and rounding explains at most {self.allowed:.2g}"
        if self.name == "isolation":
            return f"packed samples leak: {self.where} by {size}"
        if self.name == "prefixes":
            return f"a shared prefix has another effect packed than alone: {self.where} the difference is {size}"
        if self.name in ("losses", "weights"):
            return f"packed training differs from unpacked training: {self.where} the difference is {size}"
        verb = "differs" if self.name == "loss" else "differ"
        return f"the {self.name} of a pack {verb} from its samples alone: {self.where} the difference is {size}"


@torch.no_grad()
def check_isolation(pack: PackUnderTest, max_changes: int = 8) -> Check:
    """Check that the samples of a pack do not affect each other's outputs; return the largest error.

    Change one node at a time, and compare the logits of all samples without it before and after. A node is a sample
    or, if samples share a prefix, the prefix or the rest of a sample. ``max_changes`` nodes are changed at most.

    Raises:
        MismatchError: if no change affects even the logits of its own sample, so that nothing can be checked.
    """
    logits_before = pack.packed_logits(pack.batch)  # by sample
    allowed = pack.tolerances["isolation"] * _largest_logit(logits_before)
    checks = [Check("isolation", error=0.0, allowed=allowed, where="no change affected another sample")]
    any_change_has_effect = False
    nodes = [node for node in pack.nodes if len(node.samples) < len(pack.samples)]  # others leave no sample unchanged
    for node in _spread(nodes, max_changes):
        logits_after = pack.packed_logits(pack.with_change(node))
        errors = [_difference(after, before) for after, before in zip(logits_after, logits_before, strict=True)]
        checks += _isolation_checks(pack, node, errors, allowed)
        if not all(errors[number] <= allowed for number in node.samples):  # NaN is an effect, too
            any_change_has_effect = True
    if nodes and not any_change_has_effect:
        raise MismatchError(
            "changing a sample's tokens does not change its logits, so nothing can be verified",
            "Check that --model is a trained model whose weights are not all zero.",
        )
    return worst_of(checks)[0]


def _isolation_checks(pack: PackUnderTest, changed: Node, errors: Sequence[float], allowed: float) -> list[Check]:
    """Return a check for each sample without the changed node; ``errors``: how much the logits of each one changed."""
    change = f"changing {pack.node_name(changed)} changes the logits of"
    others = [(number, error) for number, error in enumerate(errors) if number not in changed.samples]
    return [Check("isolation", error, allowed, f"{change} {pack.name(number)}") for number, error in others]


def check_prefixes(pack: PackUnderTest, max_changes: int = 4) -> Check:
    """Change one shared prefix at a time, and compare the logits of its samples packed and alone."""
    checks = [Check("prefixes", 0.0, pack.tolerances["logits"], "no prefix had another effect")]
    for changed in _spread([node for node in pack.nodes if node.is_shared], max_changes):
        checks += _compare_logits("prefixes", pack, changed)
    return worst_of(checks)[0]


def check_logits(pack: PackUnderTest) -> Check:
    """Compare the logits of each sample in the pack with its logits alone."""
    return worst_of(_compare_logits("logits", pack))[0]


@torch.no_grad()
def _compare_logits(name: str, pack: PackUnderTest, changed: Node | None = None) -> list[Check]:
    """Compare logits packed and alone: of all samples, or of those of the node ``changed``, which is changed first."""
    packed = pack.packed_logits(pack.batch if changed is None else pack.with_change(changed))
    numbers = range(len(pack.samples)) if changed is None else changed.samples
    with original_attention(base_model(pack.model)):
        alone = {number: pack.logits_alone(number, changed) for number in numbers}
    allowed = pack.tolerances["logits"] * _largest_logit(list(alone.values()))
    change = "" if changed is None else f"after changing {pack.node_name(changed)} "
    return [
        Check(name, _difference(packed[number], logits), allowed, f"{change}in {pack.name(number)}")
        for number, logits in alone.items()
    ]


@torch.no_grad()
def check_loss(pack: PackUnderTest) -> Check:
    """Compare the mean loss over the pack's targets with the same mean computed from each sample alone."""
    packed = pack.packed_loss()
    with original_attention(base_model(pack.model)):
        alone = sum(float(pack.loss(batch)) for batch in pack.batches_alone)
    where = f"the mean over {pack.num_targets:,} targets is {packed:.6g} packed and {alone:.6g} alone;"
    return Check("loss", abs(packed - alone), pack.tolerances["loss"] * max(1.0, abs(alone)), where)


def check_gradients(pack: PackUnderTest, max_samples: int = 8) -> Check:
    """Compare the gradients of the pack's loss with the sum of the gradients of each sample alone.

    Overwrites the model's gradients. In 16 bits, the rounding of sums over more than ``max_samples`` could hide errors.
    """
    pack = pack.limited_to(max_samples)
    pack.model.zero_grad(set_to_none=True)
    with original_attention(base_model(pack.model)):
        for batch in pack.batches_alone:
            torch.autograd.backward(pack.loss(batch))  # adds to the gradients
    norms_alone = _gradient_norms(pack.model)
    pack.subtract_packed_gradients()  # what remains is the error
    error_norms = _gradient_norms(pack.model)
    pack.model.zero_grad(set_to_none=True)
    # Errors are relative to the gradient of the samples alone, or to a minimum for parameters with tiny gradients.
    largest_norm = max(norms_alone.values(), default=0.0)
    min_norm = _MIN_GRADIENT * largest_norm if largest_norm else 1.0
    allowed = pack.tolerances["gradients"]
    checks = [Check("gradients", error=0.0, allowed=allowed, where="nowhere")]
    for name, error_norm in error_norms.items():
        norm_alone = norms_alone.get(name, 0.0)
        checks.append(Check("gradients", error_norm / max(norm_alone, min_norm), allowed, f"in {name}"))
    return worst_of(checks)[0]


def _gradient_norms(model: nn.Module) -> dict[str, float]:
    return {name: float(p.grad.float().norm()) for name, p in model.named_parameters() if p.grad is not None}


def worst_of(checks: Sequence[Check]) -> list[Check]:
    """Return the check with the largest excess for each name, in the order in which the names first appear."""
    names = dict.fromkeys(check.name for check in checks)
    return [max((check for check in checks if check.name == name), key=lambda check: check.excess) for name in names]


def raise_if_failed(checks: Sequence[Check], *, shares_prefixes: bool = False) -> None:
    """Raise a MismatchError that describes every failed check, if any; its remedy depends on ``shares_prefixes``."""
    if failures := [check.sentence() for check in checks if not check.passed]:
        alternative = "--share-prefix false or " if shares_prefixes else ""
        raise MismatchError(
            "\n".join(failures),
            f"Try --attn-impl sdpa, or train with {alternative}--packing false. If sdpa fails, too, please report the "
            "model's name.",
        )


def _spread(nodes: Sequence[Node], max_nodes: int) -> list[Node]:
    """Return at most ``max_nodes`` evenly spaced nodes, including the first and the last."""
    numbers = np.linspace(0, len(nodes) - 1, min(max_nodes, len(nodes))).round().astype(int)
    return [nodes[number] for number in numbers.tolist()]


def _largest_logit(logits: Sequence[Tensor]) -> float:
    """Return the largest absolute logit, at least 1."""
    return max([1.0, *(float(tensor.abs().max()) for tensor in logits if tensor.numel())])


def _difference(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference; 0 for empty tensors."""
    return float((a - b).abs().max()) if a.numel() else 0.0


def verify_before_training(
    run: Run, model: nn.Module, spec: InputSpec, parallel: SequenceParallel | None, progress: Progress
) -> None:
    """Check on a few short samples that the model keeps the samples of a pack apart; raise a MismatchError if not.

    ``model`` is not yet wrapped for several processes. Does nothing if weights are sharded, or without packing.
    """
    config = run.config
    if not (config.removes_padding and config.verify_packing):
        return
    on_gpu = torch.cuda.is_available()
    is_sharded_on_gpu = on_gpu and (config.fsdp or config.deepspeed)
    if config.shares_experts or zero_stage(config) == 3 or is_sharded_on_gpu:
        progress.note("packing is not verified, because the weights are sharded; run packtool verify on one device")
        return
    samples = _samples_to_verify(run, spec)
    if len(samples) < 2:  # a single sample cannot leak into another
        return
    min_shared = run.source.min_shared  # tokens of a prefix that is computed once; None without shared prefixes
    # Low-precision hidden states enlarge differences between packed and alone; the check of isolation stays exact.
    has_low_precision = config.fp8 or config.qat is not None
    checks = verify_cheaply(
        model,
        samples,
        spec,
        dtype=resolve_dtype(spec.config, config, on_gpu=on_gpu),
        parallel=parallel,
        min_shared=min_shared,
        compares_losses=not has_low_precision,
    )
    raise_if_failed(checks, shares_prefixes=min_shared is not None)


def _samples_to_verify(run: Run, spec: InputSpec) -> list[EncodedSample]:
    """Return short samples that a run trains first, without those whose media it would skip."""
    samples = run.source.first_samples(MAX_CHECKED_SAMPLES)
    if run.config.on_bad_media == "skip":
        samples = [sample for sample in samples if sample_media_error(sample, spec) is None]
    return shortest_samples(samples)


def verify_cheaply(
    model: nn.Module,
    samples: Sequence[EncodedSample],
    spec: InputSpec,
    *,
    dtype: torch.dtype | None = None,
    parallel: SequenceParallel | None = None,
    min_shared: int | None = None,
    compares_losses: bool = True,
) -> list[Check]:
    """Run the checks that need no gradients: ``isolation``, ``loss`` and, if prefixes are shared, ``prefixes``.

    Mode, weights and random numbers of the model are unchanged afterwards.

    Args:
        model: with packed attention, not yet wrapped for several processes.
        samples: at least two, better short ones.
        dtype: of the computation under autocast; by default that of the weights.
        parallel: the ranks over which sequences are split; all of them call this with the same samples.
        min_shared: minimum tokens of a shared prefix that is computed once; None shares no prefix.
    """
    weights = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    autocast = _autocast(weights, dtype)
    dtype = dtype or weights[0].dtype
    with without_dropout(model), torch.no_grad(), autocast:
        pack = PackUnderTest(model, samples, spec, dtype, parallel, has_unsplit=True, min_shared=min_shared)
        # With ``parallel``, ``pack.batch`` has only this rank's inputs.
        full_batch = pack.batch if parallel is None else collate_packs(pack.samples, spec)
        refuse_leaky_inputs(full_batch.model_inputs())
        checks = [check_isolation(pack, max_changes=_MAX_CHANGES)]
        if compares_losses:
            checks.append(check_loss(pack))
        if pack.is_tree:  # some samples share a prefix
            checks.append(check_prefixes(pack, max_changes=1))
        return checks


def _autocast(weights: Sequence[Tensor], dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """Return a context that computes in ``dtype``, where weights have another one."""
    # Look at every weight: frozen and trained ones may differ in their type.
    if dtype is None or all(weight.dtype == dtype for weight in weights):
        return contextlib.nullcontext()
    return torch.autocast(weights[0].device.type, dtype)


def shortest_samples(samples: Sequence[EncodedSample], max_tokens: int = _MAX_TOKENS) -> list[EncodedSample]:
    """Return as many of the shortest samples as fit into ``max_tokens``, at least two, in their original order."""
    chosen, num_tokens = set[int](), 0
    for number in sorted(range(len(samples)), key=lambda number: samples[number].length):
        num_tokens += samples[number].length
        if num_tokens <= max_tokens or len(chosen) < 2:
            chosen.add(number)
    return [sample for number, sample in enumerate(samples) if number in chosen]
