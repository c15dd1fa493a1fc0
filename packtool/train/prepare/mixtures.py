"""The caches that a command names, and the recipe by which they are mixed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from packtool import storage
from packtool.config.mixture import (
    MixOptions,
    Recipe,
    SourceRecipe,
    amount_behind,
    parse_amount,
    parse_recipe,
    with_joined_sources,
)
from packtool.config.settings import parse_yaml
from packtool.encode.loss_scale import parse_loss_scale
from packtool.errors import ConfigError
from packtool.planning.epoch import EpochPlan
from packtool.planning.mixture import Mixture, SourceCounts, by_name, counts_of_steps, share_figures


def named_sources(options: MixOptions) -> tuple[tuple[str, ...], Recipe | None]:
    """The directories of all caches, and the recipe; None where every sample is trained once an epoch.

    Raises:
        ConfigError: naming every mistake of an amount, a loss scale or of the file of ``--mix``.
        StorageError: if that cannot be read.
    """
    problems: list[str] = []
    if options.mix is not None:
        if not storage.exists(options.mix):
            raise ConfigError(f"--mix {options.mix}: there is no such file", "Give a YAML file with sources.")
        recipe = parse_recipe(storage.read_bytes(options.mix).decode(errors="replace"), options.mix, options)
        stages = tuple(_with_amounts(stage, problems) for stage in recipe.stages)
        recipe = dataclasses.replace(_with_amounts(recipe, problems), stages=stages)
        recipe = with_joined_sources(recipe) if stages and not problems else recipe
        sources = recipe.sources
    else:
        sources = tuple(
            _with_amount(SourceRecipe(path=name), "--cached-dataset", problems) for name in options.cached_dataset
        )
        if options.interleaves:
            problems += [
                f"{source.path}#{source.amount}: leave out the #: --interleave-probs and --mix-strategy tell it"
                for source in sources
                if source.amount is not None
            ]
        stop = options.mix_stop or ("all" if options.mix_strategy == "interleave_over" else "first")
        weighted = sources
        if options.interleaves and options.mix_strategy != "interleave_once":
            pairs = zip(sources, options.interleaving or (1.0,) * len(sources), strict=True)
            weighted = tuple(dataclasses.replace(source, weight=weight) for source, weight in pairs)
        recipe = Recipe(sources=weighted, stop=stop, resample=options.resample, place="--cached-dataset")
    if problems:
        raise ConfigError.from_problems(problems)
    is_mixed = options.mix is not None or options.interleaves or any(source.amount is not None for source in sources)
    return tuple(source.path for source in sources), recipe if is_mixed else None


def portable_recipe(path: str) -> bytes:
    """The YAML of a file of ``--mix`` that could be read, with paths that are the same from every folder."""
    import yaml  # here, because most runs need none of it

    value = parse_yaml(storage.read_bytes(path).decode(errors="replace"))
    for part in (value, *value.get("stages", ())):
        if "sources" in part:
            sources = [{"path": each} if isinstance(each, str) else each for each in part["sources"]]
            part["sources"] = [{**each, "path": storage.absolute(each["path"])} for each in sources]
    return bytes(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, encoding="utf-8"))


def mixture_lines(mixture: Mixture, first: EpochPlan) -> Iterator[str]:
    """Describe the samples of each source in an epoch, for the log."""
    drawn = "drawn anew in every epoch" if mixture.resample else "drawn once (--resample false)"
    yield f"mixture: {mixture.num_drawn:,} samples an epoch of {len(mixture.names)} sources, {drawn}:"
    yield from source_lines(share_figures(counts_in(first, mixture)))


def source_lines(figures: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for each source, from the figures of ``share_figures``."""
    width = max(map(len, figures))
    for name, each in figures.items():
        yield (
            f"  {name:{width}}  {each['num_samples']:,} samples ({each['epochs']:.3g} epochs of it), of samples "
            f"{each['share_of_samples']:.1%}, of tokens {each['share_of_tokens']:.1%}, of target tokens "
            f"{each['share_of_target_tokens']:.1%}"
        )


def counts_in(plan: EpochPlan, mixture: Mixture) -> dict[str, SourceCounts]:
    """Counts of each source in an epoch."""
    return by_name(counts_of_steps(plan.packs, plan.steps, mixture).sum(axis=0), mixture)


def _with_amounts(recipe: Recipe, problems: list[str]) -> Recipe:
    """A recipe with the amounts after the # of its paths parsed."""
    sources = tuple(_with_amount(source, recipe.place, problems) for source in recipe.sources)
    if recipe.has_weights:
        problems += [
            f"{recipe.place}: {source.path}#{source.amount}: weights say how much is taken; leave out the #"
            for source in sources
            if source.amount is not None
        ]
    for source in sources:
        try:
            parse_loss_scale(source.loss_scale or "default")
        except ConfigError as error:
            problems.append(f"{recipe.place}, {source.path}: {error.message}")
    return dataclasses.replace(recipe, sources=sources)


def _with_amount(source: SourceRecipe, place: str, problems: list[str]) -> SourceRecipe:
    """A source with the amount after the # of its path parsed, unless a directory has that name."""
    text = amount_behind(source.path)
    if not text or storage.exists(source.path):
        return source
    try:
        return dataclasses.replace(source, path=source.path[: -len(text) - 1], amount=parse_amount(text))
    except ValueError as error:
        problems.append(f"{place} {source.path}: {error}")
        return source
