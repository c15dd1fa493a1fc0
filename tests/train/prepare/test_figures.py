"""The micro-batch that needs most memory, against what collation makes of the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packtool.batch.collate import collate_tree
from packtool.batch.collate_shard import with_rank_media
from packtool.batch.shard import SequenceSplit
from packtool.batch.spec import InputSpec
from packtool.launch.world import World
from packtool.planning.skrull import SHARDED
from packtool.train.prepare.figures import RankTokens, max_keys_per_pack
from packtool.train.prepare.run import Run
from tests.train.alike import make_alike_world
from tests.train.tiny import TinyWorld


def samples_of_micro_batches(run: Run) -> list[tuple[list[Any], list[int]]]:
    """Samples of each micro-batch of each data-parallel rank of the first epoch, and their places."""
    plan, micro_batch_samples = run.timeline.first_plan, []
    for step in range(plan.steps.num_steps):
        for rank in range(plan.steps.world_size):
            for micro_batch in range(plan.steps.num_micro_batches(step)):
                positions = [int(p) for pack in plan.samples(step, rank, micro_batch) for p in pack]
                places = plan.placement_of(step, rank, micro_batch)
                micro_batch_samples.append(
                    (
                        [run.source.reader.sample(position) for position in positions],
                        [SHARDED] * len(positions) if places is None else places.tolist(),
                    )
                )
    return micro_batch_samples


@pytest.mark.parametrize(
    "settings",
    [{}, {"per_device_train_batch_size": 2}, {"schedule": "skrull", "bucket_size": "128"}],
    ids=["packs", "two packs", "skrull"],
)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_encode_complete_images(size: int, settings: dict[str, Any], tiny: TinyWorld) -> None:
    config = tiny.config("unused", sequence_parallel_size=size, **settings)
    run = Run.of(config, World(0, size, size))
    (peak_batch,) = run.peak_memory_batches()
    spec = InputSpec.load(run.source.files.directory, run.source.media_limits, config)
    max_media_tokens = largest = num_held = 0
    for samples, places in samples_of_micro_batches(run):
        for rank in range(size):
            rank_samples = with_rank_media(samples, places, spec, SequenceSplit(size, 1, rank))
            max_media_tokens = max(
                max_media_tokens, sum(sample.num_media_tokens for sample in rank_samples if sample.images)
            )
        pictures = [image.num_tokens for sample in samples for image in sample.images]
        largest, num_held = max([largest, *pictures]), max(num_held, sum(pictures))
    assert peak_batch.num_local_vision_tokens is not None
    assert max(largest, num_held // size) <= max_media_tokens
    assert max_media_tokens <= peak_batch.num_local_vision_tokens <= 1.15 * max_media_tokens
    assert peak_batch.computed == (128 if "schedule" in settings else 256 * config.per_device_train_batch_size // size)
    assert peak_batch.vision == min(num_held, peak_batch.computed - 1)
    if not settings:
        assert peak_batch.num_local_vision_tokens > num_held / size + 1, "an even part would be too little"


def test_keys_of_packs_with_trees(tiny: TinyWorld, tmp_path: Path) -> None:
    """Tokens from the root to the end of each node, at most, of every pack as it is collated."""
    world = make_alike_world(tiny, tmp_path / "alike")
    run = Run.of(world.config(tmp_path / "out"), World())
    packs = run.timeline.first_plan.packs
    assert packs.shared_tokens is not None
    spec = InputSpec.load(run.source.files.directory, run.source.media_limits, run.config)
    max_keys, num_keys = max_keys_per_pack(packs), []
    for pack_index in range(packs.num_packs):
        samples = [run.source.reader.sample(int(position)) for position in packs.pack(pack_index)]
        batch = collate_tree(samples, spec, frozenset())
        num_keys.append(len(getattr(batch, "key_index", batch.input_ids[0])))
    assert (max_keys >= num_keys).all()
    assert (max_keys <= 1.5 * np.array(num_keys)).all()
    # The expected keys: near those of packs that share prefixes, 0 for others.
    gathers = packs.sums_per_pack(packs.shared_tokens) > 0
    assert packs.gathered_keys_per_pack() == pytest.approx(np.where(gathers, num_keys, 0), rel=0.15)
    (heaviest,) = run.peak_memory_batches()
    assert heaviest.keys == max_keys.max() > heaviest.computed


def test_compiled_lengths_are_padded(tiny: TinyWorld) -> None:
    full, between = (
        Run.of(tiny.config("unused", torch_compile=True, packing_length=length), World()).peak_memory_batches()
        for length in (256, 240)
    )
    assert [tokens.computed for tokens in full] == [256, 288], "with a filler for a picture it is one length more"
    assert full[0].vision > full[1].vision == 0
    assert [tokens.computed for tokens in between] == [256]


def test_media_of_a_stream_are_estimated(tiny: TinyWorld) -> None:
    (peak_batch,) = Run.of(tiny.config("unused", **tiny.streamed()), World()).peak_memory_batches()
    assert peak_batch == RankTokens(computed=256, vision=255)
    config = tiny.config("unused", **tiny.streamed(), sequence_parallel_size=4)
    (shared,) = Run.of(config, World(0, 4, 4)).peak_memory_batches()
    assert (shared.computed, shared.vision) == (64, 63)
    assert shared.num_local_vision_tokens == 64
