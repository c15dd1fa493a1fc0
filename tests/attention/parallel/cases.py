"""Attends to shared sequences on all ranks of a process group; writes how far each case is from the dense reference."""

from __future__ import annotations

import functools
import json
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from packtool.attention.choose import KERNELS
from packtool.attention.kernel import Varlen
from packtool.attention.parallel.attend import attend_shard
from packtool.attention.parallel.axes import Axes
from packtool.attention.parallel.blocks import BlockKernel, CpuFlashBlockKernel, MathBlockKernel
from packtool.attention.parallel.mesh import SequenceParallel
from packtool.batch.shard import SequenceShard, assign_tokens
from packtool.planning.skrull import SHARDED
from tests.attention.hybrids import HYBRIDS
from tests.attention.parallel.shared_model import Found, Setting, check_model, tree_errors
from tests.batch.reduced import VISION_MODELS

MESHES = {
    "ring-2": Axes(2, 1, "ring"),
    "allgather-2": Axes(2, 1, "allgather"),
    "ulysses-2": Axes(1, 2),
    "ring-4": Axes(4, 1, "ring"),
    "allgather-4": Axes(4, 1, "allgather"),
    "ulysses-4": Axes(1, 4),
    "ring-2-ulysses-2": Axes(2, 2, "ring"),
    "allgather-2-ulysses-2": Axes(2, 2, "allgather"),
}
HEADS = [(8, 8), (8, 2), (8, 1)]
# Lengths, and the ranks (of two, in pairs of four) that documents are local to.
SEQUENCES: dict[str, tuple[list[int], list[int]]] = {
    "all sharded": ([37, 3, 64, 1, 21], [SHARDED] * 5),
    "some local": ([37, 5, 64, 9, 21], [SHARDED, 0, SHARDED, 1, SHARDED]),
    "all local": ([17, 5, 8], [0, 1, 0]),
    "one rank has all": ([17, 5, 8], [1, SHARDED, 1]),
}
BLOCKS: dict[str, tuple[BlockKernel, torch.dtype]] = {
    "cpu_flash": (CpuFlashBlockKernel(), torch.float32),
    "math": (MathBlockKernel(), torch.float32),
    "float64": (MathBlockKernel(), torch.float64),
    "bfloat16": (CpuFlashBlockKernel(), torch.bfloat16),
}


# By the number of processes; with four, "ring-2" is two groups side by side.
CHOSEN = {
    2: ("ring-2", "allgather-2", "ulysses-2"),
    4: ("ring-2", "ring-4", "allgather-4", "ulysses-4", "ring-2-ulysses-2", "allgather-2-ulysses-2"),
}
MODELS = {
    2: [
        *product(VISION_MODELS, ("ring-2", "ulysses-2")),
        *zip(HYBRIDS, ("ulysses-2", "allgather-2", "ring-2"), strict=True),
        *(
            ("qwen3_vl", "allgather-2"),
            ("glm4v", "ring-2"),
            ("qwen2", "ring-2"),
            ("qwen3", "allgather-2"),
            ("qwen2_sliding", "ulysses-2"),
        ),
    ],
    4: [
        ("qwen3_vl", "ring-2-ulysses-2"),
        ("qwen3_vl", "ulysses-4"),
        ("qwen2_5_vl", "ring-4"),
        *product(HYBRIDS[::2], ("ring-2-ulysses-2",)),
    ],
}


TREES = {
    2: [
        *product(("qwen3_vl", "qwen3_5"), ("ring-2", "allgather-2", "ulysses-2")),
        ("qwen2_5_vl", "ring-2"),
        ("qwen3_next", "ring-2"),
    ],
    4: [("qwen3_vl", "ring-2-ulysses-2"), ("qwen3_5", "allgather-2-ulysses-2"), ("qwen3", "ring-4")],
}


def cases(world_size: int) -> list[tuple[str, str, tuple[int, int], str, int | None]]:
    """(mesh, sequence, heads, blocks, window) that so many processes run."""
    names = CHOSEN[world_size]
    # With four, the numbers of heads that two do not show: two for each rank, and one for all.
    common = product(names, ("all sharded", "some local"), HEADS if world_size == 2 else HEADS[1:])
    rare = product(names, ("all local", "one rank has all"), HEADS[1:2])
    all_cases: list[Any] = [(*case, "cpu_flash", None) for case in (*common, *rare)]
    # With four, a group of two is as with two.
    all_cases += [
        (mesh, "some local", (8, 2), blocks, None)
        for mesh in (names if world_size == 2 else names[-2:])
        for blocks in ("math", "float64", "bfloat16")
    ]
    all_cases += [
        (mesh, "some local", (8, 2), blocks, 7)
        for mesh in names
        if mesh.startswith("ulysses")
        for blocks in ("cpu_flash", "math")
    ]
    return all_cases


def find_errors(
    models: dict[str, tuple[Setting, Found]],
    trees: dict[str, tuple[Setting, tuple[float, dict[str, Tensor]]]],
    result: Path,
) -> None:
    """Run every case; rank 0 writes a JSON file.

    Args:
        models: by name, with what each gives alone.
        trees: the same of models with samples that share prefixes.
    """
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    meshes = {name: SequenceParallel.on_mesh(MESHES[name], "cpu") for name in CHOSEN[size]}
    errors = {}
    for mesh, sequence, heads, blocks, window in cases(size):
        error = _error(meshes[mesh], *SEQUENCES[sequence], heads, *BLOCKS[blocks], window)
        worst = torch.tensor(error, dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        errors[f"{mesh}, {sequence}, {heads}, {blocks}, {window}"] = worst.tolist()
    for name, mesh in MODELS[size]:
        errors[f"{name}, {mesh}"] = check_model(*models[name], meshes[mesh])
    for name, mesh in TREES[size]:
        errors[f"tree of {name}, {mesh}"] = tree_errors(*trees[name], meshes[mesh])
    if dist.get_rank() == 0:
        result.write_text(json.dumps(errors))


def _error(
    parallel: SequenceParallel,
    true_lengths: list[int],
    places: list[int],
    heads: tuple[int, int],
    blocks: BlockKernel,
    dtype: torch.dtype,
    window: int | None,
) -> list[float]:
    """Largest differences of the output and the gradients of q, k and v, in units of the largest number (or 1)."""
    split = parallel.split
    lengths = [
        length if place != SHARDED else -(-length // split.multiple) * split.multiple
        for length, place in zip(true_lengths, places, strict=True)
    ]
    filler = split.num_filler_tokens(sum(n for n, place in zip(lengths, places, strict=True) if place == SHARDED))
    # As collation does: what makes shares even, and a token for ranks that would have none.
    bare = [rank for rank in range(split.size) if rank not in places and SHARDED not in places]
    lengths, places = [*lengths, filler, *(1 for _ in bare)], [*places, SHARDED, *bare]
    (q, k, v, above), expected, expected_gradients = _reference(tuple(lengths), heads, dtype, window)
    index = torch.from_numpy(assign_tokens(lengths, places, split)[split.rank])
    shard = SequenceShard(
        split,
        tuple(n for n, place in zip(lengths, places, strict=True) if place == split.rank),
        tuple(n for n, place in zip(lengths, places, strict=True) if place == SHARDED and n),
        {},
    )
    local_tensors = [tensor.detach()[index].to(dtype).requires_grad_() for tensor in (q, k, v)]
    out = attend_shard(
        local_tensors[0], local_tensors[1], local_tensors[2], shard, parallel, blocks, scale=0.4, window=window
    )
    gradients = torch.autograd.grad(out, local_tensors, above[index].to(dtype))
    pairs = zip((out, *gradients), (expected, *expected_gradients), strict=True)
    return [_difference(a, b[index], float(b.detach().abs().max())) for a, b in pairs]


@functools.cache
def _reference(
    lengths: tuple[int, ...], heads: tuple[int, int], dtype: torch.dtype, window: int | None
) -> tuple[list[Tensor], Tensor, tuple[Tensor, ...]]:
    """What ``_row`` makes, and its output and gradients by dense attention, which most meshes have in common."""
    q, k, v, above = _row(sum(lengths), heads, dtype)
    expected = KERNELS["reference"].attend(q, k, v, Varlen.of_lengths(list(lengths)), scale=0.4, window=window)
    return [q, k, v, above], expected, torch.autograd.grad(expected, (q, k, v), above.double())


def _row(num_tokens: int, heads: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """The same on all ranks: q, k, v in float64, of numbers that ``dtype`` has, and what comes from above."""
    generator = torch.Generator().manual_seed(num_tokens)
    tensors = [
        torch.randn(num_tokens, num_heads, 16, generator=generator, dtype=torch.float64).to(dtype).double()
        for num_heads in (heads[0], heads[1], heads[1], heads[0])
    ]
    return [*(tensor.requires_grad_() for tensor in tensors[:3]), tensors[3]]


def _difference(actual: Tensor, expected: Tensor, largest: float) -> float:
    if not actual.numel():
        return 0.0
    return float((actual.detach().double() - expected.detach()).abs().max()) / max(largest, 1.0)
