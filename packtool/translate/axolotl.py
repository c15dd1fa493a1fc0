"""Translation of axolotl's keys whose meaning depends on other keys: rows, order, training methods, FSDP."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from packtool.translate.names import Translation, as_text, is_true, split_list, translate_ratio
from packtool.translate.read import local_model_config


def translate_axolotl(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Translate axolotl's keys in ``values`` whose meaning depends on other keys, and remove them."""
    _axolotl_kernels(translation, values)
    _axolotl_intervals(translation, values)
    _axolotl_order(translation, values)
    for name in ("datasets", "pretraining_dataset", "test_datasets"):
        _axolotl_datasets(translation, name, values.pop(name, None))
    translate_ratio(translation, values, "val_set_size")
    _axolotl_targets(translation, values)
    _axolotl_methods(translation, values)
    if values.get("warmup_steps") is None and values.get("warmup_ratio") is None:
        translation.default("max_warmup_steps", 100, origin="3 % of the steps, at most 100")
    min_lr_ratio = values.pop("cosine_min_lr_ratio", None)
    if min_lr_ratio is not None:
        values.pop("lr_scheduler", None)
        translation.set("lr_scheduler_type", "cosine_with_min_lr", origin="lr_scheduler and cosine_min_lr_ratio")
        translation.set("lr_scheduler_kwargs", {"min_lr_rate": min_lr_ratio}, origin="cosine_min_lr_ratio")
    _axolotl_batch_size(translation, values)
    _axolotl_unfrozen_parameters(translation, values)
    _axolotl_fsdp(translation, values)


def _axolotl_kernels(translation: Translation, values: dict[str, Any]) -> None:
    """Translate the switches of Liger's kernels into one, and the names of plugins."""
    liger_names = [name for name in values if name.startswith("liger_")]
    if liger_names:
        uses_liger = [is_true(values.pop(name)) for name in liger_names]
        translation.set("use_liger_kernel", any(uses_liger), ", ".join(liger_names))
    for plugin in split_list(values.pop("plugins", None) or []):
        translation.translate_key("plugins", plugin)


def _axolotl_batch_size(translation: Translation, values: dict[str, Any]) -> None:
    """Translate ``batch_size``, the samples per step of a process, into accumulation steps unless these are set."""
    batch_size = values.pop("batch_size", None)
    if batch_size is None or values.get("gradient_accumulation_steps"):
        return
    micro_batch_size = translation.number("micro_batch_size", values.get("micro_batch_size"), 1) or 1
    accumulation_steps = int(translation.number("batch_size", batch_size, 1) // micro_batch_size)
    translation.set("gradient_accumulation_steps", max(1, accumulation_steps), "batch_size / micro_batch_size")


def _axolotl_unfrozen_parameters(translation: Translation, values: dict[str, Any]) -> None:
    """Translate ``unfrozen_parameters``, patterns for the names of the only parameters that are trained."""
    name = "unfrozen_parameters"
    patterns = split_list(values.pop(name, None) or [])
    if not patterns:
        return
    if values.get("adapter"):
        translation.omit(name, "the adapter is trained, and the model's own weights stay frozen")
        return
    if any(re.search(r"\[\d*:\d*\]$", pattern) for pattern in patterns):
        translation.refuse(name, "parts of a parameter cannot be trained; name the whole parameter")
    translation.set("freeze_parameters_ratio", 1, name)
    translation.set("trainable_parameters_regex", "|".join(patterns), name)


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
    num_expert_ranks = translation.number("expert_parallel_size", values.get("expert_parallel_size"), 1)
    if not isinstance(config, dict):
        translation.refuse("fsdp_config", "expected an object of names and values")
    elif config and num_expert_ranks >= 2:
        translation.omit("fsdp_config", "expert_parallel_size shards the other weights over all processes, too")
    elif config:
        shard = "full_shard" if is_true(config.get("reshard_after_forward", True)) else "shard_grad_op"
        options = split_list(values.get("fsdp") or [shard])
        if is_true(config.get("offload_params")) or is_true(config.get("fsdp_offload_params")):
            options.append("offload")
        values["fsdp"] = options
    unneeded_names = ["fsdp_version", "fsdp_final_state_dict_type", "special_tokens"]
    if isinstance(values.get("tokens"), dict):  # by role, like special_tokens; a list would add tokens
        unneeded_names.append("tokens")
    for name in unneeded_names:
        if values.pop(name, None):
            translation.omit(name, "packtool uses FSDP2 with full checkpoints, and the tokenizer's own tokens")


def _axolotl_order(translation: Translation, values: dict[str, Any]) -> None:
    """Translate the buffer of streamed rows, and ``curriculum_sampling``, which trains rows in the datasets' order.

    ``curriculum_sampling`` has no effect if axolotl merges several datasets, because merging shuffles their rows unless
    ``shuffle_merged_datasets`` is false.
    """
    shuffles_merged_rows = as_text(values.get("shuffle_merged_datasets")) != "false"
    is_packed = is_true(values.get("sample_packing"))
    if is_packed and is_true(values.get("streaming")):
        _axolotl_buffer(translation, values, shuffles_merged_rows)
    name = "curriculum_sampling"
    if not is_true(values.pop(name, None)):
        return
    datasets = values.get("datasets")
    if isinstance(datasets, list) and len(datasets) > 1 and shuffles_merged_rows:
        translation.omit(name, "axolotl shuffles merged datasets once; packtool shuffles them in every epoch")
        return
    values.pop("shuffle_merged_datasets", None)  # --shuffle says it, too
    translation.set("shuffle", False, name)
    if is_packed:
        translation.set("packing_algorithm", "sequential", name)


def _axolotl_buffer(translation: Translation, values: dict[str, Any], shuffles_rows: bool) -> None:
    """Translate the number of streamed rows that axolotl packs, and perhaps shuffles, at a time."""
    name = "streaming_multipack_buffer_size"
    num_rows = values.pop(name, None)
    if num_rows:
        translation.set("packing_interval", num_rows, name)
        translation.set("shuffle_buffer_size", num_rows if shuffles_rows else 1, name)


def _axolotl_targets(translation: Translation, values: dict[str, Any]) -> None:
    """Translate names of modules with adapters, which may be a regular expression; by default axolotl adapts none."""
    targets = values.pop("lora_target_modules", None)
    if targets and not is_true(values.get("lora_target_linear")):
        is_regex = isinstance(targets, str) and re.search(r"[^\w,. -]", targets) is not None
        name = "target_regex" if is_regex else "target_modules"
        translation.set(name, targets if is_regex else split_list(targets), "lora_target_modules")
    elif not targets and values.get("lora_target_parameters") and not is_true(values.get("lora_target_linear")):
        translation.set("target_modules", [], "lora_target_parameters")


# Keys of an axolotl data set that need no option, and its keys for columns, with packtool's names of the columns.
_UNNEEDED = {
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
    entries: list[dict[str, Any]] = [{"path": value}] if isinstance(value, str) else value or []
    if not _are_dataset_entries(entries):
        translation.refuse(name, "expected a list of objects with path and type")
        return
    paths: list[str] = []
    for entry in entries:
        _check_row_format(translation, name, entry)
        for key, item in entry.items():
            is_known = key in _COLUMNS or key in _UNNEEDED or key.startswith("message_field_")
            if key == "train_on_eos" and item not in (None, "turn", "all"):
                translation.refuse(f"{name}, {key}: {item}", "the end of each trained turn is trained; remove it")
            elif item and not is_known:
                translation.refuse(f"{name}, {key}", "not supported; change the rows before training")
        paths += _dataset_arguments(translation, name, entry)
    if paths:
        translation.set("val_dataset" if name == "test_datasets" else "dataset", paths, name)
    _axolotl_prompt_format(translation, name, entries)
    renamed_columns = _renamed_columns(entries)
    if renamed_columns:
        translation.set("columns", renamed_columns, f"{name}, field_*")


def _axolotl_prompt_format(translation: Translation, name: str, entries: Iterable[Mapping[str, Any]]) -> None:
    """Translate types such as ``alpaca`` and ``alpaca:chat``, each a text in which axolotl writes the question."""
    types = {str(entry["type"]) for entry in entries if entry.get("type") in _PROMPT_FORMATS}
    earlier = translation.values.get("prompt_format")  # of another list of data sets
    formats = sorted(types | {str(earlier)}) if earlier else sorted(types)
    if types and len(formats) == 1:
        translation.set("prompt_format", formats[0], f"{name}, type")
    elif types:
        reason = "one run has one prompt format; set prompt_format of each dataset in a --dataset-info file"
        translation.refuse(f"{name}, type: {', '.join(formats)}", reason)


def _are_dataset_entries(value: Any) -> bool:
    """Return whether a value is a list of objects, whose mappings of message keys are objects or missing."""
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        return False
    return all(isinstance(entry.get(_MAPPINGS) or {}, dict) for entry in value)


def _renamed_columns(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return values of ``--columns``, such as ``text=body``, for the columns of data sets that are renamed.

    A column is listed if any data set has an unusual name for it, and then with all of its names.
    """
    names_by_column: dict[str, set[str]] = {}
    for entry in entries:
        for key, item in entry.items():
            if key in _COLUMNS:
                names_by_column.setdefault(_COLUMNS[key], set()).add(item or _COLUMNS[key])
    pairs = []
    for column, names in sorted(names_by_column.items()):
        is_renamed = bool(names - {column, "conversations"})
        if is_renamed:
            pairs += [f"{column}={each}" for each in sorted(names)]
    return pairs


def _check_row_format(translation: Translation, name: str, entry: Mapping[str, Any]) -> None:
    """Check the form of the rows of an entry in list ``name``, and translate the roles that are trained."""
    row_type = entry.get("type") or "chat_template"
    first_word = re.split("[:.]", row_type)[0] if isinstance(row_type, str) else ""
    if first_word not in _TYPES:
        translation.refuse(f"{name}, type: {row_type}", f"known are {', '.join(_TYPES)}; convert the rows to messages")
    elif first_word == "alpaca" and row_type not in _PROMPT_FORMATS:
        translation.omit(
            f"{name}, type: {row_type}", "rendered by the model's own chat template, not by axolotl's prompt"
        )
    if _message_keys(entry) not in _MESSAGE_KEYS:
        translation.refuse(f"{name}, message_property_mappings", "name these keys in a --dataset-info file (tags)")
    trained_roles = split_list(entry.get("roles_to_train") or ["assistant"])
    if {"user", "human"} & set(trained_roles):
        translation.set("loss_scale", "all", f"{name}, roles_to_train")
    elif not {"assistant", "gpt", "model"} & set(trained_roles):
        translation.refuse(
            f"{name}, roles_to_train: {' '.join(trained_roles)}", "assistant turns are trained; add them"
        )


def _message_keys(entry: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the keys of role and content in the messages of a data set."""
    mappings = entry.get(_MAPPINGS)
    if mappings:
        return mappings.get("role", "role"), mappings.get("content", "content")
    return entry.get("message_field_role", "role"), entry.get("message_field_content", "content")


# First words of types.
_PROMPT_FORMATS = ("alpaca", "alpaca:chat", "alpaca:chatml", "alpaca:phi")
_TYPES = ("chat_template", "sharegpt", "alpaca", "completion", "pretrain", "input_output")
_SLICE = re.compile(r"(\w*)(?:\[:(\d+%?)\])?")


def _dataset_arguments(translation: Translation, name: str, entry: Mapping[str, Any]) -> list[str]:
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


def _axolotl_methods(translation: Translation, values: dict[str, Any]) -> None:
    """Translate the keys of training methods in ``values``, and remove them."""
    if is_true(values.pop("use_eaft", None)):
        alpha = values.pop("eaft_alpha", None)
        translation.set("eaft_alpha", 1.0 if alpha is None else alpha, "use_eaft and eaft_alpha")
        translation.set("eaft_top_k", values.pop("eaft_k", None) or 20, "use_eaft and eaft_k")
        translation.set("eaft_divisor", 1.0, "use_eaft: axolotl does not divide the entropy")
    _axolotl_tensor_parallel(translation, values)
    qat_settings = values.pop("qat", None)
    if qat_settings:
        _axolotl_qat(translation, qat_settings)
    model_config = values.get("model_config") or {}
    if as_text(model_config.get("output_router_logits", "")) == "true":
        _axolotl_router(translation, values)
    if is_true(values.get("resize_token_embeddings_to_32x")):
        _axolotl_embeddings(translation, values)


def _axolotl_tensor_parallel(translation: Translation, values: dict[str, Any]) -> None:
    """Translate processes that divide each matrix: they train the same batches as processes that divide sequences."""
    name = "tensor_parallel_size"
    tensor_size = int(translation.number(name, values.get(name), 1))
    if tensor_size > 1:
        del values[name]
        # Processes that divide sequences hold all weights, unless the weights are sharded.
        deepspeed = as_text(values.get("deepspeed") or translation.values.get("deepspeed"))
        if not (values.get("fsdp_config") or values.get("fsdp") or "zero3" in deepspeed):
            reason = "packtool divides sequences, not matrices, so each GPU would hold all weights; add fsdp_config"
            translation.refuse(f"{name}: {tensor_size}", reason)
        context_size = int(translation.number("context_parallel_size", values.pop("context_parallel_size", None), 1))
        origin = "tensor_parallel_size x context_parallel_size: processes divide sequences, not matrices"
        translation.set("sequence_parallel_size", tensor_size * context_size, origin)


_QAT_FORMATS = {"float8": "fp8", "float8_e4m3fn": "fp8"}
_QAT_RECIPES = {  # by the formats of activations and weights
    ("int8", "int4"): "int8-int4",
    ("None", "int4"): "int4",
    ("fp8", "int4"): "fp8-int4",
    ("fp8", "fp8"): "fp8",
    ("mxfp4", "mxfp4"): "mxfp4",
    ("nvfp4", "nvfp4"): "nvfp4",
}


def _axolotl_qat(translation: Translation, settings: Any) -> None:
    """Translate ``qat``: formats of activations and weights, groups of weights, and the first step with rounding."""
    if not isinstance(settings, dict):
        translation.refuse("qat", "expected an object with weight_dtype and activation_dtype")
        return
    activation_dtype = str(settings.get("activation_dtype"))
    weight_dtype = str(settings.get("weight_dtype"))
    activation_format = _QAT_FORMATS.get(activation_dtype, activation_dtype)
    weight_format = _QAT_FORMATS.get(weight_dtype, weight_dtype)
    recipe = _QAT_RECIPES.get((activation_format, weight_format))
    if recipe is None or is_true(settings.get("quantize_embedding")):
        known = ", ".join(_QAT_RECIPES.values())
        translation.refuse(f"qat: {as_text(settings)}", f"--qat rounds linear layers, to {known}")
        return
    translation.set("qat", recipe, "qat: activation_dtype and weight_dtype")
    if weight_format == "int4":
        translation.set("qat_group_size", settings.get("group_size") or 32, "qat: group_size")
    if start := settings.get("fake_quant_after_n_steps"):
        translation.set("qat_start_step", start, "qat: fake_quant_after_n_steps")


def _axolotl_router(translation: Translation, values: dict[str, Any]) -> None:
    """Translate ``output_router_logits``: the model then adds its routers' loss with the weight in config.json."""
    weight = local_model_config(values, "base_model").get("router_aux_loss_coef")
    name = "model_config: output_router_logits"
    if weight is None:
        translation.refuse(
            name, "its weight is not known without the model's config.json; give a local directory of the model"
        )
    else:
        translation.set("router_aux_loss_coef", weight, name)
    others = {key: value for key, value in values.pop("model_config").items() if key != "output_router_logits"}
    if others:
        values["model_config"] = others


def _axolotl_embeddings(translation: Translation, values: dict[str, Any]) -> None:
    """Refuse embeddings that would grow: those of a local model whose number of rows is no multiple of 32."""
    config = local_model_config(values, "base_model")
    text_config = config.get("text_config")
    size = (text_config if isinstance(text_config, dict) else config).get("vocab_size")
    if isinstance(size, int) and size % 32:
        del values["resize_token_embeddings_to_32x"]
        reason = f"it adds {-size % 32} rows to the embeddings, packtool adds none; remove it"
        translation.refuse("resize_token_embeddings_to_32x", reason)
