"""Precision of weights in memory, in computation and in checkpoints, which may differ; and quantization.

An update of AdamW is about as large as the learning rate. In bfloat16, with 8 binary digits, 1e-5 is less than half of
the last digit of every weight above 0.005, and rounding discards it. Trained weights are therefore float32, rounded for
the computation (autocast), or bfloat16 with the lost digits beside them (``kahan``). Frozen weights stay as they are.

    --master-weights    bytes for each trained weight: weight, gradient, optimizer states (AdamW)
    float32             16 = 4 + 4 + 8
    kahan               12 = 2 + 2 + 8 (first moment; second moment and its lost digits; lost digits of the weight)
    none                 8 = 2 + 2 + 4; most of a small update is lost

``--quant-bits`` stores the linear layers of a language model, but no experts of mixtures, in 4 or 8 bits by
bitsandbytes, with adapters in float32 (QLoRA, Dettmers et al. 2023, arXiv 2305.14314). FSDP and ZeRO-3 shard 4-bit
weights, but not their scales.
"""

from __future__ import annotations

import glob
import importlib.util
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from packtool.config.model import QuantizationOptions
from packtool.config.train import TrainConfig
from packtool.encode.families import family_of
from packtool.errors import ConfigError, MismatchError
from packtool.train.model.sharding import copy_weight, shards_weights
from packtool.train.prepare.checkpoint import ONLY_MODEL

MASTER_NAME = "master_weights.safetensors"
"""File of a checkpoint's trained weights in full precision, if its model is saved with fewer digits or other names."""

_HALF_PRECISION = (torch.bfloat16, torch.float16)  # 16 bits
_HEAD = "lm_head"
_ADAPTER_PARTS = ("base_model.model.", ".base_layer")
# bitsandbytes: a float32 scale for 64 weights of 4 bits; doubly quantized, an 8-bit scale and a float32 for 256 scales.
_BLOCK, _SCALE_BLOCK = 64, 256


def checkpoint_dtype(config: PreTrainedConfig) -> torch.dtype:
    """Return the precision of a checkpoint, from its configuration; float32 if that does not name it."""
    dtype = getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def keeps_masters(run: TrainConfig) -> bool:
    """Return whether trained weights of a full model are kept in float32; not with DeepSpeed, which keeps copies."""
    return run.train_type == "full" and run.master_weights == "float32" and run.deepspeed is None


def loaded_dtype(dtype: torch.dtype, config: PreTrainedConfig, run: TrainConfig) -> torch.dtype:
    """Return the precision to read weights in: the computation's, or float32 if master weights would lose digits."""
    if run.torch_dtype == "float32":
        return torch.float32
    loses_digits = dtype in _HALF_PRECISION and dtype != checkpoint_dtype(config)
    # Expert parallelism shards weights while they are read, so convert_trained_to_float32 comes too late.
    return torch.float32 if (loses_digits or run.shares_experts) and keeps_masters(run) else dtype


def convert_trained_to_float32(model: nn.Module) -> None:
    """Convert trained weights to float32, in place; frozen ones keep their precision.

    If only the bias of a norm is trained, its scale is converted too, because a norm needs both in one precision.
    """
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        is_trained = any(parameter.requires_grad for parameter in own)
        for parameter in own:
            if (parameter.requires_grad or (is_trained and parameter.ndim == 1)) and parameter.dtype in _HALF_PRECISION:
                parameter.data = parameter.data.float()


def precision_line(model: nn.Module, dtype: torch.dtype, run: TrainConfig, saved_dtype: torch.dtype) -> str:
    """Describe the precision of a run's weights in memory, in the computation (``dtype``) and in checkpoints."""
    trained_dtypes = _dtype_names(weight for weight in model.parameters() if weight.requires_grad)
    frozen_dtypes = _dtype_names(weight for weight in model.parameters() if not weight.requires_grad)
    frozen_dtypes -= {"int8", "uint8"}  # of quantized weights, which quantization_lines describes
    statements = [f"trained weights: {', '.join(sorted(trained_dtypes))}{_small_updates(trained_dtypes, dtype, run)}"]
    if frozen_dtypes:
        statements.append(f"frozen weights: {', '.join(sorted(frozen_dtypes))}")
    statements.append(f"computed in {_name(dtype)}")
    if not isinstance(model, PeftModel):
        statements.append(f"saved as {_name(saved_dtype)}")
    return "; ".join(statements)


def _small_updates(trained_dtypes: set[str], dtype: torch.dtype, run: TrainConfig) -> str:
    """Describe what keeps small updates of trained weights, or that they are lost; "" if rounding loses none."""
    is_full = run.train_type == "full"
    if is_full and run.master_weights == "kahan":
        return " plus the digits that rounding discards (kahan)"
    if run.deepspeed is not None and dtype in _HALF_PRECISION:
        return " with DeepSpeed's float32 copies"
    is_lossy = is_full and "bfloat16" in trained_dtypes
    return " (small updates are lost; --master-weights float32 keeps them)" if is_lossy else ""


def _dtype_names(weights: Iterable[Tensor]) -> set[str]:
    return {_name(weight.dtype) for weight in weights}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class SavedPrecision:
    """Precision of saved full models: that of the original checkpoint, but float32 for weights ``float32_names``."""

    dtype: torch.dtype
    float32_names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: PreTrainedConfig, model: nn.Module) -> SavedPrecision:
        """Return the precision for saving a model that was just loaded, before it is made trainable."""
        weights = [(name, parameter.dtype) for name, parameter in model.named_parameters()]
        is_short = any(dtype in _HALF_PRECISION for _, dtype in weights)
        float32_names = (name for name, dtype in weights if dtype == torch.float32) if is_short else ()
        return cls(checkpoint_dtype(config), frozenset(float32_names))

    def is_rounded(self, name: str, weight: Tensor) -> bool:
        """Return whether saving rounds a weight, of any shape."""
        return weight.dtype == torch.float32 and self.dtype in _HALF_PRECISION and name not in self.float32_names

    def cast(self, state: Mapping[str, Tensor], trained: frozenset[str]) -> dict[str, Tensor]:
        """Return weights, of any shape, in the precision for saving; only those in ``trained`` may lose digits."""
        # Rounded weights by memory address, so that tied weights stay tied.
        rounded: dict[tuple[int, torch.Size], Tensor] = {}
        saved = dict(state)
        for name, weight in state.items():
            if self.is_rounded(name, weight):
                key = weight.data_ptr(), weight.shape
                if key not in rounded:
                    short = weight.to(self.dtype)
                    rounded[key] = short if name in trained or torch.equal(short.float(), weight) else weight
                saved[name] = rounded[key]
        return saved


def save_master_weights(
    model: nn.Module, saved: SavedPrecision, checkpoint: str, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write the master weights of a checkpoint: trained weights that its model files do not have, or have rounded.

    Args:
        saved: precision of the model files, which are already written.
        checkpoint: its directory.
        weights: full weights of a sharded model by name, of any shape; all trained ones are written.
    """
    # Without experts of mixtures, which transformers saves one by one, under other names.
    names_in_files = set(_names_in_model_files(checkpoint))
    master_weights = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_in_files = name in names_in_files and not saved.is_rounded(name, parameter)
        if weights is not None:
            master_weights[name] = weights[name].detach().contiguous()
        elif not is_in_files:
            master_weights[name] = parameter.detach().contiguous()
    if master_weights:
        save_file(master_weights, os.path.join(checkpoint, MASTER_NAME))


def _names_in_model_files(checkpoint: str) -> Iterator[str]:
    """Yield the names of the weights in a checkpoint's model files."""
    for path in glob.glob(os.path.join(glob.escape(checkpoint), "model*.safetensors")):
        with safe_open(path, "pt") as file:
            yield from file.keys()


@torch.no_grad()
def load_master_weights(model: nn.Module, checkpoint: str) -> None:
    """Copy the weights that ``save_master_weights`` wrote, if any; raise if a trained weight is in no file."""
    path = os.path.join(checkpoint, MASTER_NAME)
    master_names: set[str] = set()
    if os.path.exists(path):
        with safe_open(path, "pt") as file:
            master_names = set(file.keys())
            for name, parameter in model.named_parameters():
                if name in master_names:
                    copy_weight(parameter, file.get_tensor(name))
    missing = _missing_weights(model, master_names | set(_names_in_model_files(checkpoint)))
    if missing:
        raise MismatchError(
            f"{checkpoint} lacks {len(missing)} weights that this run trains: {', '.join(missing[:3])}",
            f"Freeze the same parts as in the run that saved it; or {ONLY_MODEL}",
        )


def _missing_weights(model: nn.Module, saved_names: set[str]) -> list[str]:
    """Return the names of the trained weights of which no name is in ``saved_names``."""
    names_by_id = defaultdict[int, set[str]](set)  # of each parameter: a tied weight has several names
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_id[id(parameter)].add(name)
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and saved_names.isdisjoint(names_by_id[id(parameter)])
    ]


class KahanAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) for bfloat16 weights, without losing updates to rounding.

    As in Kahan's compensated summation (Communications of the ACM, 1965), a number x is stored as two bfloat16 numbers:
    x rounded, and the rounding error. Together they have at least 16 binary digits. Weights and second moments need
    this (with beta2 of 0.999, a moment changes by less than bfloat16 can represent); first moments change faster. The
    arguments are those of ``torch.optim.AdamW``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights; only one at a time is in float32."""
        assert closure is None, "the Trainer passes none"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name in ("mean", "square", "square_lost", "lost"):
                state[name] = torch.zeros_like(parameter)
        state["step"] += 1
        step, (beta1, beta2), gradient = float(state["step"]), group["betas"], parameter.grad.float()  # type: ignore[union-attr]
        mean = state["mean"].float().lerp_(gradient, 1 - beta1)
        square = _with_lost_digits(state["square"], state["square_lost"])
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weight = _with_lost_digits(parameter, state["lost"]).mul_(1 - group["lr"] * group["weight_decay"])
        root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weight.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**step))
        state["mean"].copy_(mean)
        _store(square, state["square"], state["square_lost"])
        _store(weight, parameter, state["lost"])


def _with_lost_digits(rounded: Tensor, lost: Tensor) -> Tensor:
    """Return a float32 value from its rounded value and its rounding error."""
    return rounded.float().add_(lost.float())


def _store(value: Tensor, rounded: Tensor, lost: Tensor) -> None:
    """Store a float32 value as its rounded value and its rounding error, in place."""
    rounded.copy_(value)
    lost.copy_(value - rounded.float())


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of trainable parameters and of all parameters."""
    num_trainable = sum(unsharded_numel(parameter) for parameter in model.parameters() if parameter.requires_grad)
    return num_trainable, sum(map(unsharded_numel, model.parameters()))


def unsharded_numel(parameter: Tensor) -> int:
    """Return the number of elements of a parameter of any shape, even sharded by ZeRO-3 or packed in 4 bits."""
    if (packed := getattr(parameter, "quant_state", None)) is not None:
        return int(packed.shape.numel())
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def quantization_config(
    options: QuantizationOptions,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    computation_dtype: torch.dtype | None = None,
) -> BitsAndBytesConfig | None:
    """Return the quantization for ``from_pretrained``; None without ``--quant-bits``; raise if it is impossible.

    Args:
        config: of the model, which says whether its checkpoint is already quantized.
        dtype: precision of the weights that are not quantized, in which quantized layers compute.
        computation_dtype: precision in which FSDP or DeepSpeed computes, by default ``dtype``.
    """
    if options.quant_bits is None:
        return None
    is_sharded = isinstance(options, TrainConfig) and shards_weights(options)
    _check_can_quantize(options.quant_bits, is_sharded=is_sharded)
    sharded_dtype = None
    if is_sharded:
        # FSDP and DeepSpeed would convert 4-bit weights that are stored as numbers of another type.
        sharded_dtype = computation_dtype or dtype

    stored_settings: Mapping[str, Any] | None = getattr(config, "quantization_config", None)
    if stored_settings:  # the checkpoint is already quantized
        _check_stored_quantization(stored_settings, options, sharded_dtype)
        settings = dict(stored_settings, bnb_4bit_compute_dtype=dtype)
        return BitsAndBytesConfig(**settings)  # type: ignore[no-untyped-call]
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=options.quant_bits == 4,
        load_in_8bit=options.quant_bits == 8,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=sharded_dtype or torch.uint8,
        bnb_4bit_quant_type=options.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=options.bnb_4bit_use_double_quant,
        llm_int8_skip_modules=list(_unquantized(config.model_type)),
    )


def _check_can_quantize(quant_bits: int, *, is_sharded: bool) -> None:
    option = f"--quant-bits {quant_bits}"
    if is_sharded and quant_bits == 8:
        problem = f"{option}: bitsandbytes does not shard 8-bit weights"
        raise ConfigError(problem, "Give --quant-bits 4, or ZeRO stage 2.")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"{option}: bitsandbytes is not installed", "pip install bitsandbytes")


def _check_stored_quantization(
    stored_settings: Mapping[str, Any], options: QuantizationOptions, sharded_dtype: torch.dtype | None
) -> None:
    """Raise a ConfigError if the weights of a checkpoint are quantized in another way than the options ask for.

    ``stored_settings`` are those of the checkpoint, by bitsandbytes' names. ``sharded_dtype`` is the type of number
    that sharded 4-bit weights must be stored as; None without sharding.
    """
    expected_settings: dict[str, Any] = {f"load_in_{options.quant_bits}bit": True}
    if options.quant_bits == 4:
        expected_settings["bnb_4bit_quant_type"] = options.bnb_4bit_quant_type
    if sharded_dtype is not None:
        expected_settings["bnb_4bit_quant_storage"] = _name(sharded_dtype)

    differences = []
    for name, expected in expected_settings.items():
        stored = stored_settings.get(name)
        if stored != expected:
            differences.append(f"{name} is {stored}, not {expected}")
    if differences:
        raise ConfigError(
            f"--quant-bits {options.quant_bits}: the weights of --model are already quantized "
            f"({stored_settings.get('quant_method')}): {', '.join(differences)}",
            "Give the model in 16 bits, or quantized in this way by bitsandbytes.",
        )


def disable_avx512_layout(model: nn.Module) -> None:
    """Disable bitsandbytes' layout of 4-bit weights for CPUs with AVX512-BF16, because it has no backward pass.

    bitsandbytes would switch to that layout in the first evaluation, or the check before the first step, and never
    switch back: the gradients of all layers below would be missing, without an error.
    """
    modules: Any = model.modules()
    for module in modules:
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _unquantized(model_type: str) -> tuple[str, ...]:
    """Return the names of the modules whose layers are not quantized."""
    towers = family_of({"model_type": model_type}).towers
    return (*towers.vision, *towers.aligner, _HEAD)


def quantized_layers(model: nn.Module, model_type: str, options: QuantizationOptions) -> list[Any]:
    """Return the layers that are or would be quantized, in a model with or without adapters."""
    if options.quant_bits is None:
        return []
    unquantized = _unquantized(model_type)
    layers = []
    for name, module in model.named_modules():
        for part in _ADAPTER_PARTS:
            name = name.replace(part, "")
        is_unquantized = any(name == part or name.startswith(f"{part}.") for part in unquantized)
        if isinstance(module, (nn.Linear, Conv1D)) and not (is_unquantized or name.endswith(_HEAD) or "lora_" in name):
            layers.append(module)
    return layers


def bytes_saved_by_quantization(layers: list[Any], options: QuantizationOptions, weight_bytes: int) -> int:
    """Return the bytes that quantization of these layers saves; ``weight_bytes`` are those of one weight."""
    num_weights = sum(unsharded_numel(layer.weight) for layer in layers)
    bytes_per_weight = 0.5 if options.quant_bits == 4 else 1
    return int(num_weights * (weight_bytes - bytes_per_weight)) - scale_bytes(layers, options)


def scale_bytes(layers: list[Any], options: QuantizationOptions) -> int:
    """Return the bytes of the scales of quantized layers."""
    if options.quant_bits == 8:  # a float32 scale for each row
        return sum(4 * (layer.nf if isinstance(layer, Conv1D) else layer.out_features) for layer in layers)
    bytes_per_weight = 1 / _BLOCK + 4 / _BLOCK / _SCALE_BLOCK if options.bnb_4bit_use_double_quant else 4 / _BLOCK
    return round(sum(unsharded_numel(layer.weight) for layer in layers) * bytes_per_weight)


def quantization_lines(model: nn.Module, model_type: str, options: QuantizationOptions) -> list[str]:
    """Return a line about the number of quantized weights; none without ``--quant-bits``."""
    if options.quant_bits is None:
        return []
    num_quantized = sum(unsharded_numel(layer.weight) for layer in quantized_layers(model, model_type, options))
    num_weights = sum(map(unsharded_numel, model.parameters()))
    kind = f"4 bits, {options.bnb_4bit_quant_type}" if options.quant_bits == 4 else "8 bits"
    return [f"quantized: {num_quantized:,} of {num_weights:,} weights ({kind}); media towers, head and experts are not"]
