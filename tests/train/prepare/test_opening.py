"""Targets and limits of a recipe's sources: those of caches that were exported so, or refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from packtool.cache.reader import CacheReader
from packtool.config.mixture import Recipe, SourceRecipe
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, MismatchError
from packtool.train.prepare.caches import check_sources
from packtool.train.prepare.opening import choices_of_targets, planned_targets
from tests.train.tiny import TinyWorld, export_rows


def recipe(tiny: TinyWorld, *sources: dict[str, Any]) -> Recipe:
    source_recipes = tuple(SourceRecipe(path=tiny.cache, **each) for each in sources)
    return Recipe(sources=source_recipes, place="--mix mix.yaml")


def test_planned_targets_follow_the_loss_scale_of_each_source(tiny: TinyWorld, tmp_path: Path) -> None:
    export_rows(tiny, tmp_path / "cache", loss_scale="last_round")
    export_rows(tiny, tmp_path / "shards", rows_per_shard=7)
    reader = CacheReader.open([str(tmp_path / "shards"), str(tmp_path / "cache"), tiny.cache])
    all_rounds, last = (
        reader.index.target_tokens[: reader.offsets[1]],
        CacheReader.open([str(tmp_path / "cache")]).index,
    )
    source_recipe = recipe(tiny, {"loss_scale": "last_round"}, {"loss_scale": "last_round"}, {})
    files = ModelFiles.load(tiny.model)
    # The second has them already; of the third nothing is said, but perhaps by the run.
    assert [choice is None for choice in choices_of_targets(reader, files, None, source_recipe)] == [False, True, True]
    assert [choice is None for choice in choices_of_targets(reader, files, "all", source_recipe)] == [
        False,
        True,
        False,
    ]
    num_targets = planned_targets(reader, source_recipe, None)
    assert (last.target_tokens != all_rounds).any()
    assert num_targets.tolist() == [*last.target_tokens, *last.target_tokens, *all_rounds]
    assert planned_targets(reader, recipe(tiny, {}, {}, {}), None) is reader.index.target_tokens


def test_a_plan_needs_the_model_for_targets(tiny: TinyWorld) -> None:
    reader = CacheReader.open([tiny.cache])
    (manifest,) = reader.manifests
    identity = dataclasses.replace(manifest.identity, spec={**manifest.identity.spec, "model": "gone"})
    reader.manifests = (dataclasses.replace(manifest, identity=identity),)
    source_recipe = recipe(tiny, {"loss_scale": "last_round"})
    with pytest.raises(ConfigError, match=r"gone does not exist\nGive the directory of the model with --model"):
        planned_targets(reader, source_recipe, None)
    assert planned_targets(reader, source_recipe, tiny.model).sum() < reader.index.target_tokens.sum()


def test_newlines_after_turns_need_the_rows(tiny: TinyWorld, tmp_path: Path) -> None:
    """The last turn in a cache ends before the newline that ``train_newline`` made a target."""
    export_rows(tiny, tmp_path / "cache", loss_scale="default+train_newline")
    reader, files = CacheReader.open([str(tmp_path / "cache")]), ModelFiles.load(tiny.model)
    (exported_choice,) = choices_of_targets(reader, files, "default+train_newline", None)
    assert exported_choice is None
    with pytest.raises(MismatchError, match="the parts of texts that last_round"):
        choices_of_targets(reader, files, "last_round+train_newline", None)


@pytest.mark.parametrize(
    ("source", "message", "remedy"),
    [
        ({"loss_scale": "react"}, "the parts of texts that react weights differently", "--loss-scale react"),
        ({"loss_scale": "last_round+hermes"}, "the parts of texts", "Leave its loss_scale in --mix mix.yaml out"),
        ({"media_limits": {"max_pixels": 64}}, "mix.yaml: .* of at most 12544 pixels.* sets 64 ", "--max-pixels 64"),
        ({"media_limits": {"image_min_token_num": 9}}, "of at least 4096 pixels.* sets 9216 ", "--min-pixels 9216"),
        ({"media_limits": {"fps": 1.0}}, "mix.yaml: .* FPS unset in the cache, 1.0 in this run", "--fps 1.0"),
    ],
)
def test_targets_and_limits_that_need_the_rows_are_refused(
    source: dict[str, Any], message: str, remedy: str, tiny: TinyWorld
) -> None:
    reader = CacheReader.open([tiny.cache, tiny.cache])
    with pytest.raises(MismatchError, match=message) as exc_info:
        planned_targets(reader, recipe(tiny, {}, source), None)
    assert remedy in str(exc_info.value.remedy)


def test_limits_of_the_cache_may_be_repeated(tiny: TinyWorld) -> None:
    limits = {"max_pixels": 112 * 112, "image_min_token_num": 4, "fps": 2.0}  # the processor's own
    reader, source_recipe = CacheReader.open([tiny.cache]), recipe(tiny, {"media_limits": limits})
    check_sources(reader, source_recipe, ModelFiles.load(tiny.model))
    assert planned_targets(reader, source_recipe, None).tolist() == reader.index.target_tokens.tolist()
