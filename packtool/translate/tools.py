"""Translation of a configuration: keys whose meaning depends on other keys, by tool, then all others by the tables."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from packtool.config.compat_names import compat_entries
from packtool.config.data import ExportConfig
from packtool.config.train import TrainConfig
from packtool.constants import TRAIN_NEWLINE
from packtool.errors import ConfigError
from packtool.translate.axolotl import translate_axolotl
from packtool.translate.names import _FIELDS, Translation, as_text, is_true, split_list, translate_ratio
from packtool.translate.read import ForeignConfig, load_config_file, local_model_config

_NEWLINE_TOOLS = ("ms-swift", "LLaMA-Factory")
"""Tools whose templates make the newline after ``<|im_end|>`` a target."""
_PROCESSES = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")


def translate(source: ForeignConfig, options: Iterable[str], command: str, environ: Mapping[str, str]) -> Translation:
    """Translate a configuration into the ``options`` of ``packtool COMMAND``.

    ``environ`` are the variables of this process, which say how many processes train.
    """
    translation = Translation(source)
    values = dict(source.values)  # each step below removes the keys that it has translated
    _translate_variables(translation)
    warmup = translation.number("warmup_steps", values.get("warmup_steps"), 0)
    if 0 < warmup < 1:  # a fraction of the steps, as in transformers
        translation.set("warmup_ratio", warmup, "warmup_steps")
        del values["warmup_steps"]
    _deepspeed(translation, values)
    _galore_and_apollo(translation, values)
    translate_keys_of_tool = _BY_TOOL[source.tool]
    variables = {**environ, **translation.environ}  # those in front of the command take precedence
    translate_keys_of_tool(translation, values, variables)
    for name, value in values.items():
        translation.translate_key(name, value)
    translation.add_defaults()
    _resolve_conflicts(translation)
    translation.restrict(options, command)
    return translation


def _resolve_conflicts(translation: Translation) -> None:
    """Change or remove options that depend on the final values of other options."""
    _default_newline_targets(translation)
    num_ranks = translation.number("sequence_parallel_size", translation.get("sequence_parallel_size"), 1)
    if num_ranks > 1 and translation.values.get("attn_impl") not in (None, "auto", "sdpa", "varlen"):
        translation.remove("attn_impl", "sequence parallelism has its own kernels")
    if is_true(translation.get("torch_compile")) and is_true(translation.get("use_liger_kernel")):
        translation.remove("use_liger_kernel", "torch_compile fuses the same operations")
    if is_true(translation.get("streaming")) and not is_true(translation.get("packing")):
        translation.remove("streaming", "streaming needs packs; rows are tokenized before training")
    if is_true(translation.get("streaming")) and translation.values.get("save_strategy") == "epoch":
        reason = "streaming does not know where an epoch ends; every --save-steps steps and the last one are saved"
        translation.origins["save_strategy"] += ": epoch"
        translation.remove("save_strategy", reason)
    if translation.tool == "LLaMA-Factory" and translation.get("train_type") == "lora":
        rank = int(translation.number("lora_rank", translation.get("lora_rank"), 8))
        translation.default("lora_alpha", 2 * rank, "LoraArguments.lora_alpha: 2 x rank")


def _default_newline_targets(translation: Translation) -> None:
    """Make newlines after answers targets where the tool does so, unless all tokens are, or a cache decides."""
    scale = as_text(translation.get("loss_scale") or "default")
    trains_everything = "all" in scale.split("+")
    if translation.tool not in _NEWLINE_TOOLS or trains_everything or translation.get("cached_dataset"):
        return
    scale_origin = translation.origins.get("loss_scale")
    origin = f"{scale_origin} and newlines after answers" if scale_origin else "newlines after answers"
    translation.values.pop("loss_scale", None)
    translation.default("loss_scale", f"{scale}+{TRAIN_NEWLINE}", origin)


def _translate_variables(translation: Translation) -> None:
    """Translate variables in front of a command: options that read them, and variables that the new command keeps."""
    options = {each.metadata["env"]: name for name, (each, _) in _FIELDS.items() if each.metadata["env"]}
    source = translation.source
    for name, value in source.environ.items():
        entry = next((each for each in compat_entries(name) if each.is_variable), None)
        if name in options:
            translation.set(options[name], value, name)
        elif entry is not None and entry.status == "unsupported":
            translation.refuse(f"{name}={value}", entry.reason)
        elif entry is None or entry.status in ("same", "unneeded") or entry.name in _PROCESSES:
            translation.environ[name] = value
        else:
            translation.omit(name, f"use {entry.options}: {entry.reason}".removesuffix(": "))
    if source.num_processes is not None and source.num_processes > 1:
        translation.environ.setdefault("NPROC_PER_NODE", str(source.num_processes))


def _ms_swift(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Translate ms-swift's keys in ``values`` whose meaning depends on other keys, and remove them."""
    if translation.source.is_record:  # ms-swift's args.json, which also has arguments without a value
        for name in [name for name, value in values.items() if value in (None, [], {}, "")]:
            del values[name]
    if translation.source.command == "export" and not is_true(values.get("to_cached_dataset")):
        raise ConfigError(
            "swift export without --to_cached_dataset true writes no cache",
            "packtool merge merges adapters; quantization, uploads and conversions need other tools.",
        )
    _ms_swift_datasets(translation, values)
    _ms_swift_caches(translation, values)
    _split_sequences(translation, values, environ)
    _adapter_settings(translation, values, "tuner_type" if "tuner_type" in values else "train_type")
    if as_text(values.get("loss_type", "")) == "loss_scale":
        translation.omit("loss_type", "--loss-scale weights the loss")
        del values["loss_type"]
    sets_step_size = "samples_per_step" in translation.values or values.get("gradient_accumulation_steps") is not None
    if not sets_step_size:  # ms-swift's default
        _, num_processes, accumulation_steps = _batch(translation, values, environ)
        origin = f"16 samples or packs per step, over {num_processes} processes"
        translation.default("gradient_accumulation_steps", accumulation_steps, origin)


def _ms_swift_datasets(translation: Translation, values: dict[str, Any]) -> None:
    """Translate ms-swift's keys of datasets and the seed of their order, and remove them."""
    datasets = split_list(values.get("dataset") or [])
    if not any("self-cognition" in dataset for dataset in datasets):
        for name in {"model_name", "model_author"} & set(values):
            translation.omit(name, "only the rows of swift/self-cognition contain these names")
            del values[name]
    if translation.source.is_pretraining:
        command = "swift pt"  # which the report names instead of a key
        translation.set("loss_scale", values.pop("loss_scale", "all"), command)
        uses_chat_template = is_true(values.pop("use_chat_template", False))
        if not uses_chat_template:
            translation.omit(command, "rows with a text column use no template")
    # DATASET#1000 are the first 1000 rows with streaming (DATASET#first1000 in packtool), and drawn rows without.
    if is_true(values.get("streaming")) and any(re.search(r"#\d+$", dataset) for dataset in datasets):
        values["dataset"] = [re.sub(r"#(\d+)$", r"#first\1", dataset) for dataset in datasets]
        translation.omit("streaming", "it only reads the first rows (#); they are tokenized before training")
        del values["streaming"]
    if "data_seed" in values and "seed" in values:
        translation.omit("data_seed", f"one seed decides packs and order: seed {values['seed']}")
        del values["data_seed"]


def _ms_swift_caches(translation: Translation, values: dict[str, Any]) -> None:
    """Translate the paths of ms-swift's caches, which have a folder for each split."""
    if values.get("cached_dataset"):
        paths = split_list(values.pop("cached_dataset"))
        caches = [path.removesuffix("/").removesuffix("/train") for path in paths]
        translation.set("cached_dataset", caches, "cached_dataset, without /train")
        if values.pop("cached_val_dataset", None):
            translation.omit("cached_val_dataset", "a cache of packtool contains its val split")


_BOFT = ("boft_block_size", "boft_block_num", "boft_n_butterfly_factor", "boft_dropout")
# Settings of adapters other than LoRA in each tool, with peft's names.
_ADAPTER_SETTINGS: dict[tuple[str, str], dict[str, str]] = {
    ("ms-swift", "boft"): {name: name for name in _BOFT},
    ("ms-swift", "bone"): {"reft_rank": "r"},
    ("LLaMA-Factory", "oft"): {"oft_rank": "r", "oft_block_size": "oft_block_size", "module_dropout": "module_dropout"},
}


def _adapter_settings(translation: Translation, values: dict[str, Any], key: str) -> None:
    """Translate the settings of an adapter other than LoRA, whose type is the value of ``key``."""
    settings = {}
    peft_names = _ADAPTER_SETTINGS.get((translation.tool, as_text(values.get(key))), {})
    for name, peft_name in peft_names.items():
        if values.get(name) is not None:
            settings[peft_name] = values.pop(name)
    if settings:
        translation.set("adapter_settings", settings, f"settings of {values[key]}")


def _batch(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Return the samples of a micro-batch, the number of processes, and the accumulation steps in ms-swift."""
    name = "per_device_train_batch_size"
    batch_size = max(1, int(translation.number(name, values.get(name), 1)))
    sizes = [environ.get(variable, "") for variable in ("NPROC_PER_NODE", "NNODES")]
    num_processes = math.prod(int(size) for size in sizes if size.isdigit() and int(size))
    default = max(1, math.ceil(16 / batch_size / num_processes))  # for at least 16 samples per step
    name = "gradient_accumulation_steps"
    return batch_size, num_processes, int(translation.number(name, values.get(name), default))


# Optimizers with projected gradients: the prefix of a tool's keys, and the defaults of those that transformers reads.
_PROJECTIONS = {
    ("ms-swift", "galore"): {"rank": 128, "update_proj_gap": 50, "scale": 1.0, "proj_type": "std"},
    ("LLaMA-Factory", "galore"): {"rank": 16, "update_interval": 200, "scale": 2.0, "proj_type": "std"},
    ("LLaMA-Factory", "apollo"): {
        "rank": 16,
        "update_interval": 200,
        "scale": 32.0,
        "proj": "random",
        "proj_type": "std",
        "scale_type": "channel",
    },
}


def _galore_and_apollo(translation: Translation, values: dict[str, Any]) -> None:
    """Translate these optimizers into transformers' optimizers of the same names, and remove their keys."""
    for (tool, method), defaults in _PROJECTIONS.items():
        if tool != translation.tool or not is_true(values.get(f"use_{method}")):
            continue
        if is_true(values.get(f"{method}_quantization")):
            translation.refuse(f"{method}_quantization", "quantized projections are not supported; remove it")
        del values[f"use_{method}"]
        arguments = _pop_projection_arguments(values, method, defaults)
        targets = []
        for name in (f"{method}_target", f"{method}_target_modules"):
            targets += [target for target in split_list(values.pop(name, None) or []) if target != "all"]
        translation.set("optim", f"{method}_adamw", f"use_{method}")
        # Linear layers of attention and MLP in transformers' names: all without the head.
        training_arguments = {"optim_target_modules": targets or ["attn", "mlp"], "optim_args": arguments}
        translation.set("training", training_arguments, f"{method}_*")


def _pop_projection_arguments(values: dict[str, Any], method: str, defaults: Mapping[str, Any]) -> str:
    """Remove an optimizer's arguments from ``values``; return them, or their defaults, as in ``rank=128,scale=1.0``."""
    arguments = {key: values.pop(f"{method}_{key}", None) or default for key, default in defaults.items()}
    if "update_interval" in arguments:  # LLaMA-Factory's name
        arguments["update_proj_gap"] = arguments.pop("update_interval")
    return ",".join(f"{key}={as_text(value)}" for key, value in arguments.items())


def _split_sequences(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Keep ms-swift's number of samples per step under sequence parallelism, which needs packs in packtool."""
    size = int(translation.number("sequence_parallel_size", values.get("sequence_parallel_size"), 1))
    if size < 2:
        return
    if not is_true(values.pop("packing", False)) and not translation.problems:
        batch_size, num_processes, accumulation_steps = _batch(translation, values, environ)
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            values.pop(name, None)
        origin = "per_device_train_batch_size x gradient_accumulation_steps x processes / sequence_parallel_size"
        samples_per_step = batch_size * accumulation_steps * num_processes // size
        translation.set("samples_per_step", max(1, samples_per_step), origin)
        translation.set("packing", True, "sequence_parallel_size")


def _llama_factory(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Translate LLaMA-Factory's keys whose meaning depends on other keys; remove them, or leave them to the tables."""
    if "do_train" in values and not is_true(values["do_train"]) and translation.source.command == "train":
        translation.refuse("do_train", "this configuration does not train; packtool eval evaluates a model")
    _llama_factory_packing(translation, values)
    _llama_factory_datasets(translation, values)
    _llama_factory_media(translation, values)
    translate_ratio(translation, values, "val_size")
    _llama_factory_methods(translation, values)
    _adapter_settings(translation, values, "finetuning_type")
    if values.get("finetuning_type") == "freeze":
        _freeze(translation, values)
    targets = values.pop("lora_target", None)
    if targets is not None:
        names = split_list(targets)
        translation.set("target_modules", ["all-linear"] if names == ["all"] else names, "lora_target")
    if values.get("tokenized_path") and translation.values.get("dataset"):
        translation.omit("tokenized_path", "packtool caches tokens itself; packtool import reads LLaMA-Factory's")
        del values["tokenized_path"]
    if values.get("adapter_name_or_path"):
        values["adapter_name_or_path"] = split_list(values["adapter_name_or_path"])


def _llama_factory_packing(translation: Translation, values: dict[str, Any]) -> None:
    """Translate packing, which is the default of pretraining, and the maximum length, which is smaller with packing."""
    is_pretraining = values.get("stage") == "pt"
    is_packed = is_true(values.get("neat_packing")) or is_true(values.get("packing", is_pretraining))
    names = [name for name in ("neat_packing", "packing") if values.get(name) is not None]
    if names or is_pretraining:
        for name in ("neat_packing", "packing"):
            values.pop(name, None)
        translation.set("packing", is_packed, " and ".join(names) or "stage: pt")
    length = int(translation.number("cutoff_len", values.pop("cutoff_len", None), 2048))
    if is_packed:
        translation.set("max_length", length - 1, "cutoff_len, less 1 with packing as in LLaMA-Factory")
    elif "cutoff_len" in translation.source.values:
        translation.set("max_length", length, "cutoff_len")


def _llama_factory_methods(translation: Translation, values: dict[str, Any]) -> None:
    """Translate BAdam and the weighted losses, with LLaMA-Factory's defaults of their settings."""
    if is_true(values.pop("use_badam", None)):
        is_layerwise = values.pop("badam_mode", "layer") == "layer"
        if not is_layerwise or values.pop("badam_start_block", None) is not None:
            translation.refuse("badam_mode, badam_start_block", "BAdam trains the layers in their order; remove them")
        translation.set("badam_switch_interval", values.pop("badam_switch_interval", None) or 50, "use_badam")
        translation.set("badam_switch_mode", values.pop("badam_switch_mode", None) or "ascending", "use_badam")
    if is_true(values.pop("use_asft_loss", None)):
        translation.set("asft_alpha", values.pop("asft_alpha", None) or 0.1, "use_asft_loss and asft_alpha")
    if is_true(values.pop("use_eaft_loss", None)):
        translation.set("eaft_alpha", values.pop("eaft_alpha", None) or 1.0, "use_eaft_loss and eaft_alpha")


def _llama_factory_datasets(translation: Translation, values: dict[str, Any]) -> None:
    """Translate LLaMA-Factory's names of datasets, the folder with their ``dataset_info.json``, and ``max_samples``."""
    folder = str(values.pop("dataset_dir", None) or "data")
    max_samples = values.pop("max_samples", None)
    if folder.startswith("REMOTE:"):
        translation.refuse(f"dataset_dir: {folder}", "download the data set, and give its folder")
    elif folder != "ONLINE" and (values.get("dataset") or values.get("eval_dataset")):
        is_default = translation.source.values.get("dataset_dir") is None
        set_folder = translation.default if is_default else translation.set
        set_folder("dataset_info", folder, "dataset_dir")
    amount = "" if max_samples is None else f"#first{max_samples}"
    for name, option in (("dataset", "dataset"), ("eval_dataset", "val_dataset")):
        if values.get(name):
            arguments = [f"{dataset}{amount}" for dataset in split_list(values.pop(name))]
            translation.set(option, arguments, f"{name} and max_samples" if amount else name)


_QWEN_MODELS = re.compile(r"qwen(2|2_5|3)_(vl|omni)|qwen3_[56]")
_MEDIA_DEFAULTS = {"image": (32 * 32, 768 * 768), "video": (16 * 16, 256 * 256)}
"""LLaMA-Factory's minimum and maximum pixels of a picture, and of a frame."""
_LEAST_MIN_PIXELS = 56 * 56  # the lowest minimum of Qwen's processors, for models that are not local
_OMNI_MIN_FRAME_TOKENS = 128


def _llama_factory_media(translation: Translation, values: dict[str, Any]) -> None:
    """Translate LLaMA-Factory's limits of pixels, given or default, for Qwen's models, and remove their keys.

    LLaMA-Factory resizes a picture to its limits, then the model's processor resizes the result to its own limits.
    packtool resizes once, so LLaMA-Factory's limits are moved into the range of the processor's.
    """
    template = str(values.get("template") or local_model_config(values, "model_name_or_path").get("model_type"))
    if not _QWEN_MODELS.match(template) or not translation.get("dataset"):
        return
    for kind, prefix in (("image", ""), ("video", "video_")):
        processor_min, processor_max = _processor_bounds(values, kind)
        if kind == "video" and "omni" in template:
            token_side = 32 if template.startswith("qwen3") else 28  # of a token's square of pixels
            processor_min = _OMNI_MIN_FRAME_TOKENS * token_side**2
        for bound, default in zip(("min", "max"), _MEDIA_DEFAULTS[kind], strict=True):
            name, option = f"{kind}_{bound}_pixels", f"{prefix}{bound}_pixels"
            value = values.pop(name, None)
            requested_pixels = int(translation.number(name, value, default))
            pixels = min(max(requested_pixels, processor_min), processor_max)
            if bound == "min" and pixels <= processor_min:  # the processor's own minimum needs no option
                if value is not None:
                    translation.omit(name, "the model's processor enlarges to its own minimum, which is larger")
            elif value is None:
                translation.default(option, pixels, name)
            else:
                translation.set(option, pixels, name)
    translation.default("fps_min_frames", 2, "an even number of frames")
    if values.get("video_maxlen") is None:
        translation.default("fps_max_frames", 128, "video_maxlen")


def _processor_bounds(values: dict[str, Any], kind: str) -> tuple[int, int]:
    """Return the minimum and maximum pixels in the settings of a local model's processor."""
    folder = Path(str(values.get("model_name_or_path")))
    names = ["video_preprocessor_config.json"] * (kind == "video") + ["preprocessor_config.json"]
    path = next((folder / name for name in names if (folder / name).exists()), None)
    settings = load_config_file(str(path)) if path else {}
    size = settings.get("size") or {}
    low = settings.get("min_pixels") or size.get("shortest_edge") or _LEAST_MIN_PIXELS
    return int(low), int(settings.get("max_pixels") or size.get("longest_edge") or 2**31)


def _freeze(translation: Translation, values: dict[str, Any]) -> None:
    """Translate LLaMA-Factory's training of a few layers: the last, the first, or those that LLaMA Pro has added."""
    layers = _unfrozen_layers(translation, values)
    modules = split_list(values.pop("freeze_trainable_modules", None) or "all")
    layer_pattern = "|".join(map(str, layers))
    module_pattern = "" if "all" in modules else "|".join(modules)
    extra_modules = split_list(values.pop("freeze_extra_modules", None) or [])
    patterns = [rf"\.({layer_pattern})\.({module_pattern})", *extra_modules]
    # Freeze all parameters except those whose names match a pattern.
    values["finetuning_type"] = "full"
    translation.set("freeze_parameters_ratio", 1, "finetuning_type: freeze")
    translation.set("trainable_parameters_regex", "|".join(patterns), f"{_FREEZE_COUNT} and similar")


_FREEZE_COUNT = "freeze_trainable_layers"


def _unfrozen_layers(translation: Translation, values: dict[str, Any]) -> range:
    """Return the numbers of the layers that LLaMA-Factory's method ``freeze`` trains."""
    count = int(translation.number(_FREEZE_COUNT, values.pop(_FREEZE_COUNT, None), 2))
    num_layers = local_model_config(values, "model_name_or_path").get("num_hidden_layers", 0)
    if not num_layers:  # not local, or with towers, whose layers have the same numbers
        reason = "its layers are unknown: give full, --freeze-parameters-ratio 1 and --trainable-parameters-regex"
        translation.refuse("finetuning_type: freeze", reason)
    layers = range(num_layers)
    if is_true(values.pop("use_llama_pro", False)):  # the last layer of each of ``count`` groups was added
        if count < 1 or num_layers % count:
            problem = f"it does not divide the model's {num_layers} layers; change it"
            translation.refuse(f"{_FREEZE_COUNT}: {count}", problem)
        group_size = max(num_layers // max(count, 1), 1)
        return layers[group_size - 1 :: group_size]
    # The last layers, or the first ones if the count is negative.
    return layers[-count:] if count > 0 else layers[:-count]


def _trl(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Translate TRL's keys in ``values`` whose meaning depends on other keys, and remove them."""
    evaluates = as_text(values.get("eval_strategy") or "no") != "no"
    subset = values.pop("dataset_config", None) or ""
    train_split = str(values.pop("dataset_train_split", None) or "train")
    test_split = str(values.pop("dataset_test_split", None) or "test")
    dataset_name = values.pop("dataset_name", None)
    datasets = values.pop("datasets", None) or []
    if dataset_name:
        train_rows = _trl_rows(str(dataset_name), subset, train_split)
        test_rows = _trl_rows(str(dataset_name), subset, test_split) if evaluates else []
        _trl_dataset(translation, train_rows, test_rows)
    else:
        _trl_mixture(translation, datasets)
    if is_true(values.get("assistant_only_loss")) or is_true(values.get("completion_only_loss")):
        values["assistant_only_loss"] = True


def _trl_dataset(translation: Translation, train_rows: list[str], test_rows: list[str]) -> None:
    """Set the rows of ``dataset_name``; if they have prompts and completions, also the loss and the prompt's format."""
    translation.set("dataset", train_rows, "dataset_name")
    if test_rows:
        translation.set("val_dataset", test_rows, "dataset_name and dataset_test_split")
    head = _head_of_json(train_rows[0])
    has_completions = '"prompt"' in head and '"completion"' in head
    if has_completions and "loss_scale" not in translation.values:
        translation.set("loss_scale", "default", "dataset_name: only completions are trained")
    if has_completions and re.search(r'"prompt"\s*:\s*"', head):
        translation.set("prompt_format", "plain", "dataset_name: prompts are text, not messages")


def _trl_mixture(translation: Translation, datasets: Any) -> None:
    """Translate the list ``datasets``, whose objects have a path and perhaps a subset and a split."""
    if not isinstance(datasets, list) or not all(isinstance(each, dict) and each.get("path") for each in datasets):
        translation.refuse("datasets", "expected a list of objects with path")
        return
    rows = []
    for entry in datasets:
        rows += _trl_rows(str(entry["path"]), str(entry.get("name") or ""), str(entry.get("split") or "train"))
        for key in sorted(set(entry) - {"path", "name", "split", "columns", "data_files", "data_dir"}):
            translation.refuse(f"datasets, {key}", "not supported; remove it")
    if datasets:
        translation.set("dataset", rows, "datasets")


def _trl_rows(name: str, subset: str, split: str) -> list[str]:
    """Return the values of ``--dataset`` for a split: a local file, files of a directory, or a hub id."""
    if os.path.isdir(name):  # as in the datasets library, names of files begin with that of their split
        files = [str(path) for path in sorted(Path(name).rglob(f"{split}*")) if path.is_file()]
        return files or ([name] if split == "train" else [])
    if os.path.exists(name):
        return [name] if split == "train" else []
    return [f"{name}:{subset}:{split}".removesuffix("::train")]


def _head_of_json(path: str) -> str:
    """Return the first rows of a local JSON file as text; "" for anything else."""
    if not path.endswith((".json", ".jsonl")) or not os.path.exists(path):
        return ""
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(1 << 16)


def _deepspeed(translation: Translation, values: dict[str, Any]) -> None:
    """Replace the path of a missing DeepSpeed file by the stage that its name says, as in ``ds_z3_config.json``."""
    path = values.get("deepspeed")
    if isinstance(path, str) and path.endswith(".json") and not os.path.exists(path):
        name = os.path.basename(path)
        if match := re.search(r"z(?:ero)?_?([0-3])", name):
            is_offloaded = "offload" in name and match[1] in "23"
            del values["deepspeed"]
            stage = f"zero{match[1]}" + ("_offload" if is_offloaded else "")
            translation.set("deepspeed", stage, f"deepspeed: {name}, which is not on this machine")


_BY_TOOL: dict[str, Callable[[Translation, dict[str, Any], Mapping[str, str]], None]] = {
    "ms-swift": _ms_swift,
    "LLaMA-Factory": _llama_factory,
    "axolotl": translate_axolotl,
    "TRL": _trl,
}
OPTIONS_OF = {"train": TrainConfig, "export": ExportConfig}
"""Settings by command of a ``ForeignConfig``."""
