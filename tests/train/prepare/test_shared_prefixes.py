"""Which runs share prefixes, what is said of it, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packtool.batch.batch import TreeBatch
from packtool.batch.collate import collate_tree
from packtool.batch.spec import InputSpec
from packtool.cache.manifest import Manifest
from packtool.cache.plan_file import read_plan
from packtool.cache.reader import CacheReader
from packtool.config.plan import PlanConfig
from packtool.config.settings import resolve
from packtool.config.train import TrainConfig
from packtool.constants import MIN_SHARED
from packtool.errors import ConfigError, MismatchError, PacktoolError, UnsupportedModelError
from packtool.launch.world import World
from packtool.planning.cost import CostModel
from packtool.report.inspect import pack_figures, pack_lines
from packtool.report.plan import plan_lines
from packtool.report.plan_page import page_content
from packtool.train.model.load import load_model
from packtool.train.model.loss import target_losses
from packtool.train.model.trainable import make_trainable
from packtool.train.prepare.costs import RunCosts
from packtool.train.prepare.preview import preview
from packtool.train.prepare.run import Run
from packtool.train.prepare.shared_prefixes import find_shared_prefixes
from scripts._flop_counter import flop_counter
from tests.train.alike import NUM_TREES, QUESTIONS, alike_rows, make_alike_world
from tests.train.tiny import TinyWorld, export_rows


@pytest.fixture(scope="module")
def alike_world(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return make_alike_world(tiny, tmp_path_factory.mktemp("alike"))


def prepared(world: TinyWorld, folder: Path, **settings: Any) -> Run:
    return Run.of(world.config(folder, **settings), World(0, settings.pop("world", 1)))


def test_auto_shares_if_it_saves_enough(alike_world: TinyWorld, tiny: TinyWorld, tmp_path: Path) -> None:
    run, unshared = prepared(alike_world, tmp_path), prepared(alike_world, tmp_path, share_prefix="false")
    assert run.source.min_shared == MIN_SHARED
    assert run.state.shares_prefixes
    assert unshared.source.min_shared is None
    assert unshared.timeline.first_plan.packs.shared_tokens is None
    assert run.timeline.first_plan.summary.num_samples == unshared.timeline.first_plan.summary.num_samples
    assert run.timeline.first_plan.summary.num_target_tokens == unshared.timeline.first_plan.summary.num_target_tokens
    assert run.timeline.first_plan.summary.longest == unshared.timeline.first_plan.summary.longest
    assert run.timeline.num_steps < unshared.timeline.num_steps
    (line,) = [line for line in run.source.lines(run.config) if line.startswith("shared prefixes: computed once")]
    saved, num_unshared = re.search(r"saves ([\d,]+) of ([\d,]+) tokens", line).groups()  # type: ignore[union-attr]
    assert int(num_unshared.replace(",", "")) == unshared.timeline.first_plan.summary.num_tokens
    saved_tokens = unshared.timeline.first_plan.summary.num_tokens - run.timeline.first_plan.summary.num_tokens
    assert int(saved.replace(",", "")) == saved_tokens
    assert "80% of the towers' work" in line
    steps = unshared.timeline.first_plan.summary.num_steps
    assert f" {steps - run.timeline.first_plan.summary.num_steps} of {steps} optimizer steps of an epoch" in line
    assert preview(plan_config(alike_world)).shared_line == line
    # What shares nothing is planned as it always was.
    other = prepared(tiny, tmp_path)
    assert other.source.min_shared is None
    assert not other.notes
    shared_run = prepared(tiny, tmp_path, share_prefix="true")
    assert shared_run.state == other.state
    assert any("no two samples share" in note for note in shared_run.notes)


def test_copies_of_an_image_are_shared(alike_world: TinyWorld, tmp_path: Path) -> None:
    """Every question has a file of its own: the same packs, which collation lays out as planned."""
    rows = alike_rows()
    pictures = Path(alike_world.rows).parent / "pictures"
    (pictures / "copies").mkdir()
    for index, row in enumerate(rows):
        for picture in row["images"]:
            shutil.copy(pictures.parent / picture, pictures / "copies" / f"{index}.png")
            row["images"] = [f"pictures/copies/{index}.png"]
    file = pictures.parent / "copies.json"
    file.write_text(json.dumps(rows))
    world = dataclasses.replace(alike_world, rows=str(file), cache=str(tmp_path / "cache"))
    export_rows(world, world.cache, max_length=160, split_dataset_ratio=0.0)
    run, expected = prepared(world, tmp_path), prepared(alike_world, tmp_path)
    packs = run.timeline.first_plan.packs
    assert packs.fingerprint == expected.timeline.first_plan.packs.fingerprint
    spec = InputSpec.load(run.source.files.directory, run.source.media_limits, run.config)
    for index, tokens in enumerate(packs.tokens_per_pack().tolist()):
        batch = collate_tree([run.source.reader.sample(int(at)) for at in packs.pack(index)], spec)
        assert batch.input_ids.shape[1] <= tokens
        assert isinstance(batch, TreeBatch)
    both = prepared(world, tmp_path, cached_dataset=(alike_world.cache, world.cache))
    assert both.source.inputs.shared is not None
    assert both.source.inputs.shared.trees.num_shared_tokens > 2 * packs.shared_tokens.sum()  # type: ignore[union-attr]


def test_added_tokens_and_costs_are_counted(alike_world: TinyWorld, tmp_path: Path) -> None:
    """Each picture once, and FLOPs that add up to less than those of whole samples."""
    run, unshared = prepared(alike_world, tmp_path), prepared(alike_world, tmp_path, share_prefix="false")
    pictures = run.source.reader.index.media_tokens[:: QUESTIONS + 2]
    assert len(pictures) == NUM_TREES
    assert run.source.figures.media_tokens.sum() == pictures.sum()
    assert (run.source.figures.media_tokens >= 0).all()
    assert run.source.figures.flops is not None
    assert unshared.source.figures.flops is not None
    assert (run.source.figures.flops <= unshared.source.figures.flops).all()
    costs = run.timeline.first_plan.summary.balance
    assert costs is not None
    assert run.source.figures.flops.sum() == pytest.approx(costs.flops)


def test_padding_of_a_shared_picture_is_counted_once(alike_world: TinyWorld, tmp_path: Path) -> None:
    shared = prepared(alike_world, tmp_path).source.inputs.shared
    assert shared is not None
    num_images = shared.index.num_images.astype(np.int64)
    index = dataclasses.replace(shared.index, patch_squares=1600 * num_images, num_patches=40 * num_images)
    prefixes = shared.prefixes.prefixes
    squares = np.where(prefixes.media_tokens > 0, 1600, 0)
    recorded = shared.prefixes._replace(prefixes=prefixes._replace(patch_squares=squares))
    padded = dataclasses.replace(shared, index=index, prefixes=recorded)
    assert index.vision_tokens.max() < 40  # the tokens of a padded picture
    cost = CostModel(1, 1, per_vision_token=25, padded_merge=1)
    assert padded.towers(cost, index.target_tokens).flops.sum() == 25 * 40 * NUM_TREES

    # One sample of each tree has smaller pictures, too: no sample adds fewer FLOPs than none for that.
    own = np.zeros_like(num_images)
    own[shared.trees.samples[shared.trees.offsets[:-1]]] = 1
    index = dataclasses.replace(
        index, patch_squares=index.patch_squares + 640 * own, num_patches=index.num_patches + 80 * own
    )
    flops = dataclasses.replace(padded, index=index).towers(cost, index.target_tokens).flops
    assert flops.min() == 0
    assert (flops[own == 1] > 25 * 40).all()


def test_costs_of_a_tree_equal_the_flops_counted_by_torch(alike_world: TinyWorld, tmp_path: Path) -> None:
    """Tower, layers whose keys are gathered, and head of a micro-batch that is a tree with answers in its prefixes."""
    prompt = f"{'context ' * 8}<image>"
    first_turns = [{"role": "user", "content": f"{prompt}who?"}, {"role": "assistant", "content": "a man and his dog"}]
    further = [
        *first_turns,
        {"role": "user", "content": "where is he? " * 9},
        {"role": "assistant", "content": "here " * 9},
    ]
    third = [*further[:2], {"role": "user", "content": "old? " * 9}, {"role": "assistant", "content": "ten " * 9}]
    other = [{"role": "user", "content": f"{prompt}{'how many? ' * 9}"}, {"role": "assistant", "content": "two " * 9}]
    rows = [{"messages": turns, "images": ["pictures/0000.png"]} for turns in (further, third, other)]
    file = Path(alike_world.rows).parent / "tree.json"
    file.write_text(json.dumps(rows))
    world = dataclasses.replace(alike_world, rows=str(file), cache=str(tmp_path / "cache"))
    export_rows(world, world.cache, max_length=500, split_dataset_ratio=0.0)
    run = prepared(world, tmp_path, gradient_checkpointing=False, packing_length=1024)
    assert run.source.inputs.shared is not None
    assert run.source.figures.flops is not None
    shared_positions = run.source.inputs.shared.trees.samples
    samples = [run.source.reader.sample(int(position)) for position in shared_positions]
    spec = InputSpec.load(run.source.files.directory, run.source.media_limits, run.config)
    loaded = load_model(world.model, spec.config, dtype=torch.float32, packing=True, attn_impl="sdpa")
    model: Any = make_trainable(loaded, run.config)
    batch = collate_tree(samples, spec)
    assert isinstance(batch, TreeBatch)
    with flop_counter() as counter:
        target_losses(model, batch, label_logits_only=True).weighted_sum().backward()
    # torch counts all keys for every query; what is causal sees no more than half of its own document.
    cost = RunCosts.of(run.config, run.source.files.config).without_recomputation
    token_counts, keys = np.array(batch.lengths), np.array(batch.key_lengths)
    unseen = cost.per_square * float((2 * token_counts * keys - (keys**2 - (keys - token_counts) ** 2)).sum())
    assert run.source.figures.flops[shared_positions].sum() == pytest.approx(
        counter.get_total_flops() - unseen, rel=0.02
    )
    # Answers of the longest row are targets of the prefix that it shares, and logits are made of them once.
    targets, logits = (
        run.source.reader.index.target_tokens[shared_positions],
        run.source.inputs.shared.logits(run.source.reader.index.target_tokens)[shared_positions],
    )
    assert logits.sum() == len(batch.target_positions) < targets.sum()
    # Prefixes do not tell of targets that were chosen among turns: as many as there is room for.
    num_logits = run.source.inputs.shared.logits(run.source.reader.index.length)[shared_positions]
    assert num_logits.tolist() == run.source.inputs.shared.trees.new_tokens(run.source.reader.index.length).tolist()


def test_max_rows_per_tree_limits_trees(alike_world: TinyWorld, tmp_path: Path) -> None:
    run = prepared(alike_world, tmp_path, max_rows_per_tree=2)
    assert run.source.inputs.shared is not None
    assert np.diff(run.source.inputs.shared.trees.offsets).max() == 2


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"packing": False}, "--packing false"),
        ({"packing": False, "dynamic_batch_tokens": 300}, "--dynamic-batch-tokens"),
        ({"schedule": "skrull", "bucket_size": "512"}, "--schedule skrull"),
        ({"max_samples_per_pack": 3}, "--max-samples-per-pack"),
        ({"neftune_noise_alpha": 5.0}, "--neftune-noise-alpha"),
    ],
)
def test_options_that_exclude_shared_prefixes(
    settings: dict[str, Any], named: str, alike_world: TinyWorld, tiny: TinyWorld, tmp_path: Path
) -> None:
    """Asked for, it is refused; else a run says what it could have saved, and one that could not save says nothing."""
    problems = alike_world.config(tmp_path, share_prefix="true", **settings).problems()
    assert any("--share-prefix true cannot be combined with" in problem and named in problem for problem in problems)
    for each, num_notes in ((alike_world, 1), (tiny, 0)):
        config = each.config(tmp_path, **settings)
        assert not config.problems()
        run = Run.of(config, World())
        notes = [note for note in run.notes if "could be saved" in note]
        assert len(notes) == num_notes
        assert all(named in note for note in notes)
        assert run.source.min_shared is None


def test_sequence_parallelism_shares_prefixes_without_sliding_windows(alike_world: TinyWorld, tmp_path: Path) -> None:
    config = alike_world.config(tmp_path, sequence_parallel_size=2)
    run = Run.of(config, World(0, 2).shared_by(2))
    assert run.source.min_shared == MIN_SHARED
    windows = {"num_attention_heads": 4, "sliding_window": 64, "use_sliding_window": True}
    shared, note = find_shared_prefixes(config, windows, run.source.reader, capacity=256)
    assert shared is None
    assert note is not None
    assert "sliding windows, which would cut prefixes" in note
    with pytest.raises(UnsupportedModelError, match="sliding windows"):
        find_shared_prefixes(dataclasses.replace(config, share_prefix="true"), windows, run.source.reader, capacity=256)


def test_other_contradictions(alike_world: TinyWorld, tmp_path: Path) -> None:
    assert not alike_world.config(tmp_path, share_prefix="true", **alike_world.streamed()).problems()
    off = alike_world.config(tmp_path, share_prefix="false", max_rows_per_tree=4)
    assert any("--max-rows-per-tree requires" in problem for problem in off.problems())
    lengths = PlanConfig(lengths="lengths.npy", packing_length=256, share_prefix="true")
    assert any("lengths alone do not show" in problem for problem in lengths.problems())


def test_a_cache_of_an_older_packtool(alike_world: TinyWorld, tmp_path: Path) -> None:
    world = make_alike_world(alike_world, tmp_path)
    path = Path(world.cache) / "packtool.json"
    manifest = json.loads(path.read_text())
    for split in manifest["splits"].values():
        split["prefixes_sha256"] = ""
    path.write_text(json.dumps(manifest))
    assert Manifest.read(world.cache)
    run = prepared(world, tmp_path)
    assert run.source.min_shared is None
    assert not run.notes
    with pytest.raises(MismatchError, match="older packtool") as error:
        prepared(world, tmp_path, share_prefix="true")
    assert "packtool export" in str(error.value)


def test_samples_longer_than_a_pack_are_an_error(alike_world: TinyWorld, tmp_path: Path) -> None:
    with pytest.raises(PacktoolError, match="longer than a pack"):
        prepared(alike_world, tmp_path, packing_length=64, max_length=160)


def plan_config(world: TinyWorld, **settings: Any) -> PlanConfig:
    return PlanConfig(cached_dataset=(world.cache,), packing_length=256, **settings)


def test_a_preview_reports_savings(alike_world: TinyWorld, tiny: TinyWorld) -> None:
    schedule = preview(plan_config(alike_world))
    figures, unshared_figures = schedule.figures(), preview(plan_config(alike_world, share_prefix="false")).figures()
    shared = figures["shared_prefixes"]
    assert unshared_figures["shared_prefixes"] is None
    assert preview(plan_config(tiny)).figures()["shared_prefixes"] is None
    assert shared["tokens_without"] == unshared_figures["tokens"]
    assert shared["tokens_saved"] == unshared_figures["tokens"] - figures["tokens"]
    assert shared["steps_without"] == unshared_figures["steps_per_epoch"] > figures["steps_per_epoch"]
    assert shared["packs_without"] == unshared_figures["num_packs"]
    assert shared["tower_work_share_saved"] == pytest.approx(0.8)
    assert (shared["num_trees"], shared["samples_per_tree"]) == (NUM_TREES, QUESTIONS + 1)
    assert shared["largest_tree"] == QUESTIONS + 1
    content = page_content(schedule, figures, "packtool plan", "alike")
    assert len(content["shared"]["headline"]) == 4
    for _, note, tree in content["shared"]["trees"]:
        assert note.startswith(f"{QUESTIONS + 1} samples, {sum(branch.num_tokens for branch in tree):,} tokens instead")
    assert sum(branch.num_tokens for pack in content["packs"] for branch in pack) == figures["tokens"]
    assert figures["tokens_of_plain_batches"] == unshared_figures["tokens_of_plain_batches"]
    assert figures["flops_per_epoch"] < unshared_figures["flops_per_epoch"]


def test_a_saved_plan_decides_whether_prefixes_are_shared(alike_world: TinyWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.arrow")
    config = plan_config(alike_world, save=path)
    preview(config).save(config.save)
    saved = read_plan(path)
    assert saved.shared_tokens is not None
    assert saved.format == "packtool plan 2"
    direct, run = prepared(alike_world, tmp_path), prepared(alike_world, tmp_path, plan=path, packing_length=None)
    assert run.timeline.first_plan.packs.fingerprint == direct.timeline.first_plan.packs.fingerprint
    assert run.timeline.first_plan.fingerprint == direct.timeline.first_plan.fingerprint
    assert run.state == direct.state
    assert (run.source.figures.media_tokens == direct.source.figures.media_tokens).all()
    assert run.source.figures.flops == pytest.approx(direct.source.figures.flops)
    assert prepared(alike_world, tmp_path, plan=path, share_prefix="true").source.min_shared == MIN_SHARED
    with pytest.raises(MismatchError, match="--share-prefix: true in the plan, false in this run"):
        prepared(alike_world, tmp_path, plan=path, share_prefix="false")
    with pytest.raises(MismatchError, match="shares prefixes, which cannot be combined with --neftune-noise-alpha"):
        prepared(alike_world, tmp_path, plan=path, neftune_noise_alpha=5.0)


def test_trees_split_over_packs_are_placed_and_reported(alike_world: TinyWorld, tmp_path: Path) -> None:
    """In one step where they fit, apart with --max-rows-per-tree, and as they come with --shuffle false."""
    path = str(tmp_path / "plan.arrow")
    variants: list[tuple[dict[str, Any], str]] = [({}, "together"), ({"max_rows_per_tree": 2}, "apart")]
    for options, expected_parts in [*variants, ({"shuffle": False}, "")]:
        plan_options = {"packing_length": 150, "gradient_accumulation_steps": 4, **options}
        schedule = preview(PlanConfig(cached_dataset=(alike_world.cache,), save=path, **plan_options))
        figures = schedule.figures()["shared_prefixes"]
        schedule.save(path)
        assert read_plan(path).parts == expected_parts
        if expected_parts:
            in_one, meeting = figures["of_them_in_one_step"], figures["of_them_meeting_in_a_step"]
            assert figures["trees_in_several_packs"] == NUM_TREES
            assert (in_one, meeting) == ((NUM_TREES, NUM_TREES) if expected_parts == "together" else (0, 0))
            expected = f"{NUM_TREES}; {in_one} within one step, {meeting} with several packs in the same step"
            assert ("    trees split over packs", expected) in plan_lines(schedule.figures())
        else:
            assert "trees_in_several_packs" not in figures
        direct = prepared(alike_world, tmp_path, **plan_options)
        # What a plan was made with is not asked for again.
        run = prepared(alike_world, tmp_path, plan=path, gradient_accumulation_steps=4, packing_length=None)
        assert (
            run.timeline.first_plan.fingerprint == direct.timeline.first_plan.fingerprint == schedule.plan.fingerprint
        )


def test_a_plan_without_split_trees_reports_none(alike_world: TinyWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.arrow")
    config = plan_config(alike_world, save=path)
    schedule = preview(config)
    schedule.save(config.save)
    assert "trees_in_several_packs" not in schedule.figures()["shared_prefixes"]
    assert b'"parts"' not in Path(path).read_bytes()


def test_inspect_draws_the_trees_of_a_pack(alike_world: TinyWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.arrow")
    config = plan_config(alike_world, save=path)
    schedule = preview(config)
    schedule.save(config.save)
    reader = CacheReader.open([alike_world.cache])
    num_pictures = 0
    for pack_index in range(schedule.plan.packs.num_packs):
        pack = pack_figures(alike_world.cache, path, pack_index)
        assert pack["tokens"] == schedule.plan.packs.tokens_per_pack()[pack_index] <= pack["packing_length"]
        assert pack["tokens_without"] == reader.index.length[schedule.plan.packs.pack(pack_index)].sum()
        parts = sorted([*pack["prefixes"], *pack["samples"]], key=lambda part: part["start"])
        assert [part["start"] for part in parts] == [0, *(part["end"] for part in parts[:-1])]
        for part in parts:
            first_position, last = part["positions"]
            assert last - first_position + 1 == part["end"] - part["start"]
            assert all(part["start"] <= a < b <= part["end"] for a, b in part["trained"])
            above = None if part["prefix"] is None else pack["prefixes"][part["prefix"]]
            assert first_position == (0 if above is None else above["positions"][1] + 1)
            # The picture stands once, in what all who ask about it have.
            is_prefix = above is None and "samples" in part
            assert len(part["media"]) == is_prefix
            num_pictures += len(part["media"])
        lines = list(pack_lines(pack))
        assert sum("prefix of" in line for line in lines) == len(pack["prefixes"])
        assert sum(" adds " in line for line in lines) == sum(part["prefix"] is not None for part in pack["samples"])
        for sample in pack["samples"]:
            assert sum(f"sample {sample['sample']}: {sample['source']}, row {sample['row']}" in line for line in lines)
    assert num_pictures == NUM_TREES


def test_inspect_needs_the_model_for_the_media_of_a_prefix(alike_world: TinyWorld, tmp_path: Path) -> None:
    for name, share in (("tree", "auto"), ("whole", "false")):
        config = plan_config(alike_world, save=str(tmp_path / name), share_prefix=share)
        preview(config).save(config.save)
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="nowhere"):
        pack_figures(alike_world.cache, str(tmp_path / "tree"), 0, nowhere)
    assert pack_figures(alike_world.cache, str(tmp_path / "whole"), 0, nowhere)["prefixes"] == []


def test_a_saved_plan_without_shared_prefixes_is_trained_without(alike_world: TinyWorld, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.arrow")
    config = plan_config(alike_world, save=path, share_prefix="false")
    preview(config).save(config.save)
    assert read_plan(path).format == "packtool plan 1"
    assert prepared(alike_world, tmp_path, plan=path).source.min_shared is None
    with pytest.raises(MismatchError, match="--share-prefix: false in the plan, true in this run"):
        prepared(alike_world, tmp_path, plan=path, share_prefix="true")


def test_the_first_samples_share_a_prefix(alike_world: TinyWorld, tmp_path: Path) -> None:
    """Packing is verified on a tree."""
    run = prepared(alike_world, tmp_path)
    first_sample, second_sample = run.source.first_samples(4)
    assert (first_sample.input_ids[:MIN_SHARED] == second_sample.input_ids[:MIN_SHARED]).all()


def test_a_run_with_shared_prefixes_is_not_resumed_without(alike_world: TinyWorld, tmp_path: Path) -> None:
    state = prepared(alike_world, tmp_path).state
    unshared_state = prepared(alike_world, tmp_path, share_prefix="false").state
    with pytest.raises(MismatchError, match="shares_prefixes: True in the checkpoint, False now"):
        unshared_state.check_continues("checkpoint-1", state)


def test_values_of_share_prefix(alike_world: TinyWorld) -> None:
    for raw, meant in ((True, "true"), ("yes", "true"), (False, "false"), ("off", "false"), ("auto", "auto")):
        options = {
            "model": alike_world.model,
            "cached_dataset": alike_world.cache,
            "output_dir": "out",
            "share_prefix": raw,
        }
        assert resolve(TrainConfig, {}, file=options).share_prefix == meant
    with pytest.raises(ConfigError):
        resolve(TrainConfig, {}, file={"model": "m", "cached_dataset": "c", "output_dir": "o", "share_prefix": "maybe"})


def test_older_exports_have_the_same_plans(tiny: TinyWorld, tmp_path: Path) -> None:
    export_rows(tiny, tmp_path / "again")
    run = prepared(tiny, tmp_path, cached_dataset=(str(tmp_path / "again"),))
    assert run.timeline.first_plan.packs.fingerprint == prepared(tiny, tmp_path).timeline.first_plan.packs.fingerprint
