"""Every call of another package's kernel, against the signatures of the versions that the documentation names."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import packtool.attention.flash as flash
from packtool.attention.choose import KERNELS
from packtool.attention.kernel import Kernel, Varlen
from packtool.attention.parallel.blocks import AttentionBlock, CudaFlashBlockKernel
from packtool.errors import ConfigError
from tests.attention.against_reference import TREES, check_kernel, check_tree, random_heads, tree_varlen

SIGNATURES: dict[str, dict[str, dict[str, str]]] = json.loads(
    Path(__file__).with_name("kernel_signatures.json").read_text(encoding="utf-8")
)
KERNEL_OF = {
    "torch": "varlen",
    "flash-attn": "flash_attention_2",
    "kernels-community/flash-attn2": "flash_attention_2",
    "flash-attn-3": "flash_attention_3",
    "kernels-community/vllm-flash-attn3": "flash_attention_3",
}
WITHOUT_LSE = [("flash-attn-3", version) for version in ("2.8.2", "2.8.3", "2.8.3.post2")]
"""Builds that never return the lse; read in their sources. Others without ``return_attn_probs`` always do."""
LENGTHS = [5, 7]


def rebuilt(signature: str) -> inspect.Signature:
    """What ``inspect.signature`` would say of the function."""
    namespace: dict[str, Any] = {}
    exec(f"def function({signature}): ...", {}, namespace)
    return inspect.signature(namespace["function"])


def versions(*packages: str) -> list[tuple[str, str]]:
    """Packages with each of their versions."""
    return [(package, version) for package in packages for version in next(iter(SIGNATURES[package].values()))]


def by_reference(arguments: dict[str, Any], *, scale: float, num_left: int, causal: bool) -> Tensor:
    """What these kernels compute: their window counts the keys before the query only.

    Args:
        found: all arguments by the names of their order.
    """
    q, k, v, bounds, other_bounds, longest, other_longest = list(arguments.values())[:7]
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    assert bounds.dtype == other_bounds.dtype == torch.int32
    assert (longest, other_longest) == (int(bounds.diff().max()), int(other_bounds.diff().max()))
    # For bounds that are one tensor torch may take cuDNN, which aligns causal masks at the beginning.
    assert (bounds is other_bounds) == torch.equal(bounds, other_bounds)
    varlen = Varlen(bounds, longest, causal=causal, keys=Varlen(other_bounds, other_longest))
    return KERNELS["reference"].attend(q, k, v, varlen, scale=scale, window=None if num_left < 0 else num_left + 1)


def flash_of(package: str, version: str) -> Callable[..., Any]:
    """``flash_attn_varlen_func`` of a version, computed by the reference."""
    signature = rebuilt(SIGNATURES[package]["flash_attn_varlen_func"][version])

    def function(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        order = ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
        arguments = {name: arguments[name] for name in order} | arguments
        num_left, right = arguments["window_size"]
        assert right == (-1 if num_left < 0 else 0)
        out = by_reference(arguments, scale=arguments["softmax_scale"], num_left=num_left, causal=arguments["causal"])
        return out if "return_attn_probs" in arguments or (package, version) in WITHOUT_LSE else (out, "lse")

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def varlen_of(version: str) -> Callable[..., Any]:
    """``varlen_attn`` of a version of torch, computed by the reference."""
    signature = rebuilt(SIGNATURES["torch"]["varlen_attn"][version])

    def function(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        # Fewer heads of K and V than of Q are an error where they are not asked for.
        assert arguments.get("enable_gqa", False) == (arguments["query"].shape[1] != arguments["key"].shape[1])
        num_left, right = arguments.get("window_size", (-1, -1))
        causal = arguments.get("is_causal", right == 0)
        scale = arguments.get("scale") or arguments["query"].shape[-1] ** -0.5
        return by_reference(arguments, scale=scale, num_left=num_left, causal=causal)

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def check_calls(kernel: Kernel, *, head_dim: int, has_windows: bool) -> None:
    """Every way to call a kernel, against the reference."""
    for heads in ((4, 4), (4, 1)):
        for scale in (None, 0.3):
            for causal in (True, False):
                varlen = replace(Varlen.of_lengths(LENGTHS), causal=causal)
                check_kernel(kernel, random_heads(sum(LENGTHS), *heads, head_dim), varlen, scale=scale)
    inputs = random_heads(sum(LENGTHS), 4, 2, head_dim), Varlen.of_lengths(LENGTHS)
    check_kernel(kernel, *inputs, window=max(LENGTHS))
    if has_windows:
        check_kernel(kernel, *inputs, window=3)
    for tree in TREES.values():
        heads = random_heads(sum(tree[1]), 4, 2, head_dim)
        for window in (None, 5) if has_windows else (None, sum(tree[1])):
            check_tree(kernel, heads, tree_varlen(*tree), window=window)


@pytest.mark.parametrize("head_dim", [8, 6])
@pytest.mark.parametrize("version", SIGNATURES["torch"]["varlen_attn"])
def test_torch_varlen_is_called_with_the_arguments_of_each_version(
    version: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash._varlen_module(), "varlen_attn", varlen_of(version))
    kernel, has_windows = KERNELS["varlen"], version != "2.10.0"
    check_calls(kernel, head_dim=head_dim, has_windows=has_windows)
    if not has_windows:
        with pytest.raises(ConfigError, match="without sliding windows"):
            kernel.attend(*random_heads(sum(LENGTHS), 4, 2, head_dim), varlen=Varlen.of_lengths(LENGTHS), window=3)


@pytest.mark.parametrize("head_dim", [8, 6])
@pytest.mark.parametrize(("package", "version"), versions(*sorted(KERNEL_OF.keys() - {"torch"})))
def test_flash_attention_is_called_with_the_arguments_of_each_version(
    package: str, version: str, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "_flash_function", lambda _: flash_of(package, version))
    check_calls(KERNELS[KERNEL_OF[package]], head_dim=head_dim, has_windows=True)


@pytest.mark.parametrize(("package", "version"), versions("flash-attn", "kernels-community/flash-attn2"))
def test_dropout_is_an_argument_of_version_2(package: str, version: str) -> None:
    assert KERNELS["flash_attention_2"].has_dropout
    assert rebuilt(SIGNATURES[package]["flash_attn_varlen_func"][version]).parameters["dropout_p"].default == 0.0


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("version", SIGNATURES["torch"]["_flash_attention_forward"])
def test_blocks_fit_the_signatures_of_torch_operators(
    version: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {name: rebuilt(each[version]) for name, each in SIGNATURES["torch"].items() if name.startswith("_flash")}
    called: dict[str, dict[str, Any]] = {}

    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        bound = known["_flash_attention_forward"].bind(*args, **kwargs)
        called["forward"] = bound.arguments
        return torch.zeros_like(bound.arguments["query"]), torch.zeros(4, sum(LENGTHS))

    def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        bound = known["_flash_attention_backward"].bind(*args, **kwargs)
        called["backward"] = bound.arguments
        return tuple(torch.zeros_like(bound.arguments[name]) for name in ("query", "key", "value"))

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    varlen = Varlen.of_lengths(LENGTHS)
    block, heads = AttentionBlock(varlen, varlen, True, 0.3, window), random_heads(sum(LENGTHS), 4, 2, 6)
    out, lse = CudaFlashBlockKernel().fwd(*heads, block=block)
    gradients = CudaFlashBlockKernel().bwd(out, *heads, out=out, lse=lse, block=block)
    assert [tensor.shape for tensor in gradients] == [tensor.shape for tensor in heads]
    for arguments in called.values():
        assert arguments["cum_seq_q"] is arguments["cum_seq_k"] is varlen.cu_seqlens
        assert (arguments["max_q"], arguments["max_k"], arguments["dropout_p"]) == (max(LENGTHS), max(LENGTHS), 0.0)
        assert (arguments["is_causal"], arguments["scale"]) == (True, 0.3)
        assert (arguments.get("window_size_left"), arguments.get("window_size_right")) == (
            (2, 0) if window else (None, None)
        )


def test_the_installed_torch_agrees_with_its_entry() -> None:
    minor = re.match(r"\d+\.\d+", torch.__version__)
    assert minor is not None
    its = [version for version in SIGNATURES["torch"]["varlen_attn"] if version.startswith(f"{minor[0]}.")]
    assert its, f"scripts/kernel_signatures.py has not seen torch {minor[0]}"
    installed = inspect.signature(flash._varlen_module().varlen_attn).parameters.values()
    untyped = inspect.Signature([parameter.replace(annotation=inspect.Parameter.empty) for parameter in installed])
    assert untyped == rebuilt(SIGNATURES["torch"]["varlen_attn"][its[-1]])
    for name in ("_flash_attention_forward", "_flash_attention_backward"):
        known = rebuilt(SIGNATURES["torch"][name][its[-1]]).parameters.values()
        schema = getattr(torch.ops.aten, name).default._schema.arguments
        assert [(each.name, each.kind is each.KEYWORD_ONLY) for each in known] == [
            (argument.name, argument.kwarg_only) for argument in schema
        ]


def test_the_documentation_names_these_versions(repository: Path) -> None:
    page = (repository / "docs" / "training-reference.md").read_text(encoding="utf-8")
    for package, kernel in KERNEL_OF.items():
        named = ", ".join(version for _, version in versions(package))
        assert f"| `{kernel}` | {package} | {named} |" in page
