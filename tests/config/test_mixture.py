from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packtool.config.mixture import MixOptions, parse_recipe, unify_sources
from packtool.config.plan import PlanConfig
from packtool.config.settings import resolve
from packtool.errors import ConfigError

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.mark.smoke
def test_recipes_in_the_documentation_are_valid() -> None:
    (text,), (stages,) = (
        re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
        for page in ("mixtures.md", "curriculum.md")
    )
    recipe = parse_recipe(text, "mix.yaml", MixOptions(mix_stop="all", resample=False))
    assert [source.weight for source in recipe.sources] == [3, 1, 2]
    assert (recipe.unit, recipe.stop, recipe.resample) == ("tokens", "all", False)
    assert (recipe.sources[1].loss_weight, recipe.sources[2].max_length) == (0.5, 16384)
    first_stage, second_stage = parse_recipe(stages, "stages.yaml", MixOptions()).stages
    assert (first_stage.until_share, first_stage.packing_length, first_stage.sequence_parallel_size) == (0.9, 8192, 1)
    assert (second_stage.until_share, second_stage.packing_length, second_stage.sequence_parallel_size) == (
        None,
        131072,
        None,
    )


def test_all_mistakes_are_reported_at_once_with_their_keys() -> None:
    text = """
    sourcs: []
    stages: []
    temperature: -1
    sources:
      - path: a
        token: 3
        max_pixels: much
        loss_scale: 2
      - samples: 2
      - path: c
        tokens: 1
        samples: none
        min_length: 1Q
    """
    with pytest.raises(ConfigError) as raised:
        parse_recipe(text, "mix.yaml", MixOptions())
    messages = str(raised.value)
    for expected in (
        "mix.yaml, sourcs: unknown key; did you mean 'sources'?",
        "mix.yaml, stages: give a list of stages",
        "temperature: -1 is not a number above 0",
        "sources[0].token: unknown key; did you mean 'tokens'?",
        "sources[0].max_pixels: 'much' is not an integer",
        "sources[0].loss_scale: 2 is not a loss scale",
        "sources[1].path: the directory of a cache is missing",
        "sources[2]: samples and tokens are two weights",
        "sources[2].samples: 'none' is not a number above 0",
        "sources[2].min_length",
    ):
        assert expected in messages, messages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3", "mapping with the key sources"),
        ("sources: [", "is not valid YAML"),
        ("sources: []", "give a list of caches"),
        ("sources: [{path: a, tokens: 1}, {path: b, samples: 1}]", "weights in samples and tokens cannot be compared"),
        ("sources: [{path: a, tokens: 1}, {path: b}]", "b has no weight"),
        ("{sources: [{path: a, tokens: 1}], temperature: 2}", "leave out one"),
        ("{sources: [{path: a}], unit: tokens}", "unit"),
    ],
)
def test_incomplete_and_contradictory_recipes_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_recipe(text, "mix.yaml", MixOptions())


STAGES = "stages: [{%s sources: [{path: a, tokens: 1}]}, {%s sources: [{path: b}]}, {%s sources: [a]}]"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("until: 120%,", "", ""), r"stages\[0\].until: '120%' is not a number of steps .* between 0% and 100%"),
        (("until: 0,", "", ""), r"stages\[0\].until: 0 is not a number of steps"),
        (("until: 1%,", "", ""), r"stages\[1\].until: it is missing: give it to every stage but the last"),
        (("until: 9%,", "until: 9%,", ""), r"stages\[1\].until: 9% is not after the 9% of the previous stage"),
        (("until: 9,", "until: 10,", "until: 11,"), r"stages\[2\].until: the last stage ends with the run"),
        (("untill: 9,", "", ""), r"stages\[0\].untill: unknown key; did you mean 'until'"),
        (("packing_length: 8Q,", "", ""), r"stages\[0\].packing_length: "),
        (("", "sequence_parallel_size: 0,", ""), r"stages\[1\].sequence_parallel_size: 0 is not a number of ranks"),
        (("temperature: 0,", "", ""), r"stages\[0\].temperature: 0 is not a number above 0"),
    ],
)
def test_invalid_stages_are_reported_with_their_keys(keys: tuple[str, str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_recipe(STAGES % keys, "mix.yaml", MixOptions())


def test_stages_inherit_common_keys_and_a_single_stage_is_the_run() -> None:
    common = "temperature: 2, sources: [a, b#9]"
    recipe = parse_recipe(f"{{{common}, stages: [{{until: 4}}, {{sources: [c], temperature: 1}}]}}", "m", MixOptions())
    first_stage, second_stage = recipe.stages
    assert [source.path for source in first_stage.sources] == ["a", "b#9"]
    assert (first_stage.until, first_stage.temperature) == (4, 2.0)
    assert (second_stage.end_text, second_stage.temperature) == ("", 1.0)
    assert not first_stage.stages
    single_stage = parse_recipe(f"{{stages: [{{{common}}}]}}", "m", MixOptions())
    assert replace(single_stage, place="--mix m") == parse_recipe(f"{{{common}}}", "m", MixOptions())
    with pytest.raises(ConfigError, match=r"the only stage is the whole run: give --packing-length"):
        parse_recipe("stages: [{packing_length: 8, sources: [a]}]", "m", MixOptions())
    with pytest.raises(ConfigError, match="temperature: every stage has its own sources"):
        parse_recipe("{temperature: 2, stages: [{sources: [a]}, {sources: [b]}]}", "m", MixOptions())
    joined = unify_sources(recipe)
    assert [source.path for source in joined.sources] == ["a", "b#9", "c"]
    assert [[source.is_taken for source in stage.sources] for stage in joined.stages] == [
        [True, True, False],
        [False, False, True],
    ]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("loss_weight: 2", r"a has the loss_weight 2\.0 in one stage and 1\.0 in another"),
        ("loss_scale: all", "a has the loss_scale all in one stage and None in another"),
        ("max_pixels: 9", r"a has the media_limits {'max_pixels': 9} in one stage and {} in another"),
    ],
)
def test_a_source_has_the_same_settings_in_all_stages(messages: str, message: str) -> None:
    text = "stages: [{until: 1, sources: [{path: a, %s}, b]}, {sources: [%s]}]"
    with pytest.raises(ConfigError, match=message):
        unify_sources(parse_recipe(text % (messages, "a"), "m", MixOptions()))
    joined = unify_sources(parse_recipe(text % (messages, f"c, {{path: a, {messages}}}"), "m", MixOptions()))
    (first_source, *others) = (
        next(each for each in part.sources if each.path == "a") for part in (joined, *joined.stages)
    )
    assert [replace(each, is_taken=False) for each in others] == [first_source, first_source]


def resolved(*caches: str, **options: Any) -> PlanConfig:
    return resolve(PlanConfig, {"cached_dataset": caches, **options})


def test_mixing_options_of_other_tools() -> None:
    config = resolved("a", "b", interleave_prob=("0.7,0.3",), stopping_strategy="all_exhausted")
    assert config.interleaving == (0.7, 0.3)
    assert config.mix_stop == "all"
    assert resolved("a", "b", mix_strategy="interleave_over").interleaves
    assert not resolved("a", "b", mix_strategy="concat").interleaves


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interleave_probs": ("0.7",)}, "1 for 2 caches"),
        ({"interleave_probs": ("0.7", "much")}, "one number for each cache"),
        ({"interleave_probs": ("1", "0")}, "must be above 0"),
        ({"interleave_probs": ("1", "2"), "mix_strategy": "concat"}, "takes every cache whole"),
        ({"mix_strategy": "interleave_over", "mix_stop": "first"}, "contradicts"),
        ({"mix_stop": "all"}, "requires weights"),
        ({"resample": False}, "--resample false requires a mixture"),
        ({"mix": "m.yaml"}, "already names the caches"),
        ({"mix": "m.yaml", "interleave_probs": ("1", "2")}, "both define a mixture"),
    ],
)
def test_contradictory_mixing_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved("a", "b", **options)
