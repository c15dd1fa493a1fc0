"""Prefixes that samples share and that are computed once; tokens and costs that each sample adds to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.attention.parallel.axes import has_sliding_windows
from packtool.cache.index import SplitPrefixes
from packtool.cache.reader import CacheReader, SplitIndex
from packtool.config.packing import SharingOptions
from packtool.config.plan import PlanConfig
from packtool.config.train import TrainConfig
from packtool.constants import MIN_SHARED
from packtool.encode.families import family_of
from packtool.encode.media_spans import MediaTokens
from packtool.errors import MismatchError, UnsupportedModelError
from packtool.planning.cost import CostModel
from packtool.planning.pack_plan import Costs, Int64Array, PackPlan
from packtool.planning.prefix_trees import (
    DrawnPrefixes,
    PartPlacement,
    Prefixes,
    PrefixTrees,
    plan_trees,
    rebuild_trees,
    values_of_prefixes,
)
from packtool.planning.towers import TowerWork
from packtool.stream.packs import IntervalSharing
from packtool.train.prepare.caches import export_command

MIN_SAVING = 0.05
"""The fraction of tokens that ``--share-prefix auto`` must save to share prefixes."""
_MIN_MENTIONED_SAVING = 0.01
"""The fraction from which on a message says that ``auto`` shares none."""


def tower_work(cost: CostModel, index: SplitIndex) -> TowerWork:
    """FLOPs of the media of each sample of a cache, with cross-attention to them, and number of its media."""
    vision_tokens = cost.padded_tokens(index.vision_tokens, index.patch_squares, index.picture_squares)
    flops = cost.towers(vision_tokens, index.patch_squares, index.audio_tokens)
    flops += cost.cross_attention(index.length, index.patch_squares)
    return TowerWork(np.rint(flops).astype(np.int64), index.num_images + index.num_videos + index.num_audios)


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Trees of samples with common prefixes.

    A sample adds to its tree the tokens after the prefix that it shares with the sample before it. Arrays (N,) are by
    position in the caches. ``prefixes`` are the candidates of each sample, recorded at export.
    """

    index: SplitIndex
    prefixes: SplitPrefixes
    trees: PrefixTrees

    @classmethod
    def undrawn(cls, config: SharingOptions, model: Mapping[str, Any], reader: CacheReader) -> SharedPrefixes | None:
        """Prefixes for epochs that each draw their samples, without trees; None if they cannot be shared."""
        if config.share_prefix == "false" or conflicts_of_sharing(config, model):
            return None
        recorded = _recorded_prefixes(reader, is_required=config.share_prefix == "true")
        if recorded is None:
            return None
        nothing = np.zeros(0, np.int64)
        trees = PrefixTrees(nothing, np.zeros(1, np.int64), nothing.astype(np.int32), nothing, nothing)
        return cls(reader.index, recorded, trees)

    def drawn(self, max_media_tokens: int | None) -> DrawnPrefixes:
        """The prefixes for epochs that draw their samples; a tree has at most ``max_media_tokens``."""
        media_tokens = self.index.media_tokens, self.prefixes.prefixes.media_tokens
        prefixes = _planner_prefixes(self.prefixes, len(self.index.length))
        return DrawnPrefixes(prefixes, media_tokens, MIN_SHARED, max_media_tokens)

    def in_packs(self, packs: PackPlan) -> SharedPrefixes:
        """The same prefixes with the trees of an epoch's packs; a sample counts as the copy that shares least."""
        if packs.shared_tokens is None:
            packs = replace(packs, shared_tokens=np.zeros_like(packs.lengths))
        trees = rebuild_trees(packs, _planner_prefixes(self.prefixes, len(self.index.length)), min_shared=MIN_SHARED)
        assert trees is not None, "the packs were made from these prefixes"
        return replace(self, trees=trees)

    @property
    def num_tokens_without_sharing(self) -> int:
        """Tokens of the samples of all trees, if nothing were shared."""
        return int(self.index.length[self.trees.samples].sum(dtype=np.int64))

    @property
    def shared_tokens(self) -> Int64Array:
        """Tokens that each sample does not compute itself; int64 (N,)."""
        shared = np.zeros(len(self.index.length), np.int64)
        shared[self.trees.samples] = self.trees.shared_tokens
        np.minimum.at(shared, self.trees.samples, self.trees.shared_tokens)  # the fewest of its copies
        return shared

    @property
    def saved(self) -> float:
        """The fraction of all tokens of the caches that sharing saves, 0 to 1."""
        return self.trees.saved(self.index.length)

    @property
    def media_tokens(self) -> Int64Array:
        """Media tokens that each sample adds; int64 (N,)."""
        return self.trees.added(self.index.media_tokens, self.prefixes.prefixes.media_tokens)

    @property
    def audio_tokens(self) -> Int64Array:
        """Audio tokens that each sample adds; int64 (N,)."""
        return self.trees.added(self.index.audio_tokens, self.prefixes.prefixes.audio_tokens)

    def logits(self, target_tokens: npt.NDArray[np.integer[Any]]) -> Int64Array:
        """Upper bound of the target tokens that each sample adds, for which logits are computed; int64 (N,).

        Exact for the targets of the export. For others, and in caches without targets of prefixes, the bound is the
        number of tokens that the sample adds. ``target_tokens`` (N,) are those of full samples.
        """
        logits = np.zeros(len(target_tokens), np.int64)
        prefix_targets, trees = self.prefixes.prefixes.target_tokens, self.trees
        samples, targets = trees.samples, target_tokens[trees.samples]
        shared = values_of_prefixes(prefix_targets, trees.shared_prefixes)  # negative if unknown
        is_exact = (targets == self.index.target_tokens[samples]) & (shared >= 0)
        new = trees.new_tokens(self.index.length)
        np.maximum.at(logits, samples, np.where(is_exact, np.maximum(targets - shared, 0), np.minimum(targets, new)))
        return logits

    def towers(self, cost: CostModel, target_tokens: npt.NDArray[np.integer[Any]]) -> TowerWork:
        """Costs of the media, and target tokens, that each sample adds; ``target_tokens`` (N,) of full samples."""
        index, prefixes = self.index, self.prefixes.prefixes
        vision_tokens = self.trees.added(index.vision_tokens, prefixes.media_tokens - prefixes.audio_tokens)
        audio_tokens = self.trees.added(index.audio_tokens, prefixes.audio_tokens)
        patch_squares = self.trees.added(index.patch_squares, prefixes.patch_squares)
        # Caches do not count the patches of prefixes: added pictures are assumed to be as those of the full sample.
        vision_tokens = cost.padded_tokens(vision_tokens, patch_squares, index.picture_squares)
        flops = np.rint(cost.towers(vision_tokens, patch_squares, audio_tokens)).astype(np.int64)
        num_media = index.num_images + index.num_videos + index.num_audios
        return TowerWork(flops, num_media, self.logits(target_tokens))

    def tower_work_saved(self, cost: CostModel) -> float:
        """The fraction of the towers' work that is saved, 0 to 1."""
        full_flops = int(tower_work(cost, self.index).flops[np.unique(self.trees.samples)].sum())
        return 1 - int(self.towers(cost, self.index.target_tokens).flops.sum()) / full_flops if full_flops else 0.0

    def sample_costs(self, cost: CostModel, target_tokens: npt.NDArray[np.integer[Any]]) -> Costs:
        """FLOPs that each sample adds, (N,); ``target_tokens`` (N,) of full samples."""
        towers = self.towers(cost, target_tokens)
        assert towers.logits is not None, "made with it"
        lengths, shared = self.index.length.astype(np.int64), self.shared_tokens
        return cost(lengths - shared, cost.attention(lengths, shared), towers.logits, towers.flops)

    def line(self, cost: CostModel, num_steps: int = 0, num_steps_whole: int = 0) -> str:
        """A log line on the savings; numbers of steps are of an epoch with and without sharing, 0 without training."""
        saved = [f"{self.trees.num_shared_tokens:,} of {self.num_tokens_without_sharing:,} tokens ({self.saved:.0%})"]
        if tower_work_saved := self.tower_work_saved(cost):
            saved.append(f"{tower_work_saved:.0%} of the towers' work")
        if num_steps_whole > num_steps:
            saved.append(f"{num_steps_whole - num_steps:,} of {num_steps_whole:,} optimizer steps of an epoch")
        listed = " and ".join([", ".join(saved[:-1]), saved[-1]] if len(saved) > 1 else saved)
        return (
            f"shared prefixes: computed once (--share-prefix false computes each sample in full), which saves {listed}"
        )


def find_shared_prefixes(
    config: SharingOptions,
    model: Mapping[str, Any],
    reader: CacheReader,
    *,
    capacity: int,
    max_length: int | None = None,
    max_samples: int | None = None,
    max_media_tokens: int | None = None,
    limit: int | None = None,
) -> tuple[SharedPrefixes | None, str | None]:
    """Find samples that begin with the same tokens, so that these prefixes can be computed once.

    Args:
        capacity: maximum tokens of a pack.
        max_length: maximum tokens of a sample; longer ones are left out.
        max_samples, max_media_tokens: maxima of a tree, which is a group of samples that share prefixes.
        limit: use only the first ``limit`` samples.

    Returns:
        The prefixes, or None to compute every sample in full; and a message for the user, if there is one.
    """
    if config.share_prefix == "false":
        return None, None
    recorded_prefixes = _recorded_prefixes(reader, is_required=config.share_prefix == "true")
    lengths = reader.index.length[:limit]
    num_samples = len(lengths)
    if recorded_prefixes is None or not _can_be_packed(lengths, capacity, max_length):
        return None, None

    prefixes = _planner_prefixes(recorded_prefixes, num_samples)
    num_prefixes = len(prefixes.lengths)
    sample_media_tokens = reader.index.media_tokens[:num_samples]
    prefix_media_tokens = recorded_prefixes.prefixes.media_tokens[:num_prefixes]
    trees = plan_trees(
        lengths,
        prefixes,
        capacity=capacity,
        min_shared=MIN_SHARED,
        max_length=max_length,
        max_samples=max_samples,
        media_tokens=(sample_media_tokens, prefix_media_tokens),
        max_media_tokens=max_media_tokens,
    )
    shared_prefixes = SharedPrefixes(reader.index, recorded_prefixes, trees)
    return decide_sharing(config, model, epochs=[shared_prefixes])


def _can_be_packed(lengths: npt.NDArray[np.integer[Any]], capacity: int, max_length: int | None) -> bool:
    """Return whether there are samples of up to ``max_length``, and all fit into packs; else planning is an error."""
    if max_length is not None:
        lengths = lengths[lengths <= max_length]
    return len(lengths) > 0 and int(lengths.max()) <= capacity


def decide_sharing(
    config: SharingOptions, model: Mapping[str, Any], epochs: Sequence[SharedPrefixes]
) -> tuple[SharedPrefixes | None, str | None]:
    """Decide whether samples share prefixes, by ``--share-prefix`` and by the tokens that this saves in ``epochs``.

    Returns:
        The prefixes of the first epoch, or None to compute every sample in full; and a message for the user, if there
        is one.
    """
    conflicting_options = conflicts_of_sharing(config, model)
    is_required = config.share_prefix == "true"
    num_shared_tokens = sum(epoch.trees.num_shared_tokens for epoch in epochs)
    if num_shared_tokens == 0:
        message = f"shared prefixes: no two samples share more than {MIN_SHARED} tokens, so each is computed in full"
        return None, message if is_required else None
    if is_required:  # conflicting options were refused
        return epochs[0], None

    num_tokens = sum(epoch.num_tokens_without_sharing for epoch in epochs)
    saved_fraction = num_shared_tokens / num_tokens
    if saved_fraction > MIN_SAVING and not conflicting_options:
        return epochs[0], None
    if saved_fraction > MIN_SAVING:
        return None, (
            f"shared prefixes: {saved_fraction:.0%} of the tokens could be saved, but each sample is computed in full: "
            f"that cannot be combined with {conflicting_options[0]}"
        )
    if conflicting_options or saved_fraction < _MIN_MENTIONED_SAVING:
        return None, None
    return None, (
        f"shared prefixes: {saved_fraction:.1%} of the tokens could be saved, too few to be worth it: each sample "
        "is computed in full; --share-prefix true shares them anyway"
    )


def conflicts_of_sharing(config: SharingOptions, model: Mapping[str, Any]) -> list[str]:
    """Options that exclude shared prefixes, also for the model; UnsupportedModelError if they are required for that."""
    conflicts = list(config.sharing_conflicts)
    conflict = ""
    if getattr(config, "sequence_parallel_ranks", 1) > 1 and has_sliding_windows(model):
        conflict = "--sequence-parallel-size for a model with sliding windows, which would cut prefixes"
    elif family_of(model).cross_attention:
        conflict = "a model with cross-attention, in which tokens before a picture attend to it"
    if conflict:
        if config.share_prefix == "true":
            problem = f"--share-prefix true cannot be combined with {conflict}"
            raise UnsupportedModelError(problem, "Leave one of them out.")
        conflicts.append(conflict)
    return conflicts


def sharing_of_stream(config: TrainConfig, model: Mapping[str, Any]) -> tuple[IntervalSharing | None, str | None]:
    """Prefix sharing of a stream, by ``--share-prefix``; if an option or the model prevents it, None and a message."""
    if config.share_prefix == "false":
        return None, None
    if conflicts := conflicts_of_sharing(config, model):
        return None, f"shared prefixes: each sample is computed in full: that cannot be combined with {conflicts[0]}"
    min_saving = 0.0 if config.share_prefix == "true" else MIN_SAVING
    limits = config.max_rows_per_tree, config.max_media_tokens_per_pack
    return IntervalSharing(MediaTokens.of(model), min_saving, *limits, parts=part_placement(config)), None


def first_pair(packs: PackPlan) -> Int64Array | None:
    """The two shortest neighbors in packs that share a prefix, int64 (2,); None if no two do."""
    pairs = np.flatnonzero(packs.full_lengths - packs.lengths)  # with the sample before
    if not len(pairs):
        return None
    at = int(pairs[np.argmin(packs.full_lengths[pairs] + packs.full_lengths[pairs - 1])])
    return packs.samples[at - 1 : at + 1]


def load_shared_prefixes(packs: PackPlan, parts: str, reader: CacheReader) -> SharedPrefixes | None:
    """Return the prefixes that the samples of a saved plan share; None if its packs share none."""
    if packs.shared_tokens is None:
        return None
    prefixes = _recorded_prefixes(reader, is_required=True)
    assert prefixes is not None, "required prefixes are an error if they are missing"
    trees = rebuild_trees(packs, _planner_prefixes(prefixes, len(reader)), min_shared=MIN_SHARED)
    if trees is None:
        raise MismatchError(
            "--plan shares prefixes that the caches do not record", "Make it again with packtool plan --save."
        )
    placements: dict[str, PartPlacement] = {"together": "together", "apart": "apart"}
    return SharedPrefixes(reader.index, prefixes, replace(trees, part_placement=placements.get(parts, "any")))


def part_placement(config: TrainConfig | PlanConfig) -> PartPlacement:
    """The placement in steps of the packs of a tree that does not fit into one pack."""
    if not config.shuffle:
        return "any"  # the order is the user's
    return "together" if config.max_rows_per_tree is None else "apart"


def _planner_prefixes(prefixes: SplitPrefixes, num_samples: int) -> Prefixes:
    """The prefixes of the first ``num_samples`` samples, for the planner of trees."""
    offsets = prefixes.offsets[: num_samples + 1]
    return Prefixes(offsets, prefixes.prefixes.lengths[: offsets[-1]], prefixes.prefixes.hashes[: offsets[-1]])


def _recorded_prefixes(reader: CacheReader, *, is_required: bool) -> SplitPrefixes | None:
    """The recorded prefixes of all samples; if a cache has none, None, or a MismatchError if ``is_required``."""
    prefixes = reader.prefixes()
    if prefixes is not None or not is_required:
        return prefixes
    directory, manifest = next(
        (directory, manifest)
        for directory, manifest in zip(reader.directories, reader.manifests, strict=True)
        if not manifest.splits[reader.split].prefixes_sha256
    )
    raise MismatchError(
        f"--share-prefix true: {directory} was exported by an older packtool, and does not record the prefixes of its "
        "samples",
        f"Leave --share-prefix out, or export into another directory:\n  {export_command(directory, manifest)}",
    )
