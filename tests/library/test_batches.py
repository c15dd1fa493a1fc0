"""The batches of a plan are those of ``packtool train``, in whatever way one goes through them."""

from __future__ import annotations

import io
import json
import pickle
from itertools import islice
from typing import Any

import pytest
import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.utils.data import DataLoader

import packtool
from packtool.errors import ConfigError, MismatchError
from packtool.launch.world import World
from packtool.train.loop.step_loader import StepLoader
from packtool.train.model.load import input_spec
from packtool.train.prepare import inputs
from packtool.train.prepare.run import Run
from tests.library.conftest import HERE, PLAN
from tests.train.tiny import TinyWorld, export_rows

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def batches(plan: packtool.Plan) -> packtool.Batches:
    return packtool.Batches(plan, **HERE)


def ids(batch: dict[str, Any]) -> list[int]:
    return list(batch["input_ids"].flatten().tolist())


def test_batches_equal_those_of_packtool_train(batches: packtool.Batches, tiny: TinyWorld, tmp_path: Any) -> None:
    config = tiny.config(tmp_path, gradient_accumulation_steps=2, num_train_epochs=2)
    run = Run.of(config, World())
    steps = StepLoader(run, input_spec(run))
    iterator = iter(batches)
    for micro_batch, step in enumerate(steps):
        for place, expected in enumerate(step.micro_batches, 1):
            batch = next(iterator)
            for name, value in expected.model_inputs().items():
                same = torch.equal(batch[name], value) if isinstance(value, Tensor) else True
                assert same, name
            targets = batch["targets"]
            assert torch.equal(targets.labels, expected.labels)
            assert torch.equal(batch["shift_labels"], expected.labels)
            assert torch.equal(batch["labels"][:, 1:], expected.labels[:, :-1])
            assert (targets.step, targets.num_items) == (micro_batch, step.figures.units)
            assert targets.ends_step == (place == len(step.planned))
    assert next(iterator, None) is None
    assert batches.num_steps == len(steps) == micro_batch + 1


@pytest.mark.parametrize("mixed", [False, True])
def test_batches_reuse_the_plan(mixed: bool, tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches take the steps of the plan that they are given; other targets need other steps."""
    plan = packtool.plan(f"{tiny.cache}#8" if mixed else tiny.cache, **PLAN)
    calls: list[str] = []
    for name in ("plan_epoch", "pack_drawn", "pack_epoch", "assign_packs", "find_shared_prefixes", "make_mixture"):
        planning = getattr(inputs, name)
        monkeypatch.setattr(inputs, name, lambda *a, _n=name, _f=planning, **k: (calls.append(_n), _f(*a, **k))[1])
    batches = packtool.Batches(plan, **HERE)
    assert [targets.num_targets for targets in (batch["targets"] for batch in batches)]
    assert len(packtool.Batches(plan, max_steps=1, **HERE)) == 2
    assert calls == []
    packtool.Batches(plan, loss_scale="all", **HERE)
    assert calls


def test_indexing_and_iterating_give_the_same(batches: packtool.Batches) -> None:
    in_turn = [ids(batch) for batch in batches]
    assert [ids(batches[index]) for index in range(len(batches))] == in_turn
    assert ids(batches[-1]) == in_turn[-1]
    assert [ids(batch) for batch in DataLoader(batches, batch_size=None, num_workers=1)] == in_turn
    with pytest.raises(IndexError, match="micro-batch 16 of 16"):
        batches[len(batches)]
    # Another process makes them anew.
    assert ids(pickle.loads(pickle.dumps(batches))[3]) == in_turn[3]


def test_ranks_of_a_plan_have_their_own_batches(tiny: TinyWorld) -> None:
    plan = packtool.plan(tiny.cache, world_size=2, **PLAN)
    ranks = [packtool.Batches(plan, rank, **HERE) for rank in range(2)]
    together = packtool.Batches(plan, "all", **HERE)
    assert len(together) == 2 * len(ranks[0])
    assert [ids(batch) for batch in together] == [ids(rank[n]) for n in range(len(ranks[0])) for rank in ranks]
    assert {batch["targets"].world_size for batch in together} == {2}
    with pytest.raises(ConfigError, match="this process is one of 1"):
        packtool.Batches(plan)
    with pytest.raises(ConfigError, match="ranks 0 to 1"):
        packtool.Batches(plan, 2)


def test_rank_all_has_equal_steps(tiny: TinyWorld) -> None:
    """Smaller steps, at the end of each epoch, are filled up with empty micro-batches."""
    plan = packtool.plan(tiny.cache, packing_length=200, gradient_accumulation_steps=4, num_train_epochs=2)
    one, every = packtool.Batches(plan, 0, **HERE), packtool.Batches(plan, "all", **HERE)
    assert (one.micro_batches_per_step, one.num_steps) == (4, 6)
    assert len(one) < len(every) == 24
    assert [index for index, batch in enumerate(every) if batch["targets"].ends_step] == [3, 7, 11, 15, 19, 23]
    short_run = packtool.Batches(plan, 0, max_steps=4, **HERE)
    assert (short_run.num_steps, len(short_run)) == (4, len(one) - 6)
    full = [batch for batch in every if batch["targets"].num_targets]
    assert [ids(batch) for batch in full] == [ids(batch) for batch in one]
    assert [batch["targets"].num_items for batch in full] == [batch["targets"].num_items for batch in one]


def test_state_resumes_with_the_next_micro_batch(plan: packtool.Plan, batches: packtool.Batches) -> None:
    all_ids = [ids(batch) for batch in batches]
    for num_given in (0, 3, len(all_ids)):
        batches_to_save, other = packtool.Batches(plan, **HERE), packtool.Batches(plan, **HERE)
        ids_before = [ids(batch) for batch in islice(batches_to_save, num_given)]
        state = json.loads(json.dumps(batches_to_save.state_dict()))
        # A look at the first one does not use it up.
        assert ids(next(iter(batches_to_save))) == all_ids[0]
        other.load_state_dict(state)
        assert ids_before + [ids(batch) for batch in other] == all_ids
        assert [ids(batch) for batch in other] == all_ids
    elsewhere = packtool.Batches(plan, loss_reduction="sample", **HERE)
    with pytest.raises(MismatchError, match="loss_reduction: token in the checkpoint, sample now"):
        elsewhere.load_state_dict(batches.state_dict())


def test_state_resumes_with_another_number_of_ranks(tiny: TinyWorld) -> None:
    """Every sample that was not trained in the epoch is trained once, and later epochs are whole."""

    def make_batches(world_size: int, rank: Any = 0) -> packtool.Batches:
        return packtool.Batches(
            packtool.plan(tiny.cache, world_size=world_size, num_train_epochs=2, **PLAN), rank, **HERE
        )

    def targets(rank_batches: list[dict[str, Any]]) -> int:
        return sum(batch["targets"].num_targets for batch in rank_batches)

    two = [make_batches(2, rank) for rank in range(2)]
    num_targets = targets([batch for rank in two for batch in rank])
    before = [list(islice(rank, two[0].micro_batches_per_step)) for rank in two]
    assert before[0][-1]["targets"].ends_step
    states = [json.loads(json.dumps(rank.state_dict())) for rank in two]
    assert states[0] == states[1], "as good for any rank"
    one = make_batches(1)
    one.load_state_dict(states[1])
    after = list(one)
    assert len(after) == len(one)
    assert targets([*before[0], *before[1], *after]) == num_targets
    assert [batch["targets"].step for batch in after if batch["targets"].ends_step] == list(range(1, one.num_steps))
    assert {batch["targets"].world_size for batch in after} == {1}
    assert [ids(one[index]) for index in range(len(one))] == [ids(batch) for batch in after]
    assert ids(pickle.loads(pickle.dumps(one))[0]) == ids(after[0])
    ids_before = [ids(batch) for batch in islice(one, 3)]
    resumed, every = make_batches(1), make_batches(1, "all")
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file))  # by default, it loads only plain values
    assert ids_before + [ids(batch) for batch in resumed] == [ids(batch) for batch in after]
    every.load_state_dict(states[0])
    full = [batch for batch in every if batch["targets"].num_targets]
    assert [ids(batch) for batch in full] == [ids(batch) for batch in after]
    assert [batch["targets"].step for batch in full] == [batch["targets"].step for batch in after]
    next(iter(two[0]))
    with pytest.raises(MismatchError, match=r"within step 0, whose remaining packs .* 2 then, 1 now"):
        make_batches(1).load_state_dict(two[0].state_dict())
    with pytest.raises(MismatchError, match="count those of all ranks"):
        make_batches(2, "all").load_state_dict(states[0])
    with pytest.raises(MismatchError, match=r"not a state of packtool\.Batches"):
        make_batches(1).load_state_dict({"micro_batch": 3})


def test_compiled_models_get_few_lengths(plan: packtool.Plan, batches: packtool.Batches, model: Any) -> None:
    padded = packtool.Batches(plan, torch_compile=True, **HERE)
    lengths = {batch["input_ids"].shape[1] for batch in padded}
    assert len(lengths) < len({batch["input_ids"].shape[1] for batch in batches})
    assert all(length % 32 == 0 for length in lengths)
    assert [b["targets"].num_targets for b in padded] == [b["targets"].num_targets for b in batches]
    with torch.no_grad():
        losses = [packtool.loss(model(**batch), batch).item() for batch in (padded[1], batches[1])]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_stateful_dataloader_of_torchdata(batches: packtool.Batches) -> None:
    loading = pytest.importorskip("torchdata.stateful_dataloader")
    all_ids = [ids(batch) for batch in batches]
    loader = loading.StatefulDataLoader(batches, batch_size=None)
    ids_before = [ids(batch) for batch in islice(loader, 5)]
    resumed = loading.StatefulDataLoader(batches, batch_size=None)
    resumed.load_state_dict(loader.state_dict())
    assert ids_before + [ids(batch) for batch in resumed] == all_ids


def test_all_tensors_of_a_batch_are_moved(batches: packtool.Batches, plan: packtool.Plan) -> None:
    """Everything that holds tensors goes along, whoever moves it."""
    batch = next(batch for batch in batches if batch["towers"])
    for moved in (send_to_device(batch, "meta"), next(iter(packtool.Batches(plan, device="meta", **HERE)))):
        parts = [moved, vars(moved["targets"])]
        for tower in moved["towers"].values():
            parts += [tower.arguments, tower.positions]
        tensors = [value for part in parts for value in part.values() if isinstance(value, Tensor)]
        assert len(tensors) > 12
        assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_unsupported_settings_are_refused(tiny: TinyWorld, plan: packtool.Plan, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="loss_reductoin is not an option of Batches; did you mean 'loss_reduction'"):
        packtool.Batches(plan, loss_reductoin="sample")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="learning_rate is not an option of Batches"):
        packtool.Batches(plan, learning_rate=1.0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"on_bad_media is not supported here: .* packtool train --on-bad-media skip"):
        packtool.Batches(plan, on_bad_media="skip")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="2 processes share each pack"):
        packtool.Batches(packtool.plan(tiny.cache, packing_length=256, world_size=2, sequence_parallel_size=2))
    stages = [{"until": 1, "sources": [tiny.cache]}, {"sources": [tiny.cache]}]
    (tmp_path / "mix.yaml").write_text(json.dumps({"stages": stages}))
    with pytest.raises(ConfigError, match="max_steps=3: the plan has stages"):
        packtool.Batches(packtool.plan(mix=tmp_path / "mix.yaml", max_steps=4, packing_length=256), 0, max_steps=3)
    (tmp_path / "lengths.txt").write_text("3 4 5")
    with pytest.raises(ConfigError, match="a plan of --lengths has no samples"):
        packtool.Batches(packtool.plan(lengths=tmp_path / "lengths.txt", packing_length=8))
    export_rows(tiny, tmp_path / "cache")
    planned = packtool.plan(tmp_path / "cache", packing_length=256)
    export_rows(tiny, tmp_path / "cache", overwrite=True, max_length=60)
    with pytest.raises(MismatchError, match="have changed since the plan was made"):
        packtool.Batches(planned)
