"""``packtool.json`` as bytes."""

from __future__ import annotations

import dataclasses
import json

from hypothesis import given
from hypothesis import strategies as st

from packtool.cache.manifest import Identity, Manifest, SourceInfo
from packtool.encode.families import MediaLimits

TEXTS = st.text(st.characters(codec="utf-8"))
SOURCES = st.builds(SourceInfo, TEXTS, st.integers(-1, 2**60), TEXTS, TEXTS, st.integers(0, 2**60), TEXTS)


@given(st.lists(SOURCES, max_size=4), TEXTS)
def test_sources_are_written_as_json_writes_them(sources: list[SourceInfo], channel: str) -> None:
    identity = Identity({"sources": []}, "type", "a", "b", "c", MediaLimits(None, None), 42, 0.0, None)
    manifest = Manifest("1.0", identity, tuple(sources), 0, {}, 0, (channel, '\n "sources": []'), {}, "0" * 16)
    plain = dataclasses.asdict(manifest)
    del plain["parts_left_out"]  # there are none, as in caches that were made before they were counted
    assert manifest.to_json() == (json.dumps(plain, indent=1, ensure_ascii=False) + "\n").encode()
