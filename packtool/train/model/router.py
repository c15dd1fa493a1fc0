"""The load-balancing loss of a mixture of experts' routers, over the tokens of samples and nothing else.

For a layer with E experts, of which each token takes k, the loss is E * sum over experts e of f_e * P_e: f_e is the
number of times that a token of the micro-batch takes e, per token, and P_e the mean probability that the router gives
to e (Fedus et al. 2021, arXiv 2101.03961, equations 4 to 6; even routers have k). Layers are averaged. A micro-batch
weighs as much as it has of the step's tokens; padding and fillers are no tokens of it:

    loss of the step = mean over target tokens  +  coefficient * sum over micro-batches of tokens / step's * balance

transformers counts padding only where it is told of it, gives every micro-batch the same weight, and multiplies means
over all layers, which one layer's experts can make even for another's.

The loss is made where the router is, and its gradient comes in with that of the router's own output, as in Megatron-LM:
layers may be recomputed, sharded (FSDP) and wrapped (DDP), for nothing leaves them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from packtool.batch.batch import Batch
from packtool.errors import ConfigError

_RECORDED = "router_logits"


class RouterBalance:
    """Adds the load-balancing loss to what routers of a model hand on, while ``of`` says which micro-batch that is.

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
        self._seen: list[Tensor] = []
        found = list(_routers(model))
        if not found:
            bare: Any = model.get_base_model() if isinstance(model, PeftModel) else model
            raise ConfigError(
                f"--router-aux-loss-coef {coefficient:g}: {type(bare).__name__} has no routers of experts",
                "Leave it out: it balances mixtures of experts.",
            )
        self._num_layers = len(found)
        for router, place in found:
            router.register_forward_hook(_Hook(self, place))

    @contextmanager
    def of(self, batch: Batch, step_tokens: int, world_size: int) -> Iterator[None]:
        """Balance a micro-batch, from its forward to the end of its backward pass.

        Args:
            step_tokens: tokens of the samples of the whole step, on all ranks.
            world_size: ranks, over which gradients are averaged.
        """
        self._tokens = batch.is_token.flatten()
        self._share, self._world_size = self._tokens.sum() / max(step_tokens, 1) / self._num_layers, world_size
        try:
            yield
        finally:
            self._tokens = None

    def taken(self) -> Tensor:
        """What this rank adds to the balance of the step, float32, 0-d; the next step begins with nothing."""
        seen, self._seen = self._seen, []
        return torch.stack(seen).sum() if seen else torch.zeros(())

    def balanced(self, handed_on: Tensor, logits: Tensor, experts: Tensor) -> Tensor:
        """What a router hands on, with the gradient of its balance behind it.

        Args:
            handed_on: what of the router's output the layer goes on with, of any shape.
            logits: (T, E).
            experts: int64 (T, k), that each token takes.
        """
        if self._tokens is None or not torch.is_grad_enabled() or not handed_on.requires_grad:
            return handed_on
        balance = load_balance(logits, experts, self._tokens)
        return _WithBalance.apply(handed_on, balance, self)

    def backward_of(self, balance: Tensor) -> Tensor:
        """The gradient of a layer's balance, 0-d, and a note of it: once, however often the layer is recomputed."""
        self._seen.append(balance.detach() * self._share)
        return self._coefficient * self._world_size * self._share


def load_balance(logits: Tensor, experts: Tensor, tokens: Tensor) -> Tensor:
    """E * sum of f_e * P_e of one layer, float32, 0-d.

    Args:
        logits: (T, E).
        experts: int64 (T, k).
        tokens: bool (T,), what counts.
    """
    counted = tokens.float()
    number = counted.sum().clamp(min=1)
    probabilities = (logits.float().softmax(-1) * counted[:, None]).sum(0) / number
    chosen = counted.new_zeros(logits.shape[-1])
    chosen.index_add_(0, experts.flatten(), counted[:, None].expand(experts.shape).flatten())
    return (probabilities * chosen).sum() / number * logits.shape[-1]


class _WithBalance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handed_on: Tensor, balance: Tensor, owner: RouterBalance) -> Tensor:
        ctx.save_for_backward(balance)
        ctx.owner = owner
        return handed_on.view_as(handed_on)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (balance,) = ctx.saved_tensors
        return gradients[0], ctx.owner.backward_of(balance), None


class _Hook:
    """What runs behind one router; a class, so that models with it can be copied."""

    def __init__(self, owner: RouterBalance, place: int) -> None:
        self._owner, self._place = owner, place

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        logits = output[self._place].flatten(0, -2)
        others = [number for number in range(len(output)) if number != self._place]
        experts = next(output[number] for number in others if not output[number].is_floating_point())
        weights = next(number for number in others if output[number].is_floating_point())
        handed_on = self._owner.balanced(output[weights], logits, experts.flatten(0, -2))
        return (*output[:weights], handed_on, *output[weights + 1 :])


def _routers(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """The routers of a model, each with the place of its logits in what it returns, as transformers records them."""
    kinds: dict[type[nn.Module], int] = {}
    for module in model.modules():
        recorded: Any = (getattr(module, "_can_record_outputs", None) or {}).get(_RECORDED)
        for each in recorded if isinstance(recorded, list) else [recorded]:
            if hasattr(each, "target_class"):
                kinds[each.target_class] = each.index
    for module in model.modules():
        # A module that is sharded is of a class that torch derives from its own.
        for kind in {*kinds} & {*type(module).__mro__}:
            yield module, kinds[kind]
