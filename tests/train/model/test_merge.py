"""A merged model answers as its adapter does, and loads like any other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from packtool.cli.main import run
from packtool.config.commands import MergeConfig
from packtool.errors import ConfigError, MismatchError, StorageError
from packtool.progress import SilentProgress
from packtool.train.model.merge import merge_adapter
from packtool.train.run import train
from tests.train.tiny import TinyWorld


@pytest.fixture(scope="module")
def adapter(tiny: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("adapter")
    settings: dict[str, Any] = {"train_type": "lora", "learning_rate": 1e-1, "max_steps": 3, "verify_packing": False}
    train(tiny.config(output_dir, **settings), SilentProgress())
    return output_dir / "last"


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(40)[None]
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def test_merged_model_gives_the_logits_of_the_adapter(
    adapter: Path, tiny: TinyWorld, tmp_path: Path, capsys: Any
) -> None:
    output = tmp_path / "merged"
    assert run(["merge", str(adapter), "--output", str(output), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["output"], summary["dtype"]) == (str(output), "float32")
    assert summary["num_merged"] > 10
    base = AutoModelForImageTextToText.from_pretrained(tiny.model)
    before = logits(base)
    expected = logits(PeftModel.from_pretrained(base, adapter))
    merged_logits = logits(AutoModelForImageTextToText.from_pretrained(output))
    assert (expected - before).abs().max() > 0.1
    torch.testing.assert_close(merged_logits, expected, rtol=1e-4, atol=1e-4)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json"):
        assert (output / name).read_bytes() == (Path(tiny.model) / name).read_bytes()
    assert (output / "generation_config.json").exists()
    assert AutoProcessor.from_pretrained(output) is not None
    assert not list(tmp_path.glob("*.part"))


def test_bfloat16_sum_is_rounded_once(adapter: Path, tmp_path: Path) -> None:
    exact, short = tmp_path / "exact", tmp_path / "short"
    merge_adapter(MergeConfig(adapter=str(adapter), output=str(exact)), SilentProgress())
    result = merge_adapter(
        MergeConfig(adapter=str(adapter), output=str(short), torch_dtype="bfloat16"), SilentProgress()
    )
    assert result.dtype == "bfloat16"
    weights, rounded = load_file(exact / "model.safetensors"), load_file(short / "model.safetensors")
    assert all(torch.equal(rounded[name], weight.bfloat16()) for name, weight in weights.items())
    assert json.loads((short / "config.json").read_text())["dtype"] == "bfloat16"


def test_unmergeable_adapters_are_refused(
    adapter: Path, tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = {
        str(tmp_path / "none"): "there is no such directory",
        str(adapter.parent): "whose last adapter is .*last",
    }
    for directory, why in messages.items():
        with pytest.raises(ConfigError, match=f"is not an adapter: .*{why}"):
            merge_adapter(MergeConfig(adapter=directory, output=str(tmp_path / "new")), SilentProgress())
    with pytest.raises(ConfigError, match=r"--base-model \./none: there is no such directory"):
        merge_adapter(
            MergeConfig(adapter=str(adapter), base_model="./none", output=str(tmp_path / "new")), SilentProgress()
        )
    with pytest.raises(ConfigError, match="is not an adapter: it is a full model"):
        merge_adapter(MergeConfig(adapter=tiny.model, output=str(tmp_path / "new")), SilentProgress())
    with pytest.raises(ConfigError, match="already exists and is not empty"):
        merge_adapter(MergeConfig(adapter=str(adapter), output=tiny.model), SilentProgress())

    def full(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("packtool.train.model.merge.copy_processor", full)
    with pytest.raises(StorageError, match="another --output"):
        merge_adapter(MergeConfig(adapter=str(adapter), output=str(tmp_path / "new")), SilentProgress())
    assert not list(tmp_path.iterdir())


def fewer_layers(tiny: TinyWorld, directory: Path) -> str:
    """peft would leave out what has no place there."""
    shutil.copytree(tiny.model, directory)
    model = AutoModelForImageTextToText.from_pretrained(tiny.model)
    del model.model.language_model.layers[1:]
    model.config.text_config.num_hidden_layers = 1
    model.save_pretrained(directory)
    return str(directory)


def truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize("damage_kind", ["fewer layers", "lacks a weight", "truncated"])
def test_adapters_that_do_not_fit_are_refused(damage_kind: str, adapter: Path, tiny: TinyWorld, tmp_path: Path) -> None:
    copy, base = Path(shutil.copytree(adapter, tmp_path / "adapter")), tiny.model
    weights = copy / "adapter_model.safetensors"
    if damage_kind == "fewer layers":
        base = fewer_layers(tiny, tmp_path / "base")
    elif damage_kind == "lacks a weight":
        save_file(dict(list(load_file(weights).items())[1:]), weights)
    else:
        truncated(weights)
    merge_config = MergeConfig(adapter=str(copy), base_model=base, output=str(tmp_path / "new"))
    with pytest.raises(MismatchError, match=r"the adapter in .* belongs to another|cannot be attached to"):
        merge_adapter(merge_config, SilentProgress())
    assert not (tmp_path / "new").exists()
