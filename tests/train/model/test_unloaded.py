"""Every saved model has all tensors of its base: also those that its class does not load."""

from __future__ import annotations

import json
import re
import shutil
import string
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import transformers
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from packtool.config.commands import MergeConfig
from packtool.progress import SilentProgress
from packtool.train.model.load import add_unloaded_tensors, tensor_files, unloaded_tensors
from packtool.train.model.merge import merge_adapter
from packtool.train.run import train
from tests.batch.reduced import reduced_model
from tests.train.test_run import Recording
from tests.train.tiny import TinyWorld

SIZES = {
    r"((num|n)_(hidden_|decoder_|encoder_)?layers?|depth|n_layer|(encoder|decoder)_layers|num_attention_blocks)$": 2,
    r"(experts|expert_num|moe_topk|per_tok|top_k)$": 4,
    r"(heads?|n_head)$": 4,
    r"vocab_size": 256,
    r"intermediate|ffn|(^|_)hidden_size|hidden_dim|d_model|embed_dim|n_embd|lora_rank|out_hidden|adapter_(in|out)": 64,
    r"(pad|bos|eos)_token_id$": 0,
}
"""The largest value of a setting in a reduced model, by what its name contains."""


def ignoring_classes() -> list[str]:
    """Classes with a language head in files that set ``_keys_to_ignore_on_load_unexpected`` to something."""
    root = Path(transformers.__file__).parent / "models"
    names = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()]
    sources = (path.read_text() for path in root.glob("*/modeling_*.py"))
    defined = {
        name
        for source in sources
        if re.search(r"_keys_to_ignore_on_load_unexpected\b(?! = None| = \[\]$)", source, re.MULTILINE)
        for name in re.findall(r"^class (\w+)", source, re.MULTILINE)
    }
    return sorted(defined & {name for name in names if isinstance(name, str)})


def reduce(config: PreTrainedConfig) -> None:
    """Make a configuration small, in place."""
    depth = getattr(config, "num_hidden_layers", None)
    for name, value in list(vars(config).items()):
        limit = next((size for pattern, size in SIZES.items() if re.search(pattern, name)), None)
        if isinstance(value, PreTrainedConfig):
            reduce(value)
        elif type(value) is int and limit is not None:
            setattr(config, name, min(value, limit))
        elif isinstance(value, list) and len(value) == depth:  # one entry a layer
            has_full = name == "layer_types" and "full_attention" in value
            setattr(config, name, [value[0], "full_attention"] if has_full else value[:2])
    if type(getattr(config, "pad_token_id", None)) is int:
        config.pad_token_id = 0
    config.per_layer_config = None
    if hasattr(config, "num_nextn_predict_layers"):
        config.num_nextn_predict_layers = 1
    if getattr(config, "num_kv_shared_layers", None) is not None:
        config.num_kv_shared_layers, config.layer_types = 1, ["full_attention"] * 2


def reduced(name: str) -> PreTrainedModel:
    """A class's model of random weights in bfloat16, or a skipped test where this installation cannot make it."""
    model_class: Any = getattr(transformers, name)
    config = model_class.config_class()
    reduce(config)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = model_class(type(config).from_dict(config.to_dict())).to(torch.bfloat16)
    except ImportError as error:
        pytest.skip(str(error))
    return model.to_empty(device="cpu")


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a model, read by its index, which must list every tensor of its files."""
    files = tensor_files(str(directory))
    shards = {path: load_file(path) for path in directory.glob("*.safetensors")}
    assert {(name, str(path)) for path, shard in shards.items() for name in shard} == set(files.items())
    return {name: shards[Path(path)][name] for name, path in files.items()}


def as_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def unloaded_names(patterns: set[str]) -> st.SearchStrategy[list[str]]:
    """Names that a class would skip while loading: some for each of its patterns, and of rotary embeddings."""
    alphabet = st.sampled_from(string.ascii_letters + string.digits + "._")
    name_lists = [st.lists(st.from_regex(pattern, alphabet=alphabet), min_size=1, max_size=3) for pattern in patterns]
    always = ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    return st.tuples(*name_lists).map(
        lambda names: sorted({name for name_list in (*names, always) for name in name_list if name})
    )


@pytest.mark.parametrize("name", ignoring_classes())
def test_saved_model_has_every_tensor_of_its_base(name: str, tmp_path: Path) -> None:
    """Nothing is trained here, so all names and bytes must be those of the base model."""
    model = reduced(name)
    for tensor in model.state_dict().values():
        if tensor.dtype == torch.bfloat16:
            tensor.copy_(torch.randint(0, 2**14, tensor.shape, dtype=torch.int16).view(torch.bfloat16))
        else:
            tensor.zero_()
    model.save_pretrained(tmp_path / "base")
    loaded = type(model).from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    loaded.save_pretrained(tmp_path / "plain")
    base = load_file(tmp_path / "base" / "model.safetensors")

    @settings(max_examples=3, deadline=None)
    @given(names=unloaded_names(model._keys_to_ignore_on_load_unexpected or set()), is_sharded=st.booleans())
    def check(names: list[str], is_sharded: bool) -> None:
        directory = tmp_path / "saved"
        for folder in (tmp_path / "with", directory):
            shutil.rmtree(folder, ignore_errors=True)
        extra = {name: torch.randint(0, 256, (3, 5), dtype=torch.uint8) for name in names if name not in base}
        write_base(tmp_path / "with", [base, extra] if is_sharded else [base | extra])
        shutil.copytree(tmp_path / "plain", directory)
        unloaded = unloaded_tensors(loaded, str(tmp_path / "with"))
        assert set(unloaded) == set(extra)
        add_unloaded_tensors(str(directory), unloaded)
        saved = read_tensors(directory)
        assert set(saved) == set(base | extra)
        for key, tensor in (base | extra).items():
            # A class may keep some of its own tensors in float32.
            assert as_bytes(saved[key].to(tensor.dtype)) == as_bytes(tensor)
        if extra:
            index = json.loads((directory / "model.safetensors.index.json").read_text())["metadata"]
            assert index["total_size"] == sum(tensor.nbytes for tensor in saved.values())
            assert index["total_parameters"] == sum(tensor.numel() for tensor in saved.values())

    check()


def write_base(directory: Path, shards: list[dict[str, Tensor]]) -> None:
    directory.mkdir()
    for shard_index, shard in enumerate(shards):
        save_file(shard, directory / f"part-{shard_index}.safetensors")
    weight_map = {name: f"part-{shard_index}.safetensors" for shard_index, shard in enumerate(shards) for name in shard}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def tiny_with_mtp(tiny: TinyWorld, tmp_path: Path) -> Path:
    """The tiny model with tensors that its class does not load, as those for multi-token prediction."""
    directory = Path(shutil.copytree(tiny.model, tmp_path / "base"))
    tensors = load_file(directory / "model.safetensors")
    extra = {"mtp.fc.weight": torch.randn(4, 8).half(), "mtp.norm.weight": torch.ones(8)}
    save_file(tensors | extra, directory / "model.safetensors", {"format": "pt"})
    return directory


def test_checkpoints_and_merged_models_keep_unloaded_tensors(
    tiny: TinyWorld, tiny_with_mtp: Path, tmp_path: Path
) -> None:
    base = read_tensors(tiny_with_mtp)
    for train_type in ("full", "lora"):
        recording = Recording()
        run_options: dict[str, Any] = {"model": str(tiny_with_mtp), "train_type": train_type, "max_steps": 2}
        train(tiny.config(tmp_path / train_type, save_steps=1, **run_options), recording)
        lines = [note for note in recording.notes if "mtp.fc.weight" in note]
        assert len(lines) == (train_type == "full")
    merged = Recording()
    merge_adapter(MergeConfig(adapter=str(tmp_path / "lora" / "last"), output=str(tmp_path / "merged")), merged)
    assert any("keep 2 tensors" in note for note in merged.notes)
    for directory in (tmp_path / "full" / "last", tmp_path / "full" / "checkpoint-1", tmp_path / "merged"):
        saved = read_tensors(directory)
        assert set(saved) == set(base)
        for name in ("mtp.fc.weight", "mtp.norm.weight"):
            assert saved[name].dtype == base[name].dtype
            assert as_bytes(saved[name]) == as_bytes(base[name])
        loaded = AutoModelForImageTextToText.from_pretrained(directory).state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items() if name in loaded)
    last = read_tensors(tmp_path / "full" / "last")
    assert not all(torch.equal(last[name], base[name]) for name in base)
    checkpoint = str(tmp_path / "full" / "checkpoint-1")
    run_options = {"model": str(tiny_with_mtp), "max_steps": 2, "resume_from_checkpoint": checkpoint}
    train(tiny.config(tmp_path / "resumed", **run_options), SilentProgress())
    resumed = read_tensors(tmp_path / "resumed" / "last")
    assert all(torch.equal(resumed[name], last[name]) for name in base)


def test_merging_changes_only_adapted_modules(tiny: TinyWorld, tiny_with_mtp: Path, tmp_path: Path) -> None:
    """Every other tensor has the bytes of the base, also where its precision is another than the model's."""
    config = json.loads((tiny_with_mtp / "config.json").read_text())
    (tiny_with_mtp / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    base = {
        name: torch.randn_like(tensor) if "norm" in name else tensor.to(torch.bfloat16)
        for name, tensor in read_tensors(tiny_with_mtp).items()
    }
    save_file(base, tiny_with_mtp / "model.safetensors", {"format": "pt"})
    run_options: dict[str, Any] = {
        "model": str(tiny_with_mtp),
        "train_type": "lora",
        "max_steps": 2,
        "learning_rate": 0.1,
    }
    train(tiny.config(tmp_path / "lora", **run_options), SilentProgress())
    adapter = str(tmp_path / "lora" / "last")
    merge_adapter(MergeConfig(adapter=adapter, output=str(tmp_path / "merged")), SilentProgress())
    merged, weights = read_tensors(tmp_path / "merged"), tmp_path / "lora" / "last" / "adapter_model.safetensors"
    changed = {name for name in base if as_bytes(merged[name]) != as_bytes(base[name])}
    assert set(merged) == set(base)
    assert changed
    adapted = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in load_file(weights)}
    assert changed <= {f"{name}.weight" for name in adapted}
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"


def test_base_model_in_pytorch_format(tmp_path: Path) -> None:
    model = reduced_model("qwen3")
    model.save_pretrained(tmp_path / "saved")
    extra = {"mtp.fc.weight": torch.randn(2, 3).t()}
    (tmp_path / "base").mkdir()
    torch.save(model.state_dict() | extra, tmp_path / "base" / "pytorch_model.bin")
    add_unloaded_tensors(str(tmp_path / "saved"), unloaded_tensors(model, str(tmp_path / "base")))
    saved = read_tensors(tmp_path / "saved")
    assert torch.equal(saved.pop("mtp.fc.weight"), extra["mtp.fc.weight"])
    assert set(saved) == set(model.state_dict())
