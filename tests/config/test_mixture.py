from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from packtool.config.mixture import MixOptions, parse_recipe
from packtool.config.plan import PlanConfig
from packtool.config.settings import resolve
from packtool.errors import ConfigError

PAGE = Path(__file__).parent.parent.parent / "docs" / "mixtures.md"


def test_the_recipe_of_the_page() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    recipe = parse_recipe(text, "mix.yaml", MixOptions(mix_stop="all", resample=False))
    assert [source.weight for source in recipe.sources] == [3, 1, 2]
    assert (recipe.unit, recipe.stop, recipe.resample) == ("tokens", "all", False)
    assert (recipe.sources[1].loss_weight, recipe.sources[2].max_length) == (0.5, 16384)


def test_every_mistake_is_told_at_once_with_its_key() -> None:
    text = """
    sourcs: []
    stages: []
    temperature: -1
    sources:
      - path: a
        token: 3
        max_pixels: 9
        loss_scale: default
      - samples: 2
      - path: c
        tokens: 1
        samples: none
        min_length: 1Q
    """
    with pytest.raises(ConfigError) as raised:
        parse_recipe(text, "mix.yaml", MixOptions())
    told = str(raised.value)
    for expected in (
        "mix.yaml, sourcs: unknown key; did you mean 'sources'?",
        "mix.yaml, stages: one recipe holds for the whole run",
        "temperature: -1 is no number above 0",
        "sources[0].token: unknown key; did you mean 'tokens'?",
        "sources[0].max_pixels: limits of media are the cache's: export it with --max-pixels",
        "sources[0].loss_scale: which tokens are trained was decided at export",
        "sources[1].path: the directory of a cache is missing",
        "sources[2]: samples and tokens are two weights",
        "sources[2].samples: 'none' is no number above 0",
        "sources[2].min_length",
    ):
        assert expected in told, told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "mapping with the key sources"),
        ("sources: [", "is no YAML"),
        ("sources: []", "list of caches is missing"),
        ("sources: [{path: a, tokens: 1}, {path: b, samples: 1}]", "weights in samples and tokens cannot be compared"),
        ("sources: [{path: a, tokens: 1}, {path: b}]", "some have weights, and b none"),
        ("{sources: [{path: a, tokens: 1}], temperature: 2}", "leave out one"),
        ("{sources: [{path: a}], unit: tokens}", "unit"),
    ],
)
def test_recipes_that_say_too_little_or_too_much(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_recipe(text, "mix.yaml", MixOptions())


def resolved(*caches: str, **given: Any) -> PlanConfig:
    return resolve(PlanConfig, {"cached_dataset": caches, **given})


def test_words_of_other_tools() -> None:
    config = resolved("a", "b", interleave_prob=("0.7,0.3",), stopping_strategy="all_exhausted")
    assert config.interleaving == (0.7, 0.3)
    assert config.mix_stop == "all"
    assert resolved("a", "b", mix_strategy="interleave_over").interleaves
    assert not resolved("a", "b", mix_strategy="concat").interleaves


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"interleave_probs": ("0.7",)}, "1 for 2 caches"),
        ({"interleave_probs": ("0.7", "much")}, "one number for each cache"),
        ({"interleave_probs": ("1", "0")}, "must be above 0"),
        ({"interleave_probs": ("1", "2"), "mix_strategy": "concat"}, "takes every cache whole"),
        ({"mix_strategy": "interleave_over", "mix_stop": "first"}, "contradicts"),
        ({"mix_stop": "all"}, "goes with weights"),
        ({"mix": "m.yaml"}, "names the caches itself"),
        ({"mix": "m.yaml", "interleave_probs": ("1", "2")}, "two recipes"),
        ({"share_prefix": "true", "mix_strategy": "interleave_once"}, "does not go with mixtures"),
    ],
)
def test_options_that_contradict_each_other(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved("a", "b", **given)
