"""Rows with pictures and texts, the processor, two processes, the public commands; the model is reduced."""

from __future__ import annotations

import io
import json
import math
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from packtool.cli.main import run
from tests.cli.commands import run_here

MAX_LENGTH = 1024
SUBSET = {"mm_mathvision_a.jsonl": 12, "mm_xtuner_coco_zh.jsonl": 6, "text_gpteacher_toolformer.jsonl": 60}


@pytest.fixture(scope="module")
def world(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model`` and ``cache``."""
    root = tmp_path_factory.mktemp("real")
    shutil.copytree(data / "tokenizers" / "qwen3-vl", root / "model")
    make_weights(root / "model")
    for name, num_rows in SUBSET.items():
        with open(data / name, encoding="utf-8") as file:
            rows = [json.loads(line) for line, _ in zip(file, range(num_rows), strict=False)]
        for row in rows:
            row["images"] = [str(data / image) for image in row.get("images") or []]
        (root / name).write_text("\n".join(json.dumps(row) for row in rows))
    export = ["export", "--model", str(root / "model"), "--dataset", *(str(root / name) for name in SUBSET)]
    export += ["--media-root", str(data)]
    export += ["--max-length", str(MAX_LENGTH), "--image-max-token-num", "128", "--output-dir", str(root / "cache")]
    with redirect_stdout(io.StringIO()) as stdout:
        assert run([*export, "--json"]) == 0
    exported = json.loads(stdout.getvalue())
    assert exported["num_rows"] == sum(SUBSET.values())
    assert exported["num_samples"] >= 0.95 * exported["num_rows"]
    return root


def make_weights(model: Path) -> None:
    """Reduce a real configuration to two layers of width 64, and draw weights."""
    config = json.loads((model / "config.json").read_text())
    size = {"hidden_size": 64, "intermediate_size": 96}
    config["text_config"] |= size | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config["text_config"] |= {"head_dim": 16, "tie_word_embeddings": True}
    rope = "rope_parameters" if "rope_parameters" in config["text_config"] else "rope_scaling"
    config["text_config"][rope]["mrope_section"] = [4, 2, 2]
    config["vision_config"] |= size | {"depth": 2, "num_heads": 2, "out_hidden_size": 64}
    config["vision_config"] |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 256}
    config["tie_word_embeddings"] = True
    (model / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(model)).float().save_pretrained(model)


def test_two_processes_train(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    run_here(f"""
        NPROC_PER_NODE=2 packtool train --model model --cached-dataset cache --packing true --train-type full \\
            --max-length {MAX_LENGTH} --packing-length {MAX_LENGTH} --freeze-vit false --freeze-aligner false \\
            --learning-rate 1e-2 --max-steps 2 --logging-steps 1 --dataloader-num-workers 1 --output-dir trained
    """)
    result = json.loads((world / "trained" / "packtool_train.json").read_text())
    assert (result["num_processes"], result["steps"]) == (2, 2)
    assert result["fill"] > 0.8
    assert result["steps_without_packing"] > 5 * result["steps"]
    # Untrained, the model is about as good as guessing among all tokens; what it learns first is which ones occur.
    num_tokens = json.loads((world / "model" / "config.json").read_text())["text_config"]["vocab_size"]
    assert result["first_loss"] == pytest.approx(math.log(num_tokens), abs=0.3)
    before, after = (load_file(world / folder / "model.safetensors") for folder in ("model", "trained/checkpoint-2"))
    assert not [name for name, weight in after.items() if torch.equal(weight, before[name])]
    assert all(weight.isfinite().all() for weight in after.values())
