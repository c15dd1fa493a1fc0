"""Choice of the kernel that computes a run's attention."""

from __future__ import annotations

from functools import lru_cache

import torch

from packtool.attention.flash import FlashKernel, FlexKernel, TorchVarlenKernel
from packtool.attention.kernel import Kernel, ReferenceKernel, half_precision_error
from packtool.attention.sdpa import SdpaKernel
from packtool.errors import ConfigError

AUTO = "auto"
_FLASH = (FlashKernel(3), FlashKernel(2))
_ALL = (SdpaKernel(), TorchVarlenKernel(), *_FLASH, FlexKernel(), ReferenceKernel())
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _ALL}
"""All kernels by ``--attn-impl`` name; ``reference`` is for tests and ``packtool verify``."""


@lru_cache(maxsize=64)
def choose(
    name: str, device: torch.device, dtype: torch.dtype, *, needs_dropout: bool = False, head_dim: int = 0
) -> Kernel:
    """Return the attention kernel with this ``--attn-impl`` name; for ``auto``, the fastest that can be used.

    ``device``, ``dtype``, ``needs_dropout`` (of attention weights) and ``head_dim`` are those of an attention call.
    Raises a ConfigError if there is no such kernel, or if it cannot compute the call.
    """
    if name == AUTO:
        for candidate in _fastest_first():
            if _unusable_error(candidate, device, dtype, needs_dropout, head_dim) is None:
                return candidate
        raise AssertionError("SDPA is always usable")
    if name not in KERNELS:
        raise ConfigError(f"--attn-impl {name}: there is no such attention", f"There are auto, {', '.join(KERNELS)}.")
    kernel = KERNELS[name]
    error = _unusable_error(kernel, device, dtype, needs_dropout, head_dim)
    if error is not None:
        best = choose(AUTO, device, dtype, needs_dropout=needs_dropout, head_dim=head_dim)
        raise ConfigError(
            f"--attn-impl {name}: {error.message}",
            f"{error.remedy} --attn-impl auto takes the best that is there, here {best.name}.",
        )
    return kernel


def _fastest_first() -> list[Kernel]:
    """Return the installed kernels that ``auto`` chooses from, the fastest first; the last, SDPA, is always usable."""
    available_flash = [kernel for kernel in _FLASH if kernel.is_available()]
    return [*available_flash, KERNELS["varlen"], KERNELS["sdpa"]]


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ConfigError if a kernel supports ``dtype`` on no GPU, whether or not it is installed here."""
    kernel = KERNELS.get(name)
    if kernel is not None and kernel.is_half_only and (error := half_precision_error(name, dtype)):
        raise ConfigError(f"--attn-impl {name}: {error.message}", error.remedy)


def _unusable_error(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, needs_dropout: bool, head_dim: int
) -> ConfigError | None:
    """Return why a kernel cannot compute such an attention call, with a remedy; None if it can."""
    if error := kernel.availability_error(device, dtype):
        return error
    if needs_dropout and not kernel.has_dropout:
        problem = "the model drops attention weights (attention_dropout), which this kernel cannot"
        return ConfigError(problem, "Use sdpa, or set attention_dropout to 0 in the model's config.json.")
    if kernel.max_head_dim is not None and head_dim > kernel.max_head_dim:
        return ConfigError(f"the model's heads have {head_dim} numbers, more than {kernel.max_head_dim}", "Use sdpa.")
    return None
