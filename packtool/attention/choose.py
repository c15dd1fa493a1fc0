"""Which kernel computes a run's attention."""

from __future__ import annotations

from functools import lru_cache

import torch

from packtool.attention.flash import FlashKernel, FlexKernel, TorchVarlenKernel
from packtool.attention.kernel import Kernel, ReferenceKernel, Unavailable, needs_half
from packtool.attention.sdpa import SdpaKernel
from packtool.errors import ConfigError

AUTO = "auto"
_FLASH = (FlashKernel(3), FlashKernel(2))
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel for kernel in (SdpaKernel(), TorchVarlenKernel(), *_FLASH, FlexKernel(), ReferenceKernel())
}
"""All kernels by the names that ``--attn-impl`` takes; ``reference`` is for tests and ``packtool verify``."""


@lru_cache(maxsize=64)
def choose(
    name: str, device: torch.device, dtype: torch.dtype, *, needs_dropout: bool = False, head_dim: int = 0
) -> Kernel:
    """The kernel of that name, or with ``auto`` the best that is there.

    ``auto`` takes flash attention 3, then 2, if the package is installed or the hub's kernel has been downloaded, then
    torch's varlen attention on CUDA in 16 bits, and SDPA for each document elsewhere.

    Args:
        device: of the tensors to come.
        dtype: theirs.
        needs_dropout: the model drops attention weights.
        head_dim: D of its heads; 0 where it is not known.

    Raises:
        ConfigError: naming what is missing, and the remedy.
    """
    if name == AUTO:
        preferred: list[Kernel] = [kernel for kernel in _FLASH if kernel.is_at_hand()]
        preferred += [KERNELS["varlen"], KERNELS["sdpa"]]
        return next(kernel for kernel in preferred if _problem(kernel, device, dtype, needs_dropout, head_dim) is None)
    kernel = KERNELS.get(name)
    if kernel is None:
        raise ConfigError(f"--attn-impl {name}: there is no such attention", f"There are auto, {', '.join(KERNELS)}.")
    if missing := _problem(kernel, device, dtype, needs_dropout, head_dim):
        found = choose(AUTO, device, dtype, needs_dropout=needs_dropout, head_dim=head_dim)
        raise ConfigError(
            f"--attn-impl {name}: {missing.reason}",
            f"{missing.remedy} --attn-impl auto takes the best that is there, here {found.name}.",
        )
    return kernel


def choose_elsewhere(name: str, dtype: torch.dtype) -> None:
    """Refuse a kernel that cannot compute numbers of this type on any GPU; whether it is installed there is not asked.

    Raises:
        ConfigError: with the remedy.
    """
    kernel = KERNELS.get(name)
    if kernel is not None and kernel.is_half_only and (missing := needs_half(name, dtype)):
        raise ConfigError(f"--attn-impl {name}: {missing.reason}", missing.remedy)


def _problem(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, needs_dropout: bool, head_dim: int
) -> Unavailable | None:
    if missing := kernel.unavailable(device, dtype):
        return missing
    if needs_dropout and not kernel.has_dropout:
        return Unavailable(
            "the model drops attention weights (attention_dropout), which this kernel cannot",
            "Use sdpa, or set attention_dropout to 0 in the model's config.json.",
        )
    if kernel.max_head_dim is not None and head_dim > kernel.max_head_dim:
        return Unavailable(f"the model's heads have {head_dim} numbers, more than {kernel.max_head_dim}", "Use sdpa.")
    return None
