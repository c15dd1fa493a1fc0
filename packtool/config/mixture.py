"""How much of each cache an epoch has: options of plan and train, and the recipes that --mix reads.

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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from packtool.config.panels import Panel
from packtool.config.rows import MediaOptions
from packtool.config.settings import Synonyms, flag, option
from packtool.config.sizes import num_tokens
from packtool.config.yaml_values import parse_yaml
from packtool.errors import ConfigError, did_you_mean

MixUnit = Literal["samples", "tokens", "target_tokens"]
MixStop = Annotated[Literal["first", "all"], Synonyms({"first_exhausted": "first", "all_exhausted": "all"})]
MixStrategy = Literal["concat", "interleave_under", "interleave_over", "interleave_once"]

UNITS: tuple[str, ...] = get_args(MixUnit)
MIXTURES = "mixtures (--mix, --interleave-probs, or a # behind a cache)"
"""What ``not_shared_with`` calls them, for they share no prefixes."""
_PANEL: Panel = "Mixtures"
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)(%|x)?")
_NUMBER = re.compile(r"\d[\d.]*[%xX]?")
_MEDIA = tuple(field.name for field in dataclasses.fields(MediaOptions))
_STOPS: dict[str, Literal["first", "all"]] = {"interleave_under": "first", "interleave_over": "all"}


@dataclass(frozen=True, kw_only=True)
class MixOptions:
    """What an epoch takes of each cache."""

    cached_dataset: tuple[str, ...] = option(
        (),
        "Caches that packtool export made; several may follow. Behind one, #5000, #20% or #2.5x takes so many of its "
        "samples, a share of them, or so many epochs.",
    )
    mix: str | None = option(
        None,
        "YAML file with the caches to train, and of each a weight in samples, tokens or target tokens, a weight of its "
        "loss, a filter by length, and the name its loss is logged by.",
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


def mixture_problems(options: MixOptions, *, rows: tuple[str, ...] = (), plan: str | None = None) -> list[str]:
    """Options of mixtures that contradict each other.

    Args:
        rows: of which caches are made where none are named.
        plan: the file of a saved plan.
    """
    caches = options.cached_dataset or rows
    found = []
    if options.mix is not None and caches:
        found.append("--mix names the caches itself: leave out all others")
    given = [name for name in ("interleave_probs", "mix_strategy") if getattr(options, name)]
    if options.mix is not None:
        found += [f"{flag(name)} and --mix are two recipes: give one of them" for name in given]
    if plan is not None and options.mixing:
        found.append(f"--plan {plan} has packs already: name the caches it was made for, as they are")
    if options.interleave_probs:
        found += _probability_problems(options, len(caches))
    if options.mix_strategy in _STOPS and options.mix_stop not in (None, _STOPS[str(options.mix_strategy)]):
        found.append(f"--mix-strategy {options.mix_strategy} contradicts --mix-stop {options.mix_stop}: give one")
    if options.mix_stop is not None and options.mix is None and not given:
        found.append("--mix-stop goes with weights: --mix FILE, or --interleave-probs")
    return found


def mixed_rows_problems(*, streaming: bool, val_dataset: tuple[str, ...]) -> list[str]:
    """What does not go with rows, or caches, that are mixed by shares."""
    found = ["--interleave-probs and --mix-strategy need caches: leave out --streaming true"] if streaming else []
    if val_dataset:
        found.append("--val-dataset: rows that are mixed are a cache each; --split-dataset-ratio takes a share of each")
    return found


def _probability_problems(options: MixOptions, num_caches: int) -> list[str]:
    shown = " ".join(options.interleave_probs)
    if options.mix_strategy in ("concat", "interleave_once"):
        return [
            f"--interleave-probs {shown}: --mix-strategy {options.mix_strategy} takes every cache whole; leave out one"
        ]
    try:
        numbers = options.interleaving
    except ValueError:
        return [f"--interleave-probs {shown}: give one number for each cache, as in 0.7 0.3"]
    if not all(0 < number < math.inf for number in numbers):
        return [f"--interleave-probs {shown}: every share must be above 0; leave out a cache that is not to be trained"]
    if len(numbers) != num_caches:
        return [f"--interleave-probs {shown}: {len(numbers)} for {num_caches} caches; give one for each"]
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
    if not number:
        raise ValueError(f"#{text} takes nothing: leave it out")
    if found[2] is None:
        return Amount(number, "samples")
    return Amount(number / 100 if found[2] == "%" else number, "epochs")


@dataclass(frozen=True, kw_only=True)
class SourceRecipe:
    """One source of a mixture.

    Args:
        path: of the cache.
        amount: what an epoch takes of it; None for what its weight says, or all.
        weight: of it beside the others.
        loss_weight: that its losses are multiplied by.
        min_length, max_length: other samples are left out.
        channel: that its losses are logged by; None for the cache's name.
    """

    path: str
    amount: Amount | None = None
    weight: float | None = None
    loss_weight: float = 1.0
    min_length: int | None = None
    max_length: int | None = None
    channel: str | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What an epoch is mixed of.

    Args:
        unit: that weights are of, and that steps are even by.
        temperature: sources weigh as their sizes to the power of 1 over it.
        stop: which source ends an epoch, where there are weights.
        resample: what is taken of a source is drawn anew in every epoch.
        place: what to name in messages.
    """

    sources: tuple[SourceRecipe, ...]
    unit: MixUnit = "samples"
    temperature: float | None = None
    stop: Literal["first", "all"] = "first"
    resample: bool = True
    place: str = "--mix"

    @property
    def has_weights(self) -> bool:
        """Whether sources have weights, given or by their sizes, and not numbers of samples."""
        return self.temperature is not None or any(source.weight is not None for source in self.sources)


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
    recipe = reading.recipe(value, options)
    if reading.problems or recipe is None:
        raise ConfigError.from_problems(reading.problems)
    return recipe


class _Reading:
    """Reads a recipe and collects what is wrong with it."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.problems: list[str] = []

    def tell(self, key: str, problem: str) -> None:
        """Note a mistake at a key."""
        self.problems.append(f"--mix {self.place}, {key}: {problem}")

    def recipe(self, value: Any, options: MixOptions) -> Recipe | None:
        """The recipe, or None where nothing can be made of it."""
        if not isinstance(value, Mapping):
            self.tell("sources", "a recipe is a mapping with the key sources")
            return None
        known = ("sources", "temperature", "unit")
        for key in value:
            if key == "stages":
                self.tell("stages", "one recipe holds for the whole run; train the stages as runs one after the other")
            elif key not in known:
                self.tell(str(key), f"unknown key{did_you_mean(str(key), known)}; known are {', '.join(known)}")
        raw = value.get("sources")
        if not isinstance(raw, list) or not raw:
            self.tell("sources", "a list of caches is missing, each with its path")
            return None
        read = [self.source(each, f"sources[{number}]") for number, each in enumerate(raw)]
        temperature = self.number(value, "temperature", "temperature") if "temperature" in value else None
        unit = value.get("unit", "samples")
        if unit not in UNITS:
            self.tell("unit", f"{unit!r} is none of {', '.join(UNITS)}")
        if "unit" in value and temperature is None:
            self.tell("unit", "it says what --mix counts sizes in for temperature, which is not there")
        units = sorted({unit for _, unit in read if unit is not None})
        self.check_weights([source for source, _ in read if source is not None], units, temperature)
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

    def check_weights(self, sources: list[SourceRecipe], units: list[Any], temperature: float | None) -> None:
        """Sources are measured alike."""
        if len(units) > 1:
            self.tell("sources", f"weights in {' and '.join(units)} cannot be compared: give all in one of them")
        weighed = [source for source in sources if source.weight is not None]
        if temperature is not None and weighed:
            self.tell("temperature", "it makes weights of sizes, and sources have weights: leave out one")
        if weighed and len(weighed) < len(sources):
            others = ", ".join(source.path for source in sources if source.weight is None)
            self.tell("sources", f"some have weights, and {others} none: give all of them one of {', '.join(UNITS)}")

    def source(self, value: Any, key: str) -> tuple[SourceRecipe | None, MixUnit | None]:
        """One source, and the unit of its weight."""
        if isinstance(value, str):
            value = {"path": value}
        if not isinstance(value, Mapping):
            self.tell(key, "a source is a mapping with the key path")
            return None, None
        known = ("path", *UNITS, "loss_weight", "min_length", "max_length", "channel")
        for name in value:
            if name == "loss_scale":
                self.tell(
                    f"{key}.loss_scale", "which tokens are trained was decided at export: export it with --loss-scale"
                )
            elif name in _MEDIA and name not in known:
                self.tell(f"{key}.{name}", f"limits of media are the cache's: export it with {flag(str(name))}")
            elif name not in known:
                self.tell(f"{key}.{name}", f"unknown key{did_you_mean(str(name), known)}; known are {', '.join(known)}")
        path = value.get("path")
        if not isinstance(path, str) or not path:
            self.tell(f"{key}.path", "the directory of a cache is missing")
            return None, None
        units = [unit for unit in UNITS if unit in value]
        if len(units) > 1:
            self.tell(key, f"{' and '.join(units)} are two weights: give one of them")
        channel = value.get("channel")
        if channel is not None and not isinstance(channel, str):
            self.tell(f"{key}.channel", f"{channel!r} is no name")
        weight = self.number(value, units[0], f"{key}.{units[0]}") if units else None
        loss_weight = self.number(value, "loss_weight", f"{key}.loss_weight") if "loss_weight" in value else 1.0
        found = SourceRecipe(
            path=path,
            weight=weight,
            loss_weight=1.0 if loss_weight is None else loss_weight,
            min_length=self.length(value, "min_length", key),
            max_length=self.length(value, "max_length", key),
            channel=channel if isinstance(channel, str) else None,
        )
        return found, (units[0] if units else None)  # type: ignore[return-value]

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
