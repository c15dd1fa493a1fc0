"""Loading of models with packed attention, and copying of tensors that transformers does not load.

``config.json`` may declare layers, such as those for multi-token prediction (MTP), that inference servers read but the
transformers class skips (``_keys_to_ignore_on_load_unexpected``), so ``save_pretrained`` would write a model without
them. Every saved model gets these unloaded tensors from the base model, unchanged.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import ERROR, getLogger
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, set_seed
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.modeling_utils import load_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, logging

from packtool.attention.features import install_tower_hooks
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.attention.register import route_towers, set_attention
from packtool.attention.support import refuse_unsupported
from packtool.batch.spec import InputSpec, auto_class, without_zero3
from packtool.config.commands import EvalConfig, VerifyConfig
from packtool.config.model import QuantizationOptions
from packtool.config.train import TrainConfig
from packtool.encode.model_files import absolute_model
from packtool.errors import ConfigError, MismatchError
from packtool.progress import Progress
from packtool.train.model.compiled import compile_layers
from packtool.train.model.precision import (
    SavedPrecision,
    checkpoint_dtype,
    disable_avx512_layout,
    load_master_weights,
    loaded_dtype,
    precision_line,
    quantization_config,
    quantization_lines,
)
from packtool.train.model.sharding import expert_sharding, experts_transposed_correctly
from packtool.train.model.trainable import adapter_lines, attach_adapter, load_adapter_weights, make_trainable
from packtool.train.prepare.run import Run
from packtool.train.prepare.trained import TrainedModel

_MAX_SHOWN_NAMES = 4
_MAX_SHOWN_TENSORS = 3


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hide transformers' progress bars inside ``with``, and warnings that users can do nothing about."""
    bars: Any = logging
    # torch's advice on how to gather divided experts faster.
    getLogger("torch.distributed.tensor._redistribute").setLevel(ERROR)
    was_enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            yield
    finally:
        if was_enabled:
            bars.enable_progress_bar()


def resolve_dtype(
    config: PreTrainedConfig, run: TrainConfig | EvalConfig | VerifyConfig, *, on_gpu: bool
) -> torch.dtype:
    """Return the precision of the computation: ``auto`` is the checkpoint's on a GPU, and float32 on a CPU."""
    name: str = run.computation_dtype if isinstance(run, TrainConfig) else run.torch_dtype
    if name == "auto":
        dtype = checkpoint_dtype(config) if on_gpu else torch.float32
        is_declined = isinstance(run, TrainConfig) and str(dtype).removeprefix("torch.") in run.declined_dtypes
        return torch.float32 if is_declined else dtype
    if name == "float16" and not on_gpu:
        raise ConfigError(
            "--torch-dtype float16 needs a GPU, and so does --fp16 true", "Use float32 or bfloat16 on a CPU."
        )
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def has_gpu(run: TrainConfig) -> bool:
    """Return whether a run computes on a GPU: one of this machine, or one that a dry run plans for."""
    return (run.dry_run and run.hardware is not None) or torch.cuda.is_available()


def load_model(
    model: str | None,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    packing: bool,
    attn_impl: str = "auto",
    parallel: SequenceParallel | None = None,
    quantization: QuantizationOptions | None = None,
    computation_dtype: torch.dtype | None = None,
    experts: DistributedConfig | None = None,
) -> PreTrainedModel:
    """Load a model with its weights, or initialize it at random.

    Args:
        model: directory or hub name of the checkpoint; None for random weights.
        config: of the model; not changed.
        dtype: precision of the weights in memory.
        packing: replace the attention of the language model by packed attention.
        quantization: options of the language model's linear layers; None keeps ``dtype``.
        computation_dtype: precision in which FSDP or DeepSpeed computes; by default ``dtype``.
        experts: division of a mixture's experts among processes; None if each process has all experts.
    """
    if packing:
        refuse_unsupported(config)
    quantized = None
    if quantization is not None:
        quantized = quantization_config(quantization, config, dtype, computation_dtype)

    load_arguments: dict[str, Any] = {"dtype": dtype, "quantization_config": quantized}
    is_stored_quantized = bool(getattr(config, "quantization_config", None))
    if quantized is not None and is_stored_quantized:
        # transformers takes the quantization of a quantized checkpoint from ``config``.
        config = copy.deepcopy(config)
        config.quantization_config = quantized.to_dict()
        load_arguments["quantization_config"] = None

    if experts is not None:
        loaded_model = _load_with_divided_experts(model, config, load_arguments, experts)
    else:
        loaded_model = _load_weights(model, config, load_arguments)
    if quantized is not None:
        disable_avx512_layout(loaded_model)  # it has no backward pass
    _drop_unused_conversions(loaded_model)
    route_attention(loaded_model, packing=packing, attn_impl=attn_impl, parallel=parallel)
    return loaded_model


def _load_with_divided_experts(
    checkpoint: str | None, config: PreTrainedConfig, load_arguments: dict[str, Any], experts: DistributedConfig
) -> PreTrainedModel:
    """Load a mixture of experts of which each process holds only some experts; see ``_load_weights``."""
    with experts_transposed_correctly():  # despite an error in transformers
        model = _load_weights(checkpoint, config, load_arguments | {"distributed_config": experts})
    # Remove it, so that saved configs do not contain the division among the processes of this run.
    model.config.__dict__.pop("distributed_config", None)
    return model


def _drop_unused_conversions(model: Any) -> None:
    """Drop conversions of weight names that loading has not used (under ZeRO-3), because saving would revert them."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions:
        model._weight_conversions = [conversion for conversion in conversions if conversion.was_used()]


def _load_weights(checkpoint: str | None, config: PreTrainedConfig, load_arguments: dict[str, Any]) -> PreTrainedModel:
    """Load a model from a checkpoint, or create it with random weights.

    Args:
        checkpoint: directory or hub name; None for random weights.
        config: architecture of the model. It is not changed.
        load_arguments: further arguments of ``from_pretrained``. Random weights use only its ``dtype``.

    Raises:
        MismatchError: if the weights cannot be read, or if the checkpoint lacks weights of the model.
    """
    model_class = auto_class(config)
    config = copy.deepcopy(config)  # transformers writes the attention implementation into it
    if checkpoint is None:
        random_model: PreTrainedModel = model_class.from_config(
            config, attn_implementation="sdpa", dtype=load_arguments["dtype"]
        )
        return random_model

    try:
        model, loading_info = model_class.from_pretrained(
            checkpoint, config=config, attn_implementation="sdpa", output_loading_info=True, **load_arguments
        )
    except (OSError, SafetensorError) as error:
        raise MismatchError(
            f"the weights of {checkpoint} cannot be read: {error}",
            "Download the complete files again: a clone without git lfs contains only pointers to them.",
        ) from error

    # transformers would only warn, and initialize missing weights at random.
    missing_names = sorted(loading_info["missing_keys"])
    if missing_names:
        shown_names = _shorten(missing_names, _MAX_SHOWN_NAMES)
        raise MismatchError(
            f"{checkpoint} lacks {len(missing_names)} weights of a {type(model).__name__}: {shown_names}",
            "Check that --model is a complete checkpoint with a language head.",
        )
    return model


def _shorten(names: Sequence[str], max_names: int) -> str:
    """Join names by commas; only the first ``max_names``, then "...", if there are more."""
    dots = ", ..." if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + dots


def load_trained(trained: TrainedModel, spec: InputSpec, dtype: torch.dtype, **settings: Any) -> nn.Module:
    """Load a trained model, with its adapter if it has one; ``settings`` are those of ``load_model``."""
    model = load_model(trained.base, spec.config, dtype=dtype, **{"packing": True, **settings})
    return attach_adapter(model, trained.adapter) if trained.adapter is not None else model


def route_attention(
    model: PreTrainedModel, *, packing: bool, attn_impl: str = "auto", parallel: SequenceParallel | None = None
) -> None:
    """Run a model's media towers once per micro-batch, and with ``packing`` use packed attention for its text."""
    install_tower_hooks(model)
    route_towers(model)
    if packing:
        set_attention(model, attn_impl, parallel)


@quiet_transformers()
def model_without_weights(config: TrainConfig, model_config: PreTrainedConfig, dtype: torch.dtype) -> nn.Module:
    """Return the model made trainable, on the meta device: this takes about a second, and no memory."""
    with without_zero3(), torch.device("meta"):
        model = auto_class(model_config).from_config(model_config, dtype=loaded_dtype(dtype, model_config, config))
        return make_trainable(model, config)


def input_spec(run: Run) -> InputSpec:
    """Return the model's properties that collation needs."""
    spec = InputSpec.load(run.source.files.directory, run.source.media_limits, run.config)
    spec = spec.with_media_cache(run.config, run.state.cache)
    return dataclasses.replace(spec, loss_reduction=run.config.loss_reduction)


def build_model(
    run: Run, spec: InputSpec, dtype: torch.dtype, parallel: SequenceParallel | None, progress: Progress
) -> tuple[PreTrainedModel | PeftModel, SavedPrecision, dict[str, str]]:
    """Load the model of a run, make it trainable, and compile its layers if requested.

    Args:
        dtype: precision of the computation.

    Returns:
        the model, bare or inside an adapter; the precision of its weights in checkpoints; and the files of
        ``unloaded_tensors``, which are copied into checkpoints.
    """
    config = run.config
    set_seed(config.seed)  # so that all ranks initialize the same weights, of the model or of adapters
    checkpoint = _full_checkpoint(run)
    loaded_model = _load_for_training(checkpoint, run, spec, dtype, parallel)

    # Read both before ``make_trainable`` converts weights and adds adapters.
    saved_precision = SavedPrecision.of(spec.config, loaded_model)
    unloaded_files: dict[str, str] = {}
    if config.train_type == "full" and checkpoint is not None:
        unloaded_files = unloaded_tensors(loaded_model, run.source.files.directory)

    model = make_trainable(loaded_model, config)
    _load_resumed_weights(model, run.resume_point.weights, progress)
    lines = [
        precision_line(model, dtype, config, saved_precision.dtype),
        *unloaded_lines(unloaded_files, config.model),
        *adapter_lines(model, config),
        *quantization_lines(model, spec.config.model_type, config),
    ]
    for line in lines:
        progress.note(line)
    if config.torch_compile:
        compile_layers(model, config.torch_compile_backend)
    return model, saved_precision, unloaded_files


def _full_checkpoint(run: Run) -> str | None:
    """Return the directory or hub name of the model to load, without adapter; None for random weights."""
    weights_checkpoint = run.resume_point.weights  # checkpoint of which only the weights are loaded, or None
    if weights_checkpoint is not None and run.config.train_type == "full":
        return weights_checkpoint
    if weights_checkpoint is None and run.config.train_from_scratch:
        return None
    return absolute_model(run.config.model)


def _load_resumed_weights(model: PreTrainedModel | PeftModel, checkpoint: str | None, progress: Progress) -> None:
    """Load what the full checkpoint lacks: the adapter, or the float32 master weights, of a resumed checkpoint."""
    if checkpoint is None:
        return
    if isinstance(model, PeftModel):
        load_adapter_weights(model, checkpoint)
    else:
        load_master_weights(model, checkpoint)
    progress.note(f"weights are loaded from {checkpoint}; optimizer, schedule and data start from the beginning")


def _load_for_training(
    checkpoint: str | None, run: Run, spec: InputSpec, computation_dtype: torch.dtype, parallel: SequenceParallel | None
) -> PreTrainedModel:
    """Load the model of a run, without adapter, from a checkpoint; with random weights if that is None.

    The precision of its weights may differ from that of the computation. ``parallel`` says how ranks share a sequence;
    None if each has its own.
    """
    config = run.config
    weight_dtype = loaded_dtype(computation_dtype, spec.config, config)
    experts = None
    if config.shares_experts:
        meta_model = model_without_weights(config, spec.config, weight_dtype)
        experts = expert_sharding(meta_model, config, run.world, computation_dtype)
    return load_model(
        checkpoint,
        spec.config,
        dtype=weight_dtype,
        packing=config.removes_padding,
        attn_impl=config.attn_impl,
        parallel=parallel,
        quantization=config,  # has these options
        computation_dtype=computation_dtype,
        experts=experts,
    )


def unloaded_tensors(model: PreTrainedModel, directory: str) -> dict[str, str]:
    """Return the tensors of a checkpoint that ``from_pretrained`` does not load, with the file of each."""
    names = _names_in_model(model, directory)
    return {name: path for name, path in tensor_files(directory).items() if names[name] is None}


def restore_float32_weights(model: PreTrainedModel, directory: str) -> None:
    """Restore weights that a 16-bit checkpoint stores in float32 and that loading has rounded."""
    weights, files = model.state_dict(), tensor_files(directory)
    names = _names_in_model(model, directory, converts=False)
    for path in sorted({path for path in files.values() if path.endswith(".safetensors")}):
        with safe_open(path, "pt") as file:
            for name, tensor in _header(path).items():
                in_model = names.get(name)
                if tensor["dtype"] == "F32" and in_model and weights[in_model].dtype in (torch.bfloat16, torch.float16):
                    model.get_parameter_or_buffer(in_model).data = file.get_tensor(name)


def _names_in_model(model: PreTrainedModel, directory: str, *, converts: bool = True) -> dict[str, str | None]:
    """Map each tensor of a checkpoint to the name of the weight it is loaded into; None if it is not loaded.

    With ``converts``, also map tensors that are converted, for example merged into one weight.
    """
    weights = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter) and converts]

    def name_in_model(name: str) -> str | None:
        # As from_pretrained tries them: first the rules of the class, then only its prefix.
        rules: tuple[tuple[list[WeightRenaming], list[WeightConverter]], ...] = ((renamings, converters), ([], []))
        renamed = (rename_source_key(name, *each, model.base_model_prefix, weights)[0] for each in rules)
        return next((each for each in renamed if each in weights), None)

    return {name: name_in_model(name) for name in tensor_files(directory)}


def unloaded_lines(unloaded: Mapping[str, str], base: str) -> Iterator[str]:
    """Yield a line with the tensors that saved models keep from their base model, if there are any."""
    if unloaded:
        names = _shorten(sorted(unloaded), _MAX_SHOWN_TENSORS)
        yield f"saved models keep {len(unloaded):,} tensors of {base} that transformers does not load: {names}"


def add_unloaded_tensors(output: str, unloaded: Mapping[str, str]) -> None:
    """Add tensors of the base model, which transformers did not load, to a saved model.

    ``output`` is the directory of the saved model, ``unloaded`` the file of each tensor (see ``unloaded_tensors``).
    Each of these files gives one more shard. Tensors that the saved model has already are not added.
    """
    saved_files = tensor_files(output)
    names_by_source = defaultdict[str, list[str]](list)  # of the tensors to add, by their file
    for name, source in unloaded.items():
        if name not in saved_files:
            names_by_source[source].append(name)
    if not saved_files or not names_by_source:
        return

    saved_shards = sorted(set(saved_files.values()))
    num_saved = len(saved_shards)
    all_paths = _shard_paths(output, num_saved + len(names_by_source))
    # Rename the saved shards, because the name of a shard contains the number of shards; so no new name exists yet.
    for shard, new_path in zip(saved_shards, all_paths[:num_saved], strict=True):
        os.replace(shard, new_path)
    for (source, names), path in zip(names_by_source.items(), all_paths[num_saved:], strict=True):
        save_file(_read_tensors(source, names), path, {"format": "pt"})
    _write_index(output, all_paths)


def _shard_paths(directory: str, num_shards: int) -> list[str]:
    """Return the paths of a model's shards, which have transformers' names."""
    names = [f"model-{number:05d}-of-{num_shards:05d}.safetensors" for number in range(1, num_shards + 1)]
    return [os.path.join(directory, name) for name in names]


def _read_tensors(path: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Read tensors by name from a file of weights, of safetensors or of torch."""
    if path.endswith(".safetensors"):
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in names}
    state = load_state_dict(path)
    return {name: state[name].contiguous() for name in names}


def _write_index(output: str, paths: Sequence[str]) -> None:
    """Write the index of the shards ``paths`` of a model: the shard of each tensor, and the size of all."""
    headers = {os.path.basename(path): _header(path) for path in paths}
    tensors = [tensor for header in headers.values() for tensor in header.values()]
    num_bytes = 0
    for tensor in tensors:
        begin, end = tensor["data_offsets"]
        num_bytes += end - begin
    metadata = {"total_parameters": sum(math.prod(tensor["shape"]) for tensor in tensors), "total_size": num_bytes}
    weight_map = {name: shard for shard, header in headers.items() for name in header}
    with open(os.path.join(output, SAFE_WEIGHTS_INDEX_NAME), "w", encoding="utf-8") as index_file:
        json.dump({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}, index_file, indent=2)
        index_file.write("\n")


def tensor_files(directory: str) -> dict[str, str]:
    """Return the file of each tensor of a model, by the tensor's name; empty without files that transformers reads."""
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        path = os.path.join(directory, single)
        if os.path.isfile(path):
            names = _header(path) if single == SAFE_WEIGHTS_NAME else load_state_dict(path, map_location="meta")
            return dict.fromkeys(names, path)
        path = os.path.join(directory, index)
        if os.path.isfile(path):
            with open(path, encoding="utf-8") as file:
                files: dict[str, str] = json.load(file)["weight_map"]
            return {name: os.path.join(directory, shard) for name, shard in files.items()}
    return {}


def _header(path: str) -> dict[str, Any]:
    """Return type, shape and offsets of each tensor in a safetensors file, by name."""
    with open(path, "rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return header
