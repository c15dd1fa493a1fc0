"""A rank's part of a shared sequence: which pictures it loads."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from packtool.batch.collate import collate_packs
from packtool.batch.collate_shard import collate_shard
from packtool.batch.shard import SequenceSplit
from packtool.batch.spec import InputSpec
from packtool.encode.encoded import EncodedSample
from packtool.planning.skrull import SHARDED
from tests.batch.reduced import make_sample, reduced_config, reduced_limits, reduced_spec, save_image_processor


def test_images_of_local_samples_stay_on_their_rank(tmp_path: Path) -> None:
    save_image_processor("qwen3_vl", str(tmp_path))
    spec, limits = reduced_spec("qwen3_vl", str(tmp_path)), reduced_limits(reduced_config("qwen3_vl"))
    samples = [make_sample(8, ((side, side),), seed=n, limits=limits) for n, side in enumerate((32, 64, 48, 64))]
    for places in ([0, 1, 1, 0], [1, SHARDED, 0, SHARDED], [SHARDED] * 4):
        media_by_rank = [_media_of(samples, places, spec, SequenceSplit(2, 1, rank)) for rank in range(2)]
        for sample, place in enumerate(places):
            owner = [rank for rank in range(2) if media_by_rank[rank][sample]]
            assert len(owner) == 1 if place == SHARDED else owner == [place]
    # Rank 0 has a picture of its own as large as the largest of the others, which goes to rank 1.
    assert _media_of(samples, [SHARDED, 0, SHARDED, SHARDED], spec, SequenceSplit(2, 1, 1)) == [
        True,
        False,
        False,
        True,
    ]


@settings(max_examples=50)
@given(st.data())
def test_every_ranks_part_is_padded_by_itself(data: st.DataObject) -> None:
    ring, ulysses = data.draw(st.sampled_from([(2, 1), (1, 2), (2, 2)]))
    lengths = data.draw(st.lists(st.integers(1, 20), max_size=6))
    place = st.sampled_from([SHARDED, *range(ring * ulysses)])
    places = data.draw(st.lists(place, min_size=len(lengths), max_size=len(lengths)))
    pad_to_multiple_of = data.draw(st.integers(1, 40))
    samples = [make_sample(length, seed=index) for index, length in enumerate(lengths)]
    for rank in range(ring * ulysses):
        split = SequenceSplit(ring, ulysses, rank)
        bare = collate_shard(samples, reduced_spec("qwen2"), split, places)
        padded = collate_shard(samples, reduced_spec("qwen2"), split, places, pad_to_multiple_of=pad_to_multiple_of)
        assert padded.num_padding == -bare.input_ids.shape[1] % pad_to_multiple_of
        assert padded.input_ids.shape[1] == bare.input_ids.shape[1] + padded.num_padding
        assert padded.shard.sharded_lengths == bare.shard.sharded_lengths
        assert padded.num_target_tokens == bare.num_target_tokens
        targets = (batch.labels[0, batch.target_positions].tolist() for batch in (padded, bare))
        assert sorted(next(targets)) == sorted(next(targets))


def _media_of(samples: list[EncodedSample], places: list[int], spec: InputSpec, split: SequenceSplit) -> list[bool]:
    """Which samples' pictures a rank is given, found by their pixels."""
    batch = collate_shard(samples, spec, split, places)
    pixels_by_sample = [collate_packs([sample], spec).media["pixel_values"] for sample in samples]
    rows = {tuple(row.tolist()) for row in batch.media["pixel_values"]}
    return [tuple(pixels[0].tolist()) in rows for pixels in pixels_by_sample]
