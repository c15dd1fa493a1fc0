#!/usr/bin/env python3
"""Compare the estimated memory of a forward and backward pass with the memory of the same pass on the CPU.

    python scripts/bench_memory.py [REALDATA]

Prints the table of ``docs/benchmarks.md``, with a row for the reduced test model of each family. "kept" is what
autograd keeps after the forward pass: estimated by a trace without weights, and measured by hooks on saved tensors.
"peak" is the maximum during the pass: estimated, and added up while it is computed, with all weights, with adapters,
and with gradient checkpointing. REALDATA contains the tokenizers of the Omni models; without it these are left out.
Needs no GPU and takes a minute.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works from a checkout, too

from packtool.report.tables import aligned
from tests.train.model.measured import HEARD, TOKENS, computed_bytes, saved_bytes, traced_bytes
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


if __name__ == "__main__":
    main()
