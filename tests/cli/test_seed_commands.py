"""Run the commands of the ms-swift and MindSpeed-RL articles that packtool comes from, verbatim except for paths."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from packtool.cli.main import run
from packtool.config.settings import resolve
from packtool.config.train import TrainConfig
from packtool.demo.dataset import make_rows
from packtool.demo.model import make_model
from packtool.errors import EXIT_USAGE
from tests.cli.commands import run_here, run_in_shell
from tests.conftest import REPOSITORY
from tests.train.tiny_media import make_media_world

NUM_ROWS = 16
SEEDS = REPOSITORY.parent / "shared" / "seeds"

PATHS = {
    "/mnt/jfs/copilot/yhl/checkpoint/Qwen3-VL-30B-A3B-Instruct": "$WORK/model",
    "/mnt/cpfs/model/Qwen3-Omni-30B-A3B-Instruct": "$WORK/omni/model",
    "Qwen/Qwen3-VL-8B": "$WORK/model",
    "/mnt/jfs/copilot/yhl/modelscope_cache": "$WORK/modelscope_cache",
    "s3://yanhaolong/data/sft_data/click_pretrain_cached_resize0_q3_len10k_img5k": "$WORK/cached_10k",
    "s3://yanhaolong/data/sft_data/click_pretrain.json": "$WORK/data/train.json",
    "/mnt/cpfs/datasets/ShortsTemplateEdits/anno_jianying_mp4_seed18_train.jsonl": "$WORK/data/train.json",
    "/mnt/cpfs/datasets/ShortsTemplateEdits/pack_cached_cpfs/anno_jianying_mp4_seed18_train_len20k": "$WORK/len20k",
    "s3://path/data_cached": "$WORK/data_cached",
    "s3://path/data.json": "$WORK/data/train.json",
    "s3://path/dataset1_cached": "$WORK/dataset1_cached",
    "s3://path/dataset2_cached": "$WORK/dataset2_cached",
    "s3://path/dataset3_cached": "$WORK/dataset3_cached",
    "s3://path/dataset1.json": "$WORK/sets/dataset1.json",
    "s3://path/dataset2.json": "$WORK/sets/dataset2.json",
    "s3://bucket/data.json": "$WORK/data/train.json",
    "s3://bucket/cached_dataset": "$WORK/cached_dataset",
    "output/qwen3_vl_packed": "$WORK/output/qwen3_vl_packed",
}

EXPORT = r"""
export MODELSCOPE_CACHE='/mnt/jfs/copilot/yhl/modelscope_cache'
export IMAGE_MAX_TOKEN_NUM=5000
DATASET="s3://yanhaolong/data/sft_data/click_pretrain.json"
OUTPUT_DIR="s3://yanhaolong/data/sft_data/click_pretrain_cached_resize0_q3_len10k_img5k"
IMAGE_MAX_TOKEN_NUM=5000 swift export \
    --resize 0 \
    --model /mnt/jfs/copilot/yhl/checkpoint/Qwen3-VL-30B-A3B-Instruct \
    --dataset $DATASET \
    --to_cached_dataset true \
    --split_dataset_ratio 0 \
    --dataset_num_proc 10 \
    --max_length 10240 \
    --output_dir $OUTPUT_DIR
"""

TRAIN = r"""
export IMAGE_MAX_TOKEN_NUM=5000
export MODELSCOPE_CACHE='/mnt/jfs/copilot/yhl/modelscope_cache'
NPROC_PER_NODE=8 swift sft \
    --model /mnt/jfs/copilot/yhl/checkpoint/Qwen3-VL-30B-A3B-Instruct \
    --cached_dataset 's3://yanhaolong/data/sft_data/click_pretrain_cached_resize0_q3_len10k_img5k' \
    --packing true \
    --max_length 10240 \
    --packing_length 10240 \
    --packing_num_proc 4 \
    --train_type lora \
    --num_train_epochs 3 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 16 \
    --learning_rate 1e-4 \
    --output_dir output/qwen3_vl_packed
"""

EXPORT_EACH = r"""
for DATASET in "${DATASET_PATHS[@]}"; do
    swift export \
        --model $MODEL \
        --dataset $DATASET \
        --to_cached_dataset true \
        --max_length 10240 \
        --output_dir "${DATASET}_cached"
done
"""

EXPORT_NEW = r"""
for DATASET in "${DATASET_PATHS[@]}"; do
    DATASET_DIR=$(dirname "$DATASET")
    DATASET_FILENAME=$(basename "$DATASET" .json)
    OUTPUT_DIR="${DATASET_DIR}/${DATASET_FILENAME}_cached_q3_len10k_img5k"
    # 跳过已处理
    if aws s3 ls "$OUTPUT_DIR" &> /dev/null; then
        echo "⚠️ Skipping $DATASET_FILENAME (already exists)"
        continue
    fi
    # 预处理
    IMAGE_MAX_TOKEN_NUM=5000 swift export \
        --model $MODEL \
        --dataset $DATASET \
        --to_cached_dataset true \
        --max_length 10240 \
        --output_dir $OUTPUT_DIR
    echo "✓ Completed: $DATASET_FILENAME"
done
"""

TRAIN_ROWS = r"""
swift sft \
    --model $MODEL \
    --dataset $DATASET \
    --packing true \
    --max_length 10240
"""

TRAIN_SEVERAL = r"""
swift sft \
    --cached_dataset 's3://path/dataset1_cached' \
        's3://path/dataset2_cached' \
        's3://path/dataset3_cached' \
    --packing true \
    --max_length 10240
"""

TRAIN_LOSS_SCALES = r"""
swift sft \
    --cached_dataset 's3://path/dataset1_cached' \
        's3://path/dataset2_cached' \
    --packing true \
    --loss_scale default
"""

TRAIN_DEBUG = r"""
export SWIFT_LOG_LEVEL=DEBUG
swift sft \
    --cached_dataset $DATASET \
    --packing true \
    --logging_steps 1 \
    --save_steps 100
"""

TRAIN_ACCUMULATED = r"""
swift sft \
    --cached_dataset $DATASET \
    --packing true \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 16
"""

EXPORT_BUCKET = r"""
swift export \
    --dataset s3://bucket/data.json \
    --output_dir s3://bucket/cached_dataset
"""

TRAIN_BUCKET = r"""
swift sft \
    --cached_dataset s3://bucket/cached_dataset
"""

TRAIN_STREAM = r"""
swift sft \
    --dataset $DATASET \
    --streaming true \
    --packing true
"""

QUICK_EXPORT = r"""
IMAGE_MAX_TOKEN_NUM=5000 swift export \
    --model Qwen/Qwen3-VL-8B \
    --dataset s3://path/data.json \
    --to_cached_dataset true \
    --max_length 10240 \
    --output_dir s3://path/data_cached
"""

QUICK_TRAIN = r"""
NPROC_PER_NODE=8 swift sft \
    --model Qwen/Qwen3-VL-8B \
    --cached_dataset s3://path/data_cached \
    --packing true \
    --max_length 10240 \
    --train_type lora \
    --output_dir output
"""

EXPORT_OMNI = r"""
IMAGE_MAX_TOKEN_NUM=5000 USE_AUDIO_IN_VIDEO=true VIDEO_MAX_PIXELS=307200 USE_AUDIO_IN_VIDEO=true \
swift export \
    --model /mnt/cpfs/model/Qwen3-Omni-30B-A3B-Instruct \
    --dataset /mnt/cpfs/datasets/ShortsTemplateEdits/anno_jianying_mp4_seed18_train.jsonl \
    --split_dataset_ratio 0 \
    --dataset_num_proc 72 \
    --to_cached_dataset true \
    --max_length 20000 --truncation_strategy left \
    --output_dir /mnt/cpfs/datasets/ShortsTemplateEdits/pack_cached_cpfs/anno_jianying_mp4_seed18_train_len20k
"""

SCRIPTS = (
    EXPORT,
    TRAIN,
    EXPORT_EACH,
    EXPORT_NEW,
    TRAIN_ROWS,
    TRAIN_SEVERAL,
    TRAIN_LOSS_SCALES,
    TRAIN_DEBUG,
    TRAIN_ACCUMULATED,
    EXPORT_BUCKET,
    TRAIN_BUCKET,
    TRAIN_STREAM,
    QUICK_EXPORT,
    QUICK_TRAIN,
    EXPORT_OMNI,
)


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and rows."""
    folder = tmp_path_factory.mktemp("work")
    make_model(str(folder / "model"), 0)
    make_rows(str(folder / "data"), NUM_ROWS, 0)
    return folder


@pytest.fixture
def work(work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder as ``$WORK`` and the working directory, with the other variables of the articles."""
    monkeypatch.setenv("WORK", str(work_dir))
    monkeypatch.setenv("MODEL", str(work_dir / "model"))
    monkeypatch.setenv("PACKTOOL_CACHE_DIR", str(work_dir / "caches"))
    monkeypatch.chdir(work_dir)
    return work_dir


def with_local_paths(script: str) -> str:
    """A script with this machine's paths."""
    for path, place in sorted(PATHS.items(), key=lambda item: -len(item[0])):
        script = script.replace(path, place)
    script = re.sub(r"--output_dir output$", "--output_dir $WORK/output/quick", script, flags=re.MULTILINE)
    # Eight processes of a model on two cores only take longer.
    return script.replace("NPROC_PER_NODE=8", "NPROC_PER_NODE=2")


def newest_run(folder: Path) -> Path:
    """The run that began last, where ``--output_dir`` was left out."""
    return max((folder / "output" / "model").iterdir(), key=lambda run: int(run.name.split("-")[0][1:]))


def figures(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "packtool_train.json").read_text()))


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the articles are not beside this checkout")
def test_scripts_equal_those_of_the_articles() -> None:
    def plain(text: str) -> str:
        return re.sub(r"[\s\\]+", " ", text).strip()

    articles = " ".join(plain(path.read_text()) for path in sorted(SEEDS.glob("*.txt")))
    for script in SCRIPTS:
        for command in re.split(r"^export .*$|^DATASET=.*$|^OUTPUT_DIR=.*$", script, flags=re.MULTILINE):
            assert plain(command) in articles, command
    commands = len(re.findall(r"swift (?:export|sft) (?=-)", articles))
    # The second article also names commands in sentences.
    assert commands == sum(len(re.findall(r"swift (?:export|sft)", script)) for script in SCRIPTS) + 3


def test_export_then_train_on_two_processes(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_here(with_local_paths(EXPORT))
    assert f" {NUM_ROWS}" in capfd.readouterr().out
    run_here(with_local_paths(TRAIN))
    screen = capfd.readouterr().err
    for part in ("packing length: 10,240", "packing processes: 4", "2 processes", "samples a pack, fill"):
        assert part in screen
    result = figures(work / "output" / "qwen3_vl_packed")
    assert (result["num_samples"], result["steps"], result["num_processes"]) == (NUM_ROWS, 3, 2)
    checkpoint = Path(str(result["checkpoint"]))
    assert (checkpoint / "adapter_model.safetensors").exists()
    assert (checkpoint / "tokenizer.json").exists()


def test_the_quick_start(work: Path) -> None:
    run_here(with_local_paths(QUICK_EXPORT) + with_local_paths(QUICK_TRAIN))
    assert figures(work / "output" / "quick")["steps"] == 1


def test_loops_over_datasets(work: Path) -> None:
    sets = work / "looped"
    sets.mkdir()
    for name in ("dataset1", "dataset2"):
        (sets / f"{name}.json").write_text(
            (work / "data" / "train.json").read_text().replace("pictures/", "../data/pictures/")
        )
    # The loop of the article looks for finished exports with another tool, which finds none here.
    before = f'swift() {{ packtool "$@"; }}; aws() {{ false; }}; MODEL={work}/model\n'
    before += f"DATASET_PATHS=({sets}/dataset1.json {sets}/dataset2.json)\n"
    run_in_shell(
        before
        + with_local_paths(EXPORT_EACH)
        + with_local_paths(EXPORT_NEW).replace("--output_dir", "--media_root $WORK/data --output_dir"),
        work,
    )
    for name in ("dataset1.json_cached", "dataset2.json_cached", "dataset1_cached_q3_len10k_img5k"):
        assert (sets / name / "packtool.json").exists()


def test_train_on_rows_without_an_output_directory(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATASET", str(work / "data" / "train.json"))
    run_here(TRAIN_ROWS)
    first_run = newest_run(work)
    assert re.fullmatch(r"v\d+-\d{8}-\d{6}", first_run.name)
    run_here(TRAIN_ROWS)
    second_run = newest_run(work)
    assert second_run != first_run
    assert figures(second_run)["first_loss"] == figures(first_run)["first_loss"]
    run_here(TRAIN_ROWS.rstrip() + " --resume_from_checkpoint true")
    assert newest_run(work) == second_run


def test_train_on_caches_without_a_model(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = {"dataset1": "last_round", "dataset2": "default", "dataset3": "default"}
    rows = json.loads((work / "data" / "train.json").read_text())
    for name in sets:
        turns = [
            {**row, "messages": [*row["messages"], {"role": "user", "content": "Sure?"}, *row["messages"][1:]]}
            for row in rows
        ]
        (work / "data" / f"{name}.json").write_text(json.dumps(turns))
    info = {
        "dataset1": {"file_name": "dataset1.json", "loss_scale": "last_round"},
        "dataset2": {"file_name": "dataset2.json"},
    }
    (work / "data" / "dataset_info.json").write_text(json.dumps(info | {"dataset3": {"file_name": "dataset3.json"}}))
    for name in sets:
        run_here(
            f"packtool export --model $MODEL --dataset {name} --dataset_info $WORK/data/dataset_info.json"
            f" --per_dataset_loss_scale true --max_length 10240 --output_dir $WORK/{name}_cached"
        )
    run_here(with_local_paths(TRAIN_SEVERAL))
    manifests = [json.loads((work / f"{name}_cached" / "packtool.json").read_text()) for name in sets]
    splits = [manifest["splits"]["train"] for manifest in manifests]
    assert figures(newest_run(work))["num_samples"] == sum(split["rows"] for split in splits)
    run_here(with_local_paths(TRAIN_LOSS_SCALES))
    monkeypatch.setenv("DATASET", str(work / "dataset2_cached"))
    run_here(TRAIN_DEBUG)
    run_here(TRAIN_ACCUMULATED)
    targets = [split["target_tokens"] for split in splits]
    # The global default of TRAIN_LOSS_SCALES leaves the first set's own loss scale in force.
    assert targets[0] < targets[1] == targets[2]


def test_commands_that_name_no_model_anywhere(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows name no model: the articles leave it out for brevity, and ms-swift needs it, too."""
    monkeypatch.setenv("DATASET", str(work / "data" / "train.json"))
    for script in (EXPORT_BUCKET, TRAIN_STREAM):
        words = with_local_paths(script).replace("\\\n", " ").split()[1:]
        assert run(words) == EXIT_USAGE
        assert "--model is missing" in capsys.readouterr().err
    run_here(with_local_paths(EXPORT_BUCKET).rstrip() + " --model $MODEL\n" + with_local_paths(TRAIN_BUCKET))
    assert figures(newest_run(work))["num_samples"] == NUM_ROWS
    # A stream has no length that could end it.
    run_here(TRAIN_STREAM.rstrip() + " --model $MODEL --max_steps 1 --max_length 1024")


def test_export_of_the_second_article(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_media_world(work / "omni", hears=True)
    run_here(with_local_paths(EXPORT_OMNI))
    spec = json.loads((work / "len20k" / "packtool.json").read_text())["identity"]["spec"]
    assert (spec["max_length"], spec["truncation_strategy"]) == (20000, "left")
    capsys.readouterr()
    # It forbids packing at export, as packtool does.
    words = f"export --model {work}/model --dataset {work}/data/train.json --packing true --output_dir {work}/x"
    assert run(words.split()) == EXIT_USAGE
    assert "--packing" in capsys.readouterr().err
    for longer in ("20000", "30000"):
        run_here(f"packtool sft --cached_dataset $WORK/len20k --packing true --max_length {longer} --dry_run true")


def test_settings_of_the_third_article(work: Path, tmp_path: Path) -> None:
    """``model_parallel_size: 4`` and ``sequence_parallel_type: "ring"``."""
    run_here(
        "packtool export --model $MODEL --dataset $WORK/data/train.json --max_length 1024 --output_dir $WORK/short"
    )
    (tmp_path / "c.yaml").write_text('model_parallel_size: 4\nsequence_parallel_type: "ring"\n')
    run_here(f"NPROC_PER_NODE=4 packtool sft --config {tmp_path}/c.yaml --cached_dataset $WORK/short --dry_run true")


@pytest.mark.parametrize("dynamic", [True, False])
def test_settings_of_the_fourth_article(work: Path, dynamic: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """``use_dynamic_bsz`` decides whether ``max_packing_token_size`` or ``micro_batch_size`` makes micro-batches."""
    seed = {
        "use_remove_padding": dynamic,
        "use_dynamic_bsz": dynamic,
        "max_packing_token_size": 2048,
        "dynamic_max_batch_size": 4,
        "micro_batch_size": 1 if dynamic else 2,
    }
    source = {"cached_dataset": "c"} | ({} if dynamic else {"packing": False})
    config = resolve(TrainConfig, {}, file={**seed, **source})
    batch_options = (
        {"dynamic_batch_tokens": 2048, "dynamic_max_batch_size": 4} if dynamic else {"per_device_train_batch_size": 2}
    )
    same = resolve(TrainConfig, {}, file={"packing": False, "cached_dataset": "c", **batch_options})
    ignored = {"use_dynamic_bsz", "padding_free"}
    assert {k: v for k, v in vars(config).items() if k not in ignored} == {
        k: v for k, v in vars(same).items() if k not in ignored
    }


def test_a_dynamic_batch_size_without_a_limit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["sft", "--cached_dataset", "c", "--use_dynamic_bsz", "true"]) == EXIT_USAGE
    assert "max_packing_token_size" in capsys.readouterr().err
