"""How much of each cache an epoch has: options of plan and train; ``recipe`` reads the files of --mix.

Recipes of ``--mix``: how much of each cache an epoch has, and the stages of a curriculum.

sources:
  - path: caches/ocr
    tokens: 3
  - path: caches/chat
    tokens: 1
    loss_weight: 0.5
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

from packtool.config.conflicts import Settings
from packtool.config.data import MediaOptions
from packtool.config.settings import Panel, Synonyms, flag, num_tokens, option, parse_yaml, resolve
from packtool.errors import ConfigError, did_you_mean

MixUnit = Literal["samples", "tokens", "target_tokens"]
MixStop = Annotated[Literal["first", "all"], Synonyms({"first_exhausted": "first", "all_exhausted": "all"})]
MixStrategy = Literal["concat", "interleave_under", "interleave_over", "interleave_once"]

UNITS: tuple[str, ...] = get_args(MixUnit)
MIXTURES = "mixtures (--mix, --interleave-probs, or a # behind a cache)"
"""What ``not_shared_with`` calls them, for they share no prefixes."""
_PANEL: Panel = "Mixtures"
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)(%|x)?")
MAX_DRAWN, MAX_AMOUNT = 10_000_000, 10**15
_NUMBER = re.compile(r"\d[\d.]*[%xX]?")
_STOPS: dict[str, Literal["first", "all"]] = {"interleave_under": "first", "interleave_over": "all"}


@dataclass(frozen=True, kw_only=True)
class MixOptions(Settings):
    """What an epoch takes of each cache."""

    cached_dataset: tuple[str, ...] = option(
        (),
        "Caches that packtool export made; several may follow. Behind one, #5000, #20% or #2.5x takes so many of its "
        "samples, a share of them, or so many epochs.",
    )
    mix: str | None = option(
        None,
        "YAML file with the caches to train, and of each a weight in samples, tokens or target tokens, a weight of its "
        "loss, a loss scale, a filter by length, limits of media, and the name its loss is logged by; or with the "
        "stages of a curriculum, each with weights, a packing length and a sequence parallel size of its own.",
        panel=_PANEL,
    )
    mix_stop: MixStop | None = option(
        None,
        "With weights, an epoch ends when the first source is used up, or when all are and others came again; by "
        "default first.",
        panel=_PANEL,
        aliases=("stopping_strategy",),
    )
    resample: bool = option(
        True, "Draw anew in every epoch what it takes of a cache; false keeps the first draw.", panel=_PANEL
    )
    interleave_probs: tuple[str, ...] = option(
        (),
        "Shares of the samples that are of each cache of --cached-dataset, in their order: 0.7 0.3, or 0.7,0.3.",
        panel=_PANEL,
        aliases=("interleave_prob",),
    )
    mix_strategy: MixStrategy | None = option(
        None,
        "LLaMA-Factory's word for how caches are mixed: concat takes them whole; interleave_under and interleave_over "
        "take --interleave-probs of each, or as many samples, until the first or all are used up; interleave_once "
        "takes them whole, each evenly through the epoch.",
        panel=_PANEL,
    )

    @property
    def interleaving(self) -> tuple[float, ...]:
        """``--interleave-probs`` as numbers.

        Raises:
            ValueError: if one is none.
        """
        words = [word for given in self.interleave_probs for word in given.replace(",", " ").split()]
        return tuple(float(word) for word in words)

    @property
    def interleaves(self) -> bool:
        """Whether caches, or rows, are mixed by ``--interleave-probs`` or ``--mix-strategy``."""
        return bool(self.interleave_probs) or self.mix_strategy not in (None, "concat")

    @property
    def mixing(self) -> list[str]:
        """``MIXTURES`` where an epoch may not have every sample once; else nothing."""
        is_mixed = self.mix is not None or self.interleaves or any(map(amount_behind, self.cached_dataset))
        return [MIXTURES] if is_mixed else []

    @property
    def names_caches(self) -> bool:
        """Whether caches are given, by name or in a recipe."""
        return bool(self.cached_dataset or self.mix)

    def value_problems(self) -> list[str]:
        """What is wrong with ``--interleave-probs``."""
        if not self.interleave_probs:
            return []
        shown = f"--interleave-probs {' '.join(self.interleave_probs)}"
        if self.mix_strategy in ("concat", "interleave_once"):
            return [f"{shown}: --mix-strategy {self.mix_strategy} takes every cache whole; leave out one"]
        try:
            numbers = self.interleaving
        except ValueError:
            return [f"{shown}: give one number for each cache, as in 0.7 0.3"]
        if not all(0 < number < math.inf for number in numbers):
            return [f"{shown}: every share must be above 0; leave out a cache that is not to be trained"]
        # Each file of rows becomes a cache.
        num_caches = len(self.cached_dataset or getattr(self, "dataset", ()))
        if len(numbers) != num_caches:
            return [f"{shown}: {len(numbers)} for {num_caches} caches; give one for each"]
        return []


@dataclass(frozen=True)
class Amount:
    """What stands behind the # of a name: so many samples, a share of them, or epochs.

    Args:
        number: of ``kind``; 0.2 for 20%.
    """

    number: float
    kind: Literal["samples", "epochs"]

    def of(self, num: int) -> int:
        """The number of samples that it takes of so many, at least one."""
        return max(1, round(self.number if self.kind == "samples" else self.number * num))

    def __str__(self) -> str:
        if self.kind == "samples":
            return f"{self.number:g}"
        return f"{self.number:g}x" if self.number >= 1 else f"{100 * self.number:g}%"


def check_drawn(count: float, num: int, what: str) -> None:
    """Refuse to draw so many samples that memory would not hold their numbers.

    Args:
        count: to draw, repeated ones counted.
        num: that there are.
        what: draws them, for the message.

    Raises:
        ConfigError: if they are more than 10 million and more than 100 times those that there are.
    """
    if count > (limit := max(MAX_DRAWN, 100 * num)):
        raise ConfigError(
            f"{what} draws {count:,.0f} samples of {num:,}; at most {limit:,} can be drawn",
            "Give a smaller number behind the #, or weights that differ less.",
        )


def amount_behind(name: str) -> str:
    """What stands behind the last # of a name, if it looks like a number; else nothing."""
    _, mark, text = name.rpartition("#")
    return text if mark and _NUMBER.fullmatch(text) else ""


def parse_amount(text: str) -> Amount:
    """``5000``, ``20%`` or ``2.5x``.

    Raises:
        ValueError: with what it may be.
    """
    found = _AMOUNT.fullmatch(text.lower())
    if found is None or (found[2] is None and "." in found[1]):
        raise ValueError(f"#{text} is no number of samples (#5000), share (#20%) or number of epochs (#2.5x)")
    number = float(found[1])
    if number > MAX_AMOUNT:
        raise ValueError(f"#{text[:20]} takes too much: at most {MAX_AMOUNT:,}")
    if not number:
        raise ValueError(f"#{text} takes nothing: leave it out")
    if found[2] is None:
        return Amount(number, "samples")
    return Amount(number / 100 if found[2] == "%" else number, "epochs")


_MEDIA = tuple(field.name for field in dataclasses.fields(MediaOptions))
_OF_RECIPES = ("sources", "temperature", "unit")
_OF_STAGES = ("until", "packing_length", "sequence_parallel_size")
# Of a source, the same in all stages.
_OF_RUNS = ("channel", "loss_weight", "loss_scale", "media_limits")
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True, kw_only=True)
class SourceRecipe:
    """One source of a mixture.

    Args:
        path: of the cache.
        amount: what an epoch takes of it; None for what its weight says, or all.
        weight: of it beside the others.
        loss_weight: that its losses are multiplied by.
        loss_scale: which of its tokens are trained; None for what the run, or the export, says.
        min_length, max_length: other samples are left out.
        media_limits: that its cache has, as options name them; empty where the recipe names none.
        channel: that its losses are logged by; None for the cache's name.
        is_taken: False of a source that other stages have.
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
    """What an epoch is mixed of.

    Args:
        unit: that weights are of, and that steps are even by.
        temperature: sources weigh as their sizes to the power of 1 over it.
        stop: which source ends an epoch, where there are weights.
        resample: what is taken of a source is drawn anew in every epoch.
        place: what to name in messages.
        stages: of a curriculum, two at least, each with a recipe over the sources of all; the others of this recipe
            say nothing then.
    """

    sources: tuple[SourceRecipe, ...]
    unit: MixUnit = "samples"
    temperature: float | None = None
    stop: Literal["first", "all"] = "first"
    resample: bool = True
    place: str = "--mix"
    stages: tuple[Stage, ...] = ()

    @property
    def has_weights(self) -> bool:
        """Whether sources have weights, given or by their sizes, and not numbers of samples."""
        return self.temperature is not None or any(source.weight is not None for source in self.sources)

    @property
    def has_loss_scales(self) -> bool:
        """Whether a source says which of its tokens are trained."""
        return any(source.loss_scale is not None for source in self.sources)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of a run with a recipe of its own.

    Args:
        recipe: of its epochs.
        until: optimizer steps of the run that are done when it ends; None where a share says so, or nothing does.
        until_share: of the run, 0 to 1.
        packing_length: None for that of the options.
        sequence_parallel_size: None for that of the options.
    """

    recipe: Recipe
    until: int | None = None
    until_share: float | None = None
    packing_length: int | None = None
    sequence_parallel_size: int | None = None

    @property
    def end(self) -> str:
        """Where it ends, as the recipe has it."""
        if self.until is not None:
            return f"{self.until:,} steps"
        return "" if self.until_share is None else f"{100 * self.until_share:g}%"


def with_joined_sources(recipe: Recipe) -> Recipe:
    """A recipe whose stages all have the sources of all, in one order; a path that a stage has twice is two sources.

    Raises:
        ConfigError: if a source has two names, two loss scales, ...
    """
    keyed = [_keyed(stage.recipe.sources) for stage in recipe.stages]
    found: dict[tuple[str, int], SourceRecipe] = {}
    problems = []
    for sources in keyed:
        for key, source in sources.items():
            first = found.setdefault(key, source)
            for name in _OF_RUNS:
                one, other = getattr(first, name), getattr(source, name)
                if one != other:
                    problems.append(
                        f"{recipe.place}, stages: {source.path} has the {name} {one} in one stage and {other} in "
                        "another: give it the same in all"
                    )
    if problems:
        raise ConfigError.from_problems(problems)
    union = {
        key: SourceRecipe(path=each.path, is_taken=False, **{name: getattr(each, name) for name in _OF_RUNS})
        for key, each in found.items()
    }
    stages = [
        dataclasses.replace(
            stage, recipe=dataclasses.replace(stage.recipe, sources=tuple((union | sources)[key] for key in union))
        )
        for stage, sources in zip(recipe.stages, keyed, strict=True)
    ]
    return dataclasses.replace(recipe, sources=tuple(union.values()), stages=tuple(stages))


def _keyed(sources: Sequence[SourceRecipe]) -> dict[tuple[str, int], SourceRecipe]:
    """Sources by their paths, and how often the path was there before."""
    found: dict[tuple[str, int], SourceRecipe] = {}
    for source in sources:
        number = sum(path == source.path for path, _ in found)
        found[source.path, number] = source
    return found


def parse_recipe(text: str, place: str, options: MixOptions) -> Recipe:
    """The recipe of a YAML text.

    Args:
        place: the file's name, for messages.

    Raises:
        ConfigError: naming every mistake, and its key.
    """
    import yaml  # here, because most runs need none of it

    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--mix {place} is no YAML: {error}") from error
    reading = _Reading(place)
    recipe = reading.curriculum(value, options)
    if reading.problems or recipe is None:
        raise ConfigError.from_problems(list(dict.fromkeys(reading.problems)))
    return recipe


class _Reading:
    """Reads a recipe and collects what is wrong with it."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.problems: list[str] = []

    def tell(self, key: str, problem: str) -> None:
        """Note a mistake at a key."""
        self.problems.append(f"--mix {self.place}, {key}: {problem}")

    def curriculum(self, value: Any, options: MixOptions) -> Recipe | None:
        """The recipe of a file, with its stages, or None where nothing can be made of it."""
        if not isinstance(value, Mapping):
            self.tell("sources", "a recipe is a mapping with the key sources")
            return None
        self.refuse_others(value, (*_OF_RECIPES, "stages"), "")
        if "stages" not in value:
            return self.recipe(value, options)
        common = {key: each for key, each in value.items() if key in _OF_RECIPES}
        stages = value["stages"]
        if not isinstance(stages, list) or not stages or not all(isinstance(each, Mapping) for each in stages):
            self.tell("stages", "a list is missing of what each stage has: sources, until, packing_length, ...")
            return self.recipe(common, options)
        if all("sources" in stage for stage in stages):
            for key in common:
                self.tell(str(key), "every stage has sources of its own: give it to these")
        found = [self.stage(stage, common, f"stages[{number}]", options) for number, stage in enumerate(stages)]
        self.check_ends(found)
        if len(stages) == 1:
            for key in _OF_STAGES:
                if key in stages[0]:
                    remedy = "leave it out" if key == "until" else f"give {flag(key)}"
                    self.tell(f"stages[0].{key}", f"the only stage is the whole run: {remedy}")
            return found[0].recipe if found[0] is not None else None
        whole = tuple(stage for stage in found if stage is not None)
        return Recipe(sources=(), stages=whole, place=f"--mix {self.place}") if len(whole) == len(stages) else None

    def stage(self, value: Mapping[str, Any], common: Mapping[str, Any], key: str, options: MixOptions) -> Stage | None:
        """One stage; what it does not say of its sources, the file's own keys do."""
        self.refuse_others(value, (*_OF_RECIPES, *_OF_STAGES), f"{key}.")
        settings = {name: each for name, each in value.items() if name in _OF_STAGES}
        told = {name: each for name, each in value.items() if name in _OF_RECIPES}
        recipe = self.recipe({**common, **told}, options, f"{key}." if "sources" in value else "")
        until, share = self.until(settings.get("until"), f"{key}.until")
        size = settings.get("sequence_parallel_size")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            self.tell(f"{key}.sequence_parallel_size", f"{size!r} is no number of processes")
        length = self.length(settings, "packing_length", key)
        if recipe is None:
            return None
        return Stage(
            recipe=dataclasses.replace(recipe, place=f"--mix {self.place}, {key}"),
            until=until,
            until_share=share,
            packing_length=length,
            sequence_parallel_size=size,
        )

    def until(self, value: Any, key: str) -> tuple[int | None, float | None]:
        """Where a stage ends: after so many steps, or a share of the run, 0 to 1."""
        if value is None:
            return None, None
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value, None
        found = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
        if found is not None and 0 < float(found[1]) < 100:
            return None, float(found[1]) / 100
        self.tell(key, f"{value!r} is no number of steps (2000), and no share of the run between 0% and 100% (30%)")
        return None, None

    def check_ends(self, stages: Sequence[Stage | None]) -> None:
        """Stages end one after the other, the last with the run."""
        ends = [None if stage is None else stage.until or stage.until_share for stage in stages]
        if len(stages) > 1 and ends[-1] is not None:
            self.tell(f"stages[{len(stages) - 1}].until", "the last stage ends with the run: leave it out")
        ended = [stage for stage in stages[:-1] if stage is not None]
        if len(ended) < len(stages) - 1 or all(end is None for end in ends[:-1]):
            return
        for number, end in enumerate(ends[:-1]):
            if end is None:
                self.tell(
                    f"stages[{number}].until",
                    "it is missing: give it to every stage but the last, or to none, which trains the epochs of each",
                )
        for number, (before, stage) in enumerate(pairwise(ended), start=1):
            for one, other in ((before.until, stage.until), (before.until_share, stage.until_share)):
                if one is not None and other is not None and one >= other:
                    self.tell(
                        f"stages[{number}].until", f"{stage.end} is not behind the {before.end} of the one before"
                    )

    def refuse_others(self, value: Mapping[Any, Any], known: tuple[str, ...], inside: str) -> None:
        """Tell of keys that nobody reads."""
        for key in value:
            if key not in known:
                self.tell(f"{inside}{key}", f"unknown key{did_you_mean(str(key), known)}; known are {', '.join(known)}")

    def recipe(self, value: Mapping[str, Any], options: MixOptions, inside: str = "") -> Recipe | None:
        """The recipe of one stage or of the whole run, or None where nothing can be made of it.

        Args:
            inside: key that it is at, with a dot behind it.
        """
        raw = value.get("sources")
        if not isinstance(raw, list) or not raw:
            self.tell(f"{inside}sources", "a list of caches is missing, each with its path")
            return None
        read = [self.source(each, f"{inside}sources[{number}]") for number, each in enumerate(raw)]
        temperature = self.number(value, "temperature", f"{inside}temperature") if "temperature" in value else None
        unit = value.get("unit", "samples")
        if unit not in UNITS:
            self.tell(f"{inside}unit", f"{unit!r} is none of {', '.join(UNITS)}")
        if "unit" in value and temperature is None:
            self.tell(f"{inside}unit", "it says what --mix counts sizes in for temperature, which is not there")
        units = sorted({unit for _, unit in read if unit is not None})
        self.check_weights([source for source, _ in read if source is not None], units, temperature, inside)
        if self.problems:
            return None
        return Recipe(
            sources=tuple(source for source, _ in read if source is not None),
            unit=units[0] if units else unit,
            temperature=temperature,
            stop=options.mix_stop or "first",
            resample=options.resample,
            place=f"--mix {self.place}",
        )

    def check_weights(
        self, sources: list[SourceRecipe], units: list[Any], temperature: float | None, inside: str
    ) -> None:
        """Sources are measured alike."""
        if len(units) > 1:
            self.tell(
                f"{inside}sources", f"weights in {' and '.join(units)} cannot be compared: give all in one of them"
            )
        weighed = [source for source in sources if source.weight is not None]
        if temperature is not None and weighed:
            self.tell(f"{inside}temperature", "it makes weights of sizes, and sources have weights: leave out one")
        if weighed and len(weighed) < len(sources):
            others = ", ".join(source.path for source in sources if source.weight is None)
            self.tell(
                f"{inside}sources", f"some have weights, and {others} none: give all of them one of {', '.join(UNITS)}"
            )

    def source(self, value: Any, key: str) -> tuple[SourceRecipe | None, MixUnit | None]:
        """One source, and the unit of its weight."""
        if isinstance(value, str):
            value = {"path": value}
        if not isinstance(value, Mapping):
            self.tell(key, "a source is a mapping with the key path")
            return None, None
        known = ("path", *UNITS, "loss_weight", "loss_scale", "min_length", "max_length", "channel")
        self.refuse_others(value, (*known, *_MEDIA), f"{key}.")
        path = value.get("path")
        if not isinstance(path, str) or not path:
            self.tell(f"{key}.path", "the directory of a cache is missing")
            return None, None
        units = [unit for unit in UNITS if unit in value]
        if len(units) > 1:
            self.tell(key, f"{' and '.join(units)} are two weights: give one of them")
        weight = self.number(value, units[0], f"{key}.{units[0]}") if units else None
        loss_weight = self.number(value, "loss_weight", f"{key}.loss_weight") if "loss_weight" in value else 1.0
        found = SourceRecipe(
            path=path,
            weight=weight,
            loss_weight=1.0 if loss_weight is None else loss_weight,
            min_length=self.length(value, "min_length", key),
            max_length=self.length(value, "max_length", key),
            media_limits=self.media_limits(value, key),
            channel=self.text(value, "channel", f"{key}.channel", "name"),
            loss_scale=self.text(value, "loss_scale", f"{key}.loss_scale", "loss scale"),
        )
        return found, (units[0] if units else None)  # type: ignore[return-value]

    def media_limits(self, value: Mapping[str, Any], key: str) -> dict[str, Any]:
        """What a source says of its media, by the names of options."""
        found = {}
        for name in (each for each in _MEDIA if value.get(each) is not None):
            try:
                found[name] = getattr(resolve(MediaOptions, {name: value[name]}), name)
            except ConfigError as error:
                self.tell(f"{key}.{name}", error.message.removeprefix(f"{flag(name)}: "))
        return found

    def text(self, value: Mapping[str, Any], name: str, key: str, what: str) -> str | None:
        """A text; None where there is none."""
        raw = value.get(name)
        if raw is not None and not isinstance(raw, str):
            self.tell(key, f"{raw!r} is no {what}")
        return raw if isinstance(raw, str) else None

    def number(self, value: Mapping[str, Any], name: str, key: str) -> float | None:
        """A number above 0."""
        raw = value[name]
        if isinstance(raw, bool) or not isinstance(raw, (int, float)) or not 0 < raw < math.inf:
            self.tell(key, f"{raw!r} is no number above 0")
            return None
        return float(raw)

    def length(self, value: Mapping[str, Any], name: str, key: str) -> int | None:
        """A number of tokens, such as 8192 or 8K."""
        raw = value.get(name)
        if raw is None:
            return None
        try:
            found = num_tokens(str(raw))
        except ValueError as error:
            self.tell(f"{key}.{name}", str(error))
            return None
        if found < 1:
            self.tell(f"{key}.{name}", f"{raw!r} is no number of tokens")
        return found
