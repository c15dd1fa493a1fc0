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
from packtool.translate.axolotl_methods import translate_methods
from packtool.translate.names import _FIELDS, Translation, as_text, is_true, split_list
from packtool.translate.read import ForeignConfig, local_model_config

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
    _projected_optimizer(translation, values)
    translate_keys_of_tool = _BY_TOOL[source.tool]
    translate_keys_of_tool(translation, values, {**environ, **translation.environ})
    for name, value in values.items():
        translation.translate_key(name, value)
    translation.add_defaults()
    _adjust_combinations(translation)
    translation.restrict(options, command)
    return translation


def _adjust_combinations(translation: Translation) -> None:
    """Change or remove options that depend on the final values of other options."""
    tool, values = translation.tool, translation.values
    scale = as_text(translation.get("loss_scale") or "default")
    if tool in _NEWLINE_TOOLS and "all" not in scale.split("+") and not translation.get("cached_dataset"):
        scale_origin = translation.origins.get("loss_scale")
        origin = f"{scale_origin} and newlines after answers" if scale_origin else "newlines after answers"
        values.pop("loss_scale", None)
        translation.default("loss_scale", f"{scale}+{TRAIN_NEWLINE}", origin)
    num_ranks = translation.number("sequence_parallel_size", translation.get("sequence_parallel_size"), 1)
    if num_ranks > 1 and values.get("attn_impl") not in (None, "auto", "sdpa", "varlen"):
        translation.remove("attn_impl", "sequence parallelism has its own kernels")
    if is_true(translation.get("torch_compile")) and is_true(translation.get("use_liger_kernel")):
        translation.remove("use_liger_kernel", "torch_compile fuses the same operations")
    if is_true(translation.get("streaming")) and not is_true(translation.get("packing")):
        translation.remove("streaming", "streaming needs packs; rows are tokenized before training")
    if is_true(translation.get("streaming")) and values.get("save_strategy") == "epoch":
        reason = "streaming does not know where an epoch ends; every --save-steps steps and the last one are saved"
        translation.origins["save_strategy"] += ": epoch"
        translation.remove("save_strategy", reason)
    if tool == "LLaMA-Factory" and translation.get("train_type") == "lora":
        rank = int(translation.number("lora_rank", translation.get("lora_rank"), 8))
        translation.default("lora_alpha", 2 * rank, "LoraArguments.lora_alpha: 2 x rank")


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
    if translation.source.is_record:
        for name in [name for name, value in values.items() if value in (None, [], {}, "")]:
            del values[name]
    if translation.source.command == "export" and not is_true(values.get("to_cached_dataset")):
        raise ConfigError(
            "swift export without --to_cached_dataset true writes no cache",
            "packtool merge merges adapters; quantization, uploads and conversions need other tools.",
        )
    if "self-cognition" not in as_text(values.get("dataset", "")):
        for name in {"model_name", "model_author"} & set(values):
            translation.omit(name, "only the rows of swift/self-cognition contain these names")
            del values[name]
    if translation.source.is_pretraining:
        translation.set("loss_scale", values.pop("loss_scale", "all"), "swift pt")
        if not is_true(values.pop("use_chat_template", False)):
            translation.omit("swift pt", "rows with a text column use no template")
    # With streaming, ms-swift's #1000 takes the first rows; without, it draws rows.
    datasets = split_list(values.get("dataset") or [])
    if is_true(values.get("streaming")) and any(re.search(r"#\d+$", name) for name in datasets):
        values["dataset"] = [re.sub(r"#(?=\d+$)", "#first", name) for name in datasets]
        translation.omit("streaming", "it only reads the first rows (#); they are tokenized before training")
        del values["streaming"]
    if "data_seed" in values and "seed" in values:
        translation.omit("data_seed", f"one seed decides packs and order: seed {values['seed']}")
        del values["data_seed"]
    if values.get("cached_dataset"):
        # ms-swift's caches have a folder for each split.
        caches = [path.removesuffix("/").removesuffix("/train") for path in split_list(values.pop("cached_dataset"))]
        translation.set("cached_dataset", caches, "cached_dataset, without /train")
        if values.pop("cached_val_dataset", None):
            translation.omit("cached_val_dataset", "a cache of packtool contains its val split")
    _split_sequences(translation, values, environ)
    _adapter_settings(translation, values, "tuner_type" if "tuner_type" in values else "train_type")
    if as_text(values.get("loss_type", "")) == "loss_scale":
        translation.omit("loss_type", "--loss-scale weights the loss")
        del values["loss_type"]
    if "samples_per_step" not in translation.values and values.get("gradient_accumulation_steps") is None:
        _, num_processes, accumulation_steps = _batch(translation, values, environ)
        origin = f"16 samples or packs per step, over {num_processes} processes"
        translation.default("gradient_accumulation_steps", accumulation_steps, origin)


_BOFT = ("boft_block_size", "boft_block_num", "boft_n_butterfly_factor", "boft_dropout")
# Settings of adapters other than LoRA in each tool, with peft's names.
_ADAPTER_SETTINGS: dict[tuple[str, str], dict[str, str]] = {
    ("ms-swift", "boft"): {name: name for name in _BOFT},
    ("ms-swift", "bone"): {"reft_rank": "r"},
    ("LLaMA-Factory", "oft"): {"oft_rank": "r", "oft_block_size": "oft_block_size", "module_dropout": "module_dropout"},
}


def _adapter_settings(translation: Translation, values: dict[str, Any], key: str) -> None:
    """Translate the settings of an adapter other than LoRA, whose type is the value of ``key``."""
    names = _ADAPTER_SETTINGS.get((translation.tool, as_text(values.get(key))), {})
    if settings := {peft_name: values.pop(name) for name, peft_name in names.items() if values.get(name) is not None}:
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


def _projected_optimizer(translation: Translation, values: dict[str, Any]) -> None:
    """Translate GaLore and APOLLO into transformers' optimizers of these names, and remove their keys."""
    for (tool, method), defaults in _PROJECTIONS.items():
        if tool != translation.tool or not is_true(values.get(f"use_{method}")):
            continue
        if is_true(values.get(f"{method}_quantization")):
            translation.refuse(f"{method}_quantization", "quantized projections are not supported; remove it")
        del values[f"use_{method}"]
        arguments = {key: values.pop(f"{method}_{key}", None) or default for key, default in defaults.items()}
        # LLaMA-Factory calls it update_interval.
        arguments["update_proj_gap"] = arguments.pop("update_interval", arguments.get("update_proj_gap"))
        targets: list[str] = []
        for name in (f"{method}_target", f"{method}_target_modules"):
            targets += [target for target in split_list(values.pop(name, None) or []) if target != "all"]
        translation.set("optim", f"{method}_adamw", f"use_{method}")
        # Linear layers of attention and MLP in transformers' names: all without the head.
        training_arguments = {
            "optim_target_modules": targets or ["attn", "mlp"],
            "optim_args": ",".join(f"{key}={as_text(value)}" for key, value in arguments.items()),
        }
        translation.set("training", training_arguments, f"{method}_*")


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
    """Translate LLaMA-Factory's keys in ``values`` whose meaning depends on other keys, and remove them."""
    if "do_train" in values and not is_true(values["do_train"]) and translation.source.command == "train":
        translation.refuse("do_train", "this configuration does not train; packtool eval evaluates a model")
    is_pretraining = values.get("stage") == "pt"  # which packs by default
    is_packed = is_true(values.get("neat_packing")) or is_true(values.get("packing", is_pretraining))
    if values.get("packing") is not None or values.get("neat_packing") is not None or is_pretraining:
        names = [name for name in ("neat_packing", "packing") if values.pop(name, None) is not None]
        translation.set("packing", is_packed, " and ".join(names) or "stage: pt")
    length = int(translation.number("cutoff_len", values.pop("cutoff_len", None), 2048))
    if is_packed:
        translation.set("max_length", length - 1, "cutoff_len, less 1 with packing as in LLaMA-Factory")
    elif "cutoff_len" in translation.source.values:
        translation.set("max_length", length, "cutoff_len")
    _llama_factory_datasets(translation, values)
    _ratio(translation, values, "val_size")
    if is_true(values.pop("use_badam", None)):
        if values.pop("badam_mode", "layer") != "layer" or values.pop("badam_start_block", None) is not None:
            translation.refuse("badam_mode, badam_start_block", "BAdam trains the layers in their order; remove them")
        translation.set("badam_switch_interval", values.pop("badam_switch_interval", None) or 50, "use_badam")
        translation.set("badam_switch_mode", values.pop("badam_switch_mode", None) or "ascending", "use_badam")
    if is_true(values.pop("use_asft_loss", None)):
        translation.set("asft_alpha", values.pop("asft_alpha", None) or 0.1, "use_asft_loss and asft_alpha")
    if is_true(values.pop("use_eaft_loss", None)):
        translation.set("eaft_alpha", values.pop("eaft_alpha", None) or 1.0, "use_eaft_loss and eaft_alpha")
    _adapter_settings(translation, values, "finetuning_type")
    if values.get("finetuning_type") == "freeze":
        _freeze(translation, values)
    targets = values.pop("lora_target", None)
    if targets is not None:
        names = split_list(targets)
        translation.set("target_modules", ["all-linear"] if names == ["all"] else names, "lora_target")
    if values.get("tokenized_path") and values.get("dataset", translation.values.get("dataset")):
        translation.omit("tokenized_path", "packtool caches tokens itself; packtool import reads LLaMA-Factory's")
        del values["tokenized_path"]
    if values.get("adapter_name_or_path"):
        values["adapter_name_or_path"] = split_list(values["adapter_name_or_path"])


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


def _freeze(translation: Translation, values: dict[str, Any]) -> None:
    """Translate LLaMA-Factory's training of a few layers: the last, the first, or those that LLaMA Pro has added."""
    name = "freeze_trainable_layers"
    count = int(translation.number(name, values.pop(name, None), 2))  # the first -count layers, if it is negative
    num_layers = local_model_config(values, "model_name_or_path").get("num_hidden_layers", 0)
    if not num_layers:  # not local, or with towers, whose layers have the same numbers
        reason = "its layers are unknown: give full, --freeze-parameters-ratio 1 and --trainable-parameters-regex"
        translation.refuse("finetuning_type: freeze", reason)
    layers = range(num_layers)[-count:] if count > 0 else range(num_layers)[:-count]
    if is_true(values.pop("use_llama_pro", False)):  # the last layer of each of ``count`` groups was added
        if count < 1 or num_layers % count:
            translation.refuse(f"{name}: {count}", f"it does not divide the model's {num_layers} layers; change it")
        group_size = max(num_layers // max(count, 1), 1)
        layers = range(num_layers)[group_size - 1 :: group_size]
    modules = split_list(values.pop("freeze_trainable_modules", None) or "all")
    layer_pattern = "|".join(map(str, layers))
    module_pattern = "" if "all" in modules else "|".join(modules)
    extra_modules = split_list(values.pop("freeze_extra_modules", None) or [])
    patterns = [rf"\.({layer_pattern})\.({module_pattern})", *extra_modules]
    # Freeze all parameters except those whose names match a pattern.
    values["finetuning_type"] = "full"
    translation.set("freeze_parameters_ratio", 1, "finetuning_type: freeze")
    translation.set("trainable_parameters_regex", "|".join(patterns), f"{name} and similar")


def _axolotl(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Translate axolotl's keys in ``values`` whose meaning depends on other keys, and remove them."""
    liger_names = [name for name in values if name.startswith("liger_")]
    if liger_names:
        uses_liger = [is_true(values.pop(name)) for name in liger_names]
        translation.set("use_liger_kernel", any(uses_liger), ", ".join(liger_names))
    for plugin in split_list(values.pop("plugins", None) or []):
        translation.translate_key("plugins", plugin)
    _axolotl_intervals(translation, values)
    _axolotl_order(translation, values)
    for name in ("datasets", "pretraining_dataset", "test_datasets"):
        _axolotl_datasets(translation, name, values.pop(name, None))
    _ratio(translation, values, "val_set_size")
    _axolotl_targets(translation, values)
    translate_methods(translation, values)
    min_lr_ratio = values.pop("cosine_min_lr_ratio", None)
    if min_lr_ratio is not None:
        values.pop("lr_scheduler", None)
        translation.set("lr_scheduler_type", "cosine_with_min_lr", "lr_scheduler and cosine_min_lr_ratio")
        translation.set("lr_scheduler_kwargs", {"min_lr_rate": min_lr_ratio}, "cosine_min_lr_ratio")
    batch_size = values.pop("batch_size", None)
    if batch_size is not None and not values.get("gradient_accumulation_steps"):
        micro_batch_size = translation.number("micro_batch_size", values.get("micro_batch_size"), 1) or 1
        accumulation_steps = int(translation.number("batch_size", batch_size, 1) // micro_batch_size)
        translation.set("gradient_accumulation_steps", max(1, accumulation_steps), "batch_size / micro_batch_size")
    patterns = split_list(values.pop("unfrozen_parameters", None) or [])
    if patterns and values.get("adapter"):
        translation.omit("unfrozen_parameters", "the adapter is trained, and the model's own weights stay frozen")
    elif patterns:
        if any(re.search(r"\[\d*:\d*\]$", pattern) for pattern in patterns):
            translation.refuse(
                "unfrozen_parameters", "parts of a parameter cannot be trained; name the whole parameter"
            )
        translation.set("freeze_parameters_ratio", 1, "unfrozen_parameters")
        translation.set("trainable_parameters_regex", "|".join(patterns), "unfrozen_parameters")
    _axolotl_fsdp(translation, values)


def _axolotl_intervals(translation: Translation, values: dict[str, Any]) -> None:
    """Translate the numbers of evaluations and checkpoints per epoch; one per epoch is a strategy, not an interval."""
    epochs = translation.number("num_epochs", values.get("num_epochs"), 1) or 1
    for name, kind in (("evals_per_epoch", "eval"), ("saves_per_epoch", "save")):
        times_per_epoch = translation.number(name, values.pop(name, None), 0)
        if not times_per_epoch:
            continue
        if kind == "eval" and not (values.get("val_set_size") or values.get("test_datasets")):
            translation.omit(name, "there is no validation split")
        elif times_per_epoch * epochs > 1:  # below 1, ``eval_steps`` is a fraction of the run
            translation.set(f"{kind}_steps", 1 / (times_per_epoch * epochs), name)
        else:
            translation.set(f"{kind}_strategy", "epoch", name)


def _axolotl_fsdp(translation: Translation, values: dict[str, Any]) -> None:
    """Translate ``fsdp_config`` into the options of ``--fsdp``, and omit keys that packtool does not need."""
    config = values.pop("fsdp_config", None) or {}
    if not isinstance(config, dict):
        translation.refuse("fsdp_config", "expected an object of names and values")
    elif config and int(translation.number("expert_parallel_size", values.get("expert_parallel_size"), 1) or 1) > 1:
        translation.omit("fsdp_config", "expert_parallel_size shards the other weights over all processes, too")
    elif config:
        shard = "full_shard" if is_true(config.get("reshard_after_forward", True)) else "shard_grad_op"
        is_offloaded = any(is_true(config.get(name)) for name in ("offload_params", "fsdp_offload_params"))
        values["fsdp"] = split_list(values.get("fsdp") or [shard]) + (["offload"] if is_offloaded else [])
    unneeded = ["fsdp_version", "fsdp_final_state_dict_type", "special_tokens"]
    if isinstance(values.get("tokens"), dict):
        unneeded.append("tokens")
    for name in unneeded:
        if values.pop(name, None):
            translation.omit(name, "packtool uses FSDP2 with full checkpoints, and the tokenizer's own tokens")


def _axolotl_order(translation: Translation, values: dict[str, Any]) -> None:
    """Translate the buffer of streamed rows, and ``curriculum_sampling``, which trains rows in their order.

    However, axolotl shuffles rows while it merges datasets, unless ``shuffle_merged_datasets`` is false.
    """
    shuffles_merged_rows = as_text(values.get("shuffle_merged_datasets")) != "false"
    is_packed = is_true(values.get("sample_packing"))
    if is_packed and is_true(values.get("streaming")):
        num_rows = values.pop("streaming_multipack_buffer_size", None)
        if num_rows:
            translation.set("packing_interval", num_rows, "streaming_multipack_buffer_size")
            shuffled_rows = num_rows if shuffles_merged_rows else 1
            translation.set("shuffle_buffer_size", shuffled_rows, "streaming_multipack_buffer_size")
    name = "curriculum_sampling"
    if not is_true(values.pop(name, None)):
        return
    datasets = values.get("datasets")
    if isinstance(datasets, list) and len(datasets) > 1 and shuffles_merged_rows:
        translation.omit(name, "axolotl shuffles merged datasets once; packtool shuffles them in every epoch")
        return
    values.pop("shuffle_merged_datasets", None)
    translation.set("shuffle", False, name)
    if is_packed:
        translation.set("packing_algorithm", "sequential", name)


def _axolotl_targets(translation: Translation, values: dict[str, Any]) -> None:
    """Translate names of modules with adapters, which may be a regular expression; by default axolotl adapts none."""
    targets = values.pop("lora_target_modules", None)
    if targets and not is_true(values.get("lora_target_linear")):
        is_regex = isinstance(targets, str) and re.search(r"[^\w,. -]", targets) is not None
        name = "target_regex" if is_regex else "target_modules"
        translation.set(name, targets if is_regex else split_list(targets), "lora_target_modules")
    elif not targets and values.get("lora_target_parameters") and not is_true(values.get("lora_target_linear")):
        translation.set("target_modules", [], "lora_target_parameters")


# Keys of an axolotl data set that packtool needs not, or finds out itself; and columns of the two formats.
_DETECTED = {
    *("roles_to_train", "message_property_mappings", "train_on_eos", "ds_type", "field_thinking", "type", "name"),
    *("template_thinking_key", "chat_template", "chat_template_jinja", "data_files", "path", "split"),
    "trust_remote_code",
}
_MAPPINGS = "message_property_mappings"
_MESSAGE_KEYS = (("role", "content"), ("from", "value"), ("from", "content"))
_COLUMNS = {
    "field_messages": "messages",
    "field": "text",
    "text_column": "text",
    "field_instruction": "instruction",
    "field_input": "input",
    "field_output": "output",
    "field_system": "system",
    "field_tools": "tools",
}


def _axolotl_datasets(translation: Translation, name: str, value: Any) -> None:
    """Translate key ``datasets`` or similar: a path, or a list of objects with ``path``, ``type`` and column names."""
    paths: list[str] = []
    columns: dict[str, set[str]] = {}  # names of each column in the data sets, by packtool's name
    entries: list[dict[str, Any]] = [{"path": value}] if isinstance(value, str) else value or []
    is_list = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not is_list or not all(isinstance(entry.get(_MAPPINGS) or {}, dict) for entry in entries):
        translation.refuse(name, "expected a list of objects with path and type")
        return
    for entry in entries:
        _axolotl_rows(translation, name, entry)
        for key, item in entry.items():
            if key in _COLUMNS:
                columns.setdefault(_COLUMNS[key], set()).add(item or _COLUMNS[key])
            elif key == "train_on_eos" and item not in (None, "turn", "all"):
                translation.refuse(f"{name}, {key}: {item}", "the end of each trained turn is trained; remove it")
            elif item and key not in _DETECTED and not key.startswith("message_field_"):
                translation.refuse(f"{name}, {key}", "not supported; change the rows before training")
        paths += _axolotl_paths(translation, name, entry)
    if paths:
        translation.set("val_dataset" if name == "test_datasets" else "dataset", paths, name)
    # Name a column if it has an unusual name in any data set, and then by all of its names.
    renamed = {column: names for column, names in columns.items() if names - {column, "conversations"}}
    if renamed:
        pairs = [f"{column}={each}" for column, names in sorted(renamed.items()) for each in sorted(names)]
        translation.set("columns", pairs, f"{name}, field_*")


def _axolotl_rows(translation: Translation, name: str, entry: Mapping[str, Any]) -> None:
    """Check the form of the rows of an entry in list ``name``, and translate the roles that are trained."""
    row_type = entry.get("type") or "chat_template"
    first_word = re.split("[:.]", row_type)[0] if isinstance(row_type, str) else ""
    if first_word not in _TYPES:
        translation.refuse(f"{name}, type: {row_type}", f"known are {', '.join(_TYPES)}; convert the rows to messages")
    elif _TYPES[first_word]:
        translation.omit(f"{name}, type: {row_type}", _TYPES[first_word])
    message_keys = entry.get(_MAPPINGS) or {
        "role": entry.get("message_field_role", "role"),
        "content": entry.get("message_field_content", "content"),
    }
    if (message_keys.get("role", "role"), message_keys.get("content", "content")) not in _MESSAGE_KEYS:
        translation.refuse(f"{name}, message_property_mappings", "name these keys in a --dataset-info file (tags)")
    trained_roles = split_list(entry.get("roles_to_train") or ["assistant"])
    if {"user", "human"} & set(trained_roles):
        translation.set("loss_scale", "all", f"{name}, roles_to_train")
    elif not {"assistant", "gpt", "model"} & set(trained_roles):
        translation.refuse(
            f"{name}, roles_to_train: {' '.join(trained_roles)}", "assistant turns are trained; add them"
        )


# First words of types, with a remark for the report.
_TYPES = dict.fromkeys(("chat_template", "sharegpt", "alpaca", "completion", "pretrain", "input_output"), "")
_TYPES["alpaca"] = "rendered by the model's own chat template, not by axolotl's prompt"
_SLICE = re.compile(r"(\w*)(?:\[:(\d+%?)\])?")


def _axolotl_paths(translation: Translation, name: str, entry: Mapping[str, Any]) -> list[str]:
    """Return the values of ``--dataset`` for an entry: files, or a hub id with subset, split and number of rows."""
    path, split = str(entry.get("path", "")), str(entry.get("split") or "")
    match = _SLICE.fullmatch(split)
    if match is None:
        translation.refuse(f"{name}, split: {split}", "only the first rows can be selected, as in train[:20%]")
        return []
    amount = f"#first{match[2]}" if match[2] else ""
    files = [file for file in split_list(entry.get("data_files") or []) if os.path.exists(file)]
    if files:
        return [f"{file}{amount}" for file in files]
    subset = entry.get("name") or ""
    is_local = os.path.exists(path) or path.endswith((".json", ".jsonl", ".parquet", ".csv", ".txt"))
    selection = "" if is_local else f":{subset}:{match[1]}".rstrip(":")
    return [f"{path}{selection}{amount}"]


def _ratio(translation: Translation, values: dict[str, Any], name: str) -> None:
    """Translate a ratio of validation rows, which is a number of rows if it is at least 1."""
    if (size := translation.number(name, values.pop(name, None), 0)) >= 1:
        translation.refuse(f"{name}: {size:g}", "a number of rows is not supported; give a ratio such as 0.1")
    elif size:
        translation.set("split_dataset_ratio", size, name)


def _trl(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Translate TRL's keys in ``values`` whose meaning depends on other keys, and remove them."""
    subset = values.pop("dataset_config", None) or ""
    train_split = str(values.pop("dataset_train_split", None) or "train")
    test_split = str(values.pop("dataset_test_split", None) or "test")
    evaluates = as_text(values.get("eval_strategy") or "no") != "no"
    dataset_name = values.pop("dataset_name", None)
    datasets = values.pop("datasets", None) or []
    if dataset_name:
        rows = _trl_rows(str(dataset_name), subset, train_split)
        translation.set("dataset", rows, "dataset_name")
        test_rows = _trl_rows(str(dataset_name), subset, test_split) if evaluates else []
        if test_rows:
            translation.set("val_dataset", test_rows, "dataset_name and dataset_test_split")
        if "loss_scale" not in translation.values and _has_completions(rows[0]):
            translation.set("loss_scale", "default", "dataset_name: only completions are trained")
    elif not isinstance(datasets, list) or not all(isinstance(each, dict) and each.get("path") for each in datasets):
        translation.refuse("datasets", "expected a list of objects with path")
    elif datasets:
        rows = []
        for entry in datasets:
            rows += _trl_rows(str(entry["path"]), str(entry.get("name") or ""), str(entry.get("split") or "train"))
            for key in sorted(set(entry) - {"path", "name", "split", "columns", "data_files", "data_dir"}):
                translation.refuse(f"datasets, {key}", "not supported; remove it")
        translation.set("dataset", rows, "datasets")
    if any(is_true(values.get(name)) for name in ("assistant_only_loss", "completion_only_loss")):
        values["assistant_only_loss"] = True


def _trl_rows(name: str, subset: str, split: str) -> list[str]:
    """Return the values of ``--dataset`` for a split: a local file, files of a directory, or a hub id."""
    if os.path.isdir(name):  # as in the datasets library, names of files begin with that of their split
        files = [str(path) for path in sorted(Path(name).rglob(f"{split}*")) if path.is_file()]
        return files or ([name] if split == "train" else [])
    if os.path.exists(name):
        return [name] if split == "train" else []
    return [f"{name}:{subset}:{split}".removesuffix("::train")]


def _has_completions(path: str) -> bool:
    """Return whether the head of a JSON file shows rows with a prompt and a completion."""
    if not path.endswith((".json", ".jsonl")) or not os.path.exists(path):
        return False
    with open(path, encoding="utf-8", errors="replace") as file:
        head = file.read(1 << 16)
    return '"prompt"' in head and '"completion"' in head


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
    "axolotl": _axolotl,
    "TRL": _trl,
}
OPTIONS_OF = {"train": TrainConfig, "export": ExportConfig}
"""Settings by command of a ``ForeignConfig``."""
