"""Translation of a configuration: keys whose meaning depends on other keys, by tool, then all others by the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from packtool.config.compat_names import compat_entries
from packtool.config.data import ExportConfig
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError
from packtool.translate.names import _FIELDS, Translation, as_text, is_true, split_list
from packtool.translate.read import ForeignConfig

_PROCESSES = ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")


def translate(source: ForeignConfig, options: Iterable[str], command: str, environ: Mapping[str, str]) -> Translation:
    """Translate a configuration into the ``options`` of ``packtool COMMAND``.

    ``environ`` are the variables of this process, which say how many processes train.
    """
    translation = Translation(source)
    values = dict(source.values)
    _translate_variables(translation)
    _BY_TOOL[source.tool](translation, values, {**environ, **translation.environ})
    for name, value in values.items():
        translation.translate_key(name, value)
    translation.add_defaults()
    if is_true(translation.get("streaming")) and not is_true(translation.get("packing")):
        translation.omit(
            translation.origins.pop("streaming"), "streaming needs packs; rows are tokenized before training"
        )
        del translation.values["streaming"]
    if source.tool == "LLaMA-Factory":
        rank = int(translation.number("lora_rank", translation.get("lora_rank"), 8))
        translation.default("lora_alpha", 2 * rank, "LoraArguments.lora_alpha: 2 x rank")
    translation.restrict(options, command)
    return translation


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
    if "data_seed" in values and "seed" in values:
        translation.omit("data_seed", f"one seed decides packs and order: seed {values['seed']}")
        del values["data_seed"]
    if values.get("cached_dataset"):
        caches = [path.removesuffix("/").removesuffix("/train") for path in split_list(values.pop("cached_dataset"))]
        translation.set("cached_dataset", caches, "cached_dataset, without /train")
        if values.pop("cached_val_dataset", None):
            translation.omit("cached_val_dataset", "a cache of packtool contains its val split")
    _split_sequences(translation, values, environ)
    if as_text(values.get("loss_type", "")) == "loss_scale":
        translation.omit("loss_type", "--loss-scale weights the loss")
        del values["loss_type"]
    if "samples_per_step" not in translation.values and values.get("gradient_accumulation_steps") is None:
        _, num_processes, steps = _batch(translation, values, environ)
        origin = f"16 samples or packs per step, over {num_processes} processes"
        translation.default("gradient_accumulation_steps", steps, origin)


def _batch(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Return the samples of a micro-batch, the number of processes, and the accumulation steps in ms-swift."""
    name = "per_device_train_batch_size"
    batch_size = max(1, int(translation.number(name, values.get(name), 1)))
    sizes = [environ.get(variable, "") for variable in ("NPROC_PER_NODE", "NNODES")]
    num_processes = math.prod(int(size) for size in sizes if size.isdigit() and int(size))
    default = max(1, math.ceil(16 / batch_size / num_processes))
    name = "gradient_accumulation_steps"
    return batch_size, num_processes, int(translation.number(name, values.get(name), default))


def _split_sequences(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Keep the samples of each step under sequence parallelism, which needs packs."""
    size = int(translation.number("sequence_parallel_size", values.get("sequence_parallel_size"), 1))
    if size < 2:
        return
    if values.pop("attn_impl", None):
        translation.omit("attn_impl", "sequence parallelism has its own kernels")
    if not is_true(values.pop("packing", False)) and not translation.problems:
        batch_size, num_processes, steps = _batch(translation, values, environ)
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            values.pop(name, None)
        origin = "per_device_train_batch_size x gradient_accumulation_steps x processes / sequence_parallel_size"
        translation.set("samples_per_step", max(1, batch_size * steps * num_processes // size), origin)
        translation.set("packing", True, "sequence_parallel_size")


def _llama_factory(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    if "do_train" in values and not is_true(values["do_train"]) and translation.source.command == "train":
        translation.refuse("do_train", "this configuration does not train; packtool eval evaluates a model")
    is_packed = is_true(values.get("neat_packing")) or is_true(values.get("packing", values.get("stage") == "pt"))
    if values.get("packing") is not None or values.get("neat_packing") is not None or values.get("stage") == "pt":
        names = [name for name in ("neat_packing", "packing") if values.pop(name, None) is not None]
        translation.set("packing", is_packed, " and ".join(names) or "stage: pt")
    length = int(translation.number("cutoff_len", values.pop("cutoff_len", None), 2048))
    if is_packed:
        translation.set("max_length", length - 1, "cutoff_len, less 1 with packing as in LLaMA-Factory")
    elif "cutoff_len" in translation.source.values:
        translation.set("max_length", length, "cutoff_len")
    folder, limit = str(values.pop("dataset_dir", None) or "data"), values.pop("max_samples", None)
    if folder.startswith("REMOTE:"):
        translation.refuse(f"dataset_dir: {folder}", "download the data set, and give its folder")
    elif folder != "ONLINE" and (values.get("dataset") or values.get("eval_dataset")):
        is_given = translation.source.values.get("dataset_dir") is not None
        (translation.set if is_given else translation.default)("dataset_info", folder, "dataset_dir")
    origin = "dataset" if limit is None else "dataset and max_samples"
    for name, option in (("dataset", "dataset"), ("eval_dataset", "val_dataset")):
        if values.get(name):
            rows = split_list(values.pop(name))
            rows = [row if limit is None else f"{row}#first{limit}" for row in rows]
            translation.set(option, rows, origin.replace("dataset", name, 1))
    if (size := translation.number("val_size", values.pop("val_size", None), 0)) >= 1:
        translation.refuse(f"val_size: {size:g}", "a number of rows is not supported; give a ratio such as 0.1")
    elif size:
        translation.set("split_dataset_ratio", size, "val_size")
    if (targets := values.pop("lora_target", None)) is not None:
        names = split_list(targets)
        translation.set("target_modules", ["all-linear"] if names == ["all"] else names, "lora_target")
    if values.get("tokenized_path") and values.get("dataset", translation.values.get("dataset")):
        translation.omit("tokenized_path", "packtool caches tokens itself; packtool import reads LLaMA-Factory's")
        del values["tokenized_path"]
    if values.get("adapter_name_or_path"):
        values["adapter_name_or_path"] = split_list(values["adapter_name_or_path"])


def _axolotl(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    raise ConfigError("configurations of axolotl are not translated yet", "Use packtool's own options.")


def _trl(translation: Translation, values: dict[str, Any], environ: Mapping[str, str]) -> None:
    raise ConfigError("configurations of TRL are not translated yet", "Use packtool's own options.")


_BY_TOOL: dict[str, Callable[[Translation, dict[str, Any], Mapping[str, str]], None]] = {
    "ms-swift": _ms_swift,
    "LLaMA-Factory": _llama_factory,
    "axolotl": _axolotl,
    "TRL": _trl,
}
OPTIONS_OF = {"train": TrainConfig, "export": ExportConfig}
"""Settings by command of a ``ForeignConfig``."""
