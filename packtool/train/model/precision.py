"""The precision in which weights are kept, computed with and saved, which may be three different ones; quantization.

An update of AdamW is about as large as the learning rate. In bfloat16, which keeps 8 binary digits, 1e-5 is less than
half of the last digit of every weight above 0.005, and rounding discards it. Trained weights are therefore kept in
float32 and rounded for the computation only (autocast), or kept in bfloat16 together with the digits that rounding
discards (``kahan``). Frozen weights never change and keep the precision of their checkpoint.

    --master-weights    bytes for each trained weight: weight, gradient, optimizer's states (AdamW)
    float32             16 = 4 + 4 + 8
    kahan               12 = 2 + 2 + 8 (two moments, one of them with its lost digits; the weight's lost digits)
    none                 8 = 2 + 2 + 4 and most of a small update is lost

``--quant-bits`` keeps the linear layers of a language model in 4 or 8 bits, with adapters trained in float32: QLoRA
(Dettmers et al. 2023, arXiv 2305.14314), by bitsandbytes while transformers reads weights. Media towers, the head and
the experts of mixtures, which are no linear layers in transformers, keep the precision of the other weights.
"""

from __future__ import annotations

import contextlib
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

from packtool.config.model import QuantizationOptions
from packtool.config.train import TrainConfig
from packtool.encode.families import family_of
from packtool.errors import ConfigError, MismatchError
from packtool.train.model.sharding import copy_weight
from packtool.train.prepare.checkpoint import ONLY_MODEL

MASTER_NAME = "master_weights.safetensors"
"""A checkpoint's trained weights in full precision, if its model is saved with fewer digits or other names."""

_SHORT = (torch.bfloat16, torch.float16)
_HEAD = "lm_head"
_ADAPTER_PARTS = ("base_model.model.", ".base_layer")
# bitsandbytes: a float32 scale for 64 weights of 4 bits; doubly quantized, an 8-bit scale and a float32 for 256 scales.
_BLOCK, _SCALE_BLOCK = 64, 256


def checkpoint_dtype(config: PreTrainedConfig) -> torch.dtype:
    """Return the precision of a checkpoint; float32 if its configuration does not name it."""
    dtype = getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def keeps_masters(run: TrainConfig) -> bool:
    """Return whether a full model's trained weights are kept in float32 here; DeepSpeed keeps its own copies."""
    return run.train_type == "full" and run.master_weights == "float32" and run.deepspeed is None


def loaded_dtype(dtype: torch.dtype, config: PreTrainedConfig, run: TrainConfig) -> torch.dtype:
    """Return the precision to read weights in: the computation's, or float32 if master weights would lose digits.

    With ``--torch-dtype float32`` all weights stay in float32, even with ``--bf16`` or ``--fp16``.
    """
    if run.torch_dtype == "float32":
        return torch.float32
    loses = dtype in _SHORT and dtype != checkpoint_dtype(config)
    # Weights that are sharded while they are read keep that precision.
    return torch.float32 if (loses or run.shares_experts) and keeps_masters(run) else dtype


def raise_to_masters(model: nn.Module) -> None:
    """Convert trained weights to float32, in place; frozen ones keep their precision.

    If only the bias of a norm is trained, its scale is converted too: a norm needs both in one precision.
    """
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        is_trained = any(parameter.requires_grad for parameter in own)
        for parameter in own:
            if (parameter.requires_grad or (is_trained and parameter.ndim == 1)) and parameter.dtype in _SHORT:
                parameter.data = parameter.data.float()


def precision_lines(model: nn.Module, dtype: torch.dtype, run: TrainConfig, saved: torch.dtype) -> Iterator[str]:
    """Describe the precision in which a run's weights are kept, computed with and saved.

    Args:
        model: made trainable, not yet wrapped.
        dtype: of the computation.
        saved: of the original checkpoint.
    """
    kept = {str(parameter.dtype)[6:] for parameter in model.parameters() if parameter.requires_grad}
    frozen = {str(parameter.dtype)[6:] for parameter in model.parameters() if not parameter.requires_grad}
    frozen -= {"int8", "uint8"}  # quantized weights have a line of their own
    trained = ", ".join(sorted(kept))
    if run.train_type == "full" and run.master_weights == "kahan":
        trained += " with what rounding takes kept beside them (kahan)"
    elif run.deepspeed is not None and dtype in _SHORT:
        trained += " with DeepSpeed's float32 copies"
    elif run.train_type == "full" and kept & {"bfloat16"}:
        trained += ": small updates are lost, and --master-weights float32 keeps them"
    parts = [f"trained weights: {trained}"]
    if frozen:
        parts.append(f"frozen weights: {', '.join(sorted(frozen))}")
    parts.append(f"computed in {str(dtype)[6:]}")
    if not isinstance(model, PeftModel):
        parts.append(f"saved as {str(saved)[6:]}")
    yield "; ".join(parts)


@dataclass(frozen=True)
class SavedPrecision:
    """The precision in which a full model is saved: that of its original checkpoint.

    Args:
        dtype: of the original checkpoint.
        long: names of weights that stay float32 in any case, as the model's class demands.
    """

    dtype: torch.dtype
    long: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: PreTrainedConfig, model: nn.Module) -> SavedPrecision:
        """Return the precision of a model as it was loaded, before it is made trainable."""
        weights = [(name, parameter.dtype) for name, parameter in model.named_parameters()]
        is_short = any(dtype in _SHORT for _, dtype in weights)
        long = (name for name, dtype in weights if dtype == torch.float32) if is_short else ()
        return cls(checkpoint_dtype(config), frozenset(long))

    def rounds(self, name: str, weight: Tensor) -> bool:
        """Return whether a weight, of any shape, may lose digits when it is saved."""
        return weight.dtype == torch.float32 and self.dtype in _SHORT and name not in self.long

    def cast(self, state: Mapping[str, Tensor], trained: frozenset[str]) -> dict[str, Tensor]:
        """Return a model's state as it is saved.

        Args:
            state: names and weights, of any shape.
            trained: names of trained weights, which are rounded; others are rounded only if that loses nothing.
        """
        # By memory address, so that tied weights stay one.
        rounded: dict[tuple[int, torch.Size], Tensor] = {}
        saved = dict(state)
        for name, weight in state.items():
            if self.rounds(name, weight):
                key = weight.data_ptr(), weight.shape
                if key not in rounded:
                    short = weight.to(self.dtype)
                    rounded[key] = short if name in trained or torch.equal(short.float(), weight) else weight
                saved[name] = rounded[key]
        return saved


def save_masters(
    model: nn.Module, saved: SavedPrecision, checkpoint: str, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Write the trained weights that the saved model lacks, if there are any.

    The saved model has fewer digits of them, or other names: transformers saves the experts of a mixture one by one,
    and a resumed Trainer, which looks for their names in memory, would keep the initial ones.

    Args:
        weights: full weights of a sharded model, of any shape, all of which are written.
    """
    names = set(_saved_weights(checkpoint)) if weights is None else set()
    masters = {
        name: (parameter if weights is None else weights[name]).detach().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (name not in names or saved.rounds(name, parameter))
    }
    if masters:
        save_file(masters, os.path.join(checkpoint, MASTER_NAME))


def _saved_weights(checkpoint: str) -> Iterator[str]:
    for path in glob.glob(os.path.join(glob.escape(checkpoint), "model*.safetensors")):
        with safe_open(path, "pt") as file:
            yield from file.keys()


@torch.no_grad()
def load_masters(model: nn.Module, checkpoint: str) -> None:
    """Read the weights that ``save_masters`` wrote.

    Raises:
        MismatchError: if a trained weight is neither among them nor in the saved model.
    """
    path = os.path.join(checkpoint, MASTER_NAME)
    missing = []
    names = defaultdict[int, set[str]](set)  # tied weights have several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].add(name)
    opened: Any = safe_open(path, "pt") if os.path.exists(path) else contextlib.nullcontext()
    with opened as file:
        masters = set(file.keys() if file is not None else ())
        available = masters | set(_saved_weights(checkpoint))
        for name, parameter in model.named_parameters():
            if name in masters:
                copy_weight(parameter, file.get_tensor(name))
            elif parameter.requires_grad and not available & names[id(parameter)]:
                missing.append(name)
    if missing:
        raise MismatchError(
            f"{checkpoint} lacks {len(missing)} weights that this run trains: {', '.join(missing[:3])}",
            f"Freeze what was frozen there; or {ONLY_MODEL}",
        )


class KahanAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019) for bfloat16 weights, without losing updates to rounding.

    Kahan's compensated summation (Communications of the ACM, 1965), one step at a time: a number x is kept as two
    bfloat16 numbers, x rounded and the rounded rest. Together they have at least 16 binary digits. Weights and second
    moments need this (beta2 of 0.999 changes a moment by less than bfloat16 can represent); first moments change fast
    enough without. 12 bytes for each weight with its gradient instead of float32's 16.

    Args:
        params: tensors, or groups of them as torch's optimizers take them.
        lr: learning rate.
        betas: of the two moments.
        eps: added to the root of the second moment.
        weight_decay: share of a weight, times the learning rate, that each step subtracts.
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
        """Apply the gradients; one weight at a time is in float32."""
        assert closure is None, "the Trainer gives none"
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
        square = _joined(state["square"], state["square_lost"])
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        weight = _joined(parameter, state["lost"]).mul_(1 - group["lr"] * group["weight_decay"])
        root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weight.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**step))
        state["mean"].copy_(mean)
        _split(square, state["square"], state["square_lost"])
        _split(weight, parameter, state["lost"])


def _joined(rounded: Tensor, lost: Tensor) -> Tensor:
    return rounded.float().add_(lost.float())


def _split(value: Tensor, rounded: Tensor, lost: Tensor) -> None:
    rounded.copy_(value)
    lost.copy_(value - rounded.float())


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Return the number of trainable parameters, and of all."""
    sizes = [(full_size(parameter), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, trainable in sizes if trainable), sum(size for size, _ in sizes)


def full_size(parameter: Tensor) -> int:
    """Return the elements of a parameter of any shape, even if ZeRO-3 shards it or 4 bits pack two in a byte."""
    if (packed := getattr(parameter, "quant_state", None)) is not None:
        return int(packed.shape.numel())
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def quantization_config(
    options: QuantizationOptions, config: PreTrainedConfig, dtype: torch.dtype
) -> BitsAndBytesConfig | None:
    """Return the quantization for ``from_pretrained``; None without ``--quant-bits``.

    Raises:
        ConfigError: without bitsandbytes, or for a checkpoint that is quantized itself.
    """
    if options.quant_bits is None:
        return None
    option = f"--quant-bits {options.quant_bits}"
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(f"{option}: bitsandbytes is not installed", "pip install bitsandbytes")
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{option}: the weights of --model are quantized already", "Give the model in 16 bits.")
    is_four = options.quant_bits == 4
    return BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=is_four,
        load_in_8bit=not is_four,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_type=options.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=options.bnb_4bit_use_double_quant,
        llm_int8_skip_modules=list(_unquantized(config.model_type)),
    )


def keep_backward_pass(model: nn.Module) -> None:
    """Keep bitsandbytes, on a CPU with AVX512-BF16, from a layout of 4-bit weights that has no backward pass.

    It would switch to that layout in the first evaluation, or the check before the first step, and never switch back:
    the gradients of all layers below would be missing, without an error.
    """
    modules: Any = model.modules()
    for module in modules:
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _unquantized(model_type: str) -> tuple[str, ...]:
    towers = family_of({"model_type": model_type}).towers
    return (*towers.vision, *towers.aligner, _HEAD)


def quantized_layers(model: nn.Module, model_type: str, options: QuantizationOptions) -> list[nn.Linear]:
    """Return the layers that are or would be quantized, of a model with or without adapters."""
    if options.quant_bits is None:
        return []
    unquantized = _unquantized(model_type)
    layers = []
    for name, module in model.named_modules():
        for part in _ADAPTER_PARTS:
            name = name.replace(part, "")
        is_unquantized = any(name == part or name.startswith(f"{part}.") for part in unquantized)
        if isinstance(module, nn.Linear) and not (is_unquantized or name.endswith(_HEAD) or "lora_" in name):
            layers.append(module)
    return layers


def saved_bytes(layers: list[nn.Linear], options: QuantizationOptions, kept: int) -> int:
    """Return the bytes that quantization of these layers saves; an unquantized weight has ``kept`` bytes."""
    numbers = sum(full_size(layer.weight) for layer in layers)
    if options.quant_bits == 8:  # a float32 scale for each row
        return numbers * (kept - 1) - sum(4 * layer.out_features for layer in layers)
    scales = 1 / _BLOCK + 4 / _BLOCK / _SCALE_BLOCK if options.bnb_4bit_use_double_quant else 4 / _BLOCK
    return int(numbers * (kept - 0.5 - scales))


def quantization_line(model: nn.Module, model_type: str, options: QuantizationOptions) -> list[str]:
    """Return one line with the number of quantized weights; nothing without ``--quant-bits``."""
    if options.quant_bits is None:
        return []
    num_quantized = sum(full_size(layer.weight) for layer in quantized_layers(model, model_type, options))
    num_weights = sum(map(full_size, model.parameters()))
    kind = f"4 bits, {options.bnb_4bit_quant_type}" if options.quant_bits == 4 else "8 bits"
    return [
        f"quantized: {num_quantized:,} of {num_weights:,} weights ({kind}); towers of media, head and experts are not"
    ]
