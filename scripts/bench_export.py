#!/usr/bin/env python3
"""Measure the speed of export, as ratios to a baseline in the same run.

1. Pictures: packtool's encoder reads only the header of a picture. The baseline is the model's own processor, which
   decodes and resizes the picture to count its tokens (as ms-swift's cached dataset does). Both encode the same real
   rows in one process with one thread. Loading the tokenizer is not included.
2. Text: the whole command ``packtool export``, including start-up, reading, rendering, labels and Arrow files with
   checksums. The baseline is ``tokenizers`` on the same cores, which encodes the rendered conversations and writes
   nothing. Loading the tokenizer is included in both. On the real rows, repeated, and on copies in which each message
   ends with a new word, so that no row is tokenized from memory. Several numbers of processes are also compared with
   each other.
3. Tiny files: the whole command on rows with a file each. The baseline is the same rows in one file. CPU seconds of
   all processes depend less on other work on the machine than wall time; 2 and 3 measure both.

4. ms-swift: the commands ``packtool export`` and ``swift export --to_cached_dataset``, start-up included, on rows with
   pictures. Both write a cache. ``--swift-python`` names the interpreter in which ms-swift is installed.

    python scripts/bench_export.py [--realdata DIR] [--repeat 3] [--copies 12] [--num-proc 1 2] [--files 20000]
                                   [--swift-python PYTHON] [--only pictures|text|files|ms-swift]

The real data (conversations, pictures, tokenizers) is not part of this repository. Ratios are medians of the repeats.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PICTURE_ROWS = ("mm_mathvision_a.jsonl", "mm_xtuner_coco_zh.jsonl", "mm_llamafactory_mllm_demo.jsonl")
TEXT_ROWS = ("text_gpteacher_toolformer.jsonl", "text_gsm8k_test.jsonl")
_PEER = """
import json, sys, time
begin = time.perf_counter()
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
count = 0
with open(sys.argv[2]) as file:
    while texts := [json.loads(line) for _, line in zip(range(4096), file)]:
        count += sum(len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
print(json.dumps({"tokens": count, "seconds": time.perf_counter() - begin}))
"""


def main(arguments: list[str] | None = None) -> None:
    """Run the comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parent.parent.parent / "shared" / "realdata"
    parser.add_argument("--realdata", type=Path, default=default, help="folder of the real data")
    parser.add_argument("--repeat", type=int, default=3, help="number of measurements")
    parser.add_argument("--copies", type=int, default=12, help="number of times the text rows are repeated")
    parser.add_argument(
        "--num-proc", type=int, nargs="+", default=[2], help="worker processes, and threads of the baseline"
    )
    parser.add_argument("--files", type=int, default=20_000, help="number of files in the third comparison")
    parser.add_argument("--swift-python", metavar="PYTHON", help="interpreter in which ms-swift is installed")
    parser.add_argument("--only", choices=list(_COMPARISONS), help="run only this comparison")
    options = parser.parse_args(arguments)
    if not (options.realdata / "tokenizers" / "qwen3-vl").is_dir():
        print(f"{options.realdata} contains no real data; give its folder with --realdata", file=sys.stderr)
        sys.exit(2)
    for name, compare in _COMPARISONS.items():
        if options.only in (None, name):
            compare(options)


def pictures(options: argparse.Namespace) -> None:
    """Compare reading headers with decoding."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch
    from transformers import AutoProcessor

    from packtool.config.data import EncodeSpec
    from packtool.encode.encoder import Encoder
    from packtool.encode.model_files import ModelFiles
    from packtool.media.measure import load_image

    model = options.realdata / "tokenizers" / "qwen3-vl"
    rows = []
    for name in PICTURE_ROWS:
        for number, line in enumerate((options.realdata / name).read_text().splitlines()):
            rows.append((options.realdata / name, number, json.loads(line)))
    torch.set_num_threads(1)
    auto: Any = AutoProcessor
    processor = auto.from_pretrained(model)

    encoder = Encoder(EncodeSpec(model=str(model), max_length=1 << 30), ModelFiles.load(str(model)))

    def ours() -> int:
        samples = [_sample(path, number, row) for path, number, row in rows]
        encoder._cached_measure.cache_clear()  # every header is read again
        begin = time.perf_counter()
        found = encoder.encode(samples)
        timing.append(time.perf_counter() - begin)
        return sum(sample.length for item in found if isinstance(item, list) for sample in item)

    def theirs() -> int:
        count = 0
        begin = time.perf_counter()
        for path, _, row in rows:
            images = [load_image(str(path.parent / image)) for image in row["images"]]
            rendered = processor.apply_chat_template(_in_parts(row), tokenize=False)
            count += len(processor(text=[rendered], images=images)["input_ids"][0])
        timing.append(time.perf_counter() - begin)
        return count

    timing: list[float] = []
    _measured(ours, theirs)  # once for warming up
    timing.clear()
    counts = {_measured(ours, theirs) for _ in range(options.repeat)}
    paths = [str(path.parent / image) for path, _, row in rows for image in row["images"]]
    headers, decoding = _pictures_alone(paths, processor, options.repeat)
    assert all(a == b for a, b in counts), f"both count the same tokens: {counts}"
    mine, peer = ([{"wall": seconds} for seconds in timing[first::2]] for first in (0, 1))
    print(f"pictures: {len(rows)} rows, {next(iter(counts))[0]:,} tokens; reading headers is times as fast as decoding")
    print(f"  whole rows: {_quotients(peer, mine, 'wall')}")
    print(f"  the pictures alone: {_quotients(decoding, headers, 'wall')}")


def _pictures_alone(paths: list[str], processor: Any, repeat: int) -> tuple[list[dict[str, float]], ...]:
    """Return the times of each round to measure pictures by headers, and to decode and process them; without text."""
    from packtool.media.measure import load_image, measure_image
    from packtool.rows.sample import MediaRef

    headers, decoding = [], []
    for _ in range(repeat):
        begin = time.perf_counter()
        for path in paths:
            measure_image(MediaRef(path))
        middle = time.perf_counter()
        for path in paths:
            processor.image_processor(images=[load_image(path)], return_tensors="pt")
        headers.append({"wall": middle - begin})
        decoding.append({"wall": time.perf_counter() - middle})
    return headers, decoding


def _measured(*functions: Callable[[], int]) -> tuple[int, ...]:
    return tuple(function() for function in functions)


def _sample(path: Path, number: int, row: dict[str, Any]) -> Any:
    from packtool.rows.sample import MediaRef, Sample, Turn

    turns = tuple(Turn(message["role"], message["content"]) for message in row["messages"])
    images = tuple(MediaRef(str(path.parent / image)) for image in row["images"])
    return Sample(turns, images, str(path), number)


def _in_parts(row: dict[str, Any]) -> list[dict[str, Any]]:
    messages = []
    for message in row["messages"]:
        parts: list[dict[str, str]] = []
        for i, piece in enumerate(message["content"].split("<image>")):
            parts += [{"type": "image"}] if i else []
            parts += [{"type": "text", "text": piece}] if piece else []
        messages.append({"role": message["role"], "content": parts})
    return messages


def text(options: argparse.Namespace) -> None:
    """Compare the whole command with tokenization alone: on rows that are repeated, and on distinct rows."""
    lines = [line for name in TEXT_ROWS for line in (options.realdata / name).read_text().splitlines()]
    _compare_text(options, "repeated rows", lines, _numbered)
    _compare_text(options, "distinct rows", lines, _with_new_words)


def _compare_text(
    options: argparse.Namespace, title: str, lines: list[str], copied: Callable[[str, int, int], str]
) -> None:
    """Compare on ``--copies`` copies of each line; ``copied``: the row of a line's index and a copy's number."""
    from packtool.encode.model_files import ModelFiles
    from packtool.encode.template import ChatTemplate

    model = options.realdata / "tokenizers" / "qwen3-vl"
    files = ModelFiles.load(str(model))
    template = ChatTemplate(files.chat_template, files.template_variables)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        rows, rendered = work / "rows.jsonl", work / "rendered.jsonl"
        with rows.open("w") as file, rendered.open("w") as peer_file:
            for copy in range(options.copies):
                for index, line in enumerate(lines):
                    row = copied(line, index, copy)
                    file.write(row + "\n")
                    peer_file.write(json.dumps(template.render(json.loads(row)["messages"])) + "\n")
        runs: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for number in range(options.repeat):
            for num_proc in options.num_proc:
                cache = work / f"cache{number}-{num_proc}"
                runs.setdefault(("packtool", num_proc), []).append(_export(model, rows, cache, num_proc))
                runs.setdefault(("tokenizers", num_proc), []).append(_peer(model, rendered, num_proc))
                shutil.rmtree(cache)
    print(f"text, {title}: {len(lines) * options.copies:,} rows, {runs['packtool', num_proc][0]['tokens']:,} tokens")
    for num_proc in options.num_proc:
        mine, peer = runs["packtool", num_proc], runs["tokenizers", num_proc]
        print(f"  {num_proc} processes: throughput of packtool export, start-up included, relative to bare tokenizers")
        for unit in ("wall", "cpu"):
            print(f"    {unit} time: {_quotients(peer, mine, unit)}")
    for num_proc in options.num_proc[1:]:
        print(f"  {num_proc} processes or threads instead of {options.num_proc[0]}: times as fast in wall time")
        for name in ("packtool", "tokenizers"):
            print(f"    {name}: {_quotients(runs[name, options.num_proc[0]], runs[name, num_proc], 'wall')}")


def _quotients(numerators: list[dict[str, Any]], denominators: list[dict[str, Any]], unit: str) -> str:
    """Return the median of the rounds' quotients of a measurement, and the smallest and largest, as text."""
    quotients = [a[unit] / b[unit] for a, b in zip(numerators, denominators, strict=True)]
    spread = f"{min(quotients):.2f} to {max(quotients):.2f} in {len(quotients)} rounds"
    return f"{statistics.median(quotients):.2f} ({spread})"


def tiny_files(options: argparse.Namespace) -> None:
    """Compare rows with a file each with the same rows in one file."""
    model = options.realdata / "tokenizers" / "qwen3-vl"
    lines = (options.realdata / TEXT_ROWS[0]).read_text().splitlines()
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        (work / "many").mkdir()
        rows = [_numbered(lines[number % len(lines)], 0, number) + "\n" for number in range(options.files)]
        (work / "one.jsonl").write_text("".join(rows))
        for number, row in enumerate(rows):
            (work / "many" / f"{number:06d}.jsonl").write_text(row)
        one, many = [], []
        for number in range(options.repeat):
            one.append(_export(model, work / "one.jsonl", work / f"one{number}", options.num_proc[-1]))
            many.append(_export(model, work / "many", work / f"many{number}", options.num_proc[-1]))
            assert one[-1]["tokens"] == many[-1]["tokens"], "the same rows are the same tokens"
    print(f"tiny files: {options.files:,} of one row each, relative to the same rows in one file")
    for unit in ("wall", "cpu"):
        print(f"  {unit} time: {_quotients(many, one, unit)}")


def ms_swift(options: argparse.Namespace) -> None:
    """Compare ``packtool export`` with ``swift export --to_cached_dataset`` on ``--copies`` copies of the picture rows.

    Every copy has its own paths, so that no picture is measured only once.
    """
    if options.swift_python is None:
        print("ms-swift: left out, because --swift-python is missing")
        return
    model = options.realdata / "tokenizers" / "qwen3-vl"
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        rows = work / "rows.jsonl"
        with rows.open("w") as file:
            for copy in range(options.copies):
                (work / f"copy{copy}").symlink_to(options.realdata.resolve())
                for name in PICTURE_ROWS:
                    for line in (options.realdata / name).read_text().splitlines():
                        row = json.loads(line)
                        row["images"] = [str(work / f"copy{copy}" / image) for image in row["images"]]
                        file.write(json.dumps({"messages": row["messages"], "images": row["images"]}) + "\n")
        ours, theirs = [], []
        for number in range(options.repeat):
            cache = work / f"packtool{number}"
            ours.append(_export(model, rows, cache, options.num_proc[-1], "--media-access", "local"))
            cache = work / f"swift{number}"
            theirs.append(_swift_export(options.swift_python, model, rows, cache, options.num_proc[-1]))
            counts = ours[-1]["tokens"], theirs[-1]["tokens"]
            assert counts[0] == counts[1], f"packtool and ms-swift count {counts} tokens"
        num_rows = len(rows.read_text().splitlines())
    print(f"ms-swift: {num_rows:,} rows with pictures, {counts[0]:,} tokens; packtool export is times as fast")
    for unit in ("wall", "cpu"):
        print(f"  {unit} time: {_quotients(theirs, ours, unit)}")


_SWIFT_LENGTHS = """
import json, sys
from datasets import load_from_disk
lengths = load_from_disk(sys.argv[1])["lengths"]
print(json.dumps({"tokens": sum(sum(row) if isinstance(row, list) else row for row in lengths)}))
"""


def _swift_export(python: str, model: Path, rows: Path, cache: Path, num_proc: int) -> dict[str, Any]:
    """Run ``swift export`` and return its wall time, CPU seconds and number of tokens."""
    command = [python, "-c", "from swift.cli.main import cli_main; cli_main()", "export", "--to_cached_dataset", "true"]
    command += ["--model", str(model), "--model_type", "qwen3_vl", "--dataset", str(rows), "--output_dir", str(cache)]
    command += ["--max_length", "32768", "--split_dataset_ratio", "0", "--dataset_num_proc", str(num_proc)]
    # ms-swift's own minimum is smaller than the processor's.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "IMAGE_MIN_TOKEN_NUM": "64"}
    times = _timed(command, os.environ | hidden, prints_json=False)
    counted = _timed([python, "-c", _SWIFT_LENGTHS, str(cache / "train")])
    return times | {"tokens": counted["tokens"]}


def _numbered(line: str, _: int, copy: int) -> str:
    """Return a row with the copy's number at its end."""
    row = json.loads(line)
    row["messages"][-1]["content"] += f" {copy}"
    return json.dumps(row)


def _with_new_words(line: str, index: int, copy: int) -> str:
    """Return a row with a word at the end of each message that no other row has."""
    row = json.loads(line)
    for number, message in enumerate(row["messages"]):
        digits = f"{number}{copy:04}{index:06}"
        message["content"] += " " + "".join(chr(ord("a") + int(digit)) for digit in digits)
    return json.dumps(row)


def _export(model: Path, rows: Path, cache: Path, num_proc: int, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "packtool", "export", "--model", str(model), "--dataset", str(rows)]
    command += ["--max-length", "32768", "--output-dir", str(cache), "--dataset-num-proc", str(num_proc), "--json"]
    return _timed(command + list(more))


def _peer(model: Path, rendered: Path, num_threads: int) -> dict[str, Any]:
    environ = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(num_threads)}
    return _timed([sys.executable, "-c", _PEER, str(model / "tokenizer.json"), str(rendered)], environ)


def _timed(command: list[str], environ: dict[str, str] | None = None, prints_json: bool = True) -> dict[str, Any]:
    """Run a command; return the JSON that it prints, with its wall time and the CPU seconds of all its processes."""
    begin, before = time.perf_counter(), os.times()
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - begin, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    printed = json.loads(done.stdout) if prints_json else {}
    return {**printed, "wall": wall, "cpu": cpu}


_COMPARISONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "pictures": pictures,
    "text": text,
    "files": tiny_files,
    "ms-swift": ms_swift,
}


if __name__ == "__main__":
    main()
