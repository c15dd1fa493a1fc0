"""Packs of a stream: every sample once, full enough, the same for any number of workers, and resumed at any pack."""

from __future__ import annotations

import json
import multiprocessing.synchronize
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from packtool.config.data import EncodeSpec
from packtool.encode.encoded import EncodedSample
from packtool.errors import MismatchError, PacktoolError, RowError
from packtool.rows.sample import Dropped
from packtool.rows.source import SourceSpec
from packtool.stream.packs import PackStream, StreamedPack, StreamOptions
from packtool.stream.reading import StreamState, read_stream_state, write_stream_state
from tests.cache.conftest import model as model

CAPACITY = 512
NUM_ROWS, NUM_BROKEN, NUM_LONG = 900, 3, 9


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[SourceSpec]:
    """900 rows in three files; three lines are broken and nine rows too long."""
    folder = tmp_path_factory.mktemp("rows")
    random = np.random.default_rng(0)
    for part, count in enumerate((500, 300, 100)):
        lines = []
        for i in range(count):
            length = 900 if i % 100 == 50 else int(random.integers(1, 200))
            messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "x" * length}]
            lines.append("{broken" if i == 70 else json.dumps({"messages": messages, "channel": f"{part}"}))
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    return [SourceSpec(str(path)) for path in sorted(folder.iterdir())]


def options(**settings: Any) -> StreamOptions:
    plain = {"packing_interval": 100, "shuffle_buffer_size": 50, "dataset_num_proc": 1, "num_epochs": 1}
    return StreamOptions(**{"packing_length": CAPACITY, "seed": 42, "strict": False, **plain, **settings})


def stream(
    specs: Sequence[SourceSpec],
    model: Path,
    stream_options: StreamOptions,
    *,
    rank: int = 0,
    world_size: int = 1,
    **more: Any,
) -> PackStream:
    spec = EncodeSpec(model=str(model), max_length=CAPACITY)
    options: dict[str, Any] = {"log": lambda item: None, **more}
    return PackStream(specs, spec, stream_options, rank=rank, world_size=world_size, **options)


def names(samples: Sequence[EncodedSample]) -> list[tuple[str, int]]:
    return [(sample.source, sample.row) for sample in samples]


def contents(packs: Sequence[StreamedPack]) -> list[list[tuple[str, int]]]:
    return [names(pack.samples) for pack in packs]


@pytest.mark.smoke
def test_every_row_is_packed_or_reported_as_dropped(specs: list[SourceSpec], model: Path) -> None:
    dropped: list[Dropped] = []
    names = []
    for rank in range(2):
        pack_stream = stream(specs, model, options(), rank=rank, world_size=2, log=dropped.append)
        packs = list(pack_stream)
        assert all(pack.num_tokens <= CAPACITY for pack in packs)
        assert all(pack.samples for pack in packs)
        names += [name for pack in contents(packs) for name in pack]
        assert sum(pack.num_targets for pack in packs) > 0
    reasons = Counter(item.reason for item in dropped)
    assert reasons == {"invalid_json": NUM_BROKEN, "over_max_length": NUM_LONG}
    everything = names + [(item.source, item.row) for item in dropped]
    assert len(everything) == len(set(everything)) == NUM_ROWS


def test_the_number_of_workers_changes_nothing(specs: list[SourceSpec], model: Path) -> None:
    one, three = (list(stream(specs, model, options(dataset_num_proc=count))) for count in (1, 3))
    assert contents(one) == contents(three)


@pytest.fixture(scope="module", params=["shuffled", "in order", "small buffer"])
def full_stream(request: pytest.FixtureRequest, specs: list[SourceSpec], model: Path) -> tuple[StreamOptions, Any, Any]:
    stream_options = {
        "shuffled": options(num_epochs=2),
        "in order": options(shuffle_buffer_size=1, shuffle=False, packing_algorithm="sequential"),
        "small buffer": options(packing_interval=7, shuffle_buffer_size=3),
    }[request.param]
    dropped: list[Dropped] = []
    return stream_options, list(stream(specs, model, stream_options, log=dropped.append)), dropped


@pytest.mark.parametrize("share", [0.0, 0.17, 0.5, 0.73, 1.0])
def test_stream_resumes_exactly_from_any_pack(
    share: float,
    full_stream: tuple[StreamOptions, list[StreamedPack], list[Dropped]],
    specs: Any,
    model: Path,
    tmp_path: Path,
) -> None:
    """State is restored from the file of a checkpoint; each dropped row is reported once."""
    stream_options, packs, dropped = full_stream
    at = min(int(share * len(packs)), len(packs) - 1)
    write_stream_state(str(tmp_path), 3, packs[at].state)
    state = read_stream_state(str(tmp_path), 3)
    before = sum(state.counts.dropped.values())
    dropped_later: list[Dropped] = []
    resumed = list(stream(specs, model, stream_options, start=state, log=dropped_later.append))
    assert contents(resumed) == contents(packs[at + 1 :])
    for pack, expected_pack in zip(resumed, packs[at + 1 :], strict=True):
        for a, b in zip(pack.samples, expected_pack.samples, strict=True):
            assert np.array_equal(a.input_ids, b.input_ids)
            assert np.array_equal(a.labels, b.labels)
    assert dropped[:before] + dropped_later == dropped


def test_epochs_have_different_packs(specs: list[SourceSpec], model: Path) -> None:
    packs = contents(list(stream(specs, model, options(num_epochs=2))))
    counts = Counter(name for pack in packs for name in pack)
    assert set(counts.values()) == {2}
    together = Counter(tuple(sorted(pack)) for pack in packs if len(pack) > 1)
    # Blocks of 64 rows stay together, so that with so few rows chance may bring some samples together twice.
    assert sum(count - 1 for count in together.values()) <= 0.02 * len(packs)


def test_order_is_kept_without_shuffling(specs: list[SourceSpec], model: Path) -> None:
    stream_options = options(shuffle_buffer_size=1, shuffle=False, packing_algorithm="sequential", look_ahead=0)
    names = [name for pack in contents(list(stream(specs, model, stream_options))) for name in pack]
    positions = {spec.path: index for index, spec in enumerate(specs)}
    keys = [(positions[source], row) for source, row in names]
    assert keys == sorted(keys)


@pytest.mark.parametrize("budget", ["max_samples_per_pack", "max_media_tokens_per_pack"])
def test_budgets_are_kept(specs: list[SourceSpec], model: Path, budget: str) -> None:
    packs = list(stream(specs, model, options(**{budget: 3})))
    max_samples = max(len(pack.samples) for pack in packs)
    assert max_samples == 3 if budget == "max_samples_per_pack" else max_samples > 3


def test_strict_stops_at_the_first_bad_row(specs: list[SourceSpec], model: Path) -> None:
    with pytest.raises(RowError, match="row 5"):
        list(stream(specs, model, options(strict=True)))


def test_a_dead_worker_is_an_error(specs: list[SourceSpec], model: Path) -> None:
    packs = iter(stream(specs * 40, model, options(dataset_num_proc=2)))
    next(packs)
    workers = [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]
    assert len(workers) == 2
    workers[0].kill()
    with pytest.raises(PacktoolError, match="a worker process that encodes rows died"):
        list(packs)
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)


def test_workers_end_with_the_stream(specs: list[SourceSpec], model: Path) -> None:
    packs = iter(stream(specs, model, options()))
    next(packs)
    workers = [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]
    assert workers
    del packs
    assert not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)


def test_shared_memory_is_always_released(
    specs: list[SourceSpec], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A named semaphore outlives a group of processes that is killed; the stream makes none."""
    semaphores: list[object] = []
    make = multiprocessing.synchronize.SemLock.__init__
    monkeypatch.setattr(
        multiprocessing.synchronize.SemLock,
        "__init__",
        lambda self, *a, **k: (semaphores.append(a), make(self, *a, **k))[1],
    )
    assert list(stream(specs, model, options(dataset_num_proc=2)))
    assert not semaphores


def test_damaged_state_is_reported(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="stream state of rank 0"):
        read_stream_state(str(tmp_path), 0)
    write_stream_state(str(tmp_path), 0, StreamState())
    (tmp_path / "stream-00000.json").write_text("{")
    with pytest.raises(MismatchError, match="Pass another checkpoint"):
        read_stream_state(str(tmp_path), 0)


def test_fill_on_mixed_real_rows(realdata: Path) -> None:
    """At the default of a thousand samples at a time."""
    capacity = 2048
    files = (
        "mm_mathvision_a.jsonl",
        "mm_xtuner_coco_zh.jsonl",
        "text_gpteacher_toolformer.jsonl",
        "tool_reasoning_50.jsonl",
    )
    specs = [SourceSpec(str(realdata / name)) for name in files]
    spec = EncodeSpec(model=str(realdata / "tokenizers" / "qwen3-vl"), max_length=capacity, image_max_token_num=512)
    stream_options = options(packing_length=capacity, packing_interval=1000, shuffle_buffer_size=1000)
    packs = list(PackStream(specs, spec, stream_options, rank=0, world_size=1, log=lambda item: None))
    assert sum(pack.num_tokens for pack in packs) >= 0.98 * capacity * len(packs)


def test_invalid_rows_drop_only_themselves(model: Path, tmp_path: Path) -> None:
    good = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    marked = {"messages": [{"role": "user", "content": "<image>"}], "images": []}
    (tmp_path / "rows.jsonl").write_bytes(
        b"\n".join(
            [
                json.dumps(good).encode(),
                b'{"messages": "\xed\xa0\x80"}',
                b'{"messages": 1, "messages": 2}',
                json.dumps(marked).encode(),
                b'"' + b"x" * 5000 + b'"',
                json.dumps(marked | {"images": ["/proc/self/mem"]}).encode(),
                json.dumps(good).encode(),
            ]
        )
    )
    dropped: list[Dropped] = []
    stream_options = options(shuffle=False)
    packs = list(
        stream(
            [SourceSpec(str(tmp_path / "rows.jsonl"), max_row_bytes=4000)], model, stream_options, log=dropped.append
        )
    )
    assert [row for pack in contents(packs) for _, row in pack] == [0, 6]
    assert [item.row for item in dropped] == [1, 2, 3, 4, 5]
    reasons = ["invalid_text", "duplicate_keys", "image_marks", "over_max_row_bytes"]
    assert [item.reason for item in dropped][:4] == reasons
