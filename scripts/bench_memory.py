#!/usr/bin/env python3
"""The memory of a forward and backward pass, traced without weights, beside what the same pass holds on the CPU.

    python scripts/bench_memory.py [REALDATA]

Prints the table of ``docs/benchmarks.md``: for the reduced model of every family that the tests have, what autograd
keeps after the forward pass (traced, and by the hooks of saved tensors), and the most that the pass holds at a time
(traced, and added up while it is computed) with all weights, with adapters, and with recomputation. REALDATA has the
tokenizers' folders of the Omni models; without it these are left out. Needs no GPU and takes a minute.
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
    """A row of the table for each family, in KiB."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            config = config_of(name, realdata, Path(folder))
            pairs = [(traced_bytes(config, **way).peak, computed_bytes(config, **way).peak) for way in _WAYS.values()]
            kept, saved = traced_bytes(config).kept, saved_bytes(config)
        yield (name, *_told(kept, saved), *(", ".join(_told(*pair)) for pair in pairs))


def _told(traced: int, found: int) -> tuple[str, str]:
    return f"{traced / 1024:,.0f}", f"{found / 1024:,.0f} ({traced / found - 1:+.1%})"


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("realdata", type=Path, nargs="?", help="folder with tokenizers/qwen2.5-omni and the like")
    parser.add_argument("--families", nargs="+", default=[*ON_TEXT, *THAT_SEE, *THAT_HEAR], help="some of them")
    given = parser.parse_args(words)
    names = [name for name in given.families if given.realdata is not None or name not in THAT_HEAR]
    found = list(rows(names, given.realdata))
    heard = f"where it hears {HEARD.vision} a picture's and {HEARD.audio} a sound's"
    print(f"KiB of a pass over {TOKENS.computed} tokens: {TOKENS.vision} a picture's where the model sees, {heard}")
    print("\n".join(aligned([_TITLES, *found], "lr")))


if __name__ == "__main__":
    main()
