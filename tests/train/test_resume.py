"""An interrupted run, resumed, does what it would have done."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Trainer

from packtool.config.settings import flag
from packtool.errors import ConfigError, MismatchError
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.prepare.checkpoint import (
    RunState,
    copy_processor,
    find_checkpoint,
    finished_checkpoints,
    read_run_state,
    remove_oldest,
    write_run_state,
)
from packtool.train.prepare.costs import with_recomputing
from packtool.train.prepare.run import Run, resume_lines
from packtool.train.run import train
from tests.forked import forked_process
from tests.train.tiny import TinyWorld, check_same_rest, read_metrics
from tests.waiting import wait_for

# 8 packs in steps of 3: two whole steps and one of 2 packs in each of two epochs.
SETTINGS: dict[str, Any] = {"num_train_epochs": 2.0, "gradient_accumulation_steps": 3, "save_steps": 1}
SETTINGS |= {"verify_packing": False}
# Adapters draw dropout masks, so their random numbers must go on where they were.
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"train_type": "lora", "lora_dropout": 0.3, "learning_rate": 1e-2},
    "padded": {"packing": False, "gradient_accumulation_steps": 15},
    "workers": {"dataloader_num_workers": 1},
}


class BrokenOffError(Exception):
    """What happens to long runs."""


class Interrupting(SilentProgress):
    """Breaks the run off during the step after ``step``."""

    def __init__(self, step: int) -> None:
        self.left = step

    def advance(self, num_done: int, **fields: float | int | str) -> None:
        self.left -= num_done
        if self.left < 0:
            raise BrokenOffError


def lines_of(run: Run) -> list[str]:
    """Log lines of a resumed run."""
    return list(resume_lines(run.config, run.resume_point, run.state, run.timeline.num_steps))


@pytest.fixture(scope="module", params=KINDS)
def full_run(
    request: pytest.FixtureRequest, tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    """An uninterrupted run, and its settings."""
    output_dir = tmp_path_factory.mktemp("whole")
    settings = SETTINGS | KINDS[request.param]
    result = train(tiny.config(output_dir, **settings), SilentProgress())
    assert result.steps == 6
    return output_dir, settings


@pytest.mark.smoke
@pytest.mark.parametrize("step", [3, 5])
def test_resumed_steps_are_bit_identical(
    step: int, full_run: tuple[Path, Any], tiny: TinyWorld, tmp_path: Path
) -> None:
    """At the end of the first epoch, and within the second; within the first, "killed while" is resumed."""
    output_dir, settings = full_run
    config = tiny.config(tmp_path, **settings, resume_from_checkpoint=str(output_dir / f"checkpoint-{step}"))
    result = train(config, SilentProgress())
    check_same_rest(output_dir, tmp_path, step)
    assert result.resumed_from == str(output_dir / f"checkpoint-{step}")
    assert result.target_tokens == sum(line["target_tokens"] for line in read_metrics(output_dir)[step:])


def test_interrupted_run_resumes_with_true(tiny: TinyWorld, tmp_path: Path) -> None:
    settings = SETTINGS | {"save_steps": 2}
    train(tiny.config(tmp_path / "whole", **settings), SilentProgress())
    with pytest.raises(BrokenOffError):
        train(tiny.config(tmp_path / "broken", **settings), Interrupting(5))
    assert [Path(path).name for path in finished_checkpoints(str(tmp_path / "broken"))] == [
        "checkpoint-2",
        "checkpoint-4",
    ]
    train(tiny.config(tmp_path / "broken", **settings, resume_from_checkpoint="true"), SilentProgress())
    # The log goes on as if nothing had happened: step 5, trained twice, is there once.
    assert read_metrics(tmp_path / "broken") == read_metrics(tmp_path / "whole")


def test_a_checkpoint_of_another_plan_is_refused(full_run: tuple[Path, Any], tiny: TinyWorld, tmp_path: Path) -> None:
    output_dir, settings = full_run
    checkpoint = str(output_dir / "checkpoint-1")
    for change, message in (
        ({"seed": 1}, r"seed: 42 in the checkpoint, 1 now"),
        ({"gradient_accumulation_steps": 2}, r"gradient_accumulation_steps: \d+ in the checkpoint, 2 now"),
        ({"packing_length": 200}, r"packing_length: 256 in the checkpoint, 200 now"),
        ({"max_length": 90}, r"max_length: 128 in the checkpoint, 90 now"),
    ):
        config = tiny.config(tmp_path, **settings | change, resume_from_checkpoint=checkpoint)
        with pytest.raises(MismatchError, match=message):
            train(config, SilentProgress())


def resume_message(tiny: TinyWorld, output_dir: Path, settings: dict[str, Any], **changes: Any) -> str:
    """What a run that resumes after its second step says of it."""
    config = tiny.config(
        output_dir, **settings | changes, resume_from_checkpoint=str(output_dir / "checkpoint-2"), save_total_limit=9
    )
    (line,) = lines_of(Run.of(with_recomputing(config), World()))
    return line


def test_resumed_run_reports_checkpoint_and_settings(full_run: tuple[Path, Any], tiny: TinyWorld) -> None:
    output_dir, settings = full_run
    line = resume_message(tiny, output_dir, settings)
    assert line.startswith(
        f"resuming from {output_dir / 'checkpoint-2'}: 2 of 6 steps done, 4 left; changed settings: "
    )
    assert line.endswith(": --save-total-limit 9 (was default)")
    line = resume_message(tiny, output_dir, settings, logging_steps=3, report_to=("tensorboard", "wandb"))
    assert "--logging-steps 3 (was 1)" in line
    assert "--report-to tensorboard wandb (was " in line
    # As many steps as before, and schedules without an end, shift nothing.
    assert "--max-steps 6 (was default)" in resume_message(tiny, output_dir, settings, max_steps=6)
    line = resume_message(tiny, output_dir, settings, max_steps=4, data_change="allow")
    assert re.search(r"2 of 4 steps done, 2 left; .*--max-steps 4 \(was default\)", line)
    new = Run.of(tiny.config(output_dir / "new", **settings), World())
    assert not list(lines_of(new))


@hypothesis.settings(max_examples=25)
@given(num_steps=st.integers(2, 40), epochs=st.sampled_from([None, 1.0, 3.0]))
def test_a_schedule_is_never_shifted_silently(
    full_run: tuple[Path, Any], tiny: TinyWorld, num_steps: int, epochs: float | None
) -> None:
    output_dir, settings = full_run
    changes = {"max_steps": num_steps} if epochs is None else {"num_train_epochs": epochs}
    if epochs is None and num_steps == 6:
        assert "2 of 6 steps done" in resume_message(tiny, output_dir, settings, **changes)
        return
    with pytest.raises(MismatchError, match=r"the learning rate schedule would have .* instead of 6") as error:
        resume_message(tiny, output_dir, settings, **changes)
    assert "--resume-only-model" in str(error.value)


REFUSED: dict[str, Any] = {
    "learning_rate": 0.5,
    "weight_decay": 0.3,
    "warmup_ratio": 0.5,
    "lr_scheduler_type": "constant",
}
REFUSED |= {"lora_alpha": 3, "neftune_noise_alpha": 3.0, "max_grad_norm": 3.0}


@pytest.mark.parametrize("change", [{name: value} for name, value in REFUSED.items()])
def test_settings_fixed_by_the_checkpoint_are_refused(
    change: dict[str, Any], full_run: tuple[Path, Any], tiny: TinyWorld
) -> None:
    output_dir, settings = full_run
    ((name, value),) = change.items()
    expected = f"{flag(name)}: .* in the checkpoint, {str(value).lower()} now"
    with pytest.raises(MismatchError, match=f"cannot be resumed with other settings:\n  - {expected}"):
        resume_message(tiny, output_dir, settings, **change)


def test_checkpoint_of_an_older_packtool_has_no_settings(
    full_run: tuple[Path, Any], tiny: TinyWorld, tmp_path: Path
) -> None:
    output_dir, settings = full_run
    state = Path(shutil.copytree(output_dir / "checkpoint-2", tmp_path / "checkpoint-2")) / "packtool_state.json"
    values = json.loads(state.read_text())
    del values["options"], values["digest"]
    state.write_text(json.dumps(values))
    assert "changed" not in resume_message(tiny, tmp_path, settings, learning_rate=0.5)
    with pytest.raises(MismatchError, match="would have 9 steps instead of 6"):
        resume_message(tiny, tmp_path, settings, max_steps=9)


def test_finished_run_has_no_remaining_steps(full_run: tuple[Path, Any], tiny: TinyWorld) -> None:
    output_dir, settings = full_run
    before = (output_dir / "metrics.jsonl").read_bytes()
    result = train(tiny.config(output_dir, **settings, resume_from_checkpoint="true"), SilentProgress())
    assert result.checkpoint == str(output_dir / "checkpoint-6")
    assert (output_dir / "metrics.jsonl").read_bytes() == before


def test_checkpoints_record_their_step(full_run: tuple[Path, Any]) -> None:
    state = read_run_state(str(full_run[0] / "checkpoint-5"))
    assert (state.step, state.epoch, state.step_in_epoch) == (5, 1, 2)


def test_unfinished_checkpoints_are_skipped(tmp_path: Path) -> None:
    assert find_checkpoint(None, str(tmp_path))[0] is None
    assert find_checkpoint("false", str(tmp_path))[0] is None
    for step in (2, 10, 9):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-30").mkdir()
    (tmp_path / "checkpoint-x").mkdir()
    assert find_checkpoint("true", str(tmp_path))[0] == str(tmp_path / "checkpoint-10")
    assert find_checkpoint("True", str(tmp_path))[0] == str(tmp_path / "checkpoint-10")
    assert find_checkpoint(str(tmp_path / "checkpoint-2") + "/", "")[0] == str(tmp_path / "checkpoint-2")


def test_newest_checkpoint_is_the_last_saved(tmp_path: Path) -> None:
    """An earlier, longer run left its last checkpoint in the same directory."""
    make_checkpoint(tmp_path, 500, saved_at=1.0)
    make_checkpoint(tmp_path, 20, saved_at=3.0)
    make_checkpoint(tmp_path, 10, saved_at=2.0)
    assert find_checkpoint("true", str(tmp_path))[0] == str(tmp_path / "checkpoint-20")
    remove_oldest(str(tmp_path), 2)
    assert not (tmp_path / "checkpoint-500").exists()


def make_checkpoint(output_dir: Path, step: int, saved_at: float = 0.0) -> None:
    (output_dir / f"checkpoint-{step}").mkdir()
    settings = {"max_length": 1, "packing_length": 1, "world_size": 1, "gradient_accumulation_steps": 1}
    state = RunState(
        plan="p",
        cache="c",
        seed=0,
        train_type="full",
        packing=True,
        per_device_train_batch_size=1,
        step=step,
        saved_at=saved_at,
        **settings,
    )
    write_run_state(str(output_dir / f"checkpoint-{step}"), state)


def test_a_checkpoint_that_is_being_overwritten_is_not_finished(
    tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.config(tmp_path, **SETTINGS)
    train(config, SilentProgress())
    monkeypatch.setattr(Trainer, "_save_optimizer_and_scheduler", _break_off)
    with pytest.raises(BrokenOffError):
        train(dataclasses.replace(config, resume_from_checkpoint=str(tmp_path / "checkpoint-1")), SilentProgress())
    assert str(tmp_path / "checkpoint-2") not in finished_checkpoints(str(tmp_path))


def _break_off(*_: Any) -> None:
    raise BrokenOffError


def test_a_new_run_starts_a_new_log(tiny: TinyWorld, tmp_path: Path) -> None:
    for _ in range(2):
        settings = {"gradient_accumulation_steps": 4, "overwrite_output_dir": True}
        train(tiny.config(tmp_path, **settings), SilentProgress())
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_nothing_to_resume_from_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no finished checkpoint"):
        find_checkpoint("true", str(tmp_path / "new"))
    with pytest.raises(ConfigError, match="no such directory"):
        find_checkpoint(str(tmp_path / "gone"), str(tmp_path))
    with pytest.raises(MismatchError, match="not a finished checkpoint of packtool"):
        read_run_state(str(tmp_path))


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in (1, 12, 3, 2):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoint-13").mkdir()
    remove_oldest(str(tmp_path), None)
    assert len(finished_checkpoints(str(tmp_path))) == 4
    remove_oldest(str(tmp_path), 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-12", "checkpoint-13", "checkpoint-3"]


def test_save_total_limit(tiny: TinyWorld, tmp_path: Path) -> None:
    train(tiny.config(tmp_path, **SETTINGS, save_total_limit=2), SilentProgress())
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-5", "checkpoint-6"]


def test_tokenizer_and_processor_files_are_copied_and_nothing_else(tiny: TinyWorld, tmp_path: Path) -> None:
    source = tmp_path / "model"
    shutil.copytree(tiny.model, source)
    names = ["vocab.json", "merges.txt", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"]
    others = ["adapter_config.json", "model.safetensors.index.json", "README.md", "training_args.bin", "notes.txt"]
    for name in names + others:
        (source / name).write_text(json.dumps(name))
    (tmp_path / "checkpoint").mkdir()
    copy_processor(str(source), str(tmp_path / "checkpoint"))
    copied = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert copied >= {*names, "tokenizer.json", "chat_template.jinja", "preprocessor_config.json"}
    assert not copied & {*others, "config.json", "generation_config.json", "model.safetensors"}
    for name in copied:
        assert (tmp_path / "checkpoint" / name).read_bytes() == (source / name).read_bytes()


def test_run_killed_during_a_checkpoint_resumes(tiny: TinyWorld, tmp_path: Path) -> None:
    """``kill -9`` between the weights and the state: the checkpoint before is the newest that is taken."""
    settings = SETTINGS | {"save_steps": 1}
    train(tiny.config(tmp_path / "whole", **settings), SilentProgress())
    third = tmp_path / "killed" / "checkpoint-3"
    with forked_process(train, tiny.config(tmp_path / "killed", **settings), SilentProgress()) as process:
        wait_for((third / "config.json").exists, lambda: not process.is_alive())
    assert third.exists()
    done = [Path(path).name for path in finished_checkpoints(str(tmp_path / "killed"))]
    assert "checkpoint-2" in done
    assert "checkpoint-4" not in done
    train(tiny.config(tmp_path / "killed", **settings, resume_from_checkpoint="true"), SilentProgress())
    assert read_metrics(tmp_path / "killed") == read_metrics(tmp_path / "whole")
    check_same_rest(tmp_path / "whole", tmp_path / "killed", 0)
