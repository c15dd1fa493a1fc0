#!/usr/bin/env python3
"""Both stages on real rows with the real Qwen3-VL tokenizer, and packed against padded training.

Exports 364 rows with pictures and 7,673 rows of text at ``--max-length`` 4096 with the public command, then trains a
Qwen3-VL reduced to two layers of width 64 (its vocabulary of 151,936 stays) for a few steps in two processes: packed,
and with ``--packing false`` on the same cache. Prints one table; what to look at is the ratio, for absolute speed
depends on the machine.

    python scripts/bench_pipeline.py [--realdata DIR] [--max-steps 4] [--keep DIR]

The real data (conversations, pictures, tokenizers) is not part of this repository.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROWS = ("mm_mathvision_a.jsonl", "mm_xtuner_coco_zh.jsonl", "text_gpteacher_toolformer.jsonl")
MAX_LENGTH = 4096
PADDED_BATCH = 4


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parent.parent.parent / "shared" / "realdata"
    parser.add_argument("--realdata", type=Path, default=default, help="folder of the real data")
    parser.add_argument("--max-steps", type=int, default=4, help="optimizer steps to train each way")
    parser.add_argument("--num-proc", type=int, default=2, help="worker processes of export and ranks of training")
    parser.add_argument("--keep", type=Path, help="work here and leave everything behind")
    options = parser.parse_args()
    if not (options.realdata / "tokenizers" / "qwen3-vl").is_dir():
        print(f"{options.realdata} holds no real data; give its folder with --realdata", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory() as temporary:
        work = options.keep or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        make_model(options.realdata / "tokenizers" / "qwen3-vl", work / "model")
        run(options, work)


def make_model(source: Path, target: Path) -> None:
    """The real tokenizer and settings with a model that a CPU can train."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    target.chmod(0o755)
    for path in target.iterdir():
        path.chmod(0o644)
    config = json.loads((target / "config.json").read_text())
    size = {"hidden_size": 64, "intermediate_size": 96}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config["text_config"] |= {**size, **heads, "tie_word_embeddings": True}
    config["text_config"]["rope_scaling"]["mrope_section"] = [4, 2, 2]
    config["vision_config"] |= {**size, "depth": 2, "num_heads": 2, "out_hidden_size": 64}
    config["vision_config"] |= {"deepstack_visual_indexes": [0]}
    config["tie_word_embeddings"] = True
    (target / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(target)).float().save_pretrained(target)


def packtool(num_processes: int, *arguments: str) -> dict[str, Any]:
    """A public command's JSON."""
    command = [sys.executable, "-m", "packtool", *arguments, "--json"]
    environ = {**os.environ, "NPROC_PER_NODE": str(num_processes)}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


def run(options: argparse.Namespace, work: Path) -> None:
    """Export, train both ways, print."""
    model, cache, limit = str(work / "model"), str(work / "cache"), str(MAX_LENGTH)
    rows = [str(options.realdata / name) for name in ROWS]
    arguments = ["export", "--model", model, "--dataset", *rows, "--output-dir", cache, "--overwrite"]
    exported = packtool(1, *arguments, "--max-length", limit, "--dataset-num-proc", str(options.num_proc))
    common = ["train", "--model", model, "--cached-dataset", cache, "--max-length", limit, "--train-type", "full"]
    common += ["--max-steps", str(options.max_steps), "--logging-steps", "1"]
    packed = packtool(
        options.num_proc,
        *common,
        *("--packing", "true", "--packing-length", limit, "--output-dir", str(work / "packed")),
    )
    padded = packtool(
        options.num_proc,
        *common,
        *("--packing", "false", "--per-device-train-batch-size", str(PADDED_BATCH)),
        *("--output-dir", str(work / "padded")),
    )
    ratio = packed["target_tokens_per_second"] / padded["target_tokens_per_second"]
    table = {
        "rows": exported["rows"],
        "kept": exported["kept"],
        **{f"  dropped, {reason}": count for reason, count in exported["dropped"].items()},
        "export, samples/s": round(exported["rows"] / exported["seconds"]),
        "packs of 4096": packed["num_packs"],
        "fill, packed": f"{packed['fill']:.2%}",
        f"fill, padded batches of {PADDED_BATCH}": f"{padded['fill']:.2%}",
        "micro-batches of an epoch, packed": packed["num_packs"],
        f"micro-batches of an epoch, padded by {PADDED_BATCH}": -(-padded["num_samples"] // PADDED_BATCH),
        "target tokens/s, packed": round(packed["target_tokens_per_second"]),
        "target tokens/s, padded": round(padded["target_tokens_per_second"]),
        "ratio": f"{ratio:.2f}",
        "loss, packed": f"{packed['first_loss']:.3f} -> {packed['last_loss']:.3f}",
        "loss, padded": f"{padded['first_loss']:.3f} -> {padded['last_loss']:.3f}",
    }
    for name, value in table.items():
        print(f"{name:44} {value:>12}")


if __name__ == "__main__":
    main()
