"""Evaluation of each sample in packed forward passes, with results in the order of the caches.

    lengths ──► micro-batches under a token cap ──► packed forward ──► rows restored ──► inverse permutation
                (planning.dynamic)                  (no padding)       (batch.positions)  (of all ranks' results)

packed       loss of each token  (1, T)     only where a label is, in chunks: logits are the largest tensor
restored     one row a sample    (S, R)     from the token before its first target on: ``restore_padding``
summed       one number a sample (S,)

Results do not depend on which samples share a pass. Nothing is random, and every rank has equally many forward passes.
Padding is never created: ``collate_packs`` of aligned samples equals ``remove_padding`` of the padded rows. Prefixes
that samples share are computed once, and scored for each of the samples.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from transformers import PreTrainedConfig

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.recurrent import recurrent_layers, release_recurrent_layers
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
from packtool.errors import MismatchError, PacktoolError, UnsupportedModelError
from packtool.launch.world import World, all_gather_objects
from packtool.planning.dynamic import EvaluationPlan
from packtool.planning.pack_plan import Int64Array
from packtool.progress import Progress, SilentProgress
from packtool.rows.sample import RowPart
from packtool.train.model.loss import LossFunction
from packtool.train.model.trainable import base_model, without_dropout

_REMEDY = "The same command begins again"
_ORIGIN = 3 + len(dataclasses.fields(RowPart))  # tokens, source, row, part
SCORES = ("sum of losses", "target tokens", "correct ones", "first wrong position or -1")
"""Columns of what ``sample_scores`` returns."""

_CELLS_AT_ONCE = 1 << 22
"""Entries of the restored rows that are summed together, so that one long sample does not make many wide rows."""

Scorer = Callable[[Batch], tuple[Tensor, Tensor]]
"""Scores the first sequence of a micro-batch: each position's loss in nats, float32 (1, T), and whether its label is
the most likely token, bool (1, T); 0 and False where there is no label."""

FloatArray = npt.NDArray[np.float64]

RankScores = tuple[npt.NDArray[np.float64], Int64Array, tuple[str, ...]]
"""A rank's results of n samples, in the order of its micro-batches: scores, float64 (n, 4), from ``sample_scores``;
origins, int64 (n, 7), with tokens, source number, row, and the four numbers of ``RowPart``; and names of sources."""


@dataclass(frozen=True)
class Total:
    """Figures of several samples, weighted by target tokens.

    Args:
        samples: number of samples.
        target_tokens: number of their target tokens.
        loss: mean over all target tokens, in nats; nan without target tokens.
        perplexity: exp(loss).
        token_accuracy: share of the target tokens that are the most likely ones.
        exact_samples: samples whose targets are all the most likely ones.
    """

    samples: int
    target_tokens: int
    loss: float
    perplexity: float
    token_accuracy: float
    exact_samples: int


@dataclass(frozen=True, eq=False)
class Evaluation:
    """One entry for each of N samples, in the caches' order; arrays of shape (N,).

    Args:
        tokens: int64, of the sample.
        target_tokens: int64, labels after the sample's first token.
        loss_sum: float64, sum of the targets' cross-entropies in nats, without loss scales.
        num_correct: int64, targets that are the most likely token, given all true tokens before.
        first_wrong: int64, position in the sample of the first target that is not; -1 if there is none.
        source: int64, position in ``sources``.
        row: int64, row there.
        parts: int64 (N, 4), the numbers of its ``RowPart``; 0 for a sample that is a whole row.
        channel: int64, position in ``channels``, or -1.
        sources, channels: names.
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
        """Mean over each sample's target tokens, in nats; nan without target tokens."""
        return _ratio(self.loss_sum, self.target_tokens)

    @property
    def perplexity(self) -> FloatArray:
        """The exponential of the mean loss in nats."""
        with np.errstate(over="ignore"):
            return np.exp(self.loss)

    @property
    def token_accuracy(self) -> FloatArray:
        """Share of each sample's target tokens that are the most likely ones; nan without target tokens."""
        return _ratio(self.num_correct, self.target_tokens)

    @property
    def total(self) -> Total:
        """Totals over all samples."""
        return self._total_of(np.ones(len(self), np.bool_))

    @property
    def channel_totals(self) -> dict[str | None, Total]:
        """Totals of each channel with samples, in the caches' order; samples without a channel are last, as None."""
        codes = {name: code for code, name in enumerate(self.channels)} | {None: -1}
        selected = {name: self.channel == code for name, code in codes.items()}
        return {name: self._total_of(samples) for name, samples in selected.items() if samples.any()}

    def metrics(self, prefix: str = "eval_") -> dict[str, float]:
        """Return the figures of a log line: of all samples, and each named channel's loss as ``eval_loss/NAME``."""
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
        where: the samples' positions: ``seqlens``, ``cu_seqlens`` and ``prompts`` of ``sample_scores``.
        labels: of samples that share prefixes, end to end and shifted, int64 (1, T'); None where the batch has them.
        samples: tokens, source, row and row part of each sample.
    """

    batch: Batch
    where: tuple[Tensor, Tensor, Tensor]
    labels: Tensor | None
    samples: tuple[tuple[int, str, int, RowPart | None], ...]


class EvaluationMicroBatches(Dataset["EvaluationBatch | PacktoolError"]):
    """A dataset whose item i is micro-batch i of a rank.

    Args:
        micro_batches: positions of the samples of each.
        alignment: samples are padded to a multiple of it.
        packed: False for micro-batches of single samples, for models that cannot be packed.
        split: this rank's part of sequences that several ranks share.
        shares: compute prefixes that samples have in common once.
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
        shares: bool = False,
    ) -> None:
        assert not shares or (packed and split is None and alignment == 1), "trees are of one rank, without padding"
        self.reader, self.spec, self.micro_batches, self.alignment = reader, spec, micro_batches, alignment
        self.packed, self.split, self.shares = packed, split, shares

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __getitem__(self, index: int) -> EvaluationBatch | PacktoolError:
        """Return the micro-batch, or its error: raised in a worker, an error would lose its type and its remedy."""
        try:
            samples = [self.reader.sample(int(position)) for position in self.micro_batches[index]]
            aligned = [align_sample(sample, self.alignment) for sample in samples]
            if self.split is not None:
                batch: Batch = collate_shard(aligned, self.spec, self.split)
            elif self.shares:
                batch = collate_tree(aligned, self.spec)
            else:
                batch = (collate_packs if self.packed else collate_padded)(aligned, self.spec)
            batch = with_media_reads(batch, self.spec)
        except PacktoolError as error:
            return error
        prompts = []
        for sample in samples:
            targets = np.flatnonzero(sample.labels[1:] != IGNORE_INDEX)
            prompts.append(int(targets[0]) + 1 if len(targets) else sample.length)
        where = (
            torch.tensor([sample.length for sample in samples], dtype=torch.int64),
            torch.tensor(np.cumsum([0, *(sample.length for sample in aligned)]), dtype=torch.int64),
            torch.tensor(prompts, dtype=torch.int64),
        )
        labels = None
        if isinstance(batch, TreeBatch):
            shifted = np.concatenate([shifted_labels(sample) for sample in samples], dtype=np.int64)
            labels = torch.from_numpy(shifted).unsqueeze(0)
        origins = tuple((sample.length, sample.source, sample.row, sample.part) for sample in samples)
        return EvaluationBatch(batch, where, labels, origins)


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

    The model's mode, its attention and all random states are unchanged afterwards.

    Args:
        model: on its device; bare, with adapters, or in DistributedDataParallel. Packed attention need not be set.
        plan: for the data-parallel ranks of ``world``; aligned where some share sequences.
        world: this rank; with several ranks, the process group must exist.
        num_workers: processes that load media ahead of the model.
        samples: source of the samples, if other labels than the reader's are wanted.
        parallel: ranks that share sequences with this one.

    Raises:
        MismatchError: if the ranks have planned differently.
    """
    world, progress = world or World(), progress or SilentProgress()
    assert plan.num_ranks == world.data.size, "planned for another number of ranks"
    # DistributedDataParallel's own forward would wait for the other ranks.
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    packed = is_packed(bare) or can_be_packed(spec.config)
    if not packed:
        progress.note(f"samples of a {spec.config.model_type} model cannot be kept apart: evaluated one by one")
        plan = plan.one_sample_each()
    for rank, fingerprint in enumerate(all_gather_objects(plan.fingerprint, world.size)):
        if fingerprint != plan.fingerprint:
            raise MismatchError(
                f"rank {rank} would evaluate other samples than rank {world.rank}",
                "All machines must see the same caches, the same options and the same version of packtool.",
            )
    dataset = EvaluationMicroBatches(
        samples or reader,
        spec,
        plan.micro_batches(world.data.rank),
        alignment=plan.alignment,
        packed=packed,
        split=parallel.split if parallel is not None else None,
        shares=plan.trees is not None,
    )
    with evaluating(bare, packed=packed) as scorer:
        device = next(bare.parameters()).device
        mine = _score_all(scorer, parallel, device, dataset, progress, num_workers)
    # Ranks that share sequences have the same results.
    return _joined(all_gather_objects(mine, world.size)[:: world.sequence_parallel_size], plan, reader)


def _score_all(
    scorer: Scorer,
    parallel: SequenceParallel | None,
    device: torch.device,
    dataset: EvaluationMicroBatches,
    progress: Progress,
    num_workers: int,
) -> RankScores:
    """Score the samples of all micro-batches of this rank."""
    scores = [np.zeros((0, len(SCORES)))]
    origins: list[tuple[int, ...]] = []
    names: dict[str, int] = {}
    reads = MediaReads()
    loaded = load_micro_batches(dataset, range(len(dataset)), num_workers=num_workers, remedy=_REMEDY)
    progress.start("evaluate", len(dataset))
    with explain_dead_workers(_REMEDY):
        for item in cast(Iterator[EvaluationBatch], loaded):
            batch = item.batch.to(device)
            reads += batch.media_reads
            labels, (losses, correct) = batch.labels[:1], scorer(batch)
            if parallel is not None:
                assert isinstance(batch, ShardedBatch), "collated with a split"
                length = sum(batch.lengths)
                parts = (parallel.gather(part[0], batch.index, length)[None] for part in (labels, losses, correct))
                labels, losses, correct = parts
            if item.labels is not None:
                assert isinstance(batch, TreeBatch), "only trees have separate labels"
                # A target of a prefix need not be one in every sample that begins with it: they may train other turns.
                labels, index = item.labels.to(device), batch.sample_index()
                losses, correct = losses[:, index].where(labels != IGNORE_INDEX, 0), correct[:, index]
            seqlens, cu_seqlens, prompts = (tensor.to(device) for tensor in item.where)
            scores.append(sample_scores(seqlens, cu_seqlens, prompts, labels, losses, correct).cpu().numpy())
            origins += [
                (tokens, names.setdefault(source, len(names)), row, *dataclasses.astuple(part or RowPart()))
                for tokens, source, row, part in item.samples
            ]
            progress.advance(1, samples=len(origins))
    progress.finish()
    if dataset.spec.media_cache is not None:
        progress.note(reads.sentence(dataset.spec.media_cache))
    return np.concatenate(scores), np.array(origins, np.int64).reshape(-1, _ORIGIN), tuple(names)


def _joined(ranks: Sequence[RankScores], plan: EvaluationPlan, reader: CacheReader) -> Evaluation:
    """Join all ranks' results in the order of the samples."""
    sources = tuple(sorted({name for *_, names in ranks for name in names}))
    numbers = {name: number for number, name in enumerate(sources)}
    in_plan = np.concatenate([plan.order_positions(rank) for rank in range(plan.num_ranks)])
    rows = np.argsort(in_plan)[plan.batches.inverse]  # of each sample in the results of all ranks
    scores = np.concatenate([rank_scores for rank_scores, *_ in ranks])[rows]
    origins = np.concatenate([rank_origins for _, rank_origins, _ in ranks])[rows]
    codes = [np.array([numbers[name] for name in names], np.int64)[each[:, 1]] for _, each, names in ranks]
    target_tokens, num_correct, first_wrong = scores[:, 1:].astype(np.int64).T
    return Evaluation(
        tokens=origins[:, 0],
        target_tokens=target_tokens,
        loss_sum=scores[:, 0],
        num_correct=num_correct,
        first_wrong=first_wrong,
        source=np.concatenate(codes)[rows],
        row=origins[:, 2],
        parts=origins[:, 3:],
        channel=reader.index.channel[: len(plan.lengths)].astype(np.int64),
        sources=sources,
        channels=reader.index.channels,
    )


def sample_scores(
    seqlens: Tensor, cu_seqlens: Tensor, prompts: Tensor, labels: Tensor, losses: Tensor, correct: Tensor
) -> Tensor:
    """Sum the scores of a sequence of T tokens by its S samples.

    Args:
        seqlens: int64 (S,), tokens of each sample, without padding.
        cu_seqlens: int64 (S + 1,), where each begins, padding included.
        prompts: int64 (S,), tokens before the first target; all tokens of a sample without targets.
        labels: int64 (1, T), shifted.
        losses: float32 (1, T).
        correct: bool (1, T).

    Returns:
        float64 (S, 4) with the columns ``SCORES``.
    """
    widths = seqlens - prompts
    width = int(widths.max()) if len(widths) else 0
    num_at_once = max(1, _CELLS_AT_ONCE // max(width, 1))
    scores = [torch.zeros(0, 4, dtype=torch.float64, device=losses.device)]
    for start in range(0, len(widths), num_at_once):
        stop = start + num_at_once
        where = seqlens[start:stop], cu_seqlens[start : stop + 1], width, prompts[start:stop]
        is_target = restore_padding(labels != IGNORE_INDEX, *where)
        is_wrong = is_target & ~restore_padding(correct, *where)
        num_targets, num_wrong = is_target.sum(1), is_wrong.sum(1)
        # The column of the first True; its token comes after the prompt.
        first_wrong = torch.where(num_wrong > 0, (is_wrong.cumsum(1) == 0).sum(1) + prompts[start:stop], -1)
        loss_sums = restore_padding(losses, *where).double().sum(1)
        counts = (num_targets, num_targets - num_wrong, first_wrong)
        scores.append(torch.stack([loss_sums, *(count.double() for count in counts)], dim=1))
    return torch.cat(scores)


def can_be_packed(config: PreTrainedConfig) -> bool:
    """Return whether samples of this model can share a forward pass; if not, each is evaluated alone."""
    try:
        refuse_unsupported(config)
    except UnsupportedModelError:
        return False
    return True


def is_packed(model: nn.Module) -> bool:
    """Return whether a model, bare or adapted, uses packtool's attention already."""
    return str(base_model(model).config.get_text_config()._attn_implementation).startswith(ATTENTION_NAME)


@contextmanager
def evaluating(model: nn.Module, *, packed: bool) -> Iterator[Scorer]:
    """Yield a scorer that runs a model without dropout and gradients; afterwards every module is as before.

    Args:
        model: bare, or with adapters.
        packed: keep packed samples apart; a model that is trained on padded rows has transformers' own attention.
    """
    inner: Any = base_model(model)
    attention = inner.config.get_text_config()._attn_implementation
    was_isolated = any("forward" in vars(layer) for layer in recurrent_layers(inner))
    switch = packed and not is_packed(model)
    if switch:
        set_attention(inner)
    try:
        # Not inference mode: tensors that a model caches in a forward pass must be usable in the next training step.
        with without_dropout(model), torch.no_grad(), LossFunction.temporary(model) as loss_function:

            def score(batch: Batch) -> tuple[Tensor, Tensor]:
                targets = loss_function(model, batch)
                losses = torch.zeros(batch.labels.shape[1], device=batch.labels.device)
                correct = torch.zeros_like(losses, dtype=torch.bool)
                losses[targets.positions], correct[targets.positions] = targets.losses, targets.correct
                return losses[None], correct[None]

            yield score
    finally:
        if switch:
            set_text_attention(inner, str(attention))
            if not was_isolated:
                release_recurrent_layers(inner)
