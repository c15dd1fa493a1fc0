#!/usr/bin/env python3
"""Compare the estimated memory of a training step with the memory that the step takes on the CPU.

    python scripts/bench_memory.py

Prints the tables of ``docs/benchmarks.md``. The first one has a row for a small model of each family that can be
trained. The estimate is that of ``packtool train --dry-run``: weights, gradients, optimizer, and the peak of a traced
pass. Measured are all allocations of the CPU in a step of two micro-batches and an update of AdamW, as torch's profiler
records them. The second table is about ``--gradient-checkpointing auto``: the FLOPs of micro-batches in which no layer,
all layers and as many as necessary recompute, as torch counts them, and their peak.
Needs no GPU and takes half an hour; ``--families`` selects some rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a checkout, too

import torch
from torch.utils.flop_counter import FlopCounterMode

from packtool.errors import PacktoolError
from packtool.report.tables import aligned
from packtool.train.model.loss import LossFunction
from packtool.train.model.trace import run_pass, set_traced_attention
from packtool.train.prepare.figures import RankTokens
from tests.drawn_data import draw_data
from tests.train.model.real_steps import (
    EVERY_FAMILY,
    SETTINGS,
    SHARED,
    SmallModel,
    compare,
    compare_shared,
    small_model,
)
from tests.train.model.switched import (
    LONGEST,
    NUM_LAYERS,
    deep_config,
    plan_of,
    real_pass,
    switched_model,
    traced_peak,
)

_TITLES = ("family", "estimated, MiB", "measured, MiB", *SETTINGS, SHARED)


def rows(names: Sequence[str], folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield a table row for each family: bytes of steps with packs, and the estimate's error in each setting."""
    draw_data(folder / "data")
    for name in names:
        model = small_model(name, folder / "data", folder)
        packs = compare(model, "packs")
        errors = [_error(*packs), *(_compared(model, setting, folder) for setting in (*list(SETTINGS)[1:], SHARED))]
        row = (name, *(f"{num_bytes / 2**20:,.1f}" for num_bytes in packs), *errors)
        print("\t".join(row), file=sys.stderr)
        yield row


def _compared(model: SmallModel, setting: str, folder: Path) -> str:
    """Return the error of the estimate, or a dash if packtool or peft refuses the setting for a model."""
    if setting not in model.settings:
        return "-"
    try:
        return _error(*(compare_shared([model], folder)[model.name] if setting == SHARED else compare(model, setting)))
    except PacktoolError:
        return "-"


def _error(estimated: float, measured: int) -> str:
    return f"{100 * (estimated / measured - 1):+.1f}%"


_PLANNED: dict[str, tuple[str, dict[str, Any], float]] = {
    "text, all weights": ("qwen3", {}, 0.5),
    "text, all weights, little memory": ("qwen3", {}, 0.15),
    "text, adapters": ("qwen3", {"train_type": "lora"}, 0.5),
    "images, all weights": ("qwen3_vl", {}, 0.5),
    "images, adapters in the text model": ("qwen3_vl", {"train_type": "lora", "freeze_vit": True}, 0.5),
}
"""Model, options, and the budget: a share of the way from the peak with recomputation to the peak without."""
_PLANNED_TITLES = (
    *("setting", "layers", "FLOPs, all layers", "FLOPs, planned"),
    *("budget, KiB", "traced peak, KiB", "computed peak, KiB"),
)


def planned_rows() -> Iterator[tuple[str, ...]]:
    """Yield a row for each setting, with micro-batches of 100 to 400 tokens; FLOPs are relative to no recomputation."""
    for setting, (name, options, share) in _PLANNED.items():
        longest = vars(LONGEST[name])
        plan = plan_of(name, 1e12, **options)
        low, high = plan.with_recomputation(**longest), plan.without_recomputation(**longest)
        plan = dataclasses.replace(plan, budget=low + share * (high - low))
        flops, layers, traced, computed = [0, 0, 0], [], [], []
        for num_tokens in (100, 200, 300, 400):
            tokens = RankTokens(computed=num_tokens, vision=longest["vision"] * num_tokens // 400)
            planned = int(plan.num_layers(**vars(tokens)))
            layers.append(planned)
            for index, num_layers in enumerate((0, NUM_LAYERS, planned)):
                model = switched_model(deep_config(name), num_layers, **options).train()
                with FlopCounterMode(display=False) as counter:
                    LossFunction(model)(model, real_pass(name, tokens)).weighted_sum().backward()
                flops[index] += counter.get_total_flops()
            traced.append(traced_peak(name, tokens, planned, **options))
            model = switched_model(deep_config(name), planned, **options).train()
            set_traced_attention(model)
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            computed.append(run_pass(model, real_pass(name, tokens)).peak)
        added = [f"{num / flops[0] - 1:+.1%}" for num in flops[1:]]
        peaks = [f"{num / 1024:,.0f}" for num in (plan.budget, max(traced), max(computed))]
        yield (setting, f"{min(layers)} to {max(layers)} of {NUM_LAYERS}", *added, *peaks)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=EVERY_FAMILY, help="model families to measure")
    options = parser.parse_args(words)
    torch.set_num_threads(1)  # ranks are forks, which have no further threads
    print("estimated and measured memory of a step; errors of the estimate in each setting")
    with tempfile.TemporaryDirectory() as folder:
        print("\n".join(aligned([_TITLES, *rows(options.families, Path(folder))], "lr")))
    print("\n--gradient-checkpointing auto: micro-batches of 100, 200, 300 and 400 tokens")
    print("\n".join(aligned([_PLANNED_TITLES, *planned_rows()], "lr")))


if __name__ == "__main__":
    main()
