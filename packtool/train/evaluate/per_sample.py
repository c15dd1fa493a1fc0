"""Evaluation: every sample for itself, whichever others share its forward pass, in the order of the caches.

    lengths ──► micro-batches under a token cap ──► packed forward ──► rows restored ──► inverse permutation
                (plan.dynamic)                      (no padding)       (batch.padding)   (of all ranks' results)

Nothing is drawn at random, and every rank has equally many forward passes. The padding is never made in the first
place: ``collate_packs`` of aligned samples is what ``remove_padding`` makes of the padded rows. Prefixes that samples
share are computed once, and scored for each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from packtool.attention.parallel.mesh import SequenceParallel
from packtool.batch.batch import Batch, ShardedBatch, TreeBatch
from packtool.batch.collate import collate_packs, collate_padded, collate_tree, shifted_labels
from packtool.batch.collate_shard import collate_shard
from packtool.batch.dataset import deaths_told, load_micro_batches, with_reads
from packtool.batch.media_cache import MediaReads
from packtool.batch.positions import align_sample
from packtool.batch.shard import Cut
from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader
from packtool.cache.views import SampleReader
from packtool.constants import IGNORE_INDEX
from packtool.encode.encoded import EncodedSample
from packtool.errors import MismatchError, PacktoolError
from packtool.launch.world import World, all_gather_objects
from packtool.planning.dynamic import EvaluationPlan
from packtool.planning.pack_plan import Int64Array
from packtool.progress import Progress, SilentProgress
from packtool.rows.sample import RowPart
from packtool.train.evaluate.scorer import (
    SCORES,
    Evaluation,
    SamplePlaces,
    Scorer,
    bare_model,
    can_be_packed,
    evaluating,
    is_packed,
    sample_scores,
)

_REMEDY = "The same command begins again"
_ORIGIN = 3 + len(dataclasses.fields(RowPart))  # tokens, source, row, part


@dataclass(frozen=True, eq=False)
class EvaluationBatch:
    """One micro-batch, and what must be known of its samples afterwards.

    Args:
        batch: packed, or padded with a single sample.
        places: where its samples lie.
        labels: of samples that share prefixes, end to end and shifted, int64 (1, T'); None where the batch has them.
        tokens: of each sample.
        origins: (source, row, part of the row) of each.
    """

    batch: Batch
    places: SamplePlaces
    labels: Tensor | None
    tokens: tuple[int, ...]
    origins: tuple[tuple[str, int, RowPart | None], ...]


class EvaluationMicroBatches(Dataset["EvaluationBatch | PacktoolError"]):
    """Item i is micro-batch i of a rank.

    Args:
        reader: of the samples.
        spec: the model they are collated for.
        micro_batches: positions of the samples of each.
        alignment: samples are padded to a multiple of it.
        packed: False for micro-batches of single samples, for models that cannot keep several apart.
        cut: of sequences that several ranks share, and this rank's part.
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
        cut: Cut | None = None,
        shares: bool = False,
    ) -> None:
        assert not shares or (packed and cut is None and alignment == 1), "trees are of one rank, without padding"
        self.reader = reader
        self.spec = spec
        self.micro_batches = micro_batches
        self.alignment = alignment
        self.packed = packed
        self.cut = cut
        self.shares = shares

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __getitem__(self, index: int) -> EvaluationBatch | PacktoolError:
        """The micro-batch, or the error that it met: raised in a worker, it would lose its type and its remedy."""
        try:
            samples = [self.reader.sample(int(position)) for position in self.micro_batches[index]]
            aligned = [align_sample(sample, self.alignment) for sample in samples]
            batch: Batch
            if self.cut is not None:
                batch = collate_shard(aligned, self.spec, self.cut)
            else:
                batch = self._collate(aligned, self.spec)
            batch = with_reads(batch, self.spec)
        except PacktoolError as error:
            return error
        places = SamplePlaces(
            seqlens=torch.tensor([sample.length for sample in samples], dtype=torch.int64),
            cu_seqlens=torch.tensor(np.cumsum([0, *(sample.length for sample in aligned)]), dtype=torch.int64),
            prompts=torch.tensor([_prompt_length(sample) for sample in samples], dtype=torch.int64),
        )
        labels = None
        if isinstance(batch, TreeBatch):
            wanted = np.concatenate([shifted_labels(sample) for sample in samples], dtype=np.int64)
            labels = torch.from_numpy(wanted).unsqueeze(0)
        tokens = tuple(sample.length for sample in samples)
        origins = tuple((sample.source, sample.row, sample.part) for sample in samples)
        return EvaluationBatch(batch, places, labels, tokens, origins)

    @property
    def _collate(self) -> Callable[[Sequence[EncodedSample], InputSpec], Batch]:
        if self.shares:
            return collate_tree
        return collate_packs if self.packed else collate_padded


def _prompt_length(sample: EncodedSample) -> int:
    """Tokens before the first target that something comes before; all tokens if there is none."""
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
    """Evaluate the first ``len(plan.lengths)`` samples of caches; every rank calls this, and every rank has the result.

    The model's mode, its attention and all random states are afterwards what they were before.

    Args:
        model: on its device; bare, with adapters, or in DistributedDataParallel. Packed attention need not be set.
        reader: of the caches.
        spec: the model as collation sees it.
        plan: from ``plan_evaluation``, for the data-parallel ranks of ``world``; aligned where some share sequences.
        world: this rank; the process group must be there if there are several.
        progress: told of this rank's micro-batches.
        num_workers: processes that load pictures ahead of the model.
        samples: where the samples come from, if not straight from the reader: ``ChosenTargets``.
        parallel: ranks that share sequences with this one, as the model was told.

    Raises:
        DataError: naming a picture that cannot be read.
        MismatchError: if the ranks have planned differently.
    """
    world, progress = world or World(), progress or SilentProgress()
    assert plan.num_ranks == world.data.size, "planned for another number of ranks"
    bare = bare_model(model)
    packed = is_packed(bare) or can_be_packed(spec.config)
    if not packed:
        progress.note(f"samples of a {spec.config.model_type} model cannot be kept apart: evaluated one by one")
        plan = plan.alone()
    _check_plans_agree(plan, world)
    mine = plan.micro_batches(world.data.rank)
    dataset = EvaluationMicroBatches(
        samples or reader,
        spec,
        mine,
        alignment=plan.alignment,
        packed=packed,
        cut=parallel.cut if parallel is not None else None,
        shares=plan.trees is not None,
    )
    with evaluating(bare, packed=packed) as scorer:
        score = partial(_scores, scorer) if parallel is None else partial(_shared_scores, scorer, parallel)
        share = _score_all(score, next(bare.parameters()).device, dataset, progress, num_workers)
    # Ranks that share sequences have found the same.
    return _joined(all_gather_objects(share, world.size)[:: world.sequence_parallel_size], plan, reader)


def evaluate_in_training(
    model: nn.Module,
    reader: CacheReader,
    spec: InputSpec,
    plan: EvaluationPlan,
    *,
    world: World,
    num_workers: int = 0,
    samples: SampleReader | None = None,
    parallel: SequenceParallel | None = None,
) -> dict[str, float]:
    """``evaluate`` between two training steps, as figures for a log line; every rank calls this.

    Returns:
        ``eval_loss``, ``eval_perplexity``, ``eval_token_accuracy``, ``eval_target_tokens``, ``eval_samples``, and
        ``eval_loss/CHANNEL`` for each channel: the same on every rank.

    Raises:
        DataError, MismatchError: see ``evaluate``.
    """
    # No progress: the terminal's bar is the training's.
    found = evaluate(
        model, reader, spec, plan, world=world, num_workers=num_workers, samples=samples, parallel=parallel
    )
    return found.metrics()


@dataclass(frozen=True, eq=False)
class _Share:
    """What a rank found of n samples, in the order of its micro-batches.

    Args:
        scores: float64 (n, 4), from ``sample_scores``.
        origins: int64 (n, 7): tokens, position in ``names``, row, and the four numbers of ``RowPart``.
        names: of sources.
    """

    scores: npt.NDArray[np.float64]
    origins: Int64Array
    names: tuple[str, ...]


def _scores(scorer: Scorer, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Labels, losses in nats, and whether the most likely token is the label; of the first sequence, (1, T)."""
    return batch.labels[:1], *scorer(batch)


def _whole_scores(batch: Batch, labels: Tensor, losses: Tensor, correct: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of a tree for its samples, each whole, (1, T'): what several share was scored once, and is each one's."""
    assert isinstance(batch, TreeBatch), "only trees have labels apart from them"
    index = batch.sample_index()
    # A target of a prefix is not one of every sample that begins with it: a run may train other turns of them.
    return labels, losses[:, index].where(labels != IGNORE_INDEX, 0), correct[:, index]


def _shared_scores(scorer: Scorer, parallel: SequenceParallel, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of a whole sequence that ranks share, on each of them."""
    assert isinstance(batch, ShardedBatch), "collated with a cut"
    length = sum(batch.lengths)
    parts = _scores(scorer, batch)
    labels, losses, correct = (parallel.gather(part[0], batch.index, length)[None] for part in parts)
    return labels, losses, correct


def _score_all(
    score: Callable[[Batch], tuple[Tensor, Tensor, Tensor]],
    device: torch.device,
    dataset: EvaluationMicroBatches,
    progress: Progress,
    num_workers: int,
) -> _Share:
    """Run all micro-batches of this rank."""
    scores = [np.zeros((0, len(SCORES)))]
    origins: list[tuple[int, ...]] = []
    names: dict[str, int] = {}
    reads = MediaReads()
    loaded = load_micro_batches(dataset, range(len(dataset)), num_workers=num_workers, remedy=_REMEDY)
    progress.start("evaluate", len(dataset))
    with deaths_told(_REMEDY):
        for item in cast(Iterator[EvaluationBatch], loaded):
            batch = item.batch.to(device)
            reads += batch.media_reads
            found = score(batch)
            if item.labels is not None:
                found = _whole_scores(batch, item.labels.to(device), *found[1:])
            scores.append(sample_scores(item.places.to(device), *found).cpu().numpy())
            origins += [
                (tokens, names.setdefault(source, len(names)), row, *dataclasses.astuple(part or RowPart()))
                for tokens, (source, row, part) in zip(item.tokens, item.origins, strict=True)
            ]
            progress.advance(1, samples=len(origins))
    progress.finish()
    if dataset.spec.media_cache is not None:
        progress.note(reads.sentence(dataset.spec.media_cache))
    return _Share(np.concatenate(scores), np.array(origins, np.int64).reshape(-1, _ORIGIN), tuple(names))


def _check_plans_agree(plan: EvaluationPlan, world: World) -> None:
    """All ranks have planned the same, which one exchange of hashes proves."""
    for rank, other in enumerate(all_gather_objects(plan.fingerprint, world.size)):
        if other != plan.fingerprint:
            raise MismatchError(
                f"rank {rank} would evaluate other samples than rank {world.rank}",
                "All machines must see the same caches, the same options and the same version of packtool.",
            )


def _joined(shares: Sequence[_Share], plan: EvaluationPlan, reader: CacheReader) -> Evaluation:
    """All ranks' results, brought back to the samples' order."""
    names = tuple(sorted({name for share in shares for name in share.names}))
    code_of = {name: code for code, name in enumerate(names)}
    in_plan = np.concatenate([plan.places(rank) for rank in range(plan.num_ranks)])
    scores, origins = np.zeros((len(in_plan), len(SCORES))), np.zeros((len(in_plan), _ORIGIN), np.int64)
    scores[in_plan] = np.concatenate([share.scores for share in shares])
    origins[in_plan] = np.concatenate([share.origins for share in shares])
    codes = [np.array([code_of[name] for name in share.names], np.int64)[share.origins[:, 1]] for share in shares]
    origins[in_plan, 1] = np.concatenate(codes)
    back = plan.batches.inverse
    loss_sum, counts, (tokens, source, row) = scores[back, 0], scores[back, 1:].astype(np.int64), origins[back, :3].T
    target_tokens, num_correct, first_wrong = counts.T
    channel = reader.index.channel[: len(plan.lengths)].astype(np.int64)
    return Evaluation(
        tokens=tokens,
        target_tokens=target_tokens,
        loss_sum=loss_sum,
        num_correct=num_correct,
        first_wrong=first_wrong,
        source=source,
        row=row,
        parts=origins[back, 3:],
        channel=channel,
        sources=names,
        channels=reader.index.channels,
    )
