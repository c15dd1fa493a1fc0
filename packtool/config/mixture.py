"""Mixtures: options of plan and train, and the recipe files of ``--mix``.

A recipe says how much of each cache an epoch takes, and may define the stages of a curriculum:

    sources:
      - {path: caches/ocr, tokens: 3}
      - {path: caches/chat, tokens: 1, loss_weight: 0.5}
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, cast, get_args

from packtool.config.conflicts import Settings
from packtool.config.data import MediaOptions
from packtool.config.settings import Synonyms, flag, mixture_option, num_tokens, option, parse_yaml, resolve
from packtool.errors import ConfigError, did_you_mean

MixUnit = Literal["samples", "tokens", "target_tokens"]
MixStop = Annotated[Literal["first", "all"], Synonyms({"first_exhausted": "first", "all_exhausted": "all"})]
MixStrategy = Literal["concat", "interleave_under", "interleave_over", "interleave_once"]

UNITS: tuple[str, ...] = get_args(MixUnit)
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)(%|x)?")
MAX_DRAWN, MAX_AMOUNT = 10_000_000, 10**15
_NUMBER = re.compile(r"\d[\d.]*[%xX]?")


@dataclass(frozen=True, kw_only=True)
class MixOptions(Settings):
    """Amounts of each cache in an epoch."""

    cached_dataset: tuple[str, ...] = option(
        (), "Use samples of these caches; CACHE#5000, CACHE#20% or CACHE#2.5x sets how many.", path=True
    )
    mix: str | None = mixture_option(None, "Mix caches by this YAML recipe of weights, filters and stages.", path=True)
    mix_stop: MixStop | None = mixture_option(
        None,
        "End an epoch when one cache is used up (first, default), or every cache (all).",
        aliases=("stopping_strategy",),
    )
    resample: bool = mixture_option(True, "Draw different samples in each epoch; false repeats the first draw.")
    interleave_probs: tuple[str, ...] = mixture_option(
        (), "Draw these fractions of the samples from each cache, such as 0.7 0.3.", aliases=("interleave_prob",)
    )
    mix_strategy: MixStrategy | None = mixture_option(
        None, "Concatenate caches, or interleave them until the first (under) or last (over) is used up."
    )

    @property
    def interleaving(self) -> tuple[float, ...]:
        """``--interleave-probs`` as numbers; ValueError if one is no number."""
        return tuple(map(float, " ".join(self.interleave_probs).replace(",", " ").split()))

    @property
    def interleaves(self) -> bool:
        """True if caches, or rows, are mixed by ``--interleave-probs`` or ``--mix-strategy``."""
        return bool(self.interleave_probs) or self.mix_strategy not in (None, "concat")

    @property
    def mixing(self) -> bool:
        """True if an epoch may not contain every sample exactly once."""
        return self.mix is not None or self.interleaves or any(map(amount_suffix, self.cached_dataset))

    @property
    def names_caches(self) -> bool:
        """True if caches are given, by name or in a recipe."""
        return bool(self.cached_dataset or self.mix)

    def value_problems(self) -> list[str]:
        if not self.interleave_probs:
            return []
        option_text = f"--interleave-probs {' '.join(self.interleave_probs)}"
        if self.mix_strategy in ("concat", "interleave_once"):
            return [f"{option_text}: --mix-strategy {self.mix_strategy} takes every cache whole; leave out one"]
        try:
            fractions = self.interleaving
        except ValueError:
            return [f"{option_text}: give one number for each cache, as in 0.7 0.3"]
        if not all(0 < fraction < math.inf for fraction in fractions):
            return [f"{option_text}: every fraction must be above 0; leave out caches that are not trained"]
        # Each file of rows becomes a cache.
        num_caches = len(self.cached_dataset or getattr(self, "dataset", ()))
        if len(fractions) != num_caches:
            return [f"{option_text}: {len(fractions)} for {num_caches} caches; give one for each"]
        return []


@dataclass(frozen=True)
class Amount:
    """Amount of a source, written behind a #: a number of samples, or of epochs (0.2 for 20%)."""

    number: float
    kind: Literal["samples", "epochs"]

    def of(self, num: int) -> int:
        """Return the number of samples that an epoch takes from a source of ``num`` samples, at least 1."""
        return max(1, round(self.number if self.kind == "samples" else self.number * num))

    def __str__(self) -> str:
        if self.kind == "samples":
            return f"{self.number:g}"
        return f"{self.number:g}x" if self.number >= 1 else f"{100 * self.number:g}%"


def check_drawn(count: float, num: int, what: str) -> None:
    """Raise a ConfigError if an epoch draws more than 10 million samples, and 100 times the ``num`` of the source."""
    if count > (limit := max(MAX_DRAWN, 100 * num)):
        raise ConfigError(
            f"{what} draws {count:,.0f} samples of {num:,}; at most {limit:,} can be drawn",
            "Give a smaller number behind the #, or weights that differ less.",
        )


def amount_suffix(name: str) -> str:
    """Return the text behind the last # of a name if it looks like an amount, else an empty text."""
    _, mark, text = name.rpartition("#")
    return text if mark and _NUMBER.fullmatch(text) else ""


def parse_amount(text: str) -> Amount:
    """Parse ``5000``, ``20%`` or ``2.5x``; ValueError for other texts."""
    match = _AMOUNT.fullmatch(text.lower())
    if match is None or (match[2] is None and "." in match[1]):
        raise ValueError(f"#{text} is not a number of samples (#5000), a percentage (#20%) or epochs (#2.5x)")
    number = float(match[1])
    if number > MAX_AMOUNT:
        raise ValueError(f"#{text[:20]} is too large: give at most {MAX_AMOUNT:,}")
    if not number:
        raise ValueError(f"#{text} takes nothing: leave it out")
    if match[2] is None:
        return Amount(number, "samples")
    return Amount(number / 100 if match[2] == "%" else number, "epochs")


_MEDIA_OPTIONS = tuple(field.name for field in dataclasses.fields(MediaOptions))
SOURCE_KEYS = ("path", *UNITS, "loss_weight", "loss_scale", "min_length", "max_length", "channel")
"""Keys of a source in a recipe, besides limits on its media."""
_RECIPE_KEYS = ("sources", "temperature", "unit")
_STAGE_KEYS = ("until", "packing_length", "sequence_parallel_size")
# Settings of a source that must be the same in all stages.
_RUN_SETTINGS = ("channel", "loss_weight", "loss_scale", "media_limits")
_END_REMEDY = "give it to every stage but the last, or to none, which trains the epochs of each"
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True, kw_only=True)
class SourceRecipe:
    """One source of a mixture.

    Args:
        amount: samples of an epoch; None to follow the weight, or without weights to take all.
        weight: relative to the other sources.
        loss_scale: rule that selects its trained tokens; None for that of the run or the export.
        min_length, max_length: inclusive bounds of the samples' tokens.
        media_limits: required limits of its cache, by option name.
        channel: name of its losses in logs; None for the cache's name.
        is_taken: False if only other stages train this source.
    """

    path: str
    amount: Amount | None = None
    weight: float | None = None
    loss_weight: float = 1.0
    loss_scale: str | None = None
    min_length: int | None = None
    max_length: int | None = None
    media_limits: Mapping[str, Any] = field(default_factory=dict)
    channel: str | None = None
    is_taken: bool = True


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The composition of an epoch, or the stages of a curriculum.

    Args:
        unit: of weights, and of the even distribution over steps.
        temperature: weights are size^(1 / temperature).
        stop: the source that ends an epoch, if there are weights.
        place: option and file, for messages.
        stages: at least two, each with the sources of all. Of the recipe that has them, only ``sources`` and ``place``
            are used.
        until, until_share: of a stage, its end as an optimizer step or as a share of the run, 0 to 1.
        packing_length, sequence_parallel_size: of a stage; None for those of the options.
    """

    sources: tuple[SourceRecipe, ...]
    unit: MixUnit = "samples"
    temperature: float | None = None
    stop: Literal["first", "all"] = "first"
    resample: bool = True
    place: str = "--mix"
    stages: tuple[Recipe, ...] = ()
    until: int | None = None
    until_share: float | None = None
    packing_length: int | None = None
    sequence_parallel_size: int | None = None

    @property
    def has_weights(self) -> bool:
        """True if sources have weights, given or by their sizes, and not numbers of samples."""
        return self.temperature is not None or any(source.weight is not None for source in self.sources)

    @property
    def end_text(self) -> str:
        """The end of a stage as the file gives it, for messages; empty if it gives none."""
        if self.until is not None:
            return f"{self.until:,} steps"
        return "" if self.until_share is None else f"{100 * self.until_share:g}%"

    def stop_step(self, max_steps: int) -> int:
        """Steps of the run that are done when this stage ends, of ``max_steps``; without ``until``, all of them."""
        if self.until is not None:
            return self.until
        return max_steps if self.until_share is None else max(round(self.until_share * max_steps), 1)


def unify_sources(recipe: Recipe) -> Recipe:
    """Give every stage the sources of all stages in the same order; those it does not train have ``is_taken=False``."""
    sources_of_stages = [_sources_by_key(stage) for stage in recipe.stages]
    untaken_sources = _untaken_sources(sources_of_stages, recipe.place)
    stages = []
    for stage, stage_sources in zip(recipe.stages, sources_of_stages, strict=True):
        all_sources = [stage_sources.get(key, untaken) for key, untaken in untaken_sources.items()]
        stages.append(replace(stage, sources=tuple(all_sources)))
    return replace(recipe, sources=tuple(untaken_sources.values()), stages=tuple(stages))


def _untaken_sources(
    sources_of_stages: Sequence[Mapping[_SourceKey, SourceRecipe]], place: str
) -> dict[_SourceKey, SourceRecipe]:
    """Return the sources of all stages, as in a stage that does not train them; ConfigError if stages contradict."""
    untaken_sources: dict[_SourceKey, SourceRecipe] = {}
    problems = []
    for key, source in [item for stage_sources in sources_of_stages for item in stage_sources.items()]:
        if key not in untaken_sources:
            run_settings = {name: getattr(source, name) for name in _RUN_SETTINGS}
            untaken_sources[key] = SourceRecipe(path=source.path, is_taken=False, **run_settings)
        for difference in _differences(untaken_sources[key], source):
            problems.append(f"{place}, stages: {difference}: give it the same in all")
    if problems:
        raise ConfigError.from_problems(problems)
    return untaken_sources


def _differences(first: SourceRecipe, second: SourceRecipe) -> list[str]:
    """Describe the settings in which a source differs between two stages."""
    differences = []
    for name in _RUN_SETTINGS:
        value, other_value = getattr(first, name), getattr(second, name)
        if value != other_value:
            differences.append(f"{first.path} has the {name} {value} in one stage and {other_value} in another")
    return differences


_SourceKey = tuple[str, int]
"""Path of a source, and the number of earlier sources with the same path in its stage."""


def _sources_by_key(stage: Recipe) -> dict[_SourceKey, SourceRecipe]:
    """Return the sources of a stage, in order."""
    num_earlier = Counter[str]()
    sources = {}
    for source in stage.sources:
        sources[source.path, num_earlier[source.path]] = source
        num_earlier[source.path] += 1
    return sources


def parse_recipe(text: str, file: str, options: MixOptions) -> Recipe:
    """Parse the YAML text of a recipe file; the ConfigError names every mistake, and its key."""
    import yaml  # here, because most runs do not need it

    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--mix {file} is not valid YAML: {error}") from error
    parser = _RecipeParser(file, options)
    recipe = parser.parse_curriculum(value)
    if parser.problems or recipe is None:
        raise ConfigError.from_problems(list(dict.fromkeys(parser.problems)))
    return recipe


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


class _RecipeParser:
    """Parses a recipe file and collects all its problems.

    ``key`` is the position of a value in the file, such as ``stages[1].sources[0]``, and ``prefix`` that of a mapping
    with a dot at the end, empty for the file itself. Methods that parse a value return None after reporting a problem.
    """

    def __init__(self, file: str, options: MixOptions) -> None:
        self.place, self.options = f"--mix {file}", options
        self.problems: list[str] = []

    def report(self, key: str, problem: str) -> None:
        self.problems.append(f"{self.place}, {key}: {problem}")

    def parse_curriculum(self, value: Any) -> Recipe | None:
        """Parse the content of a file with or without stages; None if no recipe can be built."""
        if not isinstance(value, Mapping):
            self.report("sources", "a recipe is a mapping with the key sources")
            return None
        self.check_keys(value, (*_RECIPE_KEYS, "stages"), "")
        if "stages" not in value:
            return self.parse_recipe(value)
        defaults = {key: item for key, item in value.items() if key in _RECIPE_KEYS}  # keys that all stages share
        stages = value["stages"]
        if isinstance(stages, list) and stages and all(isinstance(stage, Mapping) for stage in stages):
            return self.parse_stages(stages, defaults)
        self.report("stages", "give a list of stages, each with sources, until, packing_length, ...")
        return self.parse_recipe(defaults)  # reports its mistakes, too

    def parse_stages(self, stages: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> Recipe | None:
        """Parse all stages; a stage without a key of ``defaults`` has that of the file."""
        if all("sources" in stage for stage in stages):  # no stage uses the sources of the file
            for key in defaults:
                self.report(str(key), "every stage has its own sources: give it in the stages")
        recipes = [self.parse_stage(stage, defaults, f"stages[{number}]") for number, stage in enumerate(stages)]
        self.check_ends(recipes)
        if len(stages) == 1:
            self.check_single_stage(stages[0])
            return recipes[0]
        valid = tuple(recipe for recipe in recipes if recipe is not None)
        if len(valid) < len(stages):
            return None
        # The recipe itself has no sources yet: ``unify_sources`` adds those of all stages.
        return Recipe(sources=(), stages=valid, place=self.place)

    def check_single_stage(self, stage: Mapping[str, Any]) -> None:
        """Report keys of the only stage that only stages have, because options do the same for the whole run."""
        for key in _STAGE_KEYS:
            if key in stage:
                remedy = "leave it out" if key == "until" else f"give {flag(key)}"
                self.report(f"stages[0].{key}", f"the only stage is the whole run: {remedy}")

    def parse_stage(self, value: Mapping[str, Any], defaults: Mapping[str, Any], key: str) -> Recipe | None:
        """Parse one stage; its keys replace those of ``defaults``, the keys of the file that all stages share."""
        self.check_keys(value, (*_RECIPE_KEYS, *_STAGE_KEYS), f"{key}.")
        recipe_keys = {name: item for name, item in value.items() if name in _RECIPE_KEYS}
        recipe_prefix = f"{key}." if "sources" in value else ""  # for problems: else the sources are the file's
        recipe = self.parse_recipe({**defaults, **recipe_keys}, recipe_prefix)
        until, until_share = self.parse_until(value.get("until"), f"{key}.until")
        sequence_parallel_size = value.get("sequence_parallel_size")
        if sequence_parallel_size is not None and not _is_positive_int(sequence_parallel_size):
            self.report(f"{key}.sequence_parallel_size", f"{sequence_parallel_size!r} is not a number of ranks")
        packing_length = self.parse_length(value, "packing_length", f"{key}.")
        if recipe is None:
            return None
        return replace(
            recipe,
            place=f"{self.place}, {key}",
            until=until,
            until_share=until_share,
            packing_length=packing_length,
            sequence_parallel_size=sequence_parallel_size,
        )

    def parse_until(self, value: Any, key: str) -> tuple[int | None, float | None]:
        """Return the end of a stage: (optimizer step, None), or (None, share of the run from 0 to 1)."""
        if value is None:
            return None, None
        if _is_positive_int(value):
            return value, None
        match = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is not None and 0 < float(match[1]) < 100:
            return None, float(match[1]) / 100
        self.report(key, f"{value!r} is not a number of steps (2000) or a share of the run between 0% and 100% (30%)")
        return None, None

    def check_ends(self, stages: Sequence[Recipe | None]) -> None:
        """Report ends of stages that are missing or not increasing, and an end of the last stage."""
        *earlier, last = stages
        if earlier and last is not None and last.end_text:
            self.report(f"stages[{len(earlier)}].until", "the last stage ends with the run: leave it out")
        valid = [stage for stage in earlier if stage is not None]
        if len(valid) < len(earlier) or not any(stage.end_text for stage in valid):
            return  # a stage is invalid, or every stage trains its own number of epochs
        for number, stage in enumerate(valid):
            if not stage.end_text:
                self.report(f"stages[{number}].until", f"it is missing: {_END_REMEDY}")
        for number, (previous, stage) in enumerate(pairwise(valid), start=1):
            # An end in steps and one in shares of the run cannot be compared before the number of steps is known.
            for end, next_end in ((previous.until, stage.until), (previous.until_share, stage.until_share)):
                if end is not None and next_end is not None and end >= next_end:
                    problem = f"{stage.end_text} is not after the {previous.end_text} of the previous stage"
                    self.report(f"stages[{number}].until", problem)

    def check_keys(self, value: Mapping[Any, Any], known: tuple[str, ...], prefix: str) -> None:
        """Report unknown keys of the mapping at ``prefix``."""
        for key in value:
            if key not in known:
                hint = did_you_mean(str(key), known)
                self.report(f"{prefix}{key}", f"unknown key{hint}; known are {', '.join(known)}")

    def parse_recipe(self, value: Mapping[str, Any], prefix: str = "") -> Recipe | None:
        """Parse the recipe of a stage or run; None if anything in the file is wrong so far."""
        raw_sources = value.get("sources")
        if not isinstance(raw_sources, list) or not raw_sources:
            self.report(f"{prefix}sources", "give a list of caches, each with its path")
            return None
        sources_and_units = [self.parse_source(raw, f"{prefix}sources[{n}]") for n, raw in enumerate(raw_sources)]
        sources = tuple(source for source, _ in sources_and_units if source is not None)
        weight_units = sorted({unit for _, unit in sources_and_units if unit is not None})
        temperature = self.parse_number(value, "temperature", prefix)
        size_unit = self.parse_size_unit(value, temperature, prefix)
        self.check_weights(sources, weight_units, temperature, prefix)
        if self.problems:
            return None
        unit = weight_units[0] if weight_units else size_unit  # a recipe has either weights, all in one unit, or sizes
        return Recipe(
            sources=sources,
            unit=cast("MixUnit", unit),
            temperature=temperature,
            stop=self.options.mix_stop or "first",
            resample=self.options.resample,
            place=self.place,
        )

    def parse_size_unit(self, value: Mapping[str, Any], temperature: float | None, prefix: str) -> str:
        """Return the unit of the sizes from which ``temperature`` computes weights."""
        unit = value.get("unit", "samples")
        if unit not in UNITS:
            self.report(f"{prefix}unit", f"{unit!r} is none of {', '.join(UNITS)}")
        if "unit" in value and temperature is None:
            self.report(f"{prefix}unit", "it applies only to temperature, which is missing: leave it out")
        return str(unit)

    def check_weights(
        self, sources: Sequence[SourceRecipe], units: Sequence[str], temperature: float | None, prefix: str
    ) -> None:
        """Report weights in several units, weights beside a temperature, and sources that alone have no weight."""
        if len(units) > 1:
            problem = f"weights in {' and '.join(units)} cannot be compared: give all in one of them"
            self.report(f"{prefix}sources", problem)
        unweighted = [source.path for source in sources if source.weight is None]
        if len(unweighted) == len(sources):
            return
        if temperature is not None:
            problem = "it computes weights from sizes, but sources have weights: leave out one"
            self.report(f"{prefix}temperature", problem)
        if unweighted:
            problem = f"{', '.join(unweighted)} has no weight, but other sources have: give every source one of "
            self.report(f"{prefix}sources", problem + ", ".join(UNITS))

    def parse_source(self, value: Any, key: str) -> tuple[SourceRecipe | None, str | None]:
        """Parse one source; return it (None after a problem), and the unit of its weight (None without a weight)."""
        if isinstance(value, str):
            value = {"path": value}
        if not isinstance(value, Mapping):
            self.report(key, "a source is a mapping with the key path")
            return None, None
        prefix = f"{key}."
        self.check_keys(value, (*SOURCE_KEYS, *_MEDIA_OPTIONS), prefix)
        path = value.get("path")
        if not isinstance(path, str) or not path:
            self.report(f"{key}.path", "the directory of a cache is missing")
            return None, None
        unit = self.parse_weight_unit(value, key)  # it is also the key of the weight
        source = SourceRecipe(
            path=path,
            loss_weight=self.parse_number(value, "loss_weight", prefix) or 1.0,
            weight=None if unit is None else self.parse_number(value, unit, prefix),
            min_length=self.parse_length(value, "min_length", prefix),
            max_length=self.parse_length(value, "max_length", prefix),
            media_limits=self.parse_media_limits(value, prefix),
            channel=self.parse_text(value, "channel", prefix, noun="name"),
            loss_scale=self.parse_text(value, "loss_scale", prefix, noun="loss scale"),
        )
        return source, unit

    def parse_weight_unit(self, value: Mapping[str, Any], key: str) -> str | None:
        """Return the unit in which a source has a weight, the key of the weight; None without a weight."""
        units = [unit for unit in UNITS if unit in value]
        if len(units) > 1:
            self.report(key, f"{' and '.join(units)} are two weights: give one of them")
        return units[0] if units else None

    def parse_media_limits(self, value: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        limits = {}
        for name in _MEDIA_OPTIONS:
            try:
                if value.get(name) is not None:
                    limits[name] = getattr(resolve(MediaOptions, {name: value[name]}), name)
            except ConfigError as error:
                self.report(f"{prefix}{name}", error.message.removeprefix(f"{flag(name)}: "))
        return limits

    def parse_text(self, value: Mapping[str, Any], name: str, prefix: str, noun: str) -> str | None:
        raw = value.get(name)
        if raw is not None and not isinstance(raw, str):
            self.report(f"{prefix}{name}", f"{raw!r} is not a {noun}")
        return raw if isinstance(raw, str) else None

    def parse_number(self, value: Mapping[str, Any], name: str, prefix: str) -> float | None:
        """Return a number above 0; None if the key is missing or its value is invalid."""
        if name not in value:
            return None
        raw = value[name]
        if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not 0 < raw < math.inf:
            self.report(f"{prefix}{name}", f"{raw!r} is not a number above 0")
            return None
        return float(raw)

    def parse_length(self, value: Mapping[str, Any], name: str, prefix: str) -> int | None:
        """Return a number of tokens, given as 8192 or 8K; None if the key is missing or its value is invalid."""
        try:
            return None if value.get(name) is None else num_tokens(str(value[name]))
        except ValueError as error:
            self.report(f"{prefix}{name}", str(error))
            return None
