"""FLOPs that torch counts, with attention on CPUs, for which torch has formulas only in later releases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten


def flop_counter() -> FlopCounterMode:
    """A silent FLOP counter, to be entered around the passes to count."""
    formulas = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of QK^T and PV, from shapes (batch, H, T, D); causal masks do not reduce them, as in torch's formulas."""
    batch, heads, num_queries, size = query
    return 2 * batch * heads * num_queries * key[2] * (size + value[3])


def _attention_backward_flops(
    _gradient: Sequence[int], query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    """FLOPs of QK^T again and of the gradients of P, V, Q and K."""
    batch, heads, num_queries, size = query
    return 2 * batch * heads * num_queries * key[2] * (3 * size + 2 * value[3])
