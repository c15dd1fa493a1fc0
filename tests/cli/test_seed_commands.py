"""The commands that ms-swift users have in their scripts run as they stand, with ``swift`` read as ``packtool``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packtool.demo.model import make_model
from packtool.demo.world import make_rows
from tests.cli.commands import run_here

EXPORT_SCRIPT = """
export MODELSCOPE_CACHE="$WORK/modelscope_cache"
export IMAGE_MAX_TOKEN_NUM=5000
DATASET="$WORK/data/train.json"
OUTPUT_DIR="$WORK/click_pretrain_cached_resize0_q3_len10k_img5k"
IMAGE_MAX_TOKEN_NUM=5000 packtool export \\
    --resize 0 \\
    --model $WORK/model \\
    --dataset $DATASET \\
    --to_cached_dataset true \\
    --split_dataset_ratio 0 \\
    --dataset_num_proc 10 \\
    --max_length 10240 \\
    --output_dir $OUTPUT_DIR
"""

TRAIN_SCRIPT = """
export IMAGE_MAX_TOKEN_NUM=5000
export MODELSCOPE_CACHE="$WORK/modelscope_cache"
NPROC_PER_NODE=2 packtool train \\
    --model $WORK/model \\
    --cached_dataset "$WORK/click_pretrain_cached_resize0_q3_len10k_img5k" \\
    --packing true \\
    --max_length 10240 \\
    --packing_length 10240 \\
    --packing_num_proc 4 \\
    --train_type lora \\
    --num_train_epochs 3 \\
    --per_device_train_batch_size 1 \\
    --gradient_accumulation_steps 16 \\
    --learning_rate 1e-4 \\
    --output_dir $WORK/output/qwen3_vl_packed
"""

SEVERAL_CACHES = """
packtool export --model $WORK/model --dataset $WORK/data/held_out.json --max_length 10240 --output_dir $WORK/second
packtool sft --model $WORK/model \\
    --cached_dataset "$WORK/first" \\
        "$WORK/second" \\
    --packing true \\
    --max_length 10240 \\
    --tuner_type lora \\
    --dry_run true \\
    --output_dir $WORK/output/several
"""

QUICK_START = """
IMAGE_MAX_TOKEN_NUM=5000 packtool export --model $WORK/model --dataset $WORK/data/train.json \\
    --to_cached_dataset true --max_length 10240 --output_dir $WORK/data_cached
packtool train --model $WORK/model --cached_dataset $WORK/data_cached --packing true --max_length 10240 \\
    --train_type lora --output_dir $WORK/output/quick
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    make_model(str(folder / "model"), 0)
    make_rows(str(folder / "data"), 60, 0)
    return folder


def test_the_long_scripts(work: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORK", str(work))
    run_here(EXPORT_SCRIPT)
    told = capfd.readouterr().out
    assert "rows in" in told
    assert " 60" in told
    run_here(TRAIN_SCRIPT)
    told = capfd.readouterr().err
    for part in ("packing length: 10,240", "packing processes: 4", "2 processes", "samples a pack, fill"):
        assert part in told
    result = json.loads((work / "output" / "qwen3_vl_packed" / "packtool_train.json").read_text())
    assert (result["num_samples"], result["steps"], result["num_processes"]) == (60, 3, 2)
    checkpoint = Path(result["checkpoint"])
    assert (checkpoint / "adapter_model.safetensors").exists()
    assert (checkpoint / "tokenizer.json").exists()


def test_the_quick_start_and_several_caches(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORK", str(work))
    run_here(QUICK_START)
    assert json.loads((work / "output" / "quick" / "packtool_train.json").read_text())["steps"] == 1
    run_here(
        "packtool export --model $WORK/model --dataset $WORK/data/train.json --max_length 10240"
        " --output_dir $WORK/first"
    )
    capsys.readouterr()
    run_here(SEVERAL_CACHES)
    assert "planned, nothing trained" in capsys.readouterr().out
    assert not (work / "output" / "several").exists()
