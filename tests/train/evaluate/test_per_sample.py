"""Every sample is evaluated as if it were alone, whatever shares its forward pass, and in the order of the caches."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from packtool.attention.register import ATTENTION_NAME
from packtool.batch.collate import collate_packs
from packtool.batch.spec import InputSpec
from packtool.cache.reader import CacheReader
from packtool.encode.encoded import EncodedSample
from packtool.errors import DataError
from packtool.launch.world import World
from packtool.progress import SilentProgress
from packtool.train.evaluate import per_sample as module
from packtool.train.evaluate.per_sample import Evaluation, evaluate
from packtool.train.model.load import load_model
from packtool.train.model.loss import HeadLoss, head_of
from packtool.train.model.trainable import make_trainable
from packtool.train.prepare.evaluation import plan_samples
from packtool.train.prepare.shared_prefixes import find_shared_prefixes
from packtool.train.run import train
from tests.train.alike import make_alike_world
from tests.train.tiny import TinyWorld, export_rows, make_tiny_text_world
from tests.train.two_evaluations import run_two_processes

SETTINGS: dict[str, Any] = {"gradient_accumulation_steps": 4, "learning_rate": 1e-2, "num_train_epochs": 6.0}
CHANNELS = ("pictures", "text", None)


@dataclasses.dataclass(frozen=True)
class Case:
    """A trained model and the cache that it is evaluated on."""

    checkpoint: str
    cache: str
    rows: str
    spec: InputSpec

    @property
    def reader(self) -> CacheReader:
        return CacheReader.open([self.cache])

    def load(self, *, packing: bool = False) -> nn.Module:
        return load_model(self.checkpoint, self.spec.config, dtype=torch.float32, packing=packing).eval()

    def evaluate(self, model: nn.Module | None = None, **plan: Any) -> Evaluation:
        reader = self.reader
        return evaluate(model or self.load(), reader, self.spec, plan_samples(reader, World(), **plan))


@pytest.fixture(scope="module")
def case(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A model that has memorized some answers, and rows with and without channels."""
    root = tmp_path_factory.mktemp("case")
    checkpoint = str(train(tiny.config(root / "full", **SETTINGS), SilentProgress()).checkpoint)
    rows = json.loads(Path(tiny.rows).read_text())
    folder = Path(tiny.rows).parent
    for row_index, row in enumerate(rows):
        row["images"] = [str(folder / image) for image in row["images"]]
        row["channel"] = CHANNELS[0 if row["images"] else 1] if row_index % 5 else None
    (root / "rows.json").write_text(json.dumps(rows))
    channels = dataclasses.replace(tiny, rows=str(root / "rows.json"), cache=str(root / "cache"))
    export_rows(channels, channels.cache, media_root=str(folder))
    limits = CacheReader.open([channels.cache]).manifests[0].identity.media_limits
    return Case(checkpoint, channels.cache, channels.rows, InputSpec.load(checkpoint, limits))


@pytest.fixture(scope="module")
def alike_case(case: Case, tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """The same model, and rows most of which share a prefix."""
    world = make_alike_world(tiny, tmp_path_factory.mktemp("alike"))
    return dataclasses.replace(case, cache=world.cache, rows=world.rows)


@torch.no_grad()
def scores_of_singles(case: Case) -> list[dict[str, float]]:
    """Compute each sample with transformers alone: its attention, mask, positions and loss."""
    model: Any = case.load()
    assert model.config.get_text_config()._attn_implementation == "sdpa"
    scores_alone = []
    for sample in map(case.reader.sample, range(len(case.reader))):
        ids = torch.from_numpy(sample.input_ids.astype(np.int64)).unsqueeze(0)
        inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": (ids == case.spec.pad_ids["image"]).int()}
        if sample.images:
            batch = collate_packs([sample], case.spec)
            inputs |= {"pixel_values": batch.pixel_values, "image_grid_thw": batch.image_grid_thw}
        logits = model(**inputs).logits[0, :-1]
        labels = torch.from_numpy(sample.labels[1:].astype(np.int64))
        places = (labels != -100).nonzero().squeeze(1)
        correct = logits.argmax(-1)[places] == labels[places]
        wrong_places = places[~correct]
        scores_alone.append(
            {
                "loss": F.cross_entropy(logits, labels).item(),
                "target_tokens": len(places),
                "token_accuracy": correct.double().mean().item(),
                "first_wrong": int(wrong_places[0]) + 1 if len(wrong_places) else -1,
            }
        )
    return scores_alone


@pytest.fixture(scope="module")
def reference(case: Case) -> list[dict[str, float]]:
    return scores_of_singles(case)


def largest_error(evaluation: Evaluation, reference: list[dict[str, float]]) -> float:
    """Return the largest error of all losses; counts must be equal."""
    assert len(evaluation) == len(reference)
    assert evaluation.target_tokens.tolist() == [sample["target_tokens"] for sample in reference]
    assert evaluation.first_wrong.tolist() == [sample["first_wrong"] for sample in reference]
    expected = np.array([[sample["loss"], sample["token_accuracy"]] for sample in reference])
    assert evaluation.token_accuracy == pytest.approx(expected[:, 1], abs=1e-12)
    assert evaluation.perplexity == pytest.approx(np.exp(expected[:, 0]), rel=1e-5)
    return float(np.abs(evaluation.loss - expected[:, 0]).max())


def test_the_reference_has_correct_and_wrong_answers(reference: list[dict[str, float]]) -> None:
    first_wrong = [sample["first_wrong"] for sample in reference]
    assert 3 < first_wrong.count(-1) < 37
    assert len(set(first_wrong)) > 8


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"max_tokens": 130},
        {"max_tokens": 400, "alignment": 8},
        {"max_tokens": 300, "max_samples": 2},
        {"max_samples": 1},
    ],
    ids=str,
)
def test_scores_equal_those_of_each_sample_alone(
    plan: dict[str, int], case: Case, reference: list[dict[str, float]]
) -> None:
    error = largest_error(case.evaluate(**plan), reference)
    print(f"{plan}: largest error of a loss {error:.1e}")
    assert error <= 1e-5


def test_unpackable_model_is_evaluated_one_by_one(
    case: Case, reference: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "can_be_packed", lambda config: False)
    model: Any = case.load()
    num_rows_per_call = []
    model.register_forward_pre_hook(
        lambda *arguments: num_rows_per_call.append(arguments[-1]["input_ids"].shape[0]), with_kwargs=True
    )
    assert largest_error(case.evaluate(model), reference) <= 1e-5
    assert len(num_rows_per_call) == 40


@pytest.mark.parametrize("label_logits_only", [True, False])
def test_losses_from_logits_if_the_head_cannot_compute_them(
    label_logits_only: bool, case: Case, reference: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeadLoss, "applies_to", lambda model: False)
    monkeypatch.setattr("packtool.train.model.loss.takes_logits_to_keep", lambda model: label_logits_only)
    monkeypatch.setattr("packtool.train.model.loss._ROWS_AT_ONCE", 7)
    monkeypatch.setattr("packtool.train.evaluate.per_sample._MAX_CELLS", 30)
    assert largest_error(case.evaluate(max_tokens=400), reference) <= 1e-5


class WithGaps:
    """Of every second sample, the second target is none: of a prefix, it is then one of some samples only."""

    def __init__(self, reader: CacheReader) -> None:
        self.reader = reader

    def sample(self, position: int) -> EncodedSample:
        sample = self.reader.sample(position)
        labels = sample.labels.copy()
        labels[np.flatnonzero(labels != -100)[1 : 1 + position % 2]] = -100
        return dataclasses.replace(sample, labels=labels)


@pytest.mark.parametrize("has_gaps", [False, True], ids=["all targets", "of some samples"])
def test_samples_with_shared_prefixes_have_the_same_scores_as_alone(
    has_gaps: bool, case: Case, alike_case: Case, tiny: TinyWorld
) -> None:
    """Questions about one image, one of which has a second turn."""
    reader = alike_case.reader
    samples = WithGaps(reader) if has_gaps else reader
    plan = plan_samples(reader, World(), max_tokens=400)
    shared, _ = find_shared_prefixes(tiny.config("unused"), alike_case.spec.config.to_dict(), reader, capacity=400)
    assert shared is not None
    model = case.load()
    rows: list[int] = []
    model.register_forward_pre_hook(
        lambda *arguments: rows.append(arguments[-1]["input_ids"].shape[1]), with_kwargs=True
    )
    tree = evaluate(model, reader, alike_case.spec, dataclasses.replace(plan, trees=shared.trees), samples=samples)
    assert sum(rows) <= dataclasses.replace(plan, trees=shared.trees).num_tokens < 0.75 * plan.num_tokens
    single_evaluation = evaluate(model, reader, alike_case.spec, plan.one_sample_each(), samples=samples)
    assert tree.loss == pytest.approx(single_evaluation.loss, abs=1e-5)
    for name in ("tokens", "target_tokens", "num_correct", "first_wrong", "row", "channel"):
        assert getattr(tree, name).tolist() == getattr(single_evaluation, name).tolist()
    assert len(set(single_evaluation.first_wrong.tolist())) > 2


def test_a_model_of_text_alone(tmp_path: Path) -> None:
    text = make_tiny_text_world(tmp_path)
    reader = CacheReader.open([text.cache])
    spec = InputSpec.load(text.model, reader.manifests[0].identity.media_limits)
    case = Case(text.model, text.cache, text.rows, spec)
    together, single = case.evaluate(), case.evaluate(max_samples=1)
    assert together.loss == pytest.approx(single.loss, abs=1e-5)
    assert together.first_wrong.tolist() == single.first_wrong.tolist()
    assert together.total.loss == pytest.approx(math.log(272), abs=2)


def test_order_origins_and_totals(case: Case, reference: list[dict[str, float]]) -> None:
    evaluation, reader = case.evaluate(max_tokens=256), case.reader
    for position in range(len(reader)):
        sample = reader.sample(position)
        assert (evaluation.sources[evaluation.source[position]], evaluation.row[position]) == (
            sample.source,
            sample.row,
        )
        assert evaluation.tokens[position] == sample.length
        assert (*evaluation.channels, None)[evaluation.channel[position]] == sample.channel
    targets = np.array([sample["target_tokens"] for sample in reference])
    losses = np.array([sample["loss"] for sample in reference])
    rights = np.array([sample["token_accuracy"] for sample in reference]) * targets
    assert set(evaluation.channel_totals) == set(CHANNELS)
    in_channel = {name: np.array([reader.sample(i).channel == name for i in range(40)]) for name in CHANNELS}
    for total, selected in [
        (evaluation.total, targets > 0),
        *((evaluation.channel_totals[name], in_channel[name]) for name in CHANNELS),
    ]:
        assert (total.samples, total.target_tokens) == (selected.sum(), targets[selected].sum())
        assert total.loss == pytest.approx((losses * targets)[selected].sum() / targets[selected].sum(), abs=1e-5)
        assert total.perplexity == pytest.approx(math.exp(total.loss))
        assert total.token_accuracy == pytest.approx(rights[selected].sum() / targets[selected].sum())
        assert total.exact_samples == sum(reference[i]["first_wrong"] == -1 for i in np.flatnonzero(selected))
    metrics = evaluation.metrics()
    assert metrics["eval_loss"] == evaluation.total.loss
    assert metrics["eval_loss/text"] == evaluation.channel_totals["text"].loss
    assert not [name for name in metrics if "None" in name]


def test_some_samples_of_several_caches(case: Case, tiny: TinyWorld) -> None:
    all_samples = case.evaluate()
    reader = CacheReader.open([tiny.cache, case.cache])
    plan = plan_samples(reader, World(), limit=55)
    both = evaluate(case.load(), reader, case.spec, plan)
    assert len(both) == 55
    assert both.loss == pytest.approx(np.concatenate([all_samples.loss, all_samples.loss[:15]]), abs=1e-5)
    assert both.channel[:40].tolist() == [-1] * 40
    assert len(both.sources) == 2


def test_samples_without_targets_have_no_loss(case: Case) -> None:
    class Silent:
        """The first sample's labels are gone."""

        def __init__(self, reader: CacheReader) -> None:
            self.reader, self.index = reader, reader.index

        def sample(self, position: int) -> Any:
            sample = self.reader.sample(position)
            return sample if position else dataclasses.replace(sample, labels=np.full_like(sample.labels, -100))

    reader = case.reader
    silent: Any = Silent(reader)
    for limit in (1, 4):
        result = evaluate(case.load(), silent, case.spec, plan_samples(reader, World(), limit=limit))
        assert result.target_tokens[0] == result.loss_sum[0] == 0
        assert result.first_wrong[0] == -1
        assert np.isnan([result.loss[0], result.perplexity[0], result.token_accuracy[0]]).all()
        assert math.isnan(result.total.loss) == (limit == 1)
        assert result.total.exact_samples == int((result.first_wrong[1:] == -1).sum())


@pytest.fixture
def training_model(case: Case, tiny: TinyWorld) -> nn.Module:
    """A model during training on padded rows: adapters with dropout, one module not in training mode."""
    config = tiny.config("unused", train_type="lora", lora_dropout=0.5, packing=False)
    model: Any = make_trainable(
        load_model(case.checkpoint, case.spec.config, dtype=torch.float32, packing=False), config
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    model.train()
    model.get_base_model().model.visual.eval()
    return model


def test_evaluation_does_not_change_training(training_model: nn.Module, case: Case) -> None:
    model: Any = training_model
    reader = case.reader
    plan = plan_samples(reader, World(), max_tokens=200)
    modes = {name: part.training for name, part in model.named_modules()}
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    metrics, metrics_with_worker = (
        evaluate(model, reader, case.spec, plan, world=World(), num_workers=workers).metrics() for workers in (0, 1)
    )
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])
    assert states[2] == random.getstate()
    assert modes == {name: part.training for name, part in model.named_modules()}
    assert len(set(modes.values())) == 2
    assert model.config.get_text_config()._attn_implementation == "sdpa"
    assert metrics == metrics_with_worker
    assert torch.is_grad_enabled()
    head: Any = head_of(model)
    assert "forward" not in vars(head)
    # With the Trainer's own losses in the head, which stay there.
    original_head = HeadLoss(model)
    assert evaluate(model, reader, case.spec, plan, world=World()).metrics() == metrics
    assert head.forward.__self__ is original_head
    del head.forward
    packed = load_model(case.checkpoint, case.spec.config, dtype=torch.float32, packing=True)
    without_adapter = evaluate(packed, reader, case.spec, plan).total.loss
    assert abs(metrics["eval_loss"] - without_adapter) > 1e-3
    assert packed.training == packed.lm_head.training
    assert packed.config.get_text_config()._attn_implementation == ATTENTION_NAME


def test_the_model_is_restored_after_an_error(training_model: nn.Module, case: Case) -> None:
    class Broken(SilentProgress):
        def advance(self, num_done: int, **fields: float | int | str) -> None:
            raise DataError("gone")

    reader = case.reader
    with pytest.raises(DataError):
        evaluate(training_model, reader, case.spec, plan_samples(reader, World()), progress=Broken())
    assert training_model.training
    model: Any = training_model
    assert model.config.get_text_config()._attn_implementation == "sdpa"


def test_two_processes_get_the_results_of_all_samples(case: Case, tmp_path: Path) -> None:
    """In one launch: samples divided over ranks, a wrapped model, a rank without samples, differing plans."""
    job = {"model": case.checkpoint, "cache": case.cache, "output": str(tmp_path / "two.parquet")}
    run_two_processes(job | {"results": str(tmp_path / "rank-{}.json")}, tmp_path)
    first_rank, second_rank = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert first_rank == second_rank
    assert first_rank["differing"] == "MismatchError"
    assert first_rank["single"]["samples"] == 1
    assert first_rank["sharded"] == pytest.approx(first_rank["single"])
    evaluation = case.evaluate()
    expected = evaluation.metrics()
    assert first_rank["wrapped"].keys() == expected.keys()
    for name, value in expected.items():
        assert first_rank["wrapped"][name] == pytest.approx(value, abs=1e-5, rel=1e-5)
    table = pq.read_table(tmp_path / "two.parquet")
    columns, info = table.to_pydict(), json.loads(table.schema.metadata[b"packtool"])
    assert columns["sample"] == list(range(40))
    assert columns["loss"] == pytest.approx(evaluation.loss, abs=1e-5)
    assert columns["first_wrong"] == evaluation.first_wrong.tolist()
    assert info["total"]["loss"] == pytest.approx(evaluation.total.loss, abs=1e-5)
