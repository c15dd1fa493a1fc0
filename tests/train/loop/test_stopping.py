"""A run that is told to stop finishes its step and can be gone on with; one whose numbers are none stops by itself."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.elastic.multiprocessing.api import SignalException
from transformers import TrainerControl, TrainerState

from packtool.cli.main import run
from packtool.config.train import TrainConfig
from packtool.errors import ConfigError, DivergedError, StoppedError
from packtool.launch import torchrun
from packtool.launch.worker import begin_worker
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.loop.watch import SIGNALS, StepWatch, StopSignals
from packtool.train.model.loss import StepMean
from packtool.train.prepare.checkpoint import finished_checkpoints
from packtool.train.prepare.run import Run
from packtool.train.run import train
from tests.forked import forked_process, started_ranks
from tests.train.tiny import TinyWorld, check_same_rest, read_metrics
from tests.waiting import PATIENCE_S, wait_for

GIVEN: dict[str, Any] = {"gradient_accumulation_steps": 2, "verify_packing": False}
FOUR_STEPS = 4


def kill_from_another_process(signum: signal.Signals, pids: list[int]) -> None:
    """Send a signal by a process that is not the receivers' parent, without the system's ``kill``."""
    code = "import os, sys; [os.kill(int(pid), int(sys.argv[1])) for pid in sys.argv[2:]]"
    subprocess.run([sys.executable, "-I", "-c", code, str(int(signum)), *map(str, pids)], check=True)


class Sending(SilentProgress):
    """Sends this process signals when a step is done, and, as a scheduler does, those that load pictures, too."""

    def __init__(self, step: int, *signals: signal.Signals) -> None:
        self.left, self.signals = step, signals
        self.lines: list[str] = []
        self.others = {child.pid for child in psutil.Process().children()}  # such as the tests' S3 server

    def note(self, message: str) -> None:
        self.lines.append(message)

    def advance(self, num_done: int, **fields: float | int | str) -> None:
        self.left -= num_done
        if self.left == 0:
            children = [child for child in psutil.Process().children() if "python" in child.name()]
            workers = [child.pid for child in children if child.pid not in self.others]
            for signum in self.signals:
                os.kill(os.getpid(), signum)
                if workers:
                    kill_from_another_process(signum, workers)


@pytest.fixture(scope="module")
def full_run(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("whole")
    assert train(tiny.config(output_dir, **GIVEN), SilentProgress()).steps == FOUR_STEPS
    return output_dir


@pytest.mark.parametrize(
    ("signum", "code", "workers"), [(signal.SIGTERM, 143, 1), (signal.SIGUSR1, 138, 0), (signal.SIGINT, 130, 0)]
)
def test_signal_stops_a_run_after_saving_a_checkpoint(
    signum: signal.Signals, code: int, workers: int, full_run: Path, tiny: TinyWorld, tmp_path: Path
) -> None:
    before = signal.getsignal(signum)
    settings = GIVEN | {"dataloader_num_workers": workers}
    with pytest.raises(
        StoppedError, match=rf"stopped by {signum.name} after step 2 of 4; .*checkpoint-2 is"
    ) as exc_info:
        train(tiny.config(tmp_path, **settings), Sending(1, signum))
    assert exc_info.value.exit_code == code
    assert signal.getsignal(signum) is before
    train(tiny.config(tmp_path, **settings, resume_from_checkpoint="true"), SilentProgress())
    assert read_metrics(tmp_path) == read_metrics(full_run)
    check_same_rest(full_run, tmp_path, 0)


def test_without_a_log_line_a_signal_stops_one_step_later(tiny: TinyWorld, tmp_path: Path) -> None:
    with pytest.raises(StoppedError, match=r"stopped by SIGTERM after step 3 of 4; .*checkpoint-3 is complete"):
        train(tiny.config(tmp_path, **GIVEN | {"logging_steps": 10}), Sending(1, signal.SIGTERM))
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 3]


def test_signal_in_the_last_step_changes_nothing(tiny: TinyWorld, tmp_path: Path) -> None:
    result = train(tiny.config(tmp_path, **GIVEN), Sending(3, signal.SIGTERM))
    assert result.steps == FOUR_STEPS


def test_second_ctrl_c_ends_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # the same key, passed on by a launcher
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGINT
        now += 1.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_data_workers_ignore_stop_signals() -> None:
    begun = multiprocessing.get_context("fork").Event()

    def load() -> None:
        begin_worker(0)
        begun.set()
        time.sleep(60)

    worker = multiprocessing.get_context("fork").Process(target=load, daemon=True)
    with StopSignals():
        worker.start()
        assert begun.wait(PATIENCE_S)
        for signum in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
            assert worker.pid is not None
            kill_from_another_process(signum, [worker.pid])
        worker.join(0.3)
        assert worker.is_alive()
        worker.terminate()  # torch clearing away
        worker.join(PATIENCE_S)
        assert worker.exitcode == 0


def test_launcher_without_ranks_ends_on_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "_ranks", lambda: iter(()))
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    try:
        for signum in SIGNALS:
            torchrun.SignalForwarder()
            with pytest.raises(SignalException) as exc_info:
                os.kill(os.getpid(), signum)
            assert exc_info.value.sigval == signum
    finally:
        signal.set_wakeup_fd(-1)  # the launcher's thread would end this process at a later test's signal
        for signum, handler in before.items():
            signal.signal(signum, handler)


def test_launcher_forwards_signals_and_waits(tmp_path: Path) -> None:
    """The "ranks" are shells that take a moment to end, with the code that a stopped run ends with."""
    script = f"trap 'sleep 1; echo $RANK >> {tmp_path}/done; exit 143' TERM; touch {tmp_path}/up$RANK; "
    script += "while :; do sleep 0.1; done"
    options = ["--standalone", "--nproc-per-node", "2", "--no-python", "bash", "-c", script]
    with forked_process(torchrun.run_torchrun, options) as launcher:
        wait_for(lambda: len(list(tmp_path.glob("up*"))) == 2, lambda: not launcher.is_alive())
        os.kill(launcher.pid or 0, signal.SIGTERM)
        launcher.join(PATIENCE_S)
    assert launcher.exitcode == 143
    assert sorted((tmp_path / "done").read_text().split()) == ["0", "1"]


def test_all_ranks_stop_if_one_receives_a_signal(
    tiny: TinyWorld, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--model", tiny.model, "--cached-dataset", tiny.cache, "--output-dir", str(tmp_path / "out")]
    words += ["--packing", "true", "--packing-length", "256", "--num-train-epochs", "1000", "--logging-steps", "1"]
    metrics = tmp_path / "out" / "metrics.jsonl"
    with started_ranks(2, run, [*words, "--dataloader-num-workers", "0"], scratch=tmp_path) as ranks:
        wait_for(metrics.exists, lambda: not all(rank.is_alive() for rank in ranks))
        os.kill(ranks[1].pid or 0, signal.SIGUSR1)
        for rank in ranks:
            rank.join(PATIENCE_S)
    stderr = capfd.readouterr().err
    assert [rank.exitcode for rank in ranks] == [138, 138], stderr
    (checkpoint,) = finished_checkpoints(str(tmp_path / "out"))
    assert f"{checkpoint} is complete" in stderr
    assert stderr.count("stopped by SIGUSR1") == 1
    assert len(list(Path(checkpoint).glob("rng_state_*.pth"))) == 2


def test_jit_checkpoints_of_transformers_are_refused(tiny: TinyWorld, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"enable_jit_checkpoint.*\n?.*SIGTERM"):
        train(tiny.config(tmp_path, **GIVEN, training={"enable_jit_checkpoint": True}), SilentProgress())


@pytest.fixture
def bad_third_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of the second micro-batch of the third step is NaN."""
    contribution, calls = StepMean.contribution, iter(range(1000))

    def broken(self: StepMean, loss_sum: Tensor) -> Tensor:
        return contribution(self, loss_sum) * (float("nan") if next(calls) == 5 else 1.0)

    monkeypatch.setattr(StepMean, "contribution", broken)


def bad_rows(config: TrainConfig) -> list[int]:
    """Numbers in the cache of the samples of that micro-batch."""
    (pack,) = Run.of(config, World()).timeline.plan_of(0).samples(2, 0, 1)
    return [int(position) for position in pack]


def reported_rows(error: DivergedError) -> list[int]:
    """Numbers in the cache of the samples that an error names, of which there are at most six."""
    assert "rank 0, micro-batch 1:" in str(error)
    return [int(sample_index) for sample_index in re.findall(r"row \d+ of \S*train.json \(sample (\d+)\)", str(error))]


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.usefixtures("bad_third_step")
def test_nan_loss_stops_a_run(tiny: TinyWorld, tmp_path: Path) -> None:
    config = tiny.config(tmp_path, **GIVEN, save_steps=1, save_total_limit=1)
    rows = bad_rows(config)
    with pytest.raises(DivergedError, match="gradient of step 3 is infinite or not a number") as exc_info:
        train(config, SilentProgress())
    assert exc_info.value.exit_code == 1
    assert reported_rows(exc_info.value) == rows[:6]
    (checkpoint,) = finished_checkpoints(str(tmp_path))
    assert checkpoint.endswith("checkpoint-2")
    assert all(torch.isfinite(weight).all() for weight in load_file(Path(checkpoint) / "model.safetensors").values())


@pytest.mark.usefixtures("bad_third_step")
def test_bad_step_is_detected_one_step_later_if_nothing_is_stored(tiny: TinyWorld, tmp_path: Path) -> None:
    """The third step changes the weights; the fourth, which would be saved, finds out."""
    config = tiny.config(tmp_path, **GIVEN | {"logging_steps": 10}, save_steps=2)
    rows, progress = bad_rows(config), Sending(0)
    with pytest.raises(DivergedError, match="gradient of step 3 is infinite or not a number") as exc_info:
        train(config, progress)
    assert reported_rows(exc_info.value) == rows[:6]
    assert progress.left == -3
    assert [Path(checkpoint).name for checkpoint in finished_checkpoints(str(tmp_path))] == ["checkpoint-2"]


def test_bad_step_is_detected_before_an_evaluation() -> None:
    watch = StepWatch(StopSignals(), lambda: lambda _: [], on_nan="stop", world=World(), progress=SilentProgress())
    watch.record_loss(torch.tensor(float("nan")))
    watch.before_update(0, torch.nn.Linear(1, 1), torch.device("cpu"))
    watch.end_step(TrainerState(), TrainerControl(), will_evaluate=False)
    with pytest.raises(DivergedError, match="step 1 is infinite"):
        watch.end_step(TrainerState(), TrainerControl(), will_evaluate=True)


@pytest.mark.usefixtures("bad_third_step")
def test_on_nan_skip_skips_a_bad_step(tiny: TinyWorld, tmp_path: Path) -> None:
    progress = Sending(0)
    train(tiny.config(tmp_path, **GIVEN, on_nan="skip", save_steps=1), progress)
    weights = [load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors") for step in (2, 3, 4)]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    assert not all(torch.equal(weight, weights[2][name]) for name, weight in weights[0].items())
    assert all(torch.isfinite(weight).all() for weight in weights[2].values())
    assert any("skipped (--on-nan skip)" in line for line in progress.lines)
    lines = [strict(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] is None for line in lines] == [False, False, True, False]
    strict((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    strict((tmp_path / "packtool_train.json").read_text())


@pytest.mark.usefixtures("bad_third_step")
def test_on_nan_go_on_keeps_the_last_good_checkpoint(tiny: TinyWorld, tmp_path: Path) -> None:
    train(tiny.config(tmp_path, **GIVEN, on_nan="go-on", save_steps=1, save_total_limit=1), SilentProgress())
    names = [Path(checkpoint).name for checkpoint in finished_checkpoints(str(tmp_path))]
    assert names == ["checkpoint-2", "checkpoint-4"]
    weights = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert not all(torch.isfinite(weight).all() for weight in weights.values())
    strict((tmp_path / "packtool_train.json").read_text())


@pytest.mark.usefixtures("bad_third_step")
def test_bad_step_of_a_stream_names_its_rows(tiny: TinyWorld, tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="gradient of step 3 is") as exc_info:
        train(tiny.config(tmp_path, **GIVEN | tiny.streamed()), SilentProgress())
    (rows_text,) = re.findall(r"rank 0, micro-batch 1: (.*)", str(exc_info.value))
    rows = re.findall(r"row (\d+) of \S*train.json", rows_text)
    assert rows
    assert len(set(rows)) == len(rows)
