"""Which kernel is taken, and what is said when the one that was asked for is not there."""

from __future__ import annotations

import importlib.machinery
import itertools
import re
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

import packtool.attention.flash as flash
import packtool.attention.torch_varlen as torch_varlen
from packtool.attention.choose import KERNELS, choose
from packtool.attention.varlen import Varlen
from packtool.errors import ConfigError
from tests.attention.against_reference import check_kernel, random_heads

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def _chosen_anew() -> Any:
    for cached in (choose, flash._function, torch_varlen._module):
        cached.cache_clear()
    yield
    for cached in (choose, flash._function, torch_varlen._module):
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
    ("name", "device", "dtype", "told"),
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
def test_what_is_not_there_is_named_with_the_remedy(
    name: str, device: torch.device, dtype: torch.dtype, told: str
) -> None:
    with pytest.raises(ConfigError) as error:
        choose(name, device, dtype)
    assert f"--attn-impl {name}" in str(error.value)
    assert re.search(told, str(error.value))


def test_an_old_gpu_gets_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert choose("auto", GPU, torch.float16).name == "sdpa"
    with pytest.raises(ConfigError, match="Ampere"):
        choose("varlen", GPU, torch.float16)


def test_dropout_is_refused_where_it_would_be_left_out(hopper: None) -> None:
    with pytest.raises(ConfigError, match="attention_dropout"):
        choose("varlen", GPU, torch.bfloat16, needs_dropout=True)
    with pytest.raises(ConfigError, match="320 numbers"):
        choose("varlen", GPU, torch.bfloat16, head_dim=320)


def _by_reference(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, left: int) -> tuple[Tensor, Tensor]:
    """What a flash kernel computes, by the reference: its window counts the keys before the query only."""
    window = None if left < 0 else left + 1
    out, lse = KERNELS["reference"].fwd(q, k, v, Varlen(bounds, 0), scale=scale, window=window)
    return out.to(q.dtype), lse.float()


def _install(monkeypatch: pytest.MonkeyPatch, name: str, function: Any) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.flash_attn_varlen_func = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)


def _flash_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), return_attn_probs=False,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """With the signature of flash-attn 2."""
    assert causal
    assert q.shape[-1] % 8 == 0
    assert cu_seqlens_q.dtype == torch.int32
    assert (cu_seqlens_q is cu_seqlens_k, max_seqlen_q) == (True, max_seqlen_k)
    out, lse = _by_reference(q, k, v, cu_seqlens_q, softmax_scale, window_size[0])
    return (out, lse, None) if return_attn_probs else out


def _flash_2_of_old(*args, return_attn_probs=False, **kwargs):  # type: ignore[no-untyped-def]
    """Before 2.7 the lse was padded."""
    found = _flash_2(*args, return_attn_probs=return_attn_probs, **kwargs)
    if not return_attn_probs:
        return found
    bounds = kwargs["cu_seqlens_q"].tolist()
    padded = torch.zeros(len(bounds) - 1, found[1].shape[0], kwargs["max_seqlen_q"])
    for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
        padded[number, :, : stop - start] = found[1][:, start:stop]
    return found[0], padded, None


def _flash_3_of_old(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
    window_size=(-1, -1),
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Early builds of version 3 always told the lse."""
    return _by_reference(q, k, v, cu_seqlens_q, softmax_scale, window_size[0])


@pytest.mark.parametrize(
    ("version", "function"), [(2, _flash_2), (2, _flash_2_of_old), (3, _flash_2), (3, _flash_3_of_old)]
)
@pytest.mark.parametrize("head_dim", [8, 6])
def test_flash_attention_is_called_as_it_wants(
    version: int, function: Any, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(monkeypatch, {2: "flash_attn", 3: "flash_attn_interface"}[version], function)
    kernel = KERNELS[f"flash_attention_{version}"]
    for window in (None, 3):
        check_kernel(kernel, random_heads(12, 4, 2, head_dim), Varlen.of_lengths([5, 7]), window=window)


@pytest.mark.usefixtures("hopper")
def test_auto_takes_flash_attention_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "flash_attn", _flash_2)
    assert choose("auto", GPU, torch.bfloat16).name == "flash_attention_2"
    assert choose("auto", CPU, torch.bfloat16).name == "sdpa"
    choose.cache_clear()
    _install(monkeypatch, "flash_attn_interface", _flash_2)
    assert choose("auto", GPU, torch.bfloat16).name == "flash_attention_3"
    choose.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert choose("auto", GPU, torch.bfloat16).name == "flash_attention_2"


def test_the_hubs_kernel_is_taken_only_once_downloaded(
    hopper: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
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


def _varlen_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):  # type: ignore[no-untyped-def]
    assert is_causal
    assert query.shape == key.shape
    return _by_reference(query, key, value, cu_seq_q, query.shape[-1] ** -0.5, -1)


def _varlen_2_11(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)
):  # type: ignore[no-untyped-def]  # fmt: skip
    assert query.shape == key.shape
    assert window_size[1] == 0
    return _by_reference(query, key, value, cu_seq_q, scale, window_size[0])


def _varlen_2_12(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False,
):  # type: ignore[no-untyped-def]  # fmt: skip
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert return_aux.lse
    return _by_reference(query, key, value, cu_seq_q, scale, window_size[0])


@pytest.mark.parametrize("function", [_varlen_2_10, _varlen_2_11, _varlen_2_12])
@pytest.mark.parametrize("head_dim", [8, 6])
def test_torchs_varlen_is_called_as_each_version_wants(
    function: Any, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = torch_varlen._module()
    monkeypatch.setattr(module, "varlen_attn", function)
    varlen = Varlen.of_lengths([5, 7])
    for scale in (None, 0.3):
        for heads in ((4, 4), (4, 1)):
            check_kernel(KERNELS["varlen"], random_heads(12, *heads, head_dim), varlen, scale=scale)
    if function is _varlen_2_10:
        check_kernel(KERNELS["varlen"], random_heads(12, 4, 2, head_dim), varlen, window=7)
        with pytest.raises(ConfigError, match="without sliding windows"):
            KERNELS["varlen"].fwd(*random_heads(12, 4, 2, head_dim), varlen, window=3)
    else:
        check_kernel(KERNELS["varlen"], random_heads(12, 4, 2, head_dim), varlen, window=3)


def test_the_arguments_that_are_given_exist_in_this_torch() -> None:
    import inspect

    known = inspect.signature(torch_varlen._module().varlen_attn).parameters
    assert {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "return_aux"} <= set(known)
