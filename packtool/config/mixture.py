"""How much of each cache an epoch has: options of plan and train; ``recipe`` reads the files of --mix."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from packtool.config.panels import Panel
from packtool.config.settings import Synonyms, flag, option
from packtool.errors import ConfigError

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
    if not options.resample and not options.mixing:
        found.append("--resample false goes with mixtures: --mix FILE, --interleave-probs, or a # behind a cache")
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
