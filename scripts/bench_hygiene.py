#!/usr/bin/env python3
"""Measure what the checks for duplicates and overlaps cost, and find planted overlaps among many rows.

The rows are real conversations (text_gpteacher_toolformer.jsonl), repeated, each with new words. 50 of them contain a
question of the held-out set (text_gsm8k_test.jsonl) in another text. Two or three exports of them alternate:

1. with ``--check-against``, which must find exactly the planted rows
2. without it
3. with ``--baseline DIR``: by the packtool in that checkout, such as one without hashes

Ratios are those of the CPU seconds of all processes, medians of the repeats.

    python scripts/bench_hygiene.py [--realdata DIR] [--rows 100000] [--repeat 3] [--num-proc 2] [--baseline DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

NUM_PLANTED = 50


def main() -> None:
    """Run the exports and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--realdata", type=Path, default=root.parent / "shared" / "realdata", help="real data")
    parser.add_argument("--rows", type=int, default=100_000, help="number of rows")
    parser.add_argument("--repeat", type=int, default=3, help="number of measurements")
    parser.add_argument("--num-proc", type=int, default=2, help="worker processes")
    parser.add_argument("--baseline", type=Path, help="checkout of another packtool")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench_hygiene_") as folder:
        rows = Path(folder) / "rows.jsonl"
        planted = write_rows(rows, options.realdata, options.rows)
        held_out = ["--check-against", str(options.realdata / "text_gsm8k_test.jsonl")]
        ways = {"with --check-against": (root, held_out), "without": (root, [])}
        if options.baseline is not None:
            ways["baseline"] = (options.baseline.resolve(), [])
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(options.repeat):
            for name, (checkout, more) in ways.items():
                cache = Path(folder) / "cache"
                seconds[name].append(export(checkout, options, rows, cache, more))
                if more and not repeat:
                    check_planted(cache, planted)
                subprocess.run(["rm", "-rf", str(cache)], check=True)
    reference = "baseline" if options.baseline is not None else "without"
    for name, measured in seconds.items():
        ratios = [a / b for a, b in zip(measured, seconds[reference], strict=True)]
        spread = f"{statistics.median(ratios):.3f} of {reference} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"  {name:<22} {statistics.median(measured):8.1f} CPU s, {spread}")


def write_rows(path: Path, realdata: Path, num_rows: int) -> list[int]:
    """Write the rows; return the numbers of those with a planted question."""
    drawn = random.Random(1)
    texts = [json.loads(line) for line in (realdata / "text_gpteacher_toolformer.jsonl").open()]
    questions = [json.loads(line) for line in (realdata / "text_gsm8k_test.jsonl").open()]
    planted = sorted(drawn.sample(range(num_rows), NUM_PLANTED))
    questions_by_row = dict(zip(planted, drawn.sample(questions, NUM_PLANTED), strict=True))
    with path.open("w") as file:
        for i in range(num_rows):
            messages = [dict(message) for message in texts[i % len(texts)]["messages"]]
            for message in messages:
                message["content"] += f" {drawn.getrandbits(40):x}"
            if i in questions_by_row:
                question = next(turn for turn in questions_by_row[i]["messages"] if turn["role"] == "user")
                messages[0]["content"] += f" Consider this: {question['content']} What do you think?"
            file.write(json.dumps({"messages": messages}) + "\n")
    return planted


def export(checkout: Path, options: argparse.Namespace, rows: Path, cache: Path, more: list[str]) -> float:
    """Run the export of a checkout; return the CPU seconds of its processes."""
    command = [sys.executable, "-m", "packtool", "export", "--dataset", str(rows), "--output-dir", str(cache)]
    command += ["--model", str(options.realdata / "tokenizers" / "qwen3-vl"), "--max-length", "8192"]
    command += ["--dataset-num-proc", str(options.num_proc), *more]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    before = os.times()
    subprocess.run(
        command, check=True, env=environment, cwd=checkout, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def check_planted(cache: Path, planted: list[int]) -> None:
    """Print how many planted rows were found, and how many others."""
    lines = [json.loads(line) for line in (cache / "hygiene.jsonl").read_text().splitlines()[1:]]
    overlaps = {line["row"] for line in lines if line["kind"] == "held_out_overlap"}
    print(f"{len(overlaps & {*planted})} of {len(planted)} planted rows found, {len(overlaps - {*planted})} others")


if __name__ == "__main__":
    main()
