"""The load-balancing loss of a mixture of experts, over the tokens of samples only.

For a layer with E experts, k of which are chosen for each token, the loss is E * sum over experts e of f_e * P_e: f_e
is how often e is chosen per token, and P_e the mean probability that the router gives to e (Fedus et al. 2021, arXiv
2101.03961, equations 4 to 6; an evenly balanced router has k). Layers are averaged. Each micro-batch is weighted by its
share of the step's tokens, without padding and fillers:

    loss of the step = mean over target tokens  +  coefficient * sum over micro-batches of tokens / step's * balance

transformers may count padding, weights all micro-batches equally, and multiplies means over all layers, so that the
experts of one layer can hide the imbalance of another.

The loss is computed at the router, and its gradient is added to that of the router's own output, as in Megatron-LM:
nothing leaves a layer, so layers may be recomputed, sharded (FSDP) and wrapped (DDP).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from packtool.batch.batch import Batch
from packtool.errors import ConfigError
from packtool.train.model.towers import base_model

_RECORDED = "router_logits"


class RouterBalance:
    """Adds the load-balancing loss to the outputs of a model's routers, inside ``of``.

    Args:
        model: bare or inside an adapter, not yet wrapped.
        coefficient: of the loss.

    Raises:
        ConfigError: for a model without routers.
    """

    def __init__(self, model: nn.Module, coefficient: float) -> None:
        self._coefficient = coefficient
        self._tokens: Tensor | None = None
        self._world_size = 1
        self._share = torch.zeros(())
        self._balances: list[Tensor] = []
        routers = list(_routers(model))
        if not routers:
            raise ConfigError(
                f"--router-aux-loss-coef {coefficient:g}: {type(base_model(model)).__name__} has no routers of experts",
                "Leave it out: it balances mixtures of experts.",
            )
        self._num_layers = len(routers)
        for router, logits_index in routers:
            # Not a closure: a copy of the model would share it.
            router.register_forward_hook(partial(self._after_router, logits_index))

    @contextmanager
    def of(self, batch: Batch, step_tokens: int, world_size: int) -> Iterator[None]:
        """Balance a micro-batch, from its forward to the end of its backward pass.

        Args:
            step_tokens: tokens of all samples of the step, on all ranks.
            world_size: number of ranks, over which gradients are averaged.
        """
        self._tokens = batch.is_token.flatten()
        self._share, self._world_size = self._tokens.sum() / max(step_tokens, 1) / self._num_layers, world_size
        try:
            yield
        finally:
            self._tokens = None

    def take(self) -> Tensor:
        """Return this rank's part of the step's balance, float32, 0-d, and start the next step from 0."""
        balances, self._balances = self._balances, []
        return torch.stack(balances).sum() if balances else torch.zeros(())

    def _after_router(self, logits_index: int, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Return a router's output, with the balance's gradient attached to the weights of the chosen experts."""
        others = [index for index in range(len(output)) if index != logits_index]
        weights = next(index for index in others if output[index].is_floating_point())
        if self._tokens is None or not torch.is_grad_enabled() or not output[weights].requires_grad:
            return output
        experts = next(output[index] for index in others if not output[index].is_floating_point())
        balance = load_balance(output[logits_index].flatten(0, -2), experts.flatten(0, -2), self._tokens)
        return (*output[:weights], _WithBalance.apply(output[weights], balance, self), *output[weights + 1 :])

    def backward_of(self, balance: Tensor) -> Tensor:
        """Record a layer's balance, once however often the layer is recomputed, and return its gradient, 0-d."""
        self._balances.append(balance.detach() * self._share)
        return self._coefficient * self._world_size * self._share


def load_balance(logits: Tensor, experts: Tensor, tokens: Tensor) -> Tensor:
    """Return E * sum of f_e * P_e of one layer, float32, 0-d.

    Args:
        logits: (T, E).
        experts: int64 (T, k).
        tokens: bool (T,), which positions count.
    """
    counted = tokens.float()
    num_tokens = counted.sum().clamp(min=1)
    probabilities = (logits.float().softmax(-1) * counted[:, None]).sum(0) / num_tokens
    counts = counted.new_zeros(logits.shape[-1])
    counts.index_add_(0, experts.flatten(), counted[:, None].expand(experts.shape).flatten())
    return (probabilities * counts).sum() / num_tokens * logits.shape[-1]


class _WithBalance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, balance: Tensor, owner: RouterBalance) -> Tensor:
        ctx.save_for_backward(balance)
        ctx.owner = owner
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (balance,) = ctx.saved_tensors
        return gradients[0], ctx.owner.backward_of(balance), None


def _routers(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Yield the routers of a model with the index of the logits in their output, as transformers records them."""
    indexes: dict[type[nn.Module], int] = {}
    for module in model.modules():
        recorded: Any = (getattr(module, "_can_record_outputs", None) or {}).get(_RECORDED)
        for each in recorded if isinstance(recorded, list) else [recorded]:
            if hasattr(each, "target_class"):
                indexes[each.target_class] = each.index
    for module in model.modules():
        # The class of a sharded module is derived from its own by torch.
        for kind in {*indexes} & {*type(module).__mro__}:
            yield module, indexes[kind]
