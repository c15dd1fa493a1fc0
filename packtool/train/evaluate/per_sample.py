"""Loss and accuracy of every sample, computed in packed forward passes and returned in the order of the caches.

Each micro-batch goes through three shapes (T tokens, S samples, R tokens of the longest sample after its prompt):

    packed      loss of each target token        (1, T)
    restored    one row for each sample          (S, R)    by ``restore_padding``, without the prompts
    summed      one number for each sample       (S,)

Every rank has the same number of forward passes. Shared prefixes are computed once, and scored for each sample.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from transformers import PreTrainedConfig

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.recurrent import recurrent_layers, restore_recurrent_layers
from packtool.attention.register import ATTENTION_NAME, set_attention, set_text_attention
from packtool.attention.support import refuse_unsupported
from packtool.batch.batch import Batch, ShardedBatch, TreeBatch
from packtool.batch.collate import collate_packs, collate_padded, collate_tree, shifted_labels
from packtool.batch.collate_shard import collate_shard
from packtool.batch.dataset import explain_dead_workers, load_micro_batches, with_media_reads
from packtool.batch.media_cache import MediaReads
from packtool.batch.positions import align_sample, restore_padding
from packtool.batch.shard import SequenceSplit
from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader, SampleReader
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample
from packtool.errors import MismatchError, PacktoolError, UnsupportedModelError
from packtool.launch.world import World, all_gather_objects
from packtool.planning.dynamic import EvaluationPlan
from packtool.planning.pack_plan import Int64Array
from packtool.progress import Progress, SilentProgress
from packtool.rows.sample import RowPart
from packtool.train.model.loss import LossFunction, base_model
from packtool.train.model.trainable import without_dropout

_REMEDY = "Run the same command again"
_ORIGIN_COLUMNS = 3 + len(dataclasses.fields(RowPart))  # tokens, source, row, part
SCORES = ("sum of losses", "target tokens", "correct tokens", "first wrong position or -1")
"""Columns of the result of ``sample_scores``."""

_MAX_CELLS = 1 << 22
"""Maximum entries of restored rows in memory: one long sample makes all rows of its group as wide as itself."""

Scorer = Callable[[Batch], tuple[Tensor, Tensor]]
"""Runs the model on a micro-batch; returns the loss of each position in nats, float32 (1, T), and whether its label is
the most likely token, bool (1, T). Positions without a label have 0 and False."""

FloatArray = npt.NDArray[np.float64]


SampleOrigin = tuple[int, str, int, RowPart | None]
"""Tokens, source, row and row part of a sample."""


class RankScores(NamedTuple):
    """Results of one rank for n samples, in the order of its micro-batches."""

    scores: FloatArray  # (n, 4), from ``sample_scores``
    origins: Int64Array  # (n, 7): tokens, position in ``sources``, row, and the four numbers of ``RowPart``
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Total:
    """Totals and means over several samples; means are over target tokens.

    Args:
        loss: mean cross-entropy in nats; NaN without target tokens.
        perplexity: exp(loss).
        token_accuracy: fraction of target tokens that are the model's most likely tokens.
        exact_samples: samples whose target tokens are all the model's most likely tokens.
    """

    samples: int
    target_tokens: int
    loss: float
    perplexity: float
    token_accuracy: float
    exact_samples: int


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Results of N samples in the order of the caches; arrays of shape (N,).

    Args:
        tokens: int64, length of the sample.
        target_tokens: int64, labels after the sample's first token.
        loss_sum: float64, sum of the targets' cross-entropies in nats, without loss scales.
        num_correct: int64, targets that are the most likely token given the true tokens before them.
        first_wrong: int64, position in the sample of the first target that is not the most likely token, or -1.
        source: int64, position in ``sources``.
        row: int64, row in the source.
        parts: int64 (N, 4), the fields of ``RowPart``; zeros for a sample that is a full row.
        channel: int64, position in ``channels``, or -1.
    """

    tokens: Int64Array
    target_tokens: Int64Array
    loss_sum: FloatArray
    num_correct: Int64Array
    first_wrong: Int64Array
    source: Int64Array
    row: Int64Array
    parts: Int64Array
    channel: Int64Array
    sources: tuple[str, ...]
    channels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def loss(self) -> FloatArray:
        """Mean loss over each sample's target tokens, in nats; NaN without target tokens."""
        return _ratio(self.loss_sum, self.target_tokens)

    @property
    def perplexity(self) -> FloatArray:
        """The exponential of the mean loss in nats."""
        with np.errstate(over="ignore"):
            return np.exp(self.loss)

    @property
    def token_accuracy(self) -> FloatArray:
        """Fraction of each sample's target tokens that are the most likely token; NaN without target tokens."""
        return _ratio(self.num_correct, self.target_tokens)

    @property
    def total(self) -> Total:
        return self._total_of(np.ones(len(self), np.bool_))

    @property
    def channel_totals(self) -> dict[str | None, Total]:
        """Totals of each channel with samples, in the caches' order; samples without a channel are last, as None."""
        codes = {name: code for code, name in enumerate(self.channels)} | {None: -1}
        masks = {name: self.channel == code for name, code in codes.items()}
        return {name: self._total_of(mask) for name, mask in masks.items() if mask.any()}

    def metrics(self, prefix: str = "eval_") -> dict[str, float]:
        """Return metrics for a log line: totals of all samples, and the loss of each channel as ``eval_loss/NAME``."""
        total = self.total
        names = ("loss", "perplexity", "token_accuracy", "target_tokens", "samples")
        figures: dict[str, float] = {prefix + name: getattr(total, name) for name in names}
        channels = self.channel_totals.items()
        return figures | {f"{prefix}loss/{name}": channel.loss for name, channel in channels if name is not None}

    def _total_of(self, selected: npt.NDArray[np.bool_]) -> Total:
        targets, correct = int(self.target_tokens[selected].sum()), int(self.num_correct[selected].sum())
        loss = float(self.loss_sum[selected].sum()) / targets if targets else math.nan
        with np.errstate(over="ignore"):
            perplexity = float(np.exp(loss))
        is_exact = (self.num_correct == self.target_tokens) & (self.target_tokens > 0)
        return Total(
            samples=int(selected.sum()),
            target_tokens=targets,
            loss=loss,
            perplexity=perplexity,
            token_accuracy=correct / targets if targets else math.nan,
            exact_samples=int(is_exact[selected].sum()),
        )


def _ratio(sums: npt.NDArray[np.generic], counts: Int64Array) -> FloatArray:
    ratios: FloatArray = np.full(len(counts), np.nan)
    np.divide(sums, counts, out=ratios, where=counts > 0)
    return ratios


@dataclass(frozen=True, eq=False)
class EvaluationBatch:
    """One micro-batch of S samples, with their positions and origins.

    Args:
        batch: packed, or padded with a single sample.
        spans: ``seqlens``, ``cu_seqlens`` and ``prompt_lengths`` for ``sample_scores``.
        tree_labels: of samples that share prefixes, their shifted labels one after the other, int64 (1, T'); None if no
            prefix is shared.
        origins: of each sample.
    """

    batch: Batch
    spans: tuple[Tensor, Tensor, Tensor]
    tree_labels: Tensor | None
    origins: tuple[SampleOrigin, ...]


class EvaluationMicroBatches(Dataset["EvaluationBatch | PacktoolError"]):
    """A dataset whose item i is micro-batch i of a rank.

    Args:
        micro_batches: for each micro-batch, the positions of its samples in ``reader``.
        alignment: samples are padded to a multiple of this number of tokens.
        packed: False for micro-batches of a single sample, for models that cannot be packed.
        split: this rank's part of sequences that are split over several ranks.
    """

    def __init__(
        self,
        reader: SampleReader,
        spec: InputSpec,
        micro_batches: Sequence[Int64Array],
        *,
        alignment: int = 1,
        packed: bool = True,
        split: SequenceSplit | None = None,
        shares_prefixes: bool = False,
    ) -> None:
        assert not shares_prefixes or (packed and split is None and alignment == 1), "trees: one rank, no padding"
        self.reader, self.spec, self.micro_batches, self.alignment = reader, spec, micro_batches, alignment
        self.packed, self.split, self.shares_prefixes = packed, split, shares_prefixes

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __getitem__(self, index: int) -> EvaluationBatch | PacktoolError:
        """Return the micro-batch, or its error: an error raised in a worker process loses its type and its remedy."""
        try:
            samples = [self.reader.sample(int(position)) for position in self.micro_batches[index]]
            aligned = [align_sample(sample, self.alignment) for sample in samples]  # with padding
            batch = with_media_reads(self._collate(aligned), self.spec)
        except PacktoolError as error:
            return error
        seqlens = torch.tensor([sample.length for sample in samples], dtype=torch.int64)
        cu_seqlens = torch.tensor(np.cumsum([0, *(sample.length for sample in aligned)]), dtype=torch.int64)
        prompt_lengths = torch.tensor([_prompt_length(sample) for sample in samples], dtype=torch.int64)
        tree_labels = None
        if isinstance(batch, TreeBatch):
            labels = np.concatenate([shifted_labels(sample) for sample in samples], dtype=np.int64)
            tree_labels = torch.from_numpy(labels).unsqueeze(0)
        origins = tuple((sample.length, sample.source, sample.row, sample.part) for sample in samples)
        return EvaluationBatch(batch, (seqlens, cu_seqlens, prompt_lengths), tree_labels, origins)

    def _collate(self, samples: Sequence[EncodedSample]) -> Batch:
        """Make one batch of samples with padding, in the form that this evaluation needs."""
        if self.split is not None:
            return collate_shard(samples, self.spec, self.split)
        if self.shares_prefixes:
            return collate_tree(samples, self.spec)
        if self.packed:
            return collate_packs(samples, self.spec)
        return collate_padded(samples, self.spec)


def _prompt_length(sample: EncodedSample) -> int:
    """Return the number of tokens before the first target; all tokens of a sample without targets."""
    targets = np.flatnonzero(sample.labels[1:] != IGNORE_INDEX)
    return int(targets[0]) + 1 if len(targets) else sample.length


def evaluate(
    model: nn.Module,
    reader: CacheReader,
    spec: InputSpec,
    plan: EvaluationPlan,
    *,
    world: World | None = None,
    progress: Progress | None = None,
    num_workers: int = 0,
    samples: SampleReader | None = None,
    parallel: SequenceParallel | None = None,
) -> Evaluation:
    """Evaluate the first ``len(plan.lengths)`` samples of caches; every rank calls this and gets the same result.

    The model's mode, its attention and all random states are the same before and after.

    Args:
        model: on its device, possibly with adapters or in DistributedDataParallel; attention may be packed or not.
        plan: micro-batches of the data-parallel ranks of ``world``.
        world: this rank; with several ranks, the process group must exist.
        num_workers: processes that load media ahead of the model.
        samples: the same samples with other labels; by default those of ``reader``.
        parallel: the ranks over which sequences are split.

    Raises:
        MismatchError: if the ranks have different plans.
    """
    world, progress = world or World(), progress or SilentProgress()
    assert plan.num_ranks == world.data.size, "planned for another number of ranks"
    # DistributedDataParallel's own forward would wait for the other ranks.
    unwrapped = model.module if isinstance(model, DistributedDataParallel) else model
    packed = is_packed(unwrapped) or can_be_packed(spec.config)
    if not packed:
        progress.note(f"{spec.config.model_type} models do not support packing: samples are evaluated one at a time")
        plan = plan.one_sample_each()
    for rank, fingerprint in enumerate(all_gather_objects(plan.fingerprint, world.size)):
        if fingerprint != plan.fingerprint:
            raise MismatchError(
                f"rank {rank} and rank {world.rank} planned different samples for this evaluation",
                "Use the same caches, options and packtool version on all machines.",
            )
    dataset = EvaluationMicroBatches(
        samples or reader,
        spec,
        plan.micro_batches(world.data.rank),
        alignment=plan.alignment,
        packed=packed,
        split=parallel.split if parallel is not None else None,
        shares_prefixes=plan.trees is not None,
    )
    with evaluating(unwrapped, packed=packed) as scorer:
        device = next(unwrapped.parameters()).device
        rank_scores = _score_samples(scorer, parallel, device, dataset, progress, num_workers)
    all_scores = all_gather_objects(rank_scores, world.size)
    # Ranks that split the same sequences are neighbors, and have the same results: take one of each group.
    return _join_ranks(all_scores[:: world.sequence_parallel_size], plan, reader)


def _score_samples(
    scorer: Scorer,
    parallel: SequenceParallel | None,
    device: torch.device,
    dataset: EvaluationMicroBatches,
    progress: Progress,
    num_workers: int,
) -> RankScores:
    """Load the micro-batches of this rank in worker processes, run the model on them, and score their samples.

    ``scorer`` runs the model. The ranks of ``parallel`` share each micro-batch, and all get its scores.
    """
    # Scores of the samples of each micro-batch, (S, 4); the empty array is for ranks without micro-batches.
    scores_by_batch = [np.zeros((0, len(SCORES)))]
    origins: list[SampleOrigin] = []  # of each sample
    media_reads = MediaReads()
    loaded = load_micro_batches(dataset, range(len(dataset)), num_workers=num_workers, remedy=_REMEDY)
    progress.start("evaluate", len(dataset))
    with explain_dead_workers(_REMEDY):
        for item in cast(Iterator[EvaluationBatch], loaded):  # errors were raised while loading
            batch_scores = _score_batch(scorer, parallel, device, item)
            scores_by_batch.append(batch_scores.cpu().numpy())
            origins += item.origins
            media_reads += item.batch.media_reads
            progress.advance(1, samples=len(origins))
    progress.finish()
    if dataset.spec.media_cache is not None:
        progress.note(media_reads.sentence(dataset.spec.media_cache))
    origin_rows, source_names = _number_sources(origins)
    return RankScores(np.concatenate(scores_by_batch), origin_rows, source_names)


def _number_sources(origins: Sequence[SampleOrigin]) -> tuple[Int64Array, tuple[str, ...]]:
    """Return the rows of ``RankScores.origins``, and the names of the sources that their numbers stand for."""
    numbers: dict[str, int] = {}  # of each source, by its name
    rows = []
    for num_tokens, source, row, part in origins:
        number = numbers.setdefault(source, len(numbers))
        rows.append((num_tokens, number, row, *dataclasses.astuple(part or RowPart())))
    return np.array(rows, np.int64).reshape(-1, _ORIGIN_COLUMNS), tuple(numbers)


def _score_batch(
    scorer: Scorer, parallel: SequenceParallel | None, device: torch.device, item: EvaluationBatch
) -> Tensor:
    """Return the ``SCORES`` of the S samples of a micro-batch, float64 (S, 4), on all ranks that split it."""
    batch = item.batch.to(device)
    labels = batch.labels[:1]  # (1, T); later rows of a padded batch are fillers
    losses, correct = scorer(batch)  # (1, T) each
    if isinstance(batch, ShardedBatch) and parallel is not None:
        # This rank has its own tokens of the sequence; get those of the other ranks, too.
        gather = partial(parallel.gather, index=batch.index, num_tokens=sum(batch.lengths))
        labels, losses, correct = (gather(values[0])[None] for values in (labels, losses, correct))
    if isinstance(batch, TreeBatch) and item.tree_labels is not None:
        labels = item.tree_labels.to(device)
        losses, correct = _repeat_prefix_scores(batch, labels, losses, correct)
    seqlens, cu_seqlens, prompt_lengths = (tensor.to(device) for tensor in item.spans)
    return sample_scores(seqlens, cu_seqlens, prompt_lengths, labels, losses, correct)


def _repeat_prefix_scores(batch: TreeBatch, labels: Tensor, losses: Tensor, correct: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores of the samples' labels (1, T'): those of a shared prefix (1, T) for each of its samples."""
    has_label = labels != IGNORE_INDEX  # a sample has none at some of its tokens
    tree_positions = batch.sample_index()  # of each token of each sample, (T',)
    return losses[:, tree_positions].where(has_label, 0), correct[:, tree_positions] & has_label


def _join_ranks(ranks: Sequence[RankScores], plan: EvaluationPlan, reader: CacheReader) -> Evaluation:
    """Join the results of all ranks, and sort them by the samples' order in the caches.

    ``plan`` says which rank scored which samples. The samples of a rank are in the order of its micro-batches.
    """
    sources = tuple(sorted({name for rank in ranks for name in rank.sources}))
    order = _result_numbers(plan)  # of each sample, its number in the results of all ranks, (N,)
    scores = np.concatenate([rank.scores for rank in ranks])[order]
    loss_sum, target_tokens, num_correct, first_wrong = scores.T  # the columns ``SCORES``
    origins = np.concatenate([rank.origins for rank in ranks])[order]
    tokens, _, rows = origins.T[:3]  # each rank numbers sources differently, see below
    parts = origins[:, 3:]
    source_numbers = np.concatenate([_renumber_sources(rank, sources) for rank in ranks])[order]
    channels = reader.index.channel[: len(order)]  # the first samples of the caches are evaluated
    return Evaluation(
        tokens=tokens,
        target_tokens=target_tokens.astype(np.int64),
        loss_sum=loss_sum,
        num_correct=num_correct.astype(np.int64),
        first_wrong=first_wrong.astype(np.int64),
        source=source_numbers,
        row=rows,
        parts=parts,
        channel=channels.astype(np.int64),
        sources=sources,
        channels=reader.index.channels,
    )


def _result_numbers(plan: EvaluationPlan) -> Int64Array:
    """Return, for each sample in the caches' order, the number of its result if results are joined rank by rank."""
    batch_positions = np.concatenate([plan.order_positions(number) for number in range(plan.num_ranks)])
    result_of_position: Int64Array = np.argsort(batch_positions)  # the inverse permutation
    return result_of_position[plan.batches.inverse]


def _renumber_sources(rank: RankScores, sources: Sequence[str]) -> Int64Array:
    """Return the position in ``sources`` of the source of each sample of a rank, int64 (n,)."""
    position_of = {name: position for position, name in enumerate(sources)}
    positions = np.array([position_of[name] for name in rank.sources], np.int64)  # by the rank's own numbers
    return positions[rank.origins[:, 1]]


def sample_scores(
    seqlens: Tensor, cu_seqlens: Tensor, prompt_lengths: Tensor, labels: Tensor, losses: Tensor, correct: Tensor
) -> Tensor:
    """Sum token scores of a packed sequence of T tokens for each of its S samples.

    Args:
        seqlens: int64 (S,), tokens of each sample, without padding.
        cu_seqlens: int64 (S + 1,), start of each sample, padding included.
        prompt_lengths: int64 (S,), tokens before the first target; all tokens of a sample without targets.
        labels: int64 (1, T), at each position the next token, or ``IGNORE_INDEX``.
        losses, correct: float32 and bool (1, T), of the prediction of the label.

    Returns:
        float64 (S, 4) with the columns ``SCORES``.
    """
    # Each sample becomes a row with the scores of the tokens after its prompt, as wide as the longest one. Samples are
    # taken in groups, which limits the memory for this.
    width = int((seqlens - prompt_lengths).max()) if len(seqlens) else 0
    group_size = max(1, _MAX_CELLS // max(width, 1))
    scores = [torch.zeros(0, 4, dtype=torch.float64, device=losses.device)]
    for start in range(0, len(seqlens), group_size):
        stop = start + group_size
        group_prompt_lengths = prompt_lengths[start:stop]
        to_rows = partial(
            restore_padding,
            seqlens=seqlens[start:stop],
            cu_seqlens=cu_seqlens[start : stop + 1],
            seq_len=width,
            prompt_length=group_prompt_lengths,
        )
        # All are (samples of the group, width).
        is_target = to_rows(labels != IGNORE_INDEX)
        is_wrong = is_target & ~to_rows(correct)
        target_losses = to_rows(losses)
        scores.append(_row_scores(is_target, is_wrong, target_losses, group_prompt_lengths))
    return torch.cat(scores)


def _row_scores(is_target: Tensor, is_wrong: Tensor, target_losses: Tensor, prompt_lengths: Tensor) -> Tensor:
    """Sum the scores of each of R rows of tokens, (R, W), that follow prompts of (R,) tokens; float64 (R, 4)."""
    num_targets = is_target.sum(1)
    num_wrong = is_wrong.sum(1)
    num_before_first_wrong = (is_wrong.cumsum(1) == 0).sum(1)
    first_wrong = torch.where(num_wrong > 0, prompt_lengths + num_before_first_wrong, -1)
    columns = (target_losses.double().sum(1), num_targets, num_targets - num_wrong, first_wrong)
    return torch.stack([column.double() for column in columns], dim=1)


def can_be_packed(config: PreTrainedConfig) -> bool:
    """Check whether samples of this model can share a forward pass; if not, each is evaluated alone."""
    try:
        refuse_unsupported(config)
    except UnsupportedModelError:
        return False
    return True


def is_packed(model: nn.Module) -> bool:
    """Check whether a model, possibly with adapters, already uses packtool's packed attention."""
    return str(base_model(model).config.get_text_config()._attn_implementation).startswith(ATTENTION_NAME)


@contextmanager
def evaluating(model: nn.Module, *, packed: bool) -> Iterator[Scorer]:
    """Yield a function that runs the model on a batch, without dropout and gradients, and returns scores of tokens.

    With ``packed``, it takes packs of samples: the model gets packtool's attention, which keeps them apart. Afterwards,
    the model is as before.
    """
    base: Any = base_model(model)
    original_attention = str(base.config.get_text_config()._attn_implementation)
    replaces_attention = packed and not is_packed(model)
    # Packed attention also overrides the method ``forward`` of each recurrent layer.
    had_packed_layers = any("forward" in vars(layer) for layer in recurrent_layers(base))
    if replaces_attention:
        set_attention(base)
    try:
        # Not inference mode: tensors that a model caches in a forward pass must be usable in the next training step.
        with without_dropout(model), torch.no_grad(), LossFunction.temporary(model) as loss_function:
            yield partial(_score_tokens, loss_function, model)
    finally:
        if replaces_attention:
            set_text_attention(base, original_attention)
            if not had_packed_layers:
                restore_recurrent_layers(base)


def _score_tokens(loss_function: LossFunction, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Run the model on a micro-batch, see ``Scorer``."""
    targets = loss_function(model, batch)  # losses of the positions with labels only
    losses = torch.zeros(batch.labels.shape[1], device=batch.labels.device)
    is_correct = torch.zeros_like(losses, dtype=torch.bool)
    losses[targets.positions] = targets.losses
    is_correct[targets.positions] = targets.correct
    return losses[None], is_correct[None]
