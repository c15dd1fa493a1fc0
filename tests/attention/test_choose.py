"""Which kernel is taken, and what is said when the one that was asked for is not there."""

from __future__ import annotations

import importlib.machinery
import re
import sys
import types
from typing import Any

import pytest
import torch

import packtool.attention.flash as flash
from packtool.attention.choose import choose
from packtool.errors import ConfigError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _fresh_choice() -> Any:
    for cached in (choose, flash._flash_function, flash._varlen_module):
        cached.cache_clear()
    yield
    for cached in (choose, flash._flash_function, flash._varlen_module):
        cached.cache_clear()


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_auto_is_sdpa_on_the_cpu(dtype: torch.dtype) -> None:
    assert choose("auto", CPU, dtype).name == "sdpa"


@pytest.mark.usefixtures("hopper")
def test_auto_is_varlen_on_cuda_in_16_bits() -> None:
    assert choose("auto", GPU, torch.bfloat16).name == "varlen"
    assert choose("auto", GPU, torch.float32).name == "sdpa"
    assert choose("auto", GPU, torch.bfloat16, needs_dropout=True).name == "sdpa"
    assert choose("auto", GPU, torch.bfloat16, head_dim=320).name == "sdpa"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "message"),
    [
        ("varlen", CPU, torch.bfloat16, r"runs on CUDA only.*\n.*sdpa"),
        ("varlen", GPU, torch.float32, r"bfloat16 or float16.*float32\n.*--torch-dtype bfloat16"),
        ("flash_attention_2", GPU, torch.bfloat16, r"flash-attn is installed, nor kernels.*\n.*pip install"),
        ("flash_attention_3", CPU, torch.bfloat16, r"flash-attn-3 is installed"),
        ("flex", CPU, torch.float32, r"no backward pass on the cpu\n.*sdpa"),
        ("fastest", CPU, torch.float32, r"no such attention\n.*auto, sdpa, varlen"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_missing_kernel_is_named_with_a_remedy(
    name: str, device: torch.device, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        choose(name, device, dtype)
    assert f"--attn-impl {name}" in str(error.value)
    assert re.search(message, str(error.value))


def test_an_old_gpu_gets_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert choose("auto", GPU, torch.float16).name == "sdpa"
    with pytest.raises(ConfigError, match="Ampere"):
        choose("varlen", GPU, torch.float16)


def test_unsupported_dropout_is_refused(hopper: None) -> None:
    with pytest.raises(ConfigError, match="attention_dropout"):
        choose("varlen", GPU, torch.bfloat16, needs_dropout=True)
    with pytest.raises(ConfigError, match="320 numbers"):
        choose("varlen", GPU, torch.bfloat16, head_dim=320)


def _install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.flash_attn_varlen_func = print  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.usefixtures("hopper")
def test_auto_selects_installed_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "flash_attn")
    assert choose("auto", GPU, torch.bfloat16).name == "flash_attention_2"
    assert choose("auto", CPU, torch.bfloat16).name == "sdpa"
    choose.cache_clear()
    _install(monkeypatch, "flash_attn_interface")
    assert choose("auto", GPU, torch.bfloat16).name == "flash_attention_3"
    choose.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert choose("auto", GPU, torch.bfloat16).name == "flash_attention_2"


def test_hub_kernel_is_used_only_if_downloaded(hopper: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from huggingface_hub import constants

    module = types.ModuleType("kernels")
    module.__spec__ = importlib.machinery.ModuleSpec("kernels", None)
    monkeypatch.setitem(sys.modules, "kernels", module)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert choose("auto", GPU, torch.bfloat16).name == "varlen"
    assert choose("flash_attention_2", GPU, torch.bfloat16).name == "flash_attention_2"
    (tmp_path / "models--kernels-community--flash-attn2").mkdir()
    choose.cache_clear()
    assert choose("auto", GPU, torch.bfloat16).name == "flash_attention_2"
