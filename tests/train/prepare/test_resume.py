"""Whatever becomes of the caches, of an epoch every sample is trained once."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.cache.origins import Origins
from packtool.config.train import TrainConfig
from packtool.errors import MismatchError
from packtool.planning.ledger import DataChange, Ledger, RowCounts, SourceLedger, concatenate_counts
from packtool.planning.options import PlanOptions
from packtool.train.prepare import resume
from packtool.train.prepare.checkpoint import Assignment
from packtool.train.prepare.history import begin_ledger, ledger_after, read_ledger, write_ledger
from packtool.train.prepare.inputs import EpochToResume, Inputs
from packtool.train.prepare.resume import change_lines, ledger_for_new_caches
from packtool.train.prepare.timeline import Timeline

Cache = tuple[int, tuple[int, ...]]
"""A file of rows, and which of them were exported, in which order."""


def fingerprint(cache: Cache) -> str:
    return "-".join(map(str, (cache[0], *cache[1])))


class Caches:
    """What stands for a reader of caches that were never written."""

    def __init__(self, caches: list[Cache]) -> None:
        self.caches = caches
        self.directories = tuple(f"/{cache[0]}" for cache in caches)
        self.manifests = tuple(SimpleNamespace(fingerprint=fingerprint(cache)) for cache in caches)
        self.offsets = np.cumsum([0, *(len(rows) for _, rows in caches)])
        self.samples = [(file, row) for file, rows in caches for row in rows]
        lengths = np.array([1 + (7 * file + 3 * row) % 9 for file, row in self.samples], np.int32)
        self.index = SimpleNamespace(length=lengths, media_tokens=np.zeros_like(lengths))

    def inputs(self) -> Inputs:
        options = PlanOptions(max_length=10, packing_length=12, balance="none")
        config = TrainConfig(model="m", cached_dataset=("c",), output_dir="o", num_train_epochs=2.0)
        return Inputs(config=config, options=options, lengths=self.index.length, targets=self.index.length)


def origins(caches: Caches, cache_index: int) -> Origins:
    file, rows = caches.caches[cache_index]
    named = (f"{file}.jsonl",)
    return Origins(named, (f"digest of {file}",), np.zeros(len(rows), np.int64), np.array(rows, np.int64), None)


@pytest.fixture(autouse=True)
def _unreadable_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are what their fingerprints say; none can be read."""

    def of_gone(source: Any, history: str) -> Origins:
        file, *rows = map(int, source.fingerprint.split("-"))
        return origins(Caches([(file, tuple(rows))]), 0)

    monkeypatch.setattr(resume, "read_origins", origins)
    monkeypatch.setattr(resume, "_old_origins", of_gone)
    monkeypatch.setattr(resume, "_open_unchanged", lambda source: None)


def trained_counts_of(caches: Caches, timeline: Timeline, steps: range) -> Counter[tuple[int, int]]:
    """What the ranks see, counted one by one."""
    sample_counts: Counter[tuple[int, int]] = Counter()
    for step in steps:
        span = timeline.span_at(step)
        plan, step_index = span.plan, step - span.first_step
        for rank in range(plan.steps.world_size):
            for micro_batch in range(plan.steps.num_micro_batches(step_index)):
                sample_counts.update(
                    caches.samples[at] for pack in plan.samples(step_index, rank, micro_batch) for at in pack
                )
    return sample_counts


EXPORT = st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True).map(tuple)
SOURCES = st.dictionaries(st.integers(0, 3), EXPORT, min_size=1).map(lambda sources: list(sources.items()))


@settings(max_examples=60)
@given(st.lists(st.tuples(SOURCES, st.integers(1, 3), st.integers(0, 6)), min_size=2, max_size=4))
def test_every_sample_is_trained_once_in_an_epoch(runs: list[tuple[list[Cache], int, int]]) -> None:
    """Any sources, added, removed, exported again and brought back; any world size; killed after any step."""
    trained_counts: Counter[tuple[int, int]] = Counter()
    ledger: Ledger | None = None
    for sources, world_size, num_steps in runs:
        caches = Caches(sources)
        inputs, step = caches.inputs(), 0 if ledger is None else ledger.step
        reader: Any = caches
        if ledger is None:
            ledger = begin_ledger(reader)
        else:
            counts_of = partial(inputs.epoch_counts, 0)
            to_resume = EpochToResume(lambda _, trained, counts_of=counts_of: counts_of(trained), 10, stage=None)
            ledger, changes = ledger_for_new_caches(ledger, reader, to_resume, "")
            num_left = sum(source.left for source in changes)
            assert num_left == sum(1 for sample in caches.samples if not trained_counts[sample])
        timeline = Timeline.of(inputs, (Assignment(step, world_size, 1, 1),), ledger.change)
        ends = next(at for at in range(step, step + 99) if timeline.locate(at)[0] == 1)
        stop = min(step + num_steps, ends - 1)  # within the epoch
        if stop > step:
            trained_counts += trained_counts_of(caches, timeline, range(step, stop))
            ledger = ledger_after(ledger, timeline, stop)
        counts = concatenate_counts([source.epoch for source in ledger.sources])
        assert counts.tolist() == [trained_counts[sample] for sample in caches.samples]
    trained_counts += trained_counts_of(caches, timeline, range(ledger.step, ends))
    assert all(trained_counts[sample] == 1 for sample in caches.samples)
    assert max(trained_counts.values()) == 1
    # The epoch after it has every sample again, and it is the last.
    remaining_counts = trained_counts_of(caches, timeline, range(ends, timeline.num_steps))
    assert remaining_counts == Counter(caches.samples)


def test_the_change_of_each_cache_is_described() -> None:
    before = Caches([(0, (0, 1, 2)), (1, (0, 1)), (2, (5,))])
    after: Any = Caches([(0, (0, 1, 2)), (1, (1, 2, 3)), (3, (9,))])
    reader: Any = before
    timeline = Timeline.of(before.inputs(), (Assignment(0, 1, 1, 1),))
    ledger = ledger_after(begin_ledger(reader), timeline, timeline.steps_per_epoch - 1)
    trained_samples = {
        sample
        for sample, count in zip(
            before.samples, concatenate_counts([source.epoch for source in ledger.sources]), strict=True
        )
        if count
    }
    changed, changes = ledger_for_new_caches(
        ledger, after, EpochToResume(lambda *_: np.ones(7, np.int64), 10, None), ""
    )
    first_change, reexported, new, replaced, removed = changes
    fates = [source.fate for source in changes]
    assert fates == ["as before", "exported again", "new", "replaced", "gone"]
    assert (first_change.trained + first_change.left, new.new, new.left) == (3, 1, 1)
    assert (reexported.new, reexported.trained, reexported.left) == (
        2,
        int((1, 1) in trained_samples),
        3 - ((1, 1) in trained_samples),
    )
    assert (replaced.samples, replaced.gone, removed.gone) == (2, 1, 1)
    lines = list(change_lines(changed.change, changes, 3, "and that is all"))
    assert lines[0] == f"the data changed after step {ledger.step}, in epoch 1:"
    assert lines[2].startswith("  /1: exported again, 2 samples new; ")
    assert lines[-1].endswith("in 3 steps, is planned again; samples trained in it are not repeated; and that is all")
    _, back = ledger_for_new_caches(changed, reader, EpochToResume(lambda *_: np.ones(6, np.int64), 10, None), "")
    assert [source.fate for source in back][:3] == ["as before", "back", "back"]
    assert [source.new for source in back[1:3]] == [0, 0]
    assert (
        back[2].sentence == f"/2: back again; {removed.trained} of 1 trained in this epoch, {1 - removed.trained} left"
    )


def test_a_changed_file_is_refused_if_its_rows_cannot_be_matched(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = Caches([(0, (0, 1, 2))]), Caches([(0, (0, 1, 2, 3))])
    reader: Any = before
    ledger = begin_ledger(reader)

    def edited(caches: Caches, cache_index: int) -> Origins:
        return dataclasses.replace(origins(caches, cache_index), digests=("another digest",))

    monkeypatch.setattr(resume, "read_origins", edited)
    reader = after
    with pytest.raises(MismatchError, match=r"0\.jsonl has changed since /0 was exported"):
        ledger_for_new_caches(ledger, reader, EpochToResume(lambda *_: np.ones(4, np.int64), 10, None), "")


def test_a_ledger_survives_writing_and_is_small(tmp_path: Path) -> None:
    num, random = 80_000, np.random.default_rng(0)
    ago, now = RowCounts.of(np.full(num, 3)), RowCounts.of(random.integers(0, 2, num))
    skipped = np.array([4, 4, 7])
    large = SourceLedger(directory="/a", fingerprint="f", before=ago, epoch=now, skipped=skipped, tokens=9)
    small = SourceLedger.begin("/b", "g", 5)
    change = DataChange(2, 3, (now,))
    write_ledger(str(tmp_path), Ledger(step=7, epoch=3, sources=(large,), retired=(small,)))
    # A bit a sample for the epoch that is being trained, next to nothing for those before.
    assert (tmp_path / "packtool_ledger.npz").stat().st_size < num / 8 * 1.05 + 4096
    write_ledger(str(tmp_path), Ledger(step=7, epoch=3, sources=(large,), retired=(small,), change=change))
    read_back = read_ledger(str(tmp_path))
    assert read_back is not None
    assert read_back.change is not None
    assert (read_back.step, read_back.epoch, read_back.change.step, read_back.change.epoch) == (7, 3, 2, 3)
    assert np.array_equal(read_back.change.samples(), now.counts())
    for one, other in zip((*read_back.sources, *read_back.retired), (large, small), strict=True):
        assert (one.directory, one.fingerprint, one.tokens) == (other.directory, other.fingerprint, other.tokens)
        assert np.array_equal(one.trained.counts(), other.trained.counts())
        assert np.array_equal(one.epoch.counts(), other.epoch.counts())
        assert np.array_equal(one.skipped, other.skipped)
    assert read_ledger(str(tmp_path / "elsewhere")) is None
    (tmp_path / "packtool_ledger.npz").write_bytes(b"something else")
    with pytest.raises(MismatchError, match="cannot be read"):
        read_ledger(str(tmp_path))


@pytest.mark.parametrize("field", [6, 8, 10], ids=("version", "flags", "compression"))
def test_archives_with_damaged_headers_are_refused(field: int, tmp_path: Path) -> None:
    """A changed byte in the zip directory of a ledger, or of the rows of a cache."""
    write_ledger(str(tmp_path), Ledger(step=7, epoch=3, sources=(SourceLedger.begin("/a", "f", 200),)))
    Origins(("a.jsonl",), ("digest",), np.zeros(3, np.int64), np.arange(3), None).write(str(tmp_path / "rows.npz"))
    for name in ("packtool_ledger.npz", "rows.npz"):
        content = bytearray((tmp_path / name).read_bytes())
        content[content.index(b"PK\x01\x02") + field] ^= 0x61
        (tmp_path / name).write_bytes(content)
    with pytest.raises(MismatchError, match=r"packtool_ledger\.npz cannot be read"):
        read_ledger(str(tmp_path))
    with pytest.raises(MismatchError, match=r"rows\.npz cannot be read"):
        Origins.read(str(tmp_path / "rows.npz"))


@settings(max_examples=60, deadline=None)
@given(damage=st.one_of(st.floats(0, 0.999), st.tuples(st.floats(0, 0.999), st.integers(1, 255))))
def test_damaged_ledger_is_refused_or_read_completely(
    damage: float | tuple[float, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A ledger file cut at any byte, or with any byte changed: the ledger itself, or an error that names the file."""
    directory = tmp_path_factory.mktemp("ledger")
    ledger = Ledger(step=7, epoch=3, sources=(SourceLedger.begin("/a", "f", 200),))
    write_ledger(str(directory), ledger)
    file = directory / "packtool_ledger.npz"
    content = bytearray(file.read_bytes())
    if isinstance(damage, float):
        del content[int(damage * len(content)) :]
    else:
        position, change = damage
        content[int(position * len(content))] ^= change
    file.write_bytes(content)
    read_back, message = None, ""
    try:
        read_back = read_ledger(str(directory))
    except MismatchError as error:
        message = str(error)
    if read_back is None:
        assert "packtool_ledger.npz cannot be read" in message
    else:
        assert (read_back.step, read_back.epoch, len(read_back.sources)) == (7, 3, 1)
