"""Turns that are samples of their own, trained: as trees they compute what each computes alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForImageTextToText

from packtool.attention.register import set_attention
from packtool.batch.collate import collate_packs
from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader
from packtool.config.train import TrainConfig
from packtool.encode.encoded import EncodedSample
from packtool.errors import MismatchError
from packtool.progress import SilentProgress
from packtool.rows.read import scan
from packtool.rows.source import SourceSpec
from packtool.stream import reading
from packtool.stream.reading import StreamBlock, StreamPosition
from packtool.train.model.loss import target_losses
from packtool.train.run import train
from tests.train.jobs import run_jobs
from tests.train.test_gradients import DESCENT, check_same_step
from tests.train.test_shared_prefixes import batch_of, gradients, same, tree_logits, tree_of, unpacked_copy
from tests.train.tiny import TEMPLATE, TinyWorld, export_rows, read_metrics

THOUGHT = "{%- if loop.last -%}{{- message.reasoning_content or '' -}}{%- endif -%}\n"
CONTENT = "{%- if message.content is string -%}"
NUM_ROWS = 6


def conversation(row_index: int) -> dict[str, Any]:
    """Three turns, each about one more picture than the one before; all think but the first of every odd row."""
    messages = []
    for turn in range(3):
        question = f"{'context ' * 9}{row_index}?" if not turn else f"<image>{'more ' * 4}{turn}?"
        messages.append({"role": "user", "content": question})
        thought = {"reasoning_content": "hm " * (1 + turn)} if turn or row_index % 2 == 0 else {}
        messages.append({"role": "assistant", "content": "xyz"[turn] * 3, **thought})
    return {"messages": messages, "images": [f"pictures/{row_index:04d}.png", f"pictures/{row_index + 6:04d}.png"]}


@pytest.fixture(scope="module")
def world(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """The tiny world's model with a template that leaves thoughts out, and conversations."""
    root = tmp_path_factory.mktemp("expanded")
    template = root / "thinking.jinja"
    template.write_text(TEMPLATE.replace(CONTENT, THOUGHT + CONTENT))
    rows = Path(tiny.rows).parent / "thinking.json"
    rows.write_text(json.dumps([conversation(row_index) for row_index in range(NUM_ROWS)]))
    expanded_world = replace(tiny, rows=str(rows), cache=str(root / "cache"))
    for expand, cache in (("auto", expanded_world.cache), ("true", f"{expanded_world.cache}-true")):
        export_rows(expanded_world, cache, max_length=400, chat_template=str(template), expand_turns=expand)
    return expanded_world


def samples_of(cache: str) -> list[EncodedSample]:
    reader = CacheReader.open([cache])
    return [reader.sample(position) for position in range(len(reader))]


@pytest.mark.parametrize("row_index", [0, 1])
def test_tree_of_turns_equals_its_samples(world: TinyWorld, row_index: int) -> None:
    """Logits, loss and the gradient of every parameter, the towers' too.

    The first turn of row 1 is trained in its own sample, and what another one begins with, where it is not.
    """
    row = [sample for sample in samples_of(f"{world.cache}-true") if sample.row == row_index]
    assert [len(sample.images) for sample in row] == [0, 1, 2]
    is_prefix = row[0].input_ids.tolist() == row[1].input_ids[: row[0].length].tolist()
    assert is_prefix == (row_index == 1)
    spec = InputSpec.load(world.model, CacheReader.open([world.cache]).manifests[0].identity.media_limits)
    model = AutoModelForImageTextToText.from_pretrained(world.model, dtype=torch.float32).eval()
    plain = unpacked_copy(model)
    set_attention(model)
    batch = tree_of(row, spec)
    assert batch.input_ids.shape[1] < 0.75 * sum(sample.length for sample in row)
    for sample, logits in zip(row, tree_logits(model, spec, row), strict=True):
        with torch.no_grad():
            sample_logits = plain(**batch_of(collate_packs([sample], spec)).model_inputs()).logits[0, : sample.length]
        torch.testing.assert_close(logits, sample_logits, rtol=0, atol=1e-5)
    losses = [
        target_losses(plain, batch_of(collate_packs([sample], spec)), label_logits_only=False).weighted_sum()
        for sample in row
    ]
    total = sum(float(loss.detach()) for loss in losses)
    expected = gradients(plain, losses)
    assert expected.keys() == dict(model.named_parameters()).keys()
    loss = target_losses(model, batch, label_logits_only=False).weighted_sum()
    assert float(loss.detach()) == pytest.approx(total, rel=1e-5)
    same(gradients(model, [loss]), expected)


def test_step_of_shared_turns_equals_that_of_padded_rows(world: TinyWorld, tmp_path: Path) -> None:
    run_options = DESCENT | {"packing_length": 512}
    run_options["cached_dataset"] = (f"{world.cache}-true",)
    train(
        world.config(tmp_path / "padded", **run_options, packing=False, per_device_train_batch_size=18),
        SilentProgress(),
    )
    config = world.config(tmp_path / "tree", **run_options, gradient_accumulation_steps=16, share_prefix="true")
    train(config, SilentProgress())
    check_same_step(tmp_path / "tree", tmp_path / "padded")
    (tree,), (padded,) = read_metrics(tmp_path / "tree"), read_metrics(tmp_path / "padded")
    assert tree["target_tokens"] == padded["target_tokens"]
    assert tree["tokens"] < 0.75 * padded["tokens"]


def test_evaluation_reports_each_turn_of_a_row(world: TinyWorld, tmp_path: Path) -> None:
    run_jobs(world, [("eval", tmp_path, {})])
    table = pq.read_table(tmp_path / "eval.parquet").to_pydict()
    samples = samples_of(world.cache)
    assert table["row"] == [sample.row for sample in samples]
    assert table["part"] == [vars(sample.part) if sample.part else None for sample in samples]
    assert {part["turn"] for part in table["part"]} == {1, 2, 3}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_scale": "last_round"}, "the tokens that --loss-scale last_round trains in each of them"),
        ({"loss_scale": "all"}, "the tokens that --loss-scale all trains in each of them"),
        ({"expand_turns": "false"}, "--expand-turns auto, but this run sets false"),
    ],
)
def test_settings_that_need_the_rows_are_refused(
    world: TinyWorld, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(MismatchError, match=message) as refused:
        train(world.config(tmp_path, dry_run=True, **options), SilentProgress())
    if options.get("loss_scale") == "all":  # which no export of turns has
        assert "export into another directory" in str(refused.value)
        assert "--expand-turns" not in str(refused.value)
    train(world.config(tmp_path, dry_run=True, expand_turns="auto"), SilentProgress())


def test_loss_scales_that_train_other_turns_are_refused() -> None:
    for expand, scale in (("true", "last_round"), ("true", "all+react"), ("auto", "all")):
        config = TrainConfig(model="m", output_dir="o", dataset=("d",), expand_turns=expand, loss_scale=scale)
        assert any(f"--expand-turns {expand} and --loss-scale {scale}: " in problem for problem in config.problems())


def test_streams_make_the_same_samples(world: TinyWorld) -> None:
    samples = samples_of(world.cache)
    config = world.config("unused", **world.streamed(), expand_turns="auto")
    exported = CacheReader.open([world.cache]).manifests[0].identity.spec
    export_config = config.export_config("", 200)
    spec = replace(export_config.encode_spec, chat_template=str(exported["chat_template"]))
    scanned = scan(SourceSpec(world.rows, name=world.rows))
    block = StreamBlock(StreamPosition(0, 0, 0, [], {}), scanned.source, scanned.blocks[0])
    _, encoded_samples, dropped = reading._make_encode(None, spec)(block)
    short_samples = [sample for sample in samples if sample.length <= 200]
    assert [(each.row, each.part) for each in encoded_samples] == [(each.row, each.part) for each in short_samples]
    assert {str(item.part) for item in dropped} == {"turn 3 of 3"}
    assert len(encoded_samples) + len(dropped) == len(samples)
