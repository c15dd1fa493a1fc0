"""The precision in which weights are kept, computed with and saved: three answers that need not agree.

An update of AdamW is about as large as the learning rate. In bfloat16, which keeps 8 binary digits, 1e-5 is less than
half of the last digit of every weight above 0.005 and rounding takes it away again. What is trained is therefore kept
in float32 and rounded for the computation alone (autocast), or kept in bfloat16 with the digits that rounding took
kept beside it (``kahan``). What is frozen never changes and stays as its checkpoint has it.

    --master-weights    bytes for each trained weight: weight, gradient, optimizer's states (AdamW)
    float32             16 = 4 + 4 + 8
    kahan               12 = 2 + 2 + 8 (two moments, one of them with its lost digits; the weight's lost digits)
    none                 8 = 2 + 2 + 4 and most of a small update is lost

AdamW for bfloat16 weights that loses nothing to rounding: what rounding takes is kept, and added in the next step.

A number x is kept as two bfloat16 numbers: x rounded, and what is missing, rounded. Together they have 16 binary digits
and more, where bfloat16 has 8: Kahan's compensated summation (Communications of the ACM, 1965), one step at a time.
Weights and second moments need it (beta2 of 0.999 changes a moment by less than bfloat16 can tell); first moments move
fast enough to do without. 12 bytes for each weight with its gradient instead of the 16 of float32.
"""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig

from packtool.config.train import TrainConfig
from packtool.errors import MismatchError
from packtool.train.model.sharding import put
from packtool.train.prepare.checkpoint import ONLY_MODEL

MASTER_NAME = "master_weights.safetensors"
"""The trained weights of a checkpoint as they are kept, where its model is saved with fewer digits or other names."""

_SHORT = (torch.bfloat16, torch.float16)


def checkpoint_dtype(config: PreTrainedConfig) -> torch.dtype:
    """Precision that a checkpoint was saved in; float32 where it does not say."""
    named = config.dtype
    if isinstance(named, str):
        named = getattr(torch, named)
    return named if isinstance(named, torch.dtype) else torch.float32


def keeps_masters(run: TrainConfig) -> bool:
    """Whether trained weights are float32 in this process; DeepSpeed keeps its own, adapters are peft's."""
    return run.train_type == "full" and run.master_weights == "float32" and run.deepspeed is None


def loaded_dtype(dtype: torch.dtype, config: PreTrainedConfig, run: TrainConfig) -> torch.dtype:
    """Precision to read weights in: the computation's, or float32 where that would lose digits of master weights.

    With ``--bf16`` or ``--fp16`` all weights stay in float32 where ``--torch-dtype`` says so.

    Args:
        dtype: of the computation.
        config: of the checkpoint.
    """
    if run.torch_dtype == "float32":
        return torch.float32
    loses = dtype in _SHORT and dtype != checkpoint_dtype(config)
    # What is sharded while it is read keeps its precision.
    return torch.float32 if (loses or run.shares_experts) and keeps_masters(run) else dtype


def raise_to_masters(model: nn.Module) -> None:
    """Turn the weights that are trained into float32, in place; frozen ones stay what they are.

    Where only the bias of a norm is trained its scale is turned too, for a norm computes with both in one precision.
    """
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        is_trained = any(parameter.requires_grad for parameter in own)
        for parameter in own:
            goes_along = is_trained and parameter.ndim == 1
            if (parameter.requires_grad or goes_along) and parameter.dtype in _SHORT:
                parameter.data = parameter.data.float()


def precision_lines(model: nn.Module, dtype: torch.dtype, run: TrainConfig, saved: torch.dtype) -> Iterator[str]:
    """What the weights of a run are kept, computed with and saved in.

    Args:
        model: made trainable, not yet wrapped.
        dtype: of the computation.
        saved: of the checkpoint that training began with.
    """
    kept = {str(parameter.dtype)[6:] for parameter in model.parameters() if parameter.requires_grad}
    frozen = {str(parameter.dtype)[6:] for parameter in model.parameters() if not parameter.requires_grad}
    frozen -= {"int8", "uint8"}  # told where they are counted
    how = ", ".join(sorted(kept))
    if run.train_type == "full" and run.master_weights == "kahan":
        how += " with what rounding takes kept beside them (kahan)"
    elif run.deepspeed is not None and dtype in _SHORT:
        how += " with DeepSpeed's float32 copies"
    elif run.train_type == "full" and kept & {"bfloat16"}:
        how += ": small updates are lost, and --master-weights float32 keeps them"
    parts = [f"trained weights: {how}"]
    if frozen:
        parts.append(f"frozen weights: {', '.join(sorted(frozen))}")
    parts.append(f"computed in {str(dtype)[6:]}")
    if not isinstance(model, PeftModel):
        parts.append(f"saved as {str(saved)[6:]}")
    yield "; ".join(parts)


@dataclass(frozen=True)
class SavedPrecision:
    """What a whole model is saved as: its checkpoint's precision.

    Args:
        dtype: of the checkpoint that training began with.
        long: names of weights that stay float32 whatever the rest is, as the model's class demands.
    """

    dtype: torch.dtype
    long: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: PreTrainedConfig, model: nn.Module) -> SavedPrecision:
        """The precision of a model as it was loaded, before anything was made trainable."""
        weights = [(name, parameter.dtype) for name, parameter in model.named_parameters()]
        is_short = any(dtype in _SHORT for _, dtype in weights)
        long = (name for name, dtype in weights if dtype == torch.float32) if is_short else ()
        return cls(checkpoint_dtype(config), frozenset(long))

    def cast(self, state: Mapping[str, Tensor], trained: frozenset[str]) -> dict[str, Tensor]:
        """A model's state as it is saved.

        Args:
            state: names and weights, of any shape.
            trained: names of weights that were trained: these are rounded, others only where that loses nothing.
        """
        # By where they lie, so that tied weights stay one.
        done: dict[tuple[int, torch.Size], Tensor] = {}
        return {name: self._cast(name, weight, name in trained, done) for name, weight in state.items()}

    def _cast(self, name: str, weight: Tensor, is_trained: bool, done: dict[tuple[int, torch.Size], Tensor]) -> Tensor:
        if weight.dtype != torch.float32 or self.dtype not in _SHORT or name in self.long:
            return weight
        key = weight.data_ptr(), weight.shape
        if key not in done:
            short = weight.to(self.dtype)
            done[key] = short if is_trained or torch.equal(short.float(), weight) else weight
        return done[key]


def save_masters(
    model: nn.Module, saved: SavedPrecision, checkpoint: str, whole: Mapping[str, Tensor] | None = None
) -> None:
    """Write the trained weights that the saved model does not have as they are kept, if there are any.

    It has fewer digits of them, or other names: transformers saves the experts of a mixture one by one, and a resumed
    Trainer, which looks for them under their names in memory, would go on with those that training began with.

    Args:
        whole: the weights of a sharded model in one piece, of any shape, all of which are written.
    """
    names = set(_saved_weights(checkpoint)) if whole is None else set()
    masters = {
        name: (parameter if whole is None else whole[name]).detach().contiguous()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (name not in names or _is_rounded(name, parameter, saved))
    }
    if masters:
        save_file(masters, os.path.join(checkpoint, MASTER_NAME))


def _is_rounded(name: str, parameter: Tensor, saved: SavedPrecision) -> bool:
    return parameter.dtype == torch.float32 and saved.dtype in _SHORT and name not in saved.long


def _saved_weights(checkpoint: str) -> Iterator[str]:
    for path in glob.glob(os.path.join(glob.escape(checkpoint), "model*.safetensors")):
        with safe_open(path, "pt") as file:
            yield from file.keys()


@torch.no_grad()
def load_masters(model: nn.Module, checkpoint: str) -> None:
    """Read back what ``save_masters`` wrote.

    Raises:
        MismatchError: if trained weights are neither there nor in the saved model.
    """
    path = os.path.join(checkpoint, MASTER_NAME)
    lacking = []
    by_parameter: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_parameter.setdefault(id(parameter), []).append(name)
    found: Any = safe_open(path, "pt") if os.path.exists(path) else contextlib.nullcontext()
    with found as file:
        masters = set(file.keys() if file is not None else ())
        there = masters | set(_saved_weights(checkpoint))
        for name, parameter in model.named_parameters():
            if name in masters:
                put(parameter, file.get_tensor(name))
            elif parameter.requires_grad and not there & set(by_parameter[id(parameter)]):
                lacking.append(name)
    if lacking:
        raise MismatchError(
            f"{checkpoint} lacks {len(lacking)} weights that this run trains: {', '.join(lacking[:3])}",
            f"Freeze what was frozen there; or {ONLY_MODEL}",
        )


class KahanAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019), with decay that does not go through the moments.

    Args:
        params: tensors, or groups of them as torch's optimizers take them.
        lr: learning rate.
        betas: of the two moments.
        eps: added to the root of the second moment.
        weight_decay: share of a weight, times the learning rate, that a step takes off.
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
        """Apply the gradients; one weight at a time is held in float32."""
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
