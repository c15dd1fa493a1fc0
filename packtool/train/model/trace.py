"""The memory of a forward and a backward pass, traced through the real model on tensors without numbers.

Under torch's ``FakeTensorMode`` a model of any size runs in seconds and holds nothing, but every tensor that it would
make is made and given up at its time. A dispatch mode adds up the bytes of those that are there. So towers, adapters,
gradient checkpointing, autocast's copies of weights and the head's pieces count as they are, and not by a formula.
Attention keeps what flash attention does: q, k, v, the output and the lse.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AttentionInterface, PreTrainedConfig

from packtool.attention.features import towers_of_media
from packtool.attention.register import set_attention, set_text_attention
from packtool.batch.batch import PackedBatch
from packtool.batch.spec import InputSpec
from packtool.batch.tower_inputs import tower_inputs
from packtool.encode.families import MediaLimits
from packtool.train.model.head_loss import HeadLoss
from packtool.train.model.loss import sum_of_losses, takes_logits_to_keep

_TEXT, _TOWERS = "packtool_traced", "packtool_flash_traced"


@dataclass(frozen=True)
class PassBytes:
    """The memory of a forward and backward pass beside weights and gradients, in bytes.

    Args:
        kept: by autograd, after the forward pass.
        peak: the most at a time.
    """

    kept: int
    peak: int


def trace_pass(
    model: nn.Module,
    config: PreTrainedConfig,
    *,
    num_tokens: int,
    num_media_tokens: int = 0,
    autocast: torch.dtype | None = None,
) -> PassBytes:
    """What a micro-batch's forward and backward pass would hold.

    Args:
        model: made trainable, on the meta device; it is of no use afterwards.
        config: of the model that is trained.
        num_tokens: of the micro-batch; half of them are targets.
        num_media_tokens: those of them that stand for pictures.
        autocast: precision of the computation, where the weights that are trained are kept in another.
    """
    inner: Any = model
    if isinstance(model, PeftModel):
        inner = model.get_base_model()
    batch = _batch(InputSpec("", config, MediaLimits()), num_tokens, num_media_tokens)
    AttentionInterface.register(_TEXT, _traced_attention)
    AttentionInterface.register(_TOWERS, _traced_attention)
    set_attention(inner)
    set_text_attention(inner, _TEXT)
    for tower in towers_of_media(inner):
        tower.config._attn_implementation = _TOWERS
    # Autograd makes its threads once, for the devices that there are at its first backward pass. The mode tells of
    # devices that are not there, so that pass is made before: later ones on a real GPU would miss their thread.
    torch.zeros(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        _bring_to_cpu(model)
        model.train()
        there = batch.map(lambda tensor: torch.empty_like(mode.from_tensor(tensor), device="cpu"))
        return run_pass(model, there, autocast)


def run_pass(model: nn.Module, batch: PackedBatch, autocast: torch.dtype | None = None) -> PassBytes:
    """Compute losses and gradients of a micro-batch on the CPU, with or without numbers, and add up what that holds."""
    with _LiveBytes() as live:
        with contextlib.nullcontext() if autocast is None else torch.autocast("cpu", autocast):
            if HeadLoss.applies_to(model):
                loss = HeadLoss(model).losses(model, batch).sum(None)
            else:
                loss = sum_of_losses(model, batch, label_logits_only=takes_logits_to_keep(model))
        kept = live.now
        loss.backward()  # type: ignore[no-untyped-call]
    return PassBytes(kept, live.peak)


def _batch(spec: InputSpec, num_tokens: int, num_media_tokens: int) -> PackedBatch:
    """A document of text and one picture as wide as need be: what a tower keeps follows the number of patches."""
    input_ids = torch.zeros(1, num_tokens, dtype=torch.int64)
    media: dict[str, Tensor] = {}
    if spec.sees and num_media_tokens:
        side = int(spec.config.vision_config.spatial_merge_size)
        pixels, grids = spec.family.image_inputs
        media = {
            pixels: torch.empty(num_media_tokens * side**2, spec.patch_dim, device="meta"),
            grids: torch.tensor([[1, side, side * num_media_tokens]]),
        }
        input_ids[0, :num_media_tokens] = spec.pad_ids["image"]
    positions = torch.arange(num_tokens).unsqueeze(0)
    return PackedBatch(
        input_ids=input_ids,
        labels=torch.zeros_like(input_ids),
        position_ids=positions.expand(4, 1, -1) if spec.sees else positions,
        media=media,
        towers=tower_inputs(spec, media, input_ids),
        target_positions=torch.arange(num_tokens - num_tokens // 2, num_tokens),
        loss_weights=None,
        channels=(None,),
        num_samples=1,
        cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32),
        lengths=(num_tokens,),
    )


def _bring_to_cpu(model: nn.Module) -> None:
    """Give a model of the meta device weights, and gradients where it is trained, on a CPU that holds no numbers."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            weight = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype), parameter.requires_grad)
            if weight.requires_grad:
                # There from the second micro-batch on, and counted by themselves.
                weight.grad = torch.empty_like(weight)
            setattr(module, name, weight)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the memory of all tensors that are made while it is on and are still there.

    Attributes:
        now: bytes.
        peak: the most so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.now = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._see((args, kwargs), is_new=False)
        out = func(*args, **(kwargs or {}))
        self._see(out, is_new=True)
        self.peak = max(self.peak, self.now)
        return out

    def _see(self, tensors: Any, *, is_new: bool) -> None:
        """Note the memory of tensors; what was there before, as weights, counts nothing, nor do views of it."""
        for tensor in tree_iter(tensors):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known[storage._cdata] = storage.nbytes() if is_new else 0
                    self.now += self._known[storage._cdata]
                    weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        self.now -= self._known.pop(key)


class _Keep(torch.autograd.Function):
    """Keeps what flash attention keeps, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _traced_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    out: Tensor = _Keep.apply(query, key, value)
    return out.transpose(1, 2), None
