"""``packtool.json`` as bytes."""

from __future__ import annotations

import dataclasses
import json

from hypothesis import given
from hypothesis import strategies as st

from packtool.cache.manifest import Identity, InputCounts, Manifest, SampleCounts, SourceInfo
from packtool.encode.families import MediaLimits

TEXTS = st.text(st.characters(codec="utf-8"))
SOURCES = st.builds(SourceInfo, TEXTS, st.integers(-1, 2**60), TEXTS, TEXTS, st.integers(0, 2**60), TEXTS)


@given(st.lists(SOURCES, max_size=4), TEXTS)
def test_sources_are_written_as_json(sources: list[SourceInfo], channel: str) -> None:
    identity = Identity({"sources": []}, "type", "a", "b", "c", MediaLimits(None, None), 42, 0.0, None)
    manifest = Manifest(
        packtool_version="1.0",
        identity=identity,
        sources=tuple(sources),
        rows=0,
        dropped={},
        marks_added=0,
        channels=(channel, '\n "sources": []'),
        splits={},
        fingerprint="0" * 16,
    )
    # Without parts_left_out, of which there are none, as in caches that were made before they were counted.
    names = [
        "packtool_version",
        "identity",
        "sources",
        "rows",
        "dropped",
        "marks_added",
        "channels",
        "splits",
        "fingerprint",
    ]
    plain = {name: dataclasses.asdict(manifest)[name] for name in names}
    assert manifest.to_json() == (json.dumps(plain, indent=1, ensure_ascii=False) + "\n").encode()


def test_counts_add_up() -> None:
    one = InputCounts(rows=3, dropped={"media_size": 1, "box_outside": 2}, marks_added=1)
    other = InputCounts(rows=4, dropped={"box_outside": 1}, marks_added=0, parts_left_out={"media_size": 5})
    dropped = {"box_outside": 3, "media_size": 1}
    both = InputCounts(rows=7, dropped=dropped, marks_added=1, parts_left_out={"media_size": 5})
    assert one + other == InputCounts.total([one, other]) == both
    assert list((one + other).dropped) == list(dropped), "names in one order, so that manifests are equal"
    assert InputCounts.total(()) + one == one
    assert SampleCounts.total(()).tokens == 0
