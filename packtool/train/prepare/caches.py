"""Caches of a run: named by options or by a recipe, and checked against its model and options.

An option may only repeat the settings that a cache's manifest records.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import count
from typing import Any

from packtool import storage
from packtool.cache.local import LocalCopies
from packtool.cache.manifest import Manifest
from packtool.cache.plan_file import SavedPlan
from packtool.cache.reader import CacheReader
from packtool.config.commands import EvalConfig, VerifyConfig
from packtool.config.data import BOX_SETTINGS, MISTRAL_COMMON, EncodeSpec, MediaOptions, set_kwargs
from packtool.config.mixture import (
    MixOptions,
    Recipe,
    SourceRecipe,
    amount_suffix,
    parse_amount,
    parse_recipe,
    unify_sources,
)
from packtool.config.plan import PlanConfig
from packtool.config.settings import flag, load_json, parse_yaml
from packtool.config.train import TrainConfig
from packtool.constants import VAL_SPLIT
from packtool.encode.families import ImageLimits, media_encoding, text_config_of
from packtool.encode.loss_scale import parse_loss_scale
from packtool.encode.model_files import ModelFiles, read_template
from packtool.encode.row_parts import expansion_of
from packtool.errors import ConfigError, MismatchError, UnsupportedModelError
from packtool.planning.epoch import EpochPlan
from packtool.planning.mixture import Mixture, SourceCounts, by_name, counts_of_steps
from packtool.planning.pack_plan import PackPlan
from packtool.rows.forms.segments import prompt_format_name


def named_sources(options: MixOptions) -> tuple[tuple[str, ...], Recipe | None]:
    """The directories of all caches, and the recipe of their mixture; None if an epoch has every sample once."""
    problems: list[str] = []
    recipe = _recipe_of_caches(options, problems) if options.mix is None else _recipe_of_file(options, problems)
    if problems:
        raise ConfigError.from_problems(problems)
    directories = tuple(source.path for source in recipe.sources)
    has_amounts = any(source.amount is not None for source in recipe.sources)
    is_mixture = options.mix is not None or options.interleaves or has_amounts
    return directories, recipe if is_mixture else None


def _recipe_of_file(options: MixOptions, problems: list[str]) -> Recipe:
    """Read the recipe in the file of ``--mix``; mistakes are added to ``problems``."""
    path = str(options.mix)
    if not storage.exists(path):
        raise ConfigError(f"--mix {path}: there is no such file", "Give a YAML file with sources.")
    recipe = parse_recipe(storage.read_bytes(path).decode(errors="replace"), path, options)
    stages = tuple(_with_amounts(stage, problems) for stage in recipe.stages)
    recipe = dataclasses.replace(_with_amounts(recipe, problems), stages=stages)
    return unify_sources(recipe) if stages and not problems else recipe


def _recipe_of_caches(options: MixOptions, problems: list[str]) -> Recipe:
    """The recipe of the caches of ``--cached-dataset``; mistakes are added to ``problems``."""
    sources = [_with_amount(SourceRecipe(path=name), "--cached-dataset", problems) for name in options.cached_dataset]
    if options.interleaves:
        problems += [
            f"{source.path}#{source.amount}: amounts after # cannot be combined with --interleave-probs or "
            "--mix-strategy; remove the amount"
            for source in sources
            if source.amount is not None
        ]
    if options.interleaves and options.mix_strategy != "interleave_once":
        weights = options.interleaving or (1.0,) * len(sources)
        sources = [dataclasses.replace(source, weight=weight) for source, weight in zip(sources, weights, strict=True)]
    stop = options.mix_stop or ("all" if options.mix_strategy == "interleave_over" else "first")
    return Recipe(sources=tuple(sources), stop=stop, resample=options.resample, place="--cached-dataset")


def portable_recipe(path: str) -> bytes:
    """The YAML of a valid file of ``--mix``, with absolute paths."""
    import yaml  # here, because most runs need none of it

    value = parse_yaml(storage.read_bytes(path).decode(errors="replace"))
    for level in (value, *value.get("stages", ())):
        if "sources" in level:
            sources = [{"path": source} if isinstance(source, str) else source for source in level["sources"]]
            level["sources"] = [{**source, "path": storage.absolute(source["path"])} for source in sources]
    return bytes(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, encoding="utf-8"))


def source_lines(figures: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """A line for each source of a mixture; ``figures`` are those of ``share_figures``."""
    width = max(map(len, figures))
    for name, each in figures.items():
        yield (
            f"  {name:{width}}  {each['num_samples']:,} samples ({each['epochs']:.3g} epochs of it): "
            f"{each['share_of_samples']:.1%} of samples, {each['share_of_tokens']:.1%} of tokens, "
            f"{each['share_of_target_tokens']:.1%} of target tokens"
        )


def counts_in(plan: EpochPlan, mixture: Mixture) -> dict[str, SourceCounts]:
    """Samples, tokens and target tokens of each source of a mixture in an epoch."""
    return by_name(counts_of_steps(plan.packs, plan.steps, mixture).sum(axis=0), mixture)


def _with_amounts(recipe: Recipe, problems: list[str]) -> Recipe:
    """A recipe with the amounts after # in its paths parsed; mistakes are added to ``problems``."""
    sources = tuple(_with_amount(source, recipe.place, problems) for source in recipe.sources)
    if recipe.has_weights:
        problems += [
            f"{recipe.place}: {source.path}#{source.amount}: amounts after # cannot be combined with weights; remove "
            "the amount"
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
    """A source with the amount after # in its path parsed, unless a directory has that name; as ``_with_amounts``."""
    text = amount_suffix(source.path)
    if not text or storage.exists(source.path):
        return source
    try:
        return dataclasses.replace(source, path=source.path[: -len(text) - 1], amount=parse_amount(text))
    except ValueError as error:
        problems.append(f"{place} {source.path}: {error}")
        return source


_MEDIA_NAMES = frozenset(field.name for field in fields(MediaOptions))


def open_caches(directories: Sequence[str], config: TrainConfig | VerifyConfig, files: ModelFiles) -> CacheReader:
    """Open all caches of a run, and check that they fit its model and options."""
    reader = CacheReader.open(directories, copies=LocalCopies.of(config))
    for directory, manifest in zip(reader.directories, reader.manifests, strict=True):
        check_model(directory, manifest, files, config)
        if isinstance(config, VerifyConfig):
            continue
        check_limits(directory, manifest, config)
        check_video_and_audio(directory, manifest, config, files)
        check_row_options(directory, manifest, config, with_cache_template(reader, files))
    if isinstance(config, VerifyConfig):
        refuse_stretched_positions(files.config, int(reader.index.length.max(initial=0)))
    elif config.removes_padding:
        lengths = reader.index.length
        trained = lengths[lengths <= (config.max_length or lengths.max(initial=0))]
        refuse_stretched_positions(files.config, int(trained.max(initial=0)))
    return reader


def refuse_stretched_positions(config: Mapping[str, Any], length: int) -> None:
    """Check that a model can be trained on packs; raise an UnsupportedModelError if its position encoding prevents it.

    transformers' LongRoPE and dynamic NTK use other rotary frequencies for an entire sequence if one of its positions
    is beyond the original length of the model. In a pack, the longest sample would change the others.

    Args:
        config: the model's ``config.json``.
        length: tokens of the longest sample.
    """
    text_config = text_config_of(config)
    rope = text_config.get("rope_parameters") or text_config.get("rope_scaling") or {}
    rope_by_layer_type = [settings for settings in rope.values() if isinstance(settings, Mapping)]
    for settings in (rope, *rope_by_layer_type):
        rope_type = settings.get("rope_type", settings.get("type"))
        if rope_type not in ("longrope", "su", "dynamic"):
            continue
        default_length = (
            text_config.get("original_max_position_embeddings") or text_config.get("max_position_embeddings") or 0
        )
        original_length = int(settings.get("original_max_position_embeddings") or default_length)
        if length > original_length:
            raise UnsupportedModelError(
                f"the position encoding {rope_type} of this model depends on the longest sample of a pack, if samples "
                f"have more than {original_length:,} tokens",
                f"Limit samples with --max-length {original_length} of packtool export or train, or train with "
                "--packing false --per-device-train-batch-size 1.",
            )


def check_sources(reader: CacheReader, recipe: Recipe, files: ModelFiles) -> None:
    """Check that a recipe's limits on media are those of the caches' export."""
    for directory, manifest, source in zip(reader.directories, reader.manifests, recipe.sources, strict=True):
        limits = MediaOptions(**source.media_limits)
        try:
            check_limits(directory, manifest, limits)
            check_video_and_audio(directory, manifest, limits, files)
        except MismatchError as error:
            raise MismatchError(f"{recipe.place}: {error.message}", error.remedy) from error


def with_cache_template(reader: CacheReader, files: ModelFiles) -> ModelFiles:
    """Return the files of a model with the ``--chat-template`` of the caches' export, if it still exists unchanged."""
    identity = reader.manifests[0].identity
    path = identity.spec.get("chat_template")
    if not path or not (path == MISTRAL_COMMON or os.path.isfile(path)):
        return files
    template = read_template(path, files.directory)
    with_template = dataclasses.replace(files, chat_template=template, other_template=template)
    return with_template if with_template.template_hash == identity.template_hash else files


def check_model(
    directory: str, manifest: Manifest, files: ModelFiles, config: TrainConfig | EvalConfig | VerifyConfig
) -> None:
    """Check that a cache was exported with this model's type, tokenizer and template."""
    identity = manifest.identity
    pairs = {
        "model type": (identity.model_type, files.model_type),
        "tokenizer": (identity.tokenizer_hash, files.tokenizer_hash),
    }
    if not identity.spec.get("chat_template"):  # a template of --chat-template is not the model's
        pairs["chat template"] = (identity.template_hash, files.template_hash)
    if differences := _list_differences(pairs, "in the cache", "in the model"):
        raise MismatchError(
            f"{directory} was exported for another model than {config.model}:\n{differences}",
            "Use the model it was exported for, or export for this model into another directory:\n"
            f"  {export_command(directory, manifest, model=config.model)}",
        )


def _list_differences(pairs: dict[str, tuple[Any, Any]], saved_place: str, run_place: str) -> str:
    """One line for each pair of a saved value and this run's that are not equal."""
    return "\n".join(
        f"  - {name}: {saved} {saved_place}, {current} {run_place}"
        for name, (saved, current) in pairs.items()
        if saved != current
    )


def check_limits(directory: str, manifest: Manifest, config: MediaOptions) -> None:
    """Check that limits on images, from options or the environment, are those of the export."""
    limits = manifest.identity.media_limits.image
    if limits is None:
        return
    for bound, word, exported, requested in (
        ("max", "most", limits.max_pixels, _pixels(config.max_pixels, config.image_max_token_num, limits)),
        ("min", "least", limits.min_pixels, _pixels(config.min_pixels, config.image_min_token_num, limits)),
    ):
        if requested is not None and requested != exported:
            raise MismatchError(
                f"{directory} was exported with images of at {word} {exported} pixels, but this run sets {requested} "
                f"(by --{bound}-pixels or --image-{bound}-token-num, by a source in --mix, or by the environment "
                f"variable {bound.upper()}_PIXELS or IMAGE_{bound.upper()}_TOKEN_NUM)",
                "Remove that setting to use the cache's, or export into another directory:\n"
                f"  {export_command(directory, manifest, **{f'{bound}_pixels': requested})}",
            )


def check_video_and_audio(directory: str, manifest: Manifest, config: MediaOptions, files: ModelFiles) -> None:
    """Check that the limits on videos and audio of this run are those that a cache was exported with.

    Only effective limits count: different options may mean the same limits for a model. Raises a MismatchError.
    """
    exported_limits = manifest.identity.media_limits
    if exported_limits.video is None:
        return  # a model without videos has no audio either
    exported_options = {name: value for name, value in manifest.identity.spec.items() if name in _MEDIA_NAMES}
    changed_options = _changed_media_options(exported_options, config)
    if not changed_options:
        return
    run_options = MediaOptions(**{**exported_options, **changed_options})
    run_limits = media_encoding(files, run_options).limits
    if run_limits == exported_limits:
        return

    differences = []
    for name, value in changed_options.items():
        exported = exported_options.get(name) or "unset"
        differences.append(f"{name.upper()} {exported} in the cache, {value} in this run")  # as environment variables
    raise MismatchError(
        f"{directory} was exported with other limits on videos or audio: {', '.join(differences)}",
        "Remove that setting to use the cache's, or export into another directory:\n"
        f"  {export_command(directory, manifest, **changed_options)}",
    )


def _changed_media_options(exported: Mapping[str, Any], config: MediaOptions) -> dict[str, Any]:
    """The options of a run on videos and audio that are set and differ from those of the export, by name."""
    changed = {}
    for setting in fields(MediaOptions):
        requested = getattr(config, setting.name)
        is_of_media = setting.metadata["panel"] == "Video and audio"
        if is_of_media and requested is not None and requested != exported.get(setting.name):
            changed[setting.name] = requested
    return changed


def check_row_options(directory: str, manifest: Manifest, config: TrainConfig, files: ModelFiles) -> None:
    """Check that options which the export applied to rows, such as truncation, are the same."""
    if config.max_length is not None and config.max_length > manifest.max_length and manifest.num_shortened:
        raise MismatchError(
            f"--max-length {config.max_length} is larger than the {manifest.max_length} tokens that {directory} was "
            f"exported with, and that export truncated or dropped {manifest.num_shortened:,} rows for their length",
            f"Use --max-length {manifest.max_length}, or export into another directory:\n"
            f"  {export_command(directory, manifest, max_length=config.max_length)}",
        )
    for name, (exported, requested) in _row_option_pairs(manifest, config, files).items():
        if requested is not None and requested != exported:
            exported_with = f"without {flag(name)}" if exported is None else f"with {flag(name)} {exported}"
            raise MismatchError(
                f"{directory} was exported {exported_with}, but this run sets {requested}",
                "Leave the option out, or export into another directory:\n"
                f"  {export_command(directory, manifest, **{name: requested})}",
            )


def _row_option_pairs(manifest: Manifest, config: TrainConfig, files: ModelFiles) -> dict[str, tuple[Any, Any]]:
    """The values of options on rows, by name: at export, and in this run, where None stands for an unset option."""
    spec = manifest.identity.spec
    exported_kwargs = spec.get("chat_template_kwargs")
    expand_turns = None
    if config.expand_turns:
        # The value "auto" depends on the template, which was rendered with the arguments of the export.
        exported_files = dataclasses.replace(files, chat_template_kwargs=exported_kwargs or {})
        expand_turns = expansion_of(config.expand_turns, exported_files)
    pairs = {
        name: (spec.get(name), getattr(config, name))
        for name in ("truncation_strategy", "media_overflow", *BOX_SETTINGS)
    }
    pairs["chat_template_kwargs"] = (exported_kwargs, set_kwargs(config.chat_template_kwargs) or None)
    pairs["min_length"] = (spec.get("min_length", 0), config.min_length)
    pairs["expand_turns"] = (spec.get("expand_turns", "false"), expand_turns)
    return pairs


def packs_of(saved: SavedPlan) -> PackPlan:
    """The packs of a saved plan."""
    return PackPlan(saved.samples, saved.offsets, saved.lengths, saved.capacity, saved.shared_tokens)


def check_plan(saved: SavedPlan, config: TrainConfig, reader: CacheReader) -> None:
    """Check that the packs of ``--plan FILE`` are intact and fit the caches and options of a run.

    ``saved`` is the content of the file. Options of the run that are not set take the values of the plan. Raises a
    MismatchError with all differences.
    """
    path = config.plan
    recorded_fingerprint = saved.plan
    if packs_of(saved).fingerprint != recorded_fingerprint:
        raise MismatchError(f"--plan {path} is damaged: its packs differ from those that were saved", "Save it again.")

    plan_shares_prefixes = "false" if saved.shared_tokens is None else "true"
    run_shares_prefixes = plan_shares_prefixes if config.share_prefix == "auto" else config.share_prefix
    values_of_plan_and_run = {
        "caches": (saved.cache, reader.fingerprint),
        "samples in the caches": (saved.num_cached, len(reader)),
        "--packing-length": (saved.capacity, config.packing_length or saved.capacity),
        "--max-length": (saved.max_length, config.max_length or saved.max_length),
        "--share-prefix": (plan_shares_prefixes, run_shares_prefixes),
    }
    differences = _list_differences(values_of_plan_and_run, "in the plan", "in this run")
    if differences:
        raise MismatchError(
            f"--plan {path} does not fit this run:\n{differences}",
            f"Leave --plan out, or make another plan:\n  {_plan_command(saved, config)}",
        )
    if plan_shares_prefixes == "true" and config.sharing_conflicts:
        raise MismatchError(
            f"--plan {path} shares prefixes, which cannot be combined with {config.sharing_conflicts[0]}",
            "Leave that option out, or make the plan again with --share-prefix false.",
        )


def _plan_command(saved: SavedPlan, config: TrainConfig) -> str:
    """The command that saves another plan, which fits this run, beside a saved one."""
    command = ["packtool", "plan", *config.cached_dataset]
    command += ["--packing-length", str(config.packing_length or saved.capacity)]
    if config.share_prefix != "auto":
        command += ["--share-prefix", config.share_prefix]
    command += ["--save", _unused(str(config.plan))]
    return shlex.join(command)


def repair_command(directory: str, manifest: Manifest) -> str:
    """The command that repairs a cache; its paths are absolute."""
    return shlex.join([*_export_words(manifest, {}), "--output-dir", storage.absolute(directory), "--repair"])


def export_command(directory: str, manifest: Manifest, **changes: object) -> str:
    """The command that exports the rows of a cache with changed settings into a new directory; paths are absolute."""
    return shlex.join([*_export_words(manifest, changes), "--output-dir", _unused(storage.absolute(directory))])


def _export_words(manifest: Manifest, changes: Mapping[str, object]) -> list[str]:
    spec = {**manifest.identity.spec, **changes}
    # Pixels and tokens set the same limit; the change wins.
    for bound in ("max", "min"):
        if f"{bound}_pixels" in changes:
            spec.pop(f"image_{bound}_token_num", None)
    words = ["packtool", "export", *_dataset_words(manifest)]
    defaults = {field.name: field.default for field in fields(EncodeSpec)}
    for name, value in spec.items():
        if value is not None and (name in changes or value != defaults.get(name)):
            is_json = isinstance(value, (bool, dict))
            words += ["--" + name.replace("_", "-"), json.dumps(value) if is_json else str(value)]
    if manifest.identity.split_dataset_ratio:
        words += ["--split-dataset-ratio", str(manifest.identity.split_dataset_ratio)]
    if manifest.identity.rows_per_shard:
        words += ["--rows-per-shard", str(manifest.identity.rows_per_shard)]
    return [*words, "--seed", str(manifest.identity.seed)]


def _unused(path: str) -> str:
    """A similar path that does not exist yet: ``cache-2`` for ``cache``, ``a-2.plan`` for ``a.plan``."""
    stem, suffix = os.path.splitext(path.rstrip("/"))
    return next(name for number in count(2) if not storage.exists(name := f"{stem}-{number}{suffix}"))


def _dataset_words(manifest: Manifest) -> list[str]:
    """The command-line words that select the rows of an export: files with amounts, columns, and access to media."""
    train_paths: list[str] = []
    val_paths: list[str] = []
    for source in manifest.sources:
        settings = load_json(source.settings or "{}")
        paths = val_paths if settings.get("split") == VAL_SPLIT else train_paths
        paths.append(source.path + _amount_suffix(settings))
    words = ["--dataset", *train_paths] if train_paths else []
    words += ["--val-dataset", *val_paths] if val_paths else []
    return words + _reading_words(load_json(manifest.sources[0].settings or "{}"))


def _reading_words(settings: Mapping[str, Any]) -> list[str]:
    """The command-line words of columns and access to media, which are those of the first file of an export."""
    words = []
    if settings.get("columns"):
        words += ["--columns", *(f"{name}={column}" for name, column in settings["columns"])]
    if settings.get("prompt_format"):
        words += ["--prompt-format", prompt_format_name(settings["prompt_format"])]
    root = settings.get("media_root")
    if root:
        # A relative path may not exist from here; the user must correct it then.
        words += ["--media-root", storage.absolute(root) if storage.exists(root) else root]
    for name in ("system", "media_access", "max_media_bytes"):
        if settings.get(name):
            words += [flag(name), str(settings[name])]
    return words


def _amount_suffix(settings: Mapping[str, Any]) -> str:
    """The amount of a file's rows that was exported, as written after its path: ``#500``, ``#2x``, ``#first10%``."""
    times, number = settings.get("times_sampled"), settings.get("num_sampled")
    if not times and not number:
        return ""  # all rows
    if settings.get("takes_first"):
        return f"#first{100 * times:g}%" if times else f"#first{number}"
    return f"#{times:g}x" if times else f"#{number}"


def _pixels(pixels: int | None, tokens: int | None, limits: ImageLimits) -> int | None:
    """A limit in pixels, given in pixels or in tokens; None if neither is given."""
    if pixels is not None:
        return pixels
    return None if tokens is None else tokens * limits.pixels_per_token


def stage_problems(recipe: Recipe, config: PlanConfig | TrainConfig) -> list[str]:
    """Return a message for each conflict between the stages of a recipe and the options of a run.

    Stages are trained one after the other; ``until`` says where a stage ends, in steps or as a share of the run.
    """
    problems = []
    if config.schedule == "skrull":
        problems.append(
            f"{recipe.place}, stages: they cannot be combined with --schedule skrull; leave out one of them"
        )
    previous_stop = 0  # steps that are done when the previous stage ends
    for number, stage in enumerate(recipe.stages):
        key = f"{recipe.place}, stages[{number}]"  # for messages
        problems += _pack_problems(key, stage, config)
        if config.max_steps is not None:
            is_last = number == len(recipe.stages) - 1
            problems += _end_problems(key, stage, config.max_steps, previous_stop, is_last=is_last)
            if stage.end_text:
                previous_stop = stage.stop_step(config.max_steps)
        elif stage.until is not None:
            problems.append(
                f"{key}.until: {stage.until:,} steps need --max-steps: add it, or give a share of the run (until: 30%)"
            )
    return problems


def _end_problems(key: str, stage: Recipe, max_steps: int, previous_stop: int, *, is_last: bool) -> list[str]:
    """The message that a stage ends before it begins, or has no end; ``key`` names the stage in the recipe."""
    if is_last:
        if previous_stop < max_steps:
            return []
        return [f"{key}: the run ends after step {max_steps:,} (--max-steps), before this stage begins"]
    if not stage.end_text:
        return [f"{key}.until is missing: with --max-steps, every stage but the last needs its end"]
    stop = stage.stop_step(max_steps)
    if stop > previous_stop:
        return []
    return [
        f"{key}.until: {stage.end_text} is step {stop:,}, not after step {previous_stop:,}, where the previous stage "
        "ends"
    ]


def _pack_problems(key: str, stage: Recipe, config: PlanConfig | TrainConfig) -> list[str]:
    """Conflicts of the packing options of a stage with those of the run; ``key`` names the stage in the recipe."""
    problems = []
    if stage.packing_length is not None and not config.packing:
        problems.append(f"{key}.packing_length: it cannot be combined with --packing false; leave out one of them")
    size = stage.sequence_parallel_size
    num_sharing = config.sequence_parallel_ranks  # processes that share a sequence
    if size is not None and num_sharing % size != 0:
        problems.append(
            f"{key}.sequence_parallel_size: {size} does not divide the {num_sharing} processes of the run that "
            "share a sequence: give --sequence-parallel-size the largest size, and each stage a divisor of it"
        )
    return problems
