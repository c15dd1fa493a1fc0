"""Families whose own processor makes their pictures, each with a reduced model and pictures: what its record claims."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma2Config

from packtool.attention.parallel.axes import refuse_shared
from packtool.attention.register import set_attention
from packtool.attention.support import refuse_unsupported
from packtool.batch.batch import TreeBatch
from packtool.batch.collate import collate_packs, load_media
from packtool.batch.processed import load_processed
from packtool.batch.spec import InputSpec, auto_class
from packtool.config.export import EncodeSpec
from packtool.config.train import TrainConfig
from packtool.encode.encoded import EncodedSample
from packtool.encode.encoder import Encoder
from packtool.encode.families import FAMILIES
from packtool.encode.model_files import ModelFiles
from packtool.errors import ConfigError, MediaError, UnsupportedModelError
from packtool.plan.cost import CostModel
from packtool.rows.sample import MediaRef, Sample, Turn
from packtool.train.model.load import make_trainable
from packtool.train.model.towers import towers_of
from packtool.train.verify.checks import check_gradients, check_isolation, check_logits, check_prefixes
from packtool.train.verify.pack_under_test import PackUnderTest
from tests.batch.reduced import make_picture
from tests.encode.other_families import model_of, tokens_of

TRAINED = [name for family in FAMILIES if family.kinds == ("image",) for name in family.model_types]
PICTURES = [make_picture(*size, seed=number) for number, size in enumerate([(100, 60), (70, 150), (30, 30)])]


@dataclasses.dataclass(frozen=True)
class World:
    """A family's directory, processor, encoded rows and what collation knows."""

    name: str
    directory: Path
    processor: Any
    samples: list[EncodedSample]
    spec: InputSpec

    def model(self) -> Any:
        """With weights large enough that every token matters."""
        torch.manual_seed(0)
        config = copy.deepcopy(self.spec.config)  # a model writes its choice of attention into it
        made = auto_class(config).from_config(config).eval()
        for parameter in made.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.08)
        return made


def row(number: int, question: str, *pictures: int) -> Sample:
    media = tuple(MediaRef(None, PICTURES[each]) for each in pictures)
    return Sample((Turn("user", question), Turn("assistant", f"Answer {number}.")), media, "rows.jsonl", number)


def rows_for(name: str) -> list[Sample]:
    found = [row(0, "<image>What?", 0), row(1, "text"), row(2, "<image>", 1), row(3, "Is <image> it?", 2)]
    # Its processor makes one picture of a row larger than each of two, which export refuses.
    return found if name == "llava_onevision" else [*found, row(4, "<image> or <image>?", 2, 0)]


def encode(directory: Path, rows: list[Sample], **settings: Any) -> list[Any]:
    spec = EncodeSpec(model=str(directory), **{"max_length": 10_000, **settings})
    return Encoder(spec, ModelFiles.load(str(directory))).encode(rows)


@pytest.fixture(scope="module")
def world_of(realdata: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    """The world of a family, made once."""
    folder = tmp_path_factory.mktemp("families")

    @cache
    def make(name: str) -> World:
        directory, processor = model_of(name, realdata, folder)
        files = ModelFiles.load(str(directory))
        encoder = Encoder(EncodeSpec(model=str(directory), max_length=10_000), files)
        samples = [sample for samples in encoder.encode(rows_for(name)) for sample in samples]
        return World(name, directory, processor, samples, InputSpec.load(str(directory), encoder.limits))

    return make


@pytest.mark.parametrize("name", TRAINED)
def test_tokens_and_pixels_are_the_processors(world_of: Callable[[str], World], name: str) -> None:
    world = world_of(name)
    for sample, given in zip(world.samples, rows_for(name), strict=True):
        expected = tokens_of(world.processor, given)
        np.testing.assert_array_equal(sample.input_ids, expected.pop("input_ids")[0])
        made = load_media([sample], world.spec)
        names = world.spec.family.processor_inputs or world.spec.family.image_inputs
        assert set(made) == {key for key in expected if key in names}
        for key, tensor in made.items():
            theirs = torch.as_tensor(expected[key])
            # Pictures of one row lie side by side in some families, without what fills up the smaller one.
            assert torch.equal(tensor[tensor != 0], theirs[theirs != 0])
            assert (tensor.shape == theirs.shape) or len(sample.images) > 1


@pytest.mark.parametrize("name", TRAINED)
def test_packed_equals_alone(world_of: Callable[[str], World], name: str) -> None:
    world = world_of(name)
    refuse_unsupported(world.spec.config)
    model = world.model()
    set_attention(model)
    pack = PackUnderTest(model, world.samples, world.spec, torch.float32)
    assert pack.batch.position_ids.ndim == (3 if world.spec.has_mrope else 2)
    for check in (check_isolation(pack), check_logits(pack), check_gradients(pack)):
        assert check.error <= check.allowed, check
    # A micro-batch without a picture looks at a blank one, which changes nothing.
    blank = collate_packs(world.samples[1:2], world.spec)
    assert blank.media["pixel_values"].numel()
    assert blank.lengths[0] == world.samples[1].length
    with torch.no_grad():
        logits = model(**blank.model_inputs()).logits[0, : blank.lengths[0]]
        bare = collate_packs(world.samples[1:2], world.spec, frozenset())
        torch.testing.assert_close(model(**bare.model_inputs()).logits[0], logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_each_part_is_frozen_by_its_own_option(world_of: Callable[[str], World], name: str) -> None:
    world, flags = world_of(name), {"vision tower": "freeze_vit", "aligner": "freeze_aligner"}
    flags["language model"] = "freeze_llm"

    def bare() -> Any:
        with torch.device("meta"):
            return auto_class(world.spec.config).from_config(copy.deepcopy(world.spec.config))

    model = bare()
    towers = towers_of(model, name)
    text = model.get_decoder()
    assert {towers.part_of(key) for key, module in model.named_modules() if module is text} == {"language model"}
    # peft would adapt experts in the place of layers of the tower that have the same names, which is refused.
    for train_type in ("full",) if "moe" in name else ("full", "lora"):
        for part in flags:
            frozen = {option: option != flags[part] for option in flags.values()}
            config = TrainConfig(model="m", cached_dataset=("c",), output_dir="o", train_type=train_type, **frozen)
            trained = make_trainable(bare(), config)
            names = [key.removeprefix("base_model.model.") for key, p in trained.named_parameters() if p.requires_grad]
            assert {towers.part_of(key) for key in names} == {part}
    cost = CostModel.of_config(world.spec.config.to_dict())
    assert cost.per_vision_token > 0


def test_a_picture_of_many_runs_of_placeholders_is_one_medium(world_of: Callable[[str], World]) -> None:
    """Idefics3 has marks between a picture's tiles: nothing cuts there, neither truncation nor a shared prefix."""
    world = world_of("idefics3")
    long = row(0, "<image>" + "word " * 30, 1)
    whole = world.samples[2].images[0].num_tokens
    for length in (90, 70):
        ((sample,),) = encode(world.directory, [long], max_length=length, truncation_strategy="left")
        assert sample.num_truncated
        pads = int((sample.input_ids == world.spec.pad_ids["image"]).sum())
        assert pads == whole * len(sample.images)
    alike = [row(number, f"<image>What is it? {number}", 1) for number in range(3)]
    samples = [sample for samples in encode(world.directory, alike) for sample in samples]
    model = world.model()
    set_attention(model)
    pack = PackUnderTest(model, samples, world.spec, torch.float32, least_shared=4)
    assert isinstance(pack.batch, TreeBatch)
    assert len(pack.batch.media["pixel_values"]) == 1
    for check in (check_isolation(pack), check_logits(pack), check_prefixes(pack)):
        assert check.error <= check.allowed, check


def test_a_picture_that_has_changed_is_named(world_of: Callable[[str], World]) -> None:
    world = world_of("internvl")
    (image,) = world.samples[0].images
    other = dataclasses.replace(image, data=PICTURES[2])
    with pytest.raises(MediaError, match=r"row 0 of rows\.jsonl\) has changed .* it was 100x60 .* now it is 30x30"):
        load_processed([dataclasses.replace(world.samples[0], images=(other,))], world.spec)


def test_what_cannot_be_done_is_refused_by_name(world_of: Callable[[str], World], realdata: Path) -> None:
    world = world_of("internvl")
    with pytest.raises(UnsupportedModelError, match=r"internvl model .* pictures that its own processor makes"):
        refuse_shared(world.spec.config.to_dict())
    config = copy.deepcopy(world.spec.config)
    config.text_config = Gemma2Config(num_hidden_layers=1)
    with pytest.raises(UnsupportedModelError, match=r"internvl uses soft-capped scores"):
        refuse_unsupported(config)
    gemma, _ = model_of("gemma3", realdata, world.directory.parent)
    with pytest.raises(ConfigError, match=r"'gemma3'.* see each other in both directions"):
        InputSpec.load(str(gemma), world.spec.limits)
