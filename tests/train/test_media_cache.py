"""``--media-cache`` in whole runs: nothing changes but the work, and what cannot be kept is said."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlavaConfig

import packtool
from packtool.batch.spec import InputSpec
from packtool.config.commands import EvalConfig
from packtool.encode.families import MediaLimits
from packtool.errors import ConfigError
from packtool.launch.world import World
from packtool.media import files
from packtool.progress import SilentProgress
from packtool.train.evaluate.run import evaluate_caches
from packtool.train.prepare.run import Run
from packtool.train.run import train
from tests.train.tiny import TinyWorld, export_rows, read_metrics


class RecordingProgress(SilentProgress):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.figures: list[dict[str, float | int | str]] = []

    def line(self, count: int, **figures: float | int | str) -> None:
        self.figures.append(figures)

    def note(self, line: str) -> None:
        self.notes.append(line)


@pytest.fixture(autouse=True)
def _files_have_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SETTLED_SECONDS", -1.0)


def cache_options(directory: Path, size: int = 10**8) -> dict[str, Any]:
    return {"media_cache": str(directory / "kept"), "media_cache_size": size}


def test_losses_are_unchanged_and_the_second_epoch_decodes_nothing(tiny: TinyWorld, tmp_path: Path) -> None:
    run_options = {
        "num_train_epochs": 2.0,
        "verify_packing": False,
        "save_strategy": "no",
        "gradient_accumulation_steps": 4,
    }
    train(tiny.config(tmp_path / "plain", **run_options), SilentProgress())
    progress = RecordingProgress()
    train(tiny.config(tmp_path / "with", **run_options, **cache_options(tmp_path), dataloader_num_workers=2), progress)
    lines, plain = read_metrics(tmp_path / "with"), read_metrics(tmp_path / "plain")
    assert [line["loss"] for line in lines] == [line["loss"] for line in plain]
    assert [line["media_cache_hits"] for line in lines] == [0, 0, 1, 1]
    assert [figures["kept"] for figures in progress.figures] == ["0%", "0%", "100%", "100%"]
    (line,) = [line for line in progress.notes if line.startswith("media cache:")]
    assert line.startswith("media cache: 50% of 60 pictures and videos were there; ")
    assert line.endswith(" MB of 100MB")
    assert not any("media_cache_hits" in line for line in plain)
    # Another command on the same cache finds them, too.
    evaluated = RecordingProgress()
    config = EvalConfig(
        model=tiny.model,
        cached_dataset=(tiny.cache,),
        output=str(tmp_path / "e.parquet"),
        limit=5,
        **cache_options(tmp_path),
        dataloader_num_workers=0,
    )
    evaluate_caches(config, evaluated, World())
    assert any(line.startswith("media cache: 100% of ") for line in evaluated.notes)


def test_unwritable_folder_is_reported_once_and_training_continues(tiny: TinyWorld, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    progress = RecordingProgress()
    options = cache_options(tmp_path / "file")
    run_options = {"max_steps": 2, "save_strategy": "no", "gradient_accumulation_steps": 2, **options}
    assert train(tiny.config(tmp_path / "run", **run_options), progress).steps == 2
    cache_notes = [line for line in progress.notes if line.startswith("--media-cache: ")]
    directory = options["media_cache"]
    assert cache_notes == [
        f"--media-cache: training continues without adding to the cache: {directory}: Not a directory"
    ]
    assert progress.notes[-1].endswith(f"; not all were kept: {options['media_cache']}: Not a directory")


def test_streams_and_library_batches_use_the_cache(tiny: TinyWorld, tmp_path: Path) -> None:
    progress = RecordingProgress()
    run_options = tiny.streamed() | {"max_steps": 1, "save_strategy": "no", "verify_packing": False}
    for _ in range(2):
        train(
            tiny.config(tmp_path / "run", overwrite_output_dir=True, **run_options, **cache_options(tmp_path)), progress
        )
    shares = [line.split()[2] for line in progress.notes if line.startswith("media cache:")]
    assert shares == ["0%", "100%"]
    plan = packtool.plan(tiny.cache, packing_length=256)
    options = cache_options(tmp_path / "file")
    (tmp_path / "file").write_text("")
    batches = packtool.Batches(plan, rank=0, model=tiny.model, dataloader_num_workers=0, **options)
    with pytest.warns(UserWarning, match="media_cache: nothing more is added to the cache: .*Not a directory"):
        next(iter(batches))


def test_media_unused_in_the_next_epoch_are_known(
    tiny: TinyWorld, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = str(tmp_path_factory.mktemp("other") / "cache")
    export_rows(tiny, other, image_max_token_num=6)
    run_options = {"cached_dataset": (f"{tiny.cache}#20", other), "resample": "epoch", "num_train_epochs": 2.0}
    run = Run.of(tiny.config(tmp_path, **run_options, **cache_options(tmp_path)), World())
    assert run.source.inputs.mixture is not None
    is_read_later = run.source.inputs.epoch_counts(1) > 0
    planned_epoch = run.source.planned_epoch(run.timeline.plan_of(0), 0)
    read_again_by_sample = {
        sample: is_read_again
        for step in planned_epoch.steps(0)
        for micro_batch in step
        for sample, is_read_again in zip(micro_batch.samples, micro_batch.read_again or (), strict=True)
    }
    assert len(read_again_by_sample) == 60
    assert 0 < sum(not is_read_again for is_read_again in read_again_by_sample.values()) < 20
    assert all(is_read_again == is_read_later[sample] for sample, is_read_again in read_again_by_sample.items())
    last = run.source.planned_epoch(run.timeline.plan_of(1), 1)
    assert all(micro_batch.read_again is None for step in last.steps(0) for micro_batch in step)
    assert np.count_nonzero(is_read_later) == 60


MISTAKES = {
    "--media-cache-size is missing": {"media_cache": "kept"},
    "requires --media-cache": {"media_cache_size": 10},
    "--media-cache-size 0 stores nothing": {"media_cache": "kept", "media_cache_size": 0},
    "give a directory on a disk of this machine": {"media_cache": "s3://bucket/kept", "media_cache_size": 10},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_invalid_options_are_refused_immediately(message: str, tiny: TinyWorld, tmp_path: Path) -> None:
    assert any(message in problem for problem in tiny.config(tmp_path, **MISTAKES[message]).problems())


def test_file_as_cache_folder_and_processor_families_are_refused(tiny: TinyWorld, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("")
    with pytest.raises(ConfigError, match="is a file: give a directory"):
        train(tiny.config(tmp_path / "run", dry_run=True, **cache_options(tmp_path)), SilentProgress())
    config = tiny.config(tmp_path, **cache_options(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"LLaVA 1.5, Pixtral\) are made by their own processor"):
        dataclasses.replace(InputSpec("", LlavaConfig(), MediaLimits())).with_media_cache(config, "rows")
