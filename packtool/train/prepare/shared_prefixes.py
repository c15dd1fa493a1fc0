"""Prefixes that samples share, which are computed once, and the tokens and costs that each sample adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from packtool.cache.index import SplitPrefixes
from packtool.cache.reader import CacheReader, SplitIndex
from packtool.config.mixture import MIXTURES
from packtool.config.packing import SEQUENCE_PARALLELISM, SharingOptions
from packtool.config.plan import PlanConfig
from packtool.config.train import TrainConfig
from packtool.constants import MIN_SHARED
from packtool.encode.families import family_of, text_config_of
from packtool.encode.media_spans import MediaTokens
from packtool.errors import MismatchError, UnsupportedModelError
from packtool.planning.cost import CostModel
from packtool.planning.options import PlanOptions
from packtool.planning.pack_plan import Costs, Int64Array, PackPlan
from packtool.planning.prefix_trees import NOTHING, PartsIn, Prefixes, PrefixTrees, plan_trees, rebuild_trees
from packtool.planning.towers import TowerWork
from packtool.stream.packs import IntervalSharing
from packtool.train.prepare.check import export_command
from packtool.train.prepare.costs import tower_work

WORTH_SHARING = 0.05
"""The fraction of tokens that ``--share-prefix auto`` must save to share prefixes."""
_WORTH_TELLING = 0.01


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Trees of samples with common prefixes; arrays are by position in the caches.

    Args:
        index: of the caches.
        prefixes: of their samples.
        trees: of samples with common prefixes.
    """

    index: SplitIndex
    prefixes: SplitPrefixes
    trees: PrefixTrees

    @property
    def num_whole_tokens(self) -> int:
        """Tokens of the samples of all trees, each whole."""
        return int(self.index.length[self.trees.samples].sum(dtype=np.int64))

    @property
    def saved(self) -> float:
        """The fraction of tokens that is saved, 0 to 1."""
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

        Exact for the cache's own targets; for others, and in older caches, at most the new tokens of a sample.

        Args:
            target_tokens: (N,), of each full sample.
        """
        found = np.zeros(len(target_tokens), np.int64)
        of, trees = self.prefixes.prefixes.target_tokens, self.trees
        samples, whole = trees.samples, target_tokens[trees.samples]
        has = trees.prefixes != NOTHING
        shared = np.where(has, of[np.where(has, trees.prefixes, 0)], 0) if len(of) else np.zeros(len(samples), np.int64)
        is_told = (whole == self.index.target_tokens[samples]) & (shared >= 0)
        new = trees.new_tokens(self.index.length)
        found[samples] = np.where(is_told, np.maximum(whole - shared, 0), np.minimum(whole, new))
        return found

    def towers(self, cost: CostModel, target_tokens: npt.NDArray[np.integer[Any]]) -> TowerWork:
        """Costs of the media, and target tokens, that each sample adds; ``target_tokens`` (N,) are of full samples."""
        whole, of = tower_work(cost, self.index), self.prefixes.prefixes
        flops = cost.towers(of.media_tokens - of.audio_tokens, of.patch_squares, of.audio_tokens)
        added = self.trees.added(whole.flops, np.rint(flops).astype(np.int64))
        return TowerWork(added, whole.num_seen, self.logits(target_tokens))

    def tower_work_saved(self, cost: CostModel) -> float:
        """The fraction of the towers' work that is saved, 0 to 1."""
        whole = int(tower_work(cost, self.index).flops[self.trees.samples].sum())
        return 1 - int(self.towers(cost, self.index.target_tokens).flops.sum()) / whole if whole else 0.0

    def sample_costs(self, cost: CostModel, target_tokens: npt.NDArray[np.integer[Any]]) -> Costs:
        """FLOPs that each sample adds, (N,); ``target_tokens`` (N,) are those of whole samples."""
        towers = self.towers(cost, target_tokens)
        assert towers.logits is not None, "made with it"
        whole = self.index.length.astype(np.int64)
        shared = np.zeros_like(whole)
        shared[self.trees.samples] = self.trees.shared
        return cost(whole - shared, cost.attention(whole, shared), towers.logits, towers.flops)

    def line(self, cost: CostModel, num_steps: int = 0, num_steps_whole: int = 0) -> str:
        """A sentence on what is saved.

        Args:
            num_steps, num_steps_whole: of an epoch with and without sharing; 0 if nothing is trained.
        """
        whole, seen = self.num_whole_tokens, self.tower_work_saved(cost)
        saved = [
            f"{self.trees.num_shared_tokens:,} of {whole:,} tokens ({self.saved:.0%})",
            *([f"{seen:.0%} of the work of the towers"] if seen else []),
        ]
        if num_steps_whole:
            saved.append(f"{num_steps_whole - num_steps:,} of {num_steps_whole:,} optimizer steps of an epoch")
        listed = " and ".join([", ".join(saved[:-1]), saved[-1]] if len(saved) > 1 else saved)
        return f"shared prefixes: computed once (--share-prefix false computes each sample whole), which saves {listed}"


def shared_in_packs(
    config: TrainConfig | PlanConfig, options: PlanOptions, model: Mapping[str, Any], reader: CacheReader
) -> tuple[SharedPrefixes | None, str | None]:
    """The prefixes that a run shares in its packs, and a message; as ``find_shared``."""
    shared, remark = find_shared(
        config,
        model,
        reader,
        capacity=options.packing_length,
        max_length=options.max_length,
        max_samples=config.max_rows_per_tree,
        max_media_tokens=config.max_media_tokens_per_pack,
    )
    if shared is not None:
        shared = replace(shared, trees=replace(shared.trees, parts=_parts_of(config)))
    return shared, remark


def find_shared(
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
    """The prefixes that samples share, as ``--share-prefix`` says, and a remark where they share less than they could.

    Args:
        model: its ``config.json``.
        capacity: tokens of a pack.
        max_length: longer samples are left out.
        max_samples: most samples of a tree.
        max_media_tokens: most media tokens of a tree.
        limit: take only so many samples, the first ones.

    Raises:
        MismatchError: if sharing is asked for, and a cache does not tell what its samples begin with.
        UnsupportedModelError: if it is asked for, and the model cannot begin where a prefix ends.
    """
    if config.share_prefix == "false":
        return None, None
    asked = config.share_prefix == "true"
    problem = _problem_of_model(model)
    if asked and problem:
        raise UnsupportedModelError(f"--share-prefix true: {problem}", "Leave --share-prefix out.")
    prefixes = _prefixes(reader, asked=asked)
    lengths = reader.index.length[:limit]
    kept = lengths if max_length is None else lengths[lengths <= max_length]
    if prefixes is None or not len(kept) or kept.max() > capacity:
        return None, None  # the planner tells of samples that are longer than a pack
    trees = plan_trees(
        lengths,
        _as_planned(prefixes, len(lengths)),
        capacity=capacity,
        min_shared=MIN_SHARED,
        max_length=max_length,
        max_samples=max_samples,
        media_tokens=(
            reader.index.media_tokens[: len(lengths)],
            prefixes.prefixes.media_tokens[: prefixes.offsets[len(lengths)]],
        ),
        max_media_tokens=max_media_tokens,
    )
    found = SharedPrefixes(reader.index, prefixes, trees)
    if not trees.num_shared_tokens:
        told = f"shared prefixes: no two samples share more than {MIN_SHARED} tokens, so each is computed whole"
        return None, told if asked else None
    if asked:
        return found, None
    remark = _not_worth_it(found, [*config.not_shared_with, *([problem] if problem else [])])
    return (found, None) if remark is None else (None, remark or None)


def _not_worth_it(found: SharedPrefixes, reasons: Sequence[str]) -> str | None:
    """What ``auto`` says where it shares nothing, "" where that is not worth a line; None where it shares.

    Args:
        reasons: what stands in the way.
    """
    if found.saved <= WORTH_SHARING:
        if reasons:
            return ""
        told = (
            f"shared prefixes: {found.saved:.1%} of the tokens could be saved, which is not worth it: each sample is "
            "computed whole, unless --share-prefix true shares them"
        )
        return told if found.saved >= _WORTH_TELLING and not reasons else ""
    if reasons:
        told = f"shared prefixes: {found.saved:.0%} of the tokens could be saved, but each sample is computed whole"
        return f"{told}: {_reason(reasons[0])}"
    return None


def sharing_of_stream(config: TrainConfig, model: Mapping[str, Any]) -> tuple[IntervalSharing | None, str | None]:
    """How a stream shares prefixes, as ``--share-prefix`` says, and a remark where something stands in the way.

    Args:
        model: its ``config.json``.

    Raises:
        UnsupportedModelError: if sharing is asked for, and the model cannot begin where a prefix ends.
    """
    if config.share_prefix == "false":
        return None, None
    asked, problem = config.share_prefix == "true", _problem_of_model(model)
    if asked and problem:
        raise UnsupportedModelError(f"--share-prefix true: {problem}", "Leave --share-prefix out.")
    if reasons := [*config.not_shared_with, *([problem] if problem else [])]:
        return None, f"shared prefixes: each sample is computed whole: {_reason(reasons[0])}"
    worth = 0.0 if asked else WORTH_SHARING
    media = MediaTokens.of(model)
    most = config.max_rows_per_tree, config.max_media_tokens_per_pack
    return IntervalSharing(media, worth, *most, parts=_parts_of(config)), None


def first_pair(packs: PackPlan) -> Int64Array | None:
    """The two shortest neighbours of some packs that share a prefix, int64 (2,); None if none do."""
    pairs = np.flatnonzero(packs.full_lengths - packs.lengths)  # with the sample before
    if not len(pairs):
        return None
    at = int(pairs[np.argmin(packs.full_lengths[pairs] + packs.full_lengths[pairs - 1])])
    return packs.samples[at - 1 : at + 1]


def shared_of_plan(packs: PackPlan, parts: str, model: Mapping[str, Any], reader: CacheReader) -> SharedPrefixes | None:
    """The prefixes that a saved plan shares; None if it shares none.

    Args:
        parts: what its file says of them.
        model: its ``config.json``.

    Raises:
        MismatchError: if the caches do not tell of these prefixes.
        UnsupportedModelError: if the model cannot begin where a prefix ends.
    """
    if packs.shared is None:
        return None
    if problem := _problem_of_model(model):
        raise UnsupportedModelError(
            f"--plan shares prefixes, and {problem}", "Make the plan again with --share-prefix false."
        )
    prefixes = _prefixes(reader, asked=True)
    assert prefixes is not None, "asked for"
    trees = rebuild_trees(packs, _as_planned(prefixes, len(reader)), min_shared=MIN_SHARED)
    if trees is None:
        raise MismatchError(
            "--plan shares prefixes that the caches do not tell of", "Make it again with packtool plan --save."
        )
    wanted: PartsIn = "together" if parts == "together" else "apart" if parts == "apart" else "any"
    return SharedPrefixes(reader.index, prefixes, replace(trees, parts=wanted))


def _parts_of(config: TrainConfig | PlanConfig) -> PartsIn:
    """Where steps have the parts of a tree that is cut."""
    if not config.shuffle:
        return "any"  # the order is the user's
    return "together" if config.max_rows_per_tree is None else "apart"


def _as_planned(prefixes: SplitPrefixes, num_samples: int) -> Prefixes:
    """Those of the first samples."""
    offsets = prefixes.offsets[: num_samples + 1]
    return Prefixes(offsets, prefixes.prefixes.lengths[: offsets[-1]], prefixes.prefixes.hashes[: offsets[-1]])


def _prefixes(reader: CacheReader, *, asked: bool) -> SplitPrefixes | None:
    """What the samples begin with; None if a cache does not tell, unless that is asked for."""
    found = reader.prefixes()
    if found is not None or not asked:
        return found
    directory, manifest = next(
        (directory, manifest)
        for directory, manifest in zip(reader.directories, reader.manifests, strict=True)
        if not manifest.splits[reader.split].prefixes_sha256
    )
    raise MismatchError(
        f"--share-prefix true: {directory} was exported by an older packtool, and does not tell what its samples begin "
        "with",
        f"Leave --share-prefix out, or export into another directory:\n  {export_command(directory, manifest)}",
    )


def _problem_of_model(model: Mapping[str, Any]) -> str:
    """Why samples of a model cannot go on from a prefix that they share; empty if they can."""
    kind = str(text_config_of(model).get("model_type"))
    if kind not in family_of(model).recurrent_types:
        return ""
    return f"{kind} has recurrent layers, whose state at the end of a prefix is not handed on to several samples"


def _reason(reason: str) -> str:
    """An option that stands in the way, or a sentence, as the end of another sentence."""
    return f"that does not go with {reason}" if reason.startswith(("--", SEQUENCE_PARALLELISM, MIXTURES)) else reason
