"""Translation of a configuration: keys whose meaning depends on other keys, by tool, then all others by the tables."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from packtool.config.compat_names import compat_entries
from packtool.constants import TRAIN_NEWLINE
from packtool.errors import ConfigError
from packtool.translate.names import Translation, as_text, is_true, split_list
from packtool.translate.read import FIELDS, ForeignConfig, load_config_file


def translate(source: ForeignConfig, options: Iterable[str], command: str, environ: Mapping[str, str]) -> Translation:
    """Translate a configuration into the ``options`` of ``packtool COMMAND``; ``environ`` is this process's."""
    translation = Translation(source)
    values = dict(source.values)  # without the keys that are translated
    _translate_variables(translation)
    _replace_deepspeed_file(translation, values)
    variables = {**environ, **translation.environ}  # those in front of the command take precedence
    _BY_TOOL[source.tool](translation, values, variables)
    for name, value in values.items():
        translation.translate_key(name, value)
    translation.add_defaults()
    _add_computed_defaults(translation)
    translation.remove_conflicts()
    translation.restrict(options, command)
    return translation


def _add_computed_defaults(translation: Translation) -> None:
    """Add defaults that depend on the values of other options."""
    tool = translation.source.tool
    if tool == "LLaMA-Factory" and is_true(translation.get("packing")):
        length = int(translation.number("cutoff_len", translation.get("max_length"), 2048))
        translation.values["max_length"] = length - 1
        translation.origins["max_length"] = "cutoff_len, less 1 with packing as in LLaMA-Factory"
    if tool == "LLaMA-Factory" and translation.get("train_type") == "lora":
        rank = int(translation.number("lora_rank", translation.get("lora_rank"), 8))
        translation.default("lora_alpha", 2 * rank, "LoraArguments.lora_alpha: 2 x rank")
    if tool in ("ms-swift", "LLaMA-Factory") and not translation.get("cached_dataset"):  # caches have their targets
        _train_newlines(translation)


def _train_newlines(translation: Translation) -> None:
    """Make the newlines after answers targets, as some templates of ms-swift and LLaMA-Factory do."""
    scale = as_text(translation.get("loss_scale") or "default")
    if "all" in scale.split("+"):
        return
    scale_origin = translation.origins.pop("loss_scale", None)
    origin = f"{scale_origin} and newlines after answers" if scale_origin else "newlines after answers"
    translation.values.pop("loss_scale", None)
    translation.default("loss_scale", f"{scale}+{TRAIN_NEWLINE}", origin)


def _translate_variables(translation: Translation) -> None:
    """Translate variables in front of a command: options that read them, and variables that the new command keeps."""
    options = {each.metadata["env"]: name for name, (each, _) in FIELDS.items() if each.metadata["env"]}
    source = translation.source
    for name, value in source.environ.items():
        entry = next((each for each in compat_entries(name) if each.is_variable), None)
        if name in options:
            translation.set(options[name], value, name)
        elif entry is not None and entry.status == "unsupported":
            translation.refuse(f"{name}={value}", entry.reason)
        elif entry is None or entry.status in ("same", "unneeded"):
            translation.environ[name] = value
        else:
            translation.omitted.append((name, f"use {entry.options}: {entry.reason}".removesuffix(": ")))


def _ms_swift(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Translate ms-swift's keys in ``values`` that the tables cannot translate, and remove them."""
    if translation.source.command == "export" and not is_true(values.get("to_cached_dataset")):
        raise ConfigError(
            "swift export without --to_cached_dataset true writes no cache",
            "packtool merge merges adapters; quantization, uploads and conversions need other tools.",
        )
    # With streaming, DATASET#1000 means the first 1000 rows, else 1000 random rows, as in packtool.
    datasets = split_list(values.get("dataset") or [])
    if is_true(values.get("streaming")) and any(re.search(r"#\d+$", dataset) for dataset in datasets):
        values["dataset"] = [re.sub(r"#(\d+)$", r"#first\1", dataset) for dataset in datasets]
        reason = "it only reads the first rows (#); they are tokenized before training"
        translation.omitted.append(("streaming", reason))
        del values["streaming"]
    if values.get("cached_dataset"):  # paths of folders for each split
        paths = split_list(values.pop("cached_dataset"))
        caches = [path.removesuffix("/").removesuffix("/train") for path in paths]
        translation.set("cached_dataset", caches, "cached_dataset, without /train")
    _ms_swift_batches(translation, values, environ)


def _count(translation: Translation, values: Mapping[str, Any], name: str, default: int = 1) -> int:
    """Return a number of samples, steps or processes, at least 1."""
    return max(1, int(translation.number(name, values.get(name), default)))


def _ms_swift_batches(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Keep ms-swift's number of samples per step, which is at least 16 by default."""
    count = partial(_count, translation, values)
    sizes = [environ.get(name, "") for name in ("NPROC_PER_NODE", "NNODES")]
    num_processes = math.prod(max(int(size), 1) for size in sizes if size.isdigit())
    batch_size = count("per_device_train_batch_size")
    default_steps = math.ceil(16 / batch_size / num_processes)
    accumulation_steps = count("gradient_accumulation_steps", default_steps)
    sequence_parallel_size = count("sequence_parallel_size")
    if sequence_parallel_size > 1 and not is_true(values.get("packing")):
        # packtool needs packs here; ``samples_per_step`` keeps the size of a step.
        for name in ("packing", "per_device_train_batch_size", "gradient_accumulation_steps"):
            values.pop(name, None)
        origin = "per_device_train_batch_size x gradient_accumulation_steps x processes / sequence_parallel_size"
        samples_per_step = batch_size * accumulation_steps * num_processes // sequence_parallel_size
        translation.set("samples_per_step", max(1, samples_per_step), origin)
        translation.set("packing", True, "sequence_parallel_size")
    elif values.get("gradient_accumulation_steps") is None:
        origin = f"16 samples or packs per step, over {num_processes} processes"
        translation.default("gradient_accumulation_steps", default_steps, origin)


def _llama_factory(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Translate LLaMA-Factory's keys in ``values`` that the tables cannot translate, and remove them."""
    max_samples = values.pop("max_samples", None)
    for name, option in (("dataset", "dataset"), ("eval_dataset", "val_dataset")):
        names = split_list(values.pop(name, None) or [])
        if names and max_samples is not None:
            translation.set(option, [f"{each}#first{max_samples}" for each in names], f"{name} and max_samples")
        elif names:
            translation.set(option, names, name)
    _llama_factory_media(translation, values)
    if values.get("finetuning_type") == "freeze":
        _freeze(translation, values)


_QWEN_MODELS = re.compile(r"qwen(2|2_5|3)_(vl|omni)|qwen3_[56]")
# LLaMA-Factory's keys are KIND_BOUND_pixels; the other columns are packtool's option and LLaMA-Factory's default.
_PIXEL_LIMITS = (
    ("image", "min", "min_pixels", 32 * 32),
    ("image", "max", "max_pixels", 768 * 768),
    ("video", "min", "video_min_pixels", 16 * 16),
    ("video", "max", "video_max_pixels", 256 * 256),
)


def _llama_factory_media(translation: Translation, values: dict[str, Any]) -> None:
    """Translate LLaMA-Factory's limits of pixels for Qwen's models, given or default, and remove their keys.

    It resizes media twice: to its limits, then to the processor's. packtool resizes once, so limits are clamped.
    """
    template = str(values.get("template") or translation.source.model_config.get("model_type"))
    if not _QWEN_MODELS.match(template) or not translation.get("dataset"):
        return
    for kind, bound, option, default in _PIXEL_LIMITS:
        name = f"{kind}_{bound}_pixels"
        low, high = _processor_bounds(translation.source.model_directory, kind, template)
        value = values.pop(name, None)
        pixels = min(max(int(translation.number(name, value, default)), low), high)
        if bound == "max" or pixels > low:
            set_option = translation.default if value is None else translation.set
            set_option(option, pixels, name)
        elif value is not None:
            translation.omitted.append((name, "the model's processor enlarges to its own minimum, which is larger"))
    translation.default("fps_min_frames", 2, "an even number of frames")
    if values.get("video_maxlen") is None:
        translation.default("fps_max_frames", 128, "video_maxlen")


def _processor_bounds(folder: Path, kind: str, template: str) -> tuple[int, int]:
    """Return the minimum and maximum pixels of a picture or frame in the settings of a local model's processor."""
    names = ["video_preprocessor_config.json"] * (kind == "video") + ["preprocessor_config.json"]
    path = next((folder / name for name in names if (folder / name).exists()), None)
    settings = load_config_file(str(path)) if path else {}
    size = settings.get("size") or {}
    # The lowest minimum of Qwen's processors is 56 x 56. Omni models read frames of at least 128 tokens.
    low = settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56
    if kind == "video" and "omni" in template:
        low = 128 * (32**2 if template.startswith("qwen3") else 28**2)
    return int(low), int(settings.get("max_pixels") or size.get("longest_edge") or 2**31)


def _freeze(translation: Translation, values: dict[str, Any]) -> None:
    """Translate LLaMA-Factory's training of a few layers: all parameters are frozen whose names match no pattern."""
    layer_pattern = "|".join(map(str, _unfrozen_layers(translation, values)))
    modules = split_list(values.pop("freeze_trainable_modules", None) or "all")
    module_pattern = "" if "all" in modules else "|".join(modules)
    extra_modules = split_list(values.pop("freeze_extra_modules", None) or [])
    patterns = [rf"\.({layer_pattern})\.({module_pattern})", *extra_modules]
    values["finetuning_type"] = "full"
    translation.set("freeze_parameters_ratio", 1, "finetuning_type: freeze")
    translation.set("trainable_parameters_regex", "|".join(patterns), "freeze_trainable_layers and similar")


def _unfrozen_layers(translation: Translation, values: dict[str, Any]) -> range:
    """Return the numbers of the trained layers: the last, the first if negative, or those that LLaMA Pro has added."""
    name = "freeze_trainable_layers"
    count = int(translation.number(name, values.pop(name, None), 2))
    layers = range(translation.source.model_config.get("num_hidden_layers", 0))
    if not layers:  # not local, or with towers, whose layers have the same numbers
        reason = "its layers are unknown: give full, --freeze-parameters-ratio 1 and --trainable-parameters-regex"
        translation.refuse("finetuning_type: freeze", reason)
    if not is_true(values.pop("use_llama_pro", False)):
        return layers[-count:] if count > 0 else layers[:-count]
    if count < 1 or len(layers) % count:
        translation.refuse(f"{name}: {count}", f"it does not divide the model's {len(layers)} layers; change it")
    group_size = max(len(layers) // max(count, 1), 1)  # the last layer of each group was added
    return layers[group_size - 1 :: group_size]


# Keys of a data set with names of columns, and packtool's names of these columns.
_COLUMNS = {f"field_{name}": name for name in ("messages", "instruction", "input", "output", "system", "tools")}
_COLUMNS |= {"field": "text", "text_column": "text"}


def _axolotl(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Translate keys in ``values``, and remove them, or replace their values by some that the tables translate."""
    for plugin in split_list(values.pop("plugins", None) or []):
        translation.translate_key("plugins", plugin)
    for name in ("datasets", "pretraining_dataset", "test_datasets"):
        _axolotl_datasets(translation, name, values.pop(name, None))
    for name in ("qat", "model_config"):
        if isinstance(values.get(name), dict):
            translation.translate_object(name, values.pop(name))
    _axolotl_sizes(translation, values)
    _axolotl_fsdp(translation, values)
    _axolotl_embeddings(translation, values)


def _axolotl_sizes(translation: Translation, values: dict[str, Any]) -> None:
    """Translate ``batch_size``, the samples per step of a process, and processes that divide each matrix."""
    count = partial(_count, translation, values)
    if values.get("batch_size") is not None and not values.get("gradient_accumulation_steps"):
        accumulation_steps = max(1, count("batch_size") // count("micro_batch_size"))
        translation.set("gradient_accumulation_steps", accumulation_steps, "batch_size / micro_batch_size")
    values.pop("batch_size", None)
    if count("tensor_parallel_size") > 1:  # the same batches as with processes that divide sequences
        values["tensor_parallel_size"] = count("tensor_parallel_size") * count("context_parallel_size")
        values.pop("context_parallel_size", None)


def _axolotl_fsdp(translation: Translation, values: dict[str, Any]) -> None:
    """Translate ``fsdp_config`` into the options of ``--fsdp``, which expert parallelism does not need."""
    config = values.get("fsdp_config")
    num_expert_ranks = translation.number("expert_parallel_size", values.get("expert_parallel_size"), 1)
    if not isinstance(config, dict) or num_expert_ranks >= 2:
        return
    del values["fsdp_config"]
    shard = "full_shard" if is_true(config.get("reshard_after_forward", True)) else "shard_grad_op"
    options = split_list(values.get("fsdp") or [shard])
    if is_true(config.get("offload_params")) or is_true(config.get("fsdp_offload_params")):
        options.append("offload")
    if config:
        values["fsdp"] = options


def _axolotl_embeddings(translation: Translation, values: dict[str, Any]) -> None:
    """Refuse embeddings that would grow: those of a local model whose number of rows is no multiple of 32."""
    name = "resize_token_embeddings_to_32x"
    config = translation.source.model_config
    text_config = config.get("text_config")
    size = (text_config if isinstance(text_config, dict) else config).get("vocab_size")
    if is_true(values.get(name)) and isinstance(size, int) and size % 32:
        del values[name]
        translation.refuse(name, f"it adds {-size % 32} rows to the embeddings, packtool adds none; remove it")


def _axolotl_datasets(translation: Translation, name: str, value: Any) -> None:
    """Translate key ``datasets`` or similar: a path, or a list of objects with ``path``, ``type`` and column names."""
    entries = [{"path": value}] if isinstance(value, str) else value or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        translation.refuse(name, "expected a list of objects with path and type")
        return
    paths = []
    for entry in entries:
        paths += _dataset_arguments(translation, name, entry)
        translation.translate_object("datasets", entry)
    if paths:
        translation.set("val_dataset" if name == "test_datasets" else "dataset", paths, name)
    renamed_columns = _renamed_columns(entries)
    if renamed_columns:
        translation.set("columns", renamed_columns, f"{name}, field_*")


def _renamed_columns(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return values of ``--columns``, such as ``text=body``: all names of each column that any data set renames."""
    names_by_column: dict[str, set[str]] = {}
    for entry in entries:
        for key in _COLUMNS.keys() & entry.keys():
            column = _COLUMNS[key]
            names_by_column.setdefault(column, set()).add(entry[key] or column)
    pairs = []
    for column, names in sorted(names_by_column.items()):
        if names - {column, "conversations"}:
            pairs += [f"{column}={each}" for each in sorted(names)]
    return pairs


def _dataset_arguments(translation: Translation, name: str, entry: Mapping[str, Any]) -> list[str]:
    """Return the values of ``--dataset`` for an entry: files, or a hub id with subset, split and number of rows."""
    path, split = str(entry.get("path", "")), str(entry.get("split") or "")
    match = re.fullmatch(r"(\w*)(?:\[:(\d+%?)\])?", split)
    if match is None:
        translation.refuse(f"{name}, split: {split}", "only the first rows can be selected, as in train[:20%]")
        return []
    amount = f"#first{match[2]}" if match[2] else ""
    files = [file for file in split_list(entry.get("data_files") or []) if os.path.exists(file)]
    if files:
        return [f"{file}{amount}" for file in files]
    is_local = os.path.exists(path) or path.endswith((".json", ".jsonl", ".parquet", ".csv", ".txt"))
    selection = "" if is_local else f":{entry.get('name') or ''}:{match[1]}".rstrip(":")
    return [f"{path}{selection}{amount}"]


def _trl(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Translate TRL's data sets, and remove their keys: ``dataset_name`` and similar, or the list ``datasets``."""
    subset = str(values.pop("dataset_config", None) or "")
    train_split = str(values.pop("dataset_train_split", None) or "train")
    test_split = str(values.pop("dataset_test_split", None) or "test")
    path = values.pop("dataset_name", None)
    datasets = values.pop("datasets", None) or []
    if not path:
        _trl_mixture(translation, datasets)
        return
    rows = _trl_rows(path, subset, train_split)
    translation.set("dataset", rows, "dataset_name")
    _trl_completions(translation, rows)
    if as_text(values.get("eval_strategy") or "no") != "no":
        test_rows = _trl_rows(path, subset, test_split)
        if test_rows:
            translation.set("val_dataset", test_rows, "dataset_name and dataset_test_split")


def _trl_mixture(translation: Translation, datasets: Any) -> None:
    """Translate the list ``datasets``, whose objects have a path and perhaps a subset and a split."""
    if not isinstance(datasets, list) or not all(isinstance(each, dict) and each.get("path") for each in datasets):
        translation.refuse("datasets", "expected a list of objects with path")
        return
    rows = []
    for entry in datasets:
        rows += _trl_rows(entry["path"], entry.get("name") or "", entry.get("split") or "train")
        translation.translate_object("datasets", entry)
    if rows:
        translation.set("dataset", rows, "datasets")


def _trl_completions(translation: Translation, paths: list[str]) -> None:
    """Set the loss and the format of prompts if the rows of local JSON files have prompts and completions."""
    files = [path for path in paths[:1] if path.endswith((".json", ".jsonl")) and os.path.exists(path)]
    if not files:
        return
    with open(files[0], encoding="utf-8", errors="replace") as file:
        first_rows = file.read(1 << 16)
    if '"prompt"' in first_rows and '"completion"' in first_rows:
        translation.set("loss_scale", "default", "dataset_name: only completions are trained")
        if re.search(r'"prompt"\s*:\s*"', first_rows):
            translation.set("prompt_format", "plain", "dataset_name: prompts are text, not messages")


def _trl_rows(path: Any, subset: Any, split: Any) -> list[str]:
    """Return the values of ``--dataset`` for a split: a local file, files of a directory, or a hub id."""
    name = str(path)
    if not os.path.exists(name):
        return [f"{name}:{subset}:{split}".removesuffix("::train")]
    # As in the datasets library, names of files begin with that of their split.
    files = [str(file) for file in sorted(Path(name).rglob(f"{split}*")) if file.is_file()]
    return files or ([name] if split == "train" else [])


def _replace_deepspeed_file(translation: Translation, values: dict[str, Any]) -> None:
    """Replace the path of a missing DeepSpeed file by the stage in its name, as in ``ds_z3_config.json``."""
    path = values.get("deepspeed")
    if not isinstance(path, str) or not path.endswith(".json") or os.path.exists(path):
        return
    name = os.path.basename(path)
    match = re.search(r"z(?:ero)?_?([0-3])", name)
    if match:
        is_offloaded = "offload" in name and match[1] in "23"
        del values["deepspeed"]
        stage = f"zero{match[1]}" + ("_offload" if is_offloaded else "")
        translation.set("deepspeed", stage, f"deepspeed: {name}, which is not on this machine")


_BY_TOOL: dict[str, Callable[[Translation, dict[str, Any], Mapping[str, str]], None]] = {
    "ms-swift": _ms_swift,
    "LLaMA-Factory": _llama_factory,
    "axolotl": _axolotl,
    "TRL": _trl,
}
