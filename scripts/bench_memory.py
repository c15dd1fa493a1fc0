#!/usr/bin/env python3
"""Compare the estimated memory of a forward and backward pass with the memory of the same pass on the CPU.

    python scripts/bench_memory.py [REALDATA]

Prints the table of ``docs/benchmarks.md``, with a row for the reduced test model of each family. "kept" is what
autograd keeps after the forward pass: estimated by a trace without weights, and measured by hooks on saved tensors.
"peak" is the maximum during the pass: estimated, and added up while it is computed, with all weights, with adapters,
and with gradient checkpointing. REALDATA contains the tokenizers of the Omni models; without it these are left out.
A second table is about ``--gradient-checkpointing auto``: the FLOPs of micro-batches in which no layer, all layers and
as many as necessary recompute, as torch counts them, and their peak.
Needs no GPU and takes two minutes.
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

from packtool.report.tables import aligned
from packtool.train.model.loss import LossFunction
from packtool.train.model.trace import run_pass, set_traced_attention
from packtool.train.prepare.figures import RankTokens
from tests.train.model.measured import HEARD, TOKENS, computed_bytes, saved_bytes, traced_bytes
from tests.train.model.switched import (
    LONGEST,
    NUM_LAYERS,
    deep_config,
    plan_of,
    real_pass,
    switched_model,
    traced_peak,
)
from tests.train.real_models import ON_TEXT, THAT_HEAR, THAT_SEE, config_of

_WAYS: dict[str, dict[str, bool]] = {
    "all weights": {},
    "adapters": {"adapters": True},
    "recomputed": {"recomputes": True},
}
_TITLES = ("family", "kept, traced", "kept, saved tensors", *(f"peak, {way}: traced, computed" for way in _WAYS))


def rows(names: Sequence[str], realdata: Path) -> Iterator[tuple[str, ...]]:
    """Yield a table row for each family, in KiB."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            config = config_of(name, realdata, Path(folder))
            pairs = [(traced_bytes(config, **way).peak, computed_bytes(config, **way).peak) for way in _WAYS.values()]
            kept, saved = traced_bytes(config).kept, saved_bytes(config)
        yield (name, *_told(kept, saved), *(", ".join(_told(*pair)) for pair in pairs))


def _told(traced: int, found: int) -> tuple[str, str]:
    return f"{traced / 1024:,.0f}", f"{found / 1024:,.0f} ({traced / found - 1:+.1%})"


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
        low, high = plan.recomputing(**longest), plan.keeping(**longest)
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
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "realdata", type=Path, nargs="?", help="folder with tokenizers/qwen2.5-omni and other tokenizers"
    )
    parser.add_argument(
        "--families", nargs="+", default=[*ON_TEXT, *THAT_SEE, *THAT_HEAR], help="model families to measure"
    )
    given = parser.parse_args(words)
    names = [name for name in given.families if given.realdata is not None or name not in THAT_HEAR]
    found = list(rows(names, given.realdata))
    heard = f"{HEARD.vision} of a picture and {HEARD.audio} of a sound for Omni models"
    print(f"KiB of a pass over {TOKENS.computed} tokens: {TOKENS.vision} of a picture for vision models, {heard}")
    print("\n".join(aligned([_TITLES, *found], "lr")))
    print("\n--gradient-checkpointing auto: micro-batches of 100, 200, 300 and 400 tokens")
    print("\n".join(aligned([_PLANNED_TITLES, *planned_rows()], "lr")))


if __name__ == "__main__":
    main()
