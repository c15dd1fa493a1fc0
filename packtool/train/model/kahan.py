"""AdamW for bfloat16 weights that loses nothing to rounding: what rounding takes is kept, and added in the next step.

A number x is kept as two bfloat16 numbers: x rounded, and what is missing, rounded. Together they have 16 binary digits
and more, where bfloat16 has 8: Kahan's compensated summation (Communications of the ACM, 1965), one step at a time.
Weights and second moments need it (beta2 of 0.999 changes a moment by less than bfloat16 can tell); first moments move
fast enough to do without. 12 bytes for each weight with its gradient instead of the 16 of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


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
