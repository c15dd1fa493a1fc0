"""Training on rows: streamed without a cache, resumed to the last bit, or by way of a cache of their own."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from packtool.batch.spec import InputSpec
from packtool.cli.main import run
from packtool.cli.train import _prepare_train
from packtool.config.train import TrainConfig
from packtool.encode.families import MediaLimits
from packtool.errors import ConfigError, DataError, MismatchError
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.prepare.from_rows import with_cache
from packtool.train.prepare.result import TrainResult
from packtool.train.prepare.run import Run
from packtool.train.run import train
from tests.forked import forked_process
from tests.train.test_gradients import write_lines
from tests.train.tiny import TinyWorld, check_same_rest, read_metrics
from tests.waiting import PATIENCE_S, wait_for


@pytest.fixture(scope="module")
def rows(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> str:
    """80 rows, one of them broken and one too long."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_lines(tiny, path, 2)
    long = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a" * 500}]}
    path.write_text("{broken\n" + json.dumps(long) + "\n" + path.read_text())
    return str(path)


@pytest.fixture(scope="module")
def full_run(tiny: TinyWorld, rows: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainResult]:
    """Both passes of a stream, with a checkpoint of every step; adapters draw dropout masks."""
    output_dir = tmp_path_factory.mktemp("whole")
    return output_dir, train(tiny.config(output_dir, **settings(tiny, rows)), SilentProgress())


def settings(tiny: TinyWorld, rows: str, **changes: Any) -> dict[str, Any]:
    options = {"num_train_epochs": 2.0, "save_steps": 1, "train_type": "lora", "lora_dropout": 0.3}
    return tiny.streamed(rows) | options | {"gradient_accumulation_steps": 3, "dataloader_num_workers": 1} | changes


def test_stream_trains_all_rows_and_ends(full_run: tuple[Path, TrainResult]) -> None:
    output_dir, result = full_run
    assert (result.streaming, result.num_samples) == (True, 160)
    assert result.dropped == {"invalid_json": 2, "over_max_length": 2}
    assert result.steps < 1000
    assert result.checkpoint == str(output_dir / f"checkpoint-{result.steps}")
    assert result.target_tokens == sum(line["target_tokens"] for line in read_metrics(output_dir))
    assert result.fill > 0.9
    lines = [json.loads(line) for line in (output_dir / "dropped-00000.jsonl").read_text().splitlines()]
    assert [(line["row"], line["reason"]) for line in lines] == [(0, "invalid_json"), (1, "over_max_length")] * 2


@pytest.mark.parametrize("step", [1, 5])
def test_stream_resumes_bit_exactly(
    step: int, full_run: tuple[Path, TrainResult], tiny: TinyWorld, rows: str, tmp_path: Path
) -> None:
    output_dir, result = full_run
    changes = {"resume_from_checkpoint": str(output_dir / f"checkpoint-{step}"), "dataset_num_proc": 2}
    resumed = train(tiny.config(tmp_path, **settings(tiny, rows, **changes)), SilentProgress())
    check_same_rest(output_dir, tmp_path, step)
    assert (resumed.steps, resumed.dropped) == (result.steps, result.dropped)


def test_pack_settings_must_match_when_resuming(
    full_run: tuple[Path, TrainResult], tiny: TinyWorld, rows: str, tmp_path: Path
) -> None:
    checkpoint = str(full_run[0] / "checkpoint-1")
    for change, message in (
        ({"packing_interval": 26}, "packing_interval 26"),
        ({"seed": 1}, "seed: 42 in the checkpoint, 1 now"),
        ({"dataset": (tiny.rows,)}, "cache:"),
        ({"max_length": 100}, "max_length: 128 in the checkpoint, 100 now"),
    ):
        config = tiny.config(tmp_path, **settings(tiny, rows, resume_from_checkpoint=checkpoint, **change))
        with pytest.raises(MismatchError, match=message):
            train(config, SilentProgress())
    with pytest.raises(MismatchError, match="world_size: 1 in the checkpoint, 2 now"):
        Run.of(tiny.config(tmp_path, **settings(tiny, rows, resume_from_checkpoint=checkpoint)), World(0, 2))


def test_max_steps_ends_a_stream(tiny: TinyWorld, rows: str, tmp_path: Path) -> None:
    result = train(tiny.config(tmp_path, **settings(tiny, rows, max_steps=2)), SilentProgress())
    assert result.steps == 2
    assert result.num_samples < 80


def test_stream_without_usable_rows_is_an_error(tiny: TinyWorld, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{\n{\n")
    config = tiny.config(tmp_path / "out", **tiny.streamed(str(tmp_path / "rows.jsonl")))
    with pytest.raises(
        DataError, match=r"no sample is left to train on: 2 invalid_json\nFirst dropped row: .*row 0: "
    ) as exc_info:
        train(config, SilentProgress())
    assert "one JSON object per line" in str(exc_info.value.remedy)
    assert "dropped-00000.jsonl" in str(exc_info.value.remedy)


def test_a_dead_encoder_ends_the_command(tiny: TinyWorld, rows: str, tmp_path: Path) -> None:
    """As its user sees it: a cause, a remedy, exit 1."""
    words = ["train", "--model", tiny.model, "--dataset", *[rows] * 200]
    words += ["--streaming", "true", "--packing", "true", "--max-steps", "100000", "--max-length", "128"]
    words += ["--output-dir", str(tmp_path / "out"), "--packing-interval", "20", "--logging-steps", "1"]
    words += ["--media-root", str(Path(tiny.rows).parent)]
    with forked_process(run, words, output_path=tmp_path / "output.txt") as process:
        wait_for((tmp_path / "out" / "metrics.jsonl").exists, lambda: not process.is_alive())
        children = psutil.Process(process.pid).children(recursive=True)
        workers = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
        workers[0].send_signal(signal.SIGKILL)
        process.join(PATIENCE_S)
    output = (tmp_path / "output.txt").read_text()
    assert process.exitcode == 1, output
    assert "a worker process that encodes rows died" in output
    assert "--resume-from-checkpoint" in output
    assert "Traceback" not in output


def test_all_setting_errors_are_reported_together(tiny: TinyWorld) -> None:
    config = TrainConfig(
        model="m", output_dir="o", dataset=("r.jsonl",), streaming=True, num_train_epochs=1.5, packing=False
    )
    message = "\n".join(config.problems())
    for name in ("--max-steps is missing", "remove --packing false", "--num-train-epochs 1.5"):
        assert name in message
    both = TrainConfig(model="m", output_dir="o", dataset=("r",), cached_dataset=("c",)).problems()
    neither = TrainConfig(model="m", output_dir="o").problems()
    assert "either --cached-dataset" in both[0]
    assert "either --cached-dataset" in neither[0]
    problems = TrainConfig(model="m", output_dir="o", cached_dataset=("c",), strict=True, system="s").problems()
    assert any("--strict requires --dataset" in line for line in problems)
    assert any("--system requires --dataset" in line for line in problems)


class RecordingProgress(SilentProgress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def skip_checks(config: TrainConfig) -> None:
    """In place of the checks that come before rows are read."""


@pytest.mark.parametrize("processes", [1, 2])
def test_setting_errors_are_reported_before_rows_are_read(
    tiny: TinyWorld, rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """By the run itself, or by the launcher of several processes."""
    monkeypatch.setattr("packtool.train.prepare.from_rows.export", lambda *_: pytest.fail("rows were read"))
    invalid_options = {
        "attn_impl": "flash_attention_3",
        "report_to": ("nowhere",),
        "resume_from_checkpoint": "nothing/there",
    }
    options = {"cached_dataset": (), "dataset": (rows,), "max_length": 128, "cache_dir": str(tmp_path / "copies")}
    config = tiny.config(tmp_path / "out", **options | invalid_options)
    with pytest.raises(ConfigError) as exc_info:
        train(config, SilentProgress()) if processes == 1 else _prepare_train(config, World(0, processes))
    for named in ("flash_attention_3", "--report-to nowhere", "nothing/there"):
        assert named in str(exc_info.value)


def test_rows_without_streaming_get_a_cache_once(tiny: TinyWorld, rows: str, tmp_path: Path) -> None:
    rows = shutil.copy(rows, tmp_path / "rows.jsonl")

    lines: list[str] = []

    def cached(**changes: Any) -> tuple[str, str]:
        options = {
            "cached_dataset": (),
            "dataset": (str(rows),),
            "media_root": str(Path(tiny.rows).parent),
            "max_length": 128,
            "cache_dir": str(tmp_path / "copies"),
        }
        progress = RecordingProgress()
        config = with_cache(tiny.config(tmp_path / "out", **options | changes), progress, skip_checks)
        assert not config.dataset
        lines.append(progress.notes[-1])
        return config.cached_dataset[0], progress.notes[-1].partition(":")[0]

    first_cache, status = cached()
    assert status == "cache made"
    assert cached() == (first_cache, "cache found")
    assert cached(dataset_num_proc=2) == (first_cache, "cache found")
    longer, status = cached(max_length=600)
    assert (longer != first_cache, status) == (True, "cache made")
    with open(rows, "a") as file:
        file.write("{broken\n")
    changed, status = cached()
    assert (changed not in (first_cache, longer), status) == (True, "cache made")
    assert lines[-1].endswith(" 3 dropped: 2 invalid_json, 1 over_max_length)")


def test_cache_of_rows_keeps_the_media_access(tiny: TinyWorld, tmp_path: Path) -> None:
    options = {"cached_dataset": (), "dataset": (tiny.rows,), "max_length": 128, "cache_dir": str(tmp_path / "copies")}
    allowed = {"media_access": "any", "max_media_bytes": 10_000_000, "media_root": "https://named/folder"}
    config = with_cache(tiny.config(tmp_path / "out", **options | allowed), SilentProgress(), skip_checks)
    assert {name: getattr(config, name) for name in allowed} == allowed
    plain = InputSpec.load(tiny.model, MediaLimits(), tiny.config(tmp_path, media_root="https://named/folder"))
    assert plain.media_policy.refusal("https://named/a.png") is None
    assert "--media-access any" in str(plain.media_policy.refusal("https://other/a.png"))


def test_stream_warns_immediately_of_forbidden_media(tiny: TinyWorld, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "<image>a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "images": ["../../elsewhere.png"]}) + "\n")
    progress = RecordingProgress()
    with pytest.raises(DataError, match=r"no sample is left to train on"):
        train(tiny.config(tmp_path / "out", **tiny.streamed(str(tmp_path / "rows.jsonl"))), progress)
    assert any("media_not_allowed" in line and "--media-root DIR" in line for line in progress.notes)


def test_rows_without_streaming_are_planned_like_a_cache(tiny: TinyWorld, tmp_path: Path) -> None:
    options = {"cached_dataset": (), "dataset": (tiny.rows,), "max_length": 128, "cache_dir": str(tmp_path / "copies")}
    cached_result = train(tiny.config(tmp_path / "rows", max_steps=2, **options), SilentProgress())
    train(tiny.config(tmp_path / "cache", max_steps=2), SilentProgress())
    assert read_metrics(tmp_path / "rows") == read_metrics(tmp_path / "cache")
    assert cached_result.num_samples == 40


def test_missing_model_or_file_is_reported_before_the_start(tiny: TinyWorld, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        train(tiny.config(tmp_path, **tiny.streamed(str(tmp_path / "gone.jsonl"))), SilentProgress())
    with pytest.raises(ConfigError, match="a sample cannot be drawn"):
        train(tiny.config(tmp_path, **tiny.streamed(tiny.rows + "#3")), SilentProgress())
