"""Written packs equal the plan in every format, and output is complete or absent."""

from __future__ import annotations

import base64
import importlib.util
import json
import struct
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packtool import storage
from packtool.batch.collate import collate_packs
from packtool.batch.spec import InputSpec
from packtool.cache.plan_file import read_plan
from packtool.cache.reader import CacheReader
from packtool.cli.main import run
from packtool.packs import write
from packtool.report.tables import TerminalProgress

ROOT = Path(__file__).parent.parent.parent
_spec = importlib.util.spec_from_file_location("conformance", ROOT / "scripts" / "conformance.py")
assert _spec is not None
assert _spec.loader is not None
conformance = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(conformance)
COMPARED = ("input_ids", "labels", "position_ids", "cu_seqlens")


@pytest.fixture(scope="module")
def conformance_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set of scripts/conformance.py."""
    folder = tmp_path_factory.mktemp("conformance") / "set"
    conformance.write(folder)
    return folder


def documents(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, bytes]]]:
    """Return the JSON documents of tar files, and the other files of each pack."""
    for path in sorted(folder.glob("*.tar")):
        parts: dict[str, dict[str, bytes]] = {}
        with tarfile.open(path) as file:
            for member in file:
                key, _, name = member.name.partition(".")
                content = file.extractfile(member)
                assert content is not None
                parts.setdefault(key, {})[name] = content.read()
        for document in parts.values():
            yield json.loads(document.pop("json")), document


def packs_in(folder: Path, layout: str) -> list[dict[str, Any]]:
    """Read packs with an independent reader."""
    if layout in ("webdataset", "energon"):
        return [document for document, _ in documents(folder)]
    if layout == "megatron":
        packs_found = []
        for line in pq.read_table(sorted(folder.glob("*.idx.parquet"))).to_pylist():
            cuts = [*line["seq_start_id"], len(line["input_ids"])]
            shifted = [
                token if mask else -100 for token, mask in zip(line["input_ids"][1:], line["loss_mask"], strict=False)
            ]
            positions = np.concatenate([np.arange(b - a) for a, b in pairwise(cuts)])
            packs_found.append(
                {
                    "input_ids": line["input_ids"],
                    "labels": [-100, *shifted],
                    "position_ids": [positions.tolist()],
                    "cu_seqlens": cuts,
                }
            )
        return packs_found
    kind = "arrow" if layout == "arrow" else "parquet"
    files = sorted(map(str, folder.glob(f"*.{kind}")))
    return list(datasets.load_dataset(kind, data_files=files, split="train", cache_dir=str(folder.parent / "hf")))


def interrupted(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["media", "text"])
def test_every_format_has_the_expected_values(kind: str, conformance_dir: Path) -> None:
    """Compare with the committed values, which are also compared with the readers of other trainers."""
    expected = json.loads((ROOT / "docs" / "format-expected.json").read_text())[kind]
    for layout in conformance.FORMATS:
        if (folder := conformance_dir / f"{kind}-{layout}").exists():
            packs = [{name: pack[name] for name in COMPARED} for pack in packs_in(folder, layout)]
            if kind == "text" and layout == "megatron":  # which knows one row of positions
                packs = [pack | {"position_ids": pack["position_ids"] * 4} for pack in packs]
            results = {"packs": packs, "loss": conformance.loss_of(packs)}
            assert conformance.check(results, expected) == [], layout
            packs[1]["labels"] = [*packs[1]["labels"][1:], -100]
            assert conformance.check({"packs": packs, "loss": conformance.loss_of(packs)}, expected), "shifted"


def test_packs_equal_the_micro_batches_of_training(conformance_dir: Path) -> None:
    """Compare tokens, targets and positions with those that ``packtool train`` computes from the same plan."""
    cache, plan = str(conformance_dir / "media-cache"), str(conformance_dir / "a.plan")
    assert run(["plan", cache, "--packing-length", "160", "--save", plan, "--share-prefix", "false"]) == 0
    assert (
        run(["pack", cache, "--plan", plan, "--output-dir", str(conformance_dir / "planned"), "--packs-per-file", "2"])
        == 0
    )
    reader, saved = CacheReader.open([cache]), read_plan(plan)
    spec = InputSpec.load(str(conformance_dir / "model"), reader.manifests[0].identity.media_limits)
    packs = packs_in(conformance_dir / "planned", "parquet")
    assert len(packs) == len(saved.offsets) - 1
    for pack_index, pack in enumerate(packs):
        places = saved.samples[saved.offsets[pack_index] : saved.offsets[pack_index + 1]]
        batch = collate_packs([reader.sample(int(place)) for place in places], spec, frozenset())
        assert pack["sample"] == places.tolist()
        assert pack["input_ids"] == batch.input_ids[0].tolist()
        assert pack["position_ids"] == batch.position_ids[:, 0].tolist()
        assert pack["cu_seqlens"] == batch.cu_seqlens.tolist()
        assert [*pack["labels"][1:], -100] == batch.labels[0].tolist()


def test_tar_files_have_media_and_an_index(conformance_dir: Path) -> None:
    folder = conformance_dir / "media-energon"
    images = 0
    for document, parts in documents(folder):
        assert set(parts) == {image["file"] for image in document["images"]}
        images += len(parts)
        for image in document["images"]:
            assert parts[image["file"]] == Path(image["path"]).read_bytes()
    assert images == 12
    counts = json.loads((folder / ".nv-meta" / ".info.json").read_text())["shard_counts"]
    for path in sorted(folder.glob("*.tar")):
        offsets = struct.unpack(f"<{counts[path.name] + 1}Q", path.with_suffix(".tar.idx").read_bytes())
        with tarfile.open(path) as file:
            begins = [member.offset for member in file if member.name.endswith(".json")]
        assert list(offsets[:-1]) == begins
        assert offsets[-1] <= path.stat().st_size
    manifest = json.loads((folder / "packs.json").read_text())
    assert [file["sha256"] for file in manifest["files"]] == [
        sha256((folder / file["file"]).read_bytes()).hexdigest() for file in manifest["files"]
    ]


def samples_of(cache: Path) -> list[tuple[object, ...]]:
    """Return tokens and labels of each sample, sorted, without the labels of first tokens, which packs lack."""
    reader = CacheReader.open([str(cache)])
    samples = []
    for sample in map(reader.sample, range(len(reader))):
        weights = sample.loss_scale if sample.loss_scale is not None else np.ones(sample.length)
        trained = np.where(sample.labels == -100, 0, weights)[1:].tolist()
        grids = [(image.height, image.width, image.grid, image.num_tokens) for image in sample.images]
        samples.append((sample.input_ids.tolist(), sample.labels[1:].tolist(), trained, grids, sample.channel or ""))
    return sorted(samples)


ROWS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(["wide", "tall"]), max_size=2),
        st.integers(0, 30),
        st.sampled_from([None, "a", "b"]),
        st.sampled_from([None, 0.5, 2]),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=ROWS)
def test_imported_packs_equal_the_packed_samples(
    rows: list[tuple[list[str], int, str | None, float | None, bool]],
    conformance_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """For every format: by the name of the directory, and by a pattern of its files."""
    folder = tmp_path_factory.mktemp("round-trip")
    is_plain = True
    lines: list[dict[str, Any]] = []
    for pictures, words, channel, weight, is_text in rows:
        if is_text:
            lines.append({"text": "word " * words + "ab", "channel": channel})
            continue
        turns = [{"role": "user", "content": "<image>" * len(pictures) + "why?"}]
        turns.append({"role": "assistant", "content": "because " * words, "loss_scale": weight})
        lines.append(
            {"messages": turns, "images": [f"{conformance_dir}/{name}.png" for name in pictures], "channel": channel}
        )
        is_plain &= not pictures and weight is None
    for name in ("text", "messages"):
        matching_lines = [json.dumps(line) + "\n" for line in lines if name in line]
        (folder / f"{name}.jsonl").write_text("".join(matching_lines or ['{"text": "ab"}\n']))
    model = ["--model", str(conformance_dir / "model"), "--max-length", "400", "--media-root", str(conformance_dir)]
    data = [str(folder / f"{name}.jsonl") for name in ("text", "messages")]
    assert run(["export", *model, "--dataset", *data, "--output-dir", str(folder / "cache")]) == 0
    expected = samples_of(folder / "cache")
    for layout in conformance.FORMATS:
        if layout == "megatron" and not is_plain:
            continue
        packs, cache = folder / layout, folder / f"{layout}-cache"
        packing = ["--format", layout, "--packing-length", "400", "--packs-per-file", "2"]
        assert run(["pack", str(folder / "cache"), "--output-dir", str(packs), *packing]) == 0
        named = str(packs) if len(rows) % 2 else str(packs / "packs-*")
        assert run(["import", named, *model, "--output-dir", str(cache)]) == 0
        has_channels = layout != "megatron"
        assert samples_of(cache) == [(*sample[:-1], sample[-1] if has_channels else "") for sample in expected], layout


def test_output_does_not_depend_on_the_number_of_processes(
    conformance_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["pack", str(conformance_dir / "text-cache"), "--packing-length", "160", "--packs-per-file", "2"]
    done: list[int] = []
    monkeypatch.setattr(TerminalProgress, "advance", lambda self, num_done: done.append(num_done))
    for num_proc in ("1", "2"):
        done.clear()
        assert (
            run([*words, "--output-dir", str(conformance_dir / f"by{num_proc}"), "--dataset-num-proc", num_proc]) == 0
        )
        assert sum(done) == len(list((conformance_dir / f"by{num_proc}").glob("*.parquet")))
    for path in (conformance_dir / "by1").iterdir():
        assert path.read_bytes() == (conformance_dir / "by2" / path.name).read_bytes()


def test_buckets_get_the_same_files(conformance_dir: Path, bucket: str) -> None:
    words = [
        "pack",
        str(conformance_dir / "media-cache"),
        "--packing-length",
        "160",
        "--packing-algorithm",
        "sequential",
    ]
    assert run([*words, "--packs-per-file", "3", "--format", "energon", "--output-dir", f"{bucket}/packs"]) == 0
    local = conformance_dir / "media-energon"
    for path in filter(Path.is_file, local.rglob("*")):
        there = storage.join(bucket, "packs", *path.relative_to(local).parts)
        assert storage.read_bytes(there) == path.read_bytes()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--format", "megatron"], 2, "8 of 12 samples have"),
        (["--packing-length", "3"], 3, "all 12 samples are longer than 3 tokens"),
        (["--plan", "a.plan", "--packing-length", "9"], 2, "remove --packing-length"),
        (["--plan", "nowhere"], 5, "nowhere"),
        (["--model", "nowhere"], 2, "nowhere"),
        (["--format", "parqet"], 2, "parquet"),
    ],
)
def test_wrong_options(
    words: list[str], code: int, message: str, conformance_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pack", str(conformance_dir / "media-cache"), "--output-dir", str(tmp_path / "new"), *words]) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_reference_mode_copies_no_bytes(conformance_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache with embedded media; by default, tables contain them, too."""
    words = ["--model", str(conformance_dir / "model"), "--max-length", "160", "--media", "embed"]
    rows = conformance.rows(conformance_dir, True)[1:3]
    rows[1]["images"] = [{"bytes": base64.b64encode((conformance_dir / "tall.png").read_bytes()).decode()}] * 2
    for name, num_rows in (("named", 1), ("held", 2)):
        (conformance_dir / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:num_rows]))
        data = ["--dataset", str(conformance_dir / f"{name}.jsonl"), "--output-dir", str(conformance_dir / name)]
        assert run(["export", *words, *data]) == 0
    for media, mode in (((), "embed"), (("--media", "reference"), "reference")):
        place = conformance_dir / f"packs-{mode}"
        assert run(["pack", str(conformance_dir / "named"), *media, "--output-dir", str(place)]) == 0
        assert json.loads((place / "packs.json").read_text())["media"] == mode
        (image,) = packs_in(place, "parquet")[0]["images"]
        assert (image["bytes"] is not None) == (mode == "embed")
        assert Path(image["path"]).name == "wide.png"
    capsys.readouterr()
    assert (
        run(
            [
                "pack",
                str(conformance_dir / "held"),
                "--media",
                "reference",
                "--output-dir",
                str(conformance_dir / "lost"),
            ]
        )
        == 2
    )
    assert "row 1 of" in capsys.readouterr().err


def test_failed_writes_leave_no_complete_output(
    conformance_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "pack",
        str(conformance_dir / "media-cache"),
        "--output-dir",
        str(tmp_path / "packs"),
        "--packs-per-file",
        "2",
    ]
    words += ["--packing-length", "160", "--media", "embed"]
    picture = conformance_dir / "tall.png"
    content = picture.read_bytes()
    picture.unlink()
    assert run(words) == 3
    assert "tall.png: there is no such file" in capsys.readouterr().err
    assert not (tmp_path / "packs" / "packs.json").exists()
    picture.write_text("a secret that a cache of somebody else's calls a picture")
    assert run(words) == 3
    assert "tall.png is not an image" in capsys.readouterr().err
    picture.write_bytes(content)
    publish = storage.publish

    def stop(path: str, data: bytes) -> None:
        if path.endswith("packs.json"):
            raise KeyboardInterrupt
        publish(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(storage, "publish", stop)
        assert run(words) == 130
    # Processes that are ended clean nothing up.
    (tmp_path / "packs" / "packs-00000-of-00003.parquet.4711-0a1b2c3d.partial").touch()
    with monkeypatch.context() as patched:
        patched.setattr(write, "_check_empty", lambda directory: None)
        patched.setattr(write, "map_on_processes", interrupted)
        assert run(words) == 130
    assert not list((tmp_path / "packs").glob("*.partial"))
    assert run(words) == 0, "what was begun is begun anew"
    assert len(packs_in(tmp_path / "packs", "parquet")) == 5
    assert run(words) == 4, "and what is finished stays"
    (tmp_path / "packs" / "packs.json").rename(tmp_path / "packs" / "mine.txt")
    assert run(words) == 2
    assert (tmp_path / "packs" / "mine.txt").exists()
