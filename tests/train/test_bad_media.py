"""A picture that cannot be loaded: the run stops and names it, or goes on as if its sample had never been there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from packtool import storage
from packtool.cache import task
from packtool.cache.reader import CacheReader
from packtool.errors import MediaError
from packtool.progress import SilentProgress
from packtool.train.prepare.sample_losses import losses_by_epoch
from packtool.train.run import train
from tests.batch.reduced import make_picture
from tests.train.test_gradients import DESCENT, check_same_step
from tests.train.tiny import TinyWorld, export_rows, make_tiny_rows

BAD_ROWS = (1, 10, 20)


@pytest.fixture(scope="module")
def broken(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyWorld, TinyWorld]:
    """A cache of which one picture is gone by now, one was exchanged, and one exchanged by another of its size; and one
    that never had these three rows."""
    root = tmp_path_factory.mktemp("broken")
    make_tiny_rows(root / "rows")
    rows = json.loads((root / "rows" / "train.json").read_text())
    (root / "rows" / "rest.json").write_text(json.dumps([row for i, row in enumerate(rows) if i not in BAD_ROWS]))
    worlds = []
    for name in ("train", "rest"):
        world = TinyWorld(tiny.model, str(root / name), str(root / "rows" / f"{name}.json"))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(task, "MIN_SHARED", 3)
            export_rows(world, world.cache)
        worlds.append(world)
    first_path, second_path, third = (root / "rows" / rows[row_index]["images"][0] for row_index in BAD_ROWS)
    os.remove(first_path)
    second_path.write_bytes((root / "rows" / rows[2]["images"][0]).read_bytes())
    with Image.open(third) as picture:
        size = picture.size
    third.write_bytes(make_picture(*size, seed=99))
    return worlds[0], worlds[1]


@pytest.mark.parametrize("packing", [True, False])
def test_run_stops_and_names_the_bad_file(broken: tuple[TinyWorld, TinyWorld], packing: bool, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"pictures/\d+\.png"):
        train(broken[0].config(tmp_path, packing=packing), SilentProgress())


def test_image_replaced_in_a_bucket_is_detected(tiny: TinyWorld, bucket: str, tmp_path: Path) -> None:
    """By one of another size, which is resized to the same grid."""
    make_tiny_rows(tmp_path / "rows")
    for file in (tmp_path / "rows").rglob("*.*"):
        storage.publish(f"{bucket}/rows/{file.relative_to(tmp_path / 'rows')}", file.read_bytes())
    world = TinyWorld(tiny.model, f"{bucket}/cache", f"{bucket}/rows/train.json")
    export_rows(world, world.cache)
    reader = CacheReader.open([world.cache])
    image = next(sample.images[0] for sample in map(reader.sample, range(len(reader))) if sample.images)
    assert image.path is not None
    storage.publish(image.path, make_picture(image.width + 1, image.height, seed=0))
    with pytest.raises(MediaError, match=rf"{image.path} .* it was {image.width}x{image.height} pixels"):
        train(world.config(tmp_path / "run"), SilentProgress())


KINDS: dict[str, dict[str, Any]] = {
    "packed": {"gradient_accumulation_steps": 8},
    "workers": {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "dataloader_num_workers": 1},
    "padded": {"packing": False, "per_device_train_batch_size": 10, "gradient_accumulation_steps": 4},
    "by samples": {"gradient_accumulation_steps": 8, "loss_reduction": "sample"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_skipped_samples_leave_no_trace_in_the_step(
    kind: str, broken: tuple[TinyWorld, TinyWorld], tmp_path: Path
) -> None:
    with_bad, without = broken
    settings = KINDS[kind]
    one_batch = {
        "packing": False,
        "per_device_train_batch_size": 37,
        "loss_reduction": settings.get("loss_reduction", "token"),
    }
    train(without.config(tmp_path / "without", **DESCENT, **one_batch), SilentProgress())
    run_options = DESCENT | settings | {"on_bad_media": "skip"}
    result = train(with_bad.config(tmp_path / "skipped", **run_options), SilentProgress())
    assert result.num_skipped == 3
    lines = [json.loads(line) for line in (tmp_path / "skipped" / "skipped.jsonl").read_text().splitlines()]
    assert sorted(line["row"] for line in lines) == list(BAD_ROWS)
    assert all("png" in line["message"] for line in lines)
    check_same_step(tmp_path / "skipped", tmp_path / "without")
    # A skipped sample has no loss, and those behind it in a micro-batch have their own.
    (losses,), (expected,) = (
        [*losses_by_epoch(str(tmp_path / name / "history"))[0].values()] for name in ("skipped", "without")
    )
    np.testing.assert_allclose(losses, np.insert(expected, np.array(BAD_ROWS) - np.arange(3), np.nan), rtol=2e-3)
