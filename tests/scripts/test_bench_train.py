"""The benchmark of training: every way trains the same epoch, and the peer computes the same loss."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

from packtool.batch.collate import collate_padded
from packtool.cache.reader import CacheReader
from packtool.train.model.loss import target_losses
from tests.cli.narrow_model import make_narrow_model
from tests.scripts.loading import load_script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    torch.set_num_threads(1)
    return load_script("bench_train")


def test_quick_run(bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "make_demo_model", lambda directory, seed: make_narrow_model(Path(directory)))
    bench.main(["--quick"])
    out = capsys.readouterr().out
    row = r"^(packed|padded.*|Trainer, TRL's packing) +([\d.]+)% +(\d+) +(\d+) +[\d,]+(?:  ([\d.]+) \(.*\) +[\d.]+)?$"
    rows = {match[1].strip(): match for match in re.finditer(row, out, re.MULTILINE)}
    assert len(rows) == 5
    assert next(iter(rows)) == "packed"
    assert [match[5] is None for match in rows.values()] == [True, False, False, False, False]
    fill = {name: float(match[2]) for name, match in rows.items()}
    padded, ungrouped, grouped = (name for name in rows if name.startswith("padded"))
    assert fill[padded] < fill[grouped] < fill["packed"]
    assert rows["packed"][3] == rows["Trainer, TRL's packing"][3]
    assert rows[padded][3] == rows[grouped][3]
    assert int(rows[ungrouped][3]) >= int(rows[ungrouped][4])
    for name in ("planning", "collating", "waiting for data"):
        assert re.search(rf"^  {name} +[\d.]+%", out, re.MULTILINE)
    for name in ("logits of all tokens", "logits of targets", "losses in the head"):
        assert re.search(rf"^  {name} +[\d,]+ MiB", out, re.MULTILINE)
    for variant in ("without", "with --media-cache"):
        assert re.search(rf"^{variant} +[\d.]+% +[\d.]+% +[\d.]+ +[\d.]+$", out, re.MULTILINE)
    assert re.search(r"^second epoch: [\d.]+ \(.*\) times as fast$", out, re.MULTILINE)
    assert re.search(r"of the FLOPs: head \d+%, vision \d+%; of a Qwen3-VL-2B's", out)


def test_the_peer_keeps_samples_apart(bench: ModuleType, tmp_path: Path) -> None:
    from scripts._trl_packing import FlatteningCollator

    setting, _ = bench.make_small(tmp_path)
    reader = CacheReader.open([str(setting.cache)])
    spec = bench.spec_of(bench.prepared(setting))
    samples = [reader.sample(sample_index) for sample_index in range(4)]
    model: Any = AutoModelForImageTextToText.from_pretrained(setting.model, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    with torch.no_grad():
        peer_loss = model(**FlatteningCollator(spec)([samples])).loss
        single_batches = [collate_padded([sample], spec) for sample in samples]
        losses = [target_losses(model, batch, label_logits_only=False).weighted_sum() for batch in single_batches]
    expected = torch.stack(losses).sum() / sum(batch.num_target_tokens for batch in single_batches)
    torch.testing.assert_close(peer_loss, expected)


def test_packs_of_the_peer() -> None:
    from scripts._trl_packing import pack_best_fit_decreasing

    assert pack_best_fit_decreasing([3, 9, 5, 2, 4], 10) == [[1], [2, 4], [0, 3]]


def test_reduced_model_is_consistent(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts import _reduced_model

    size = 1024
    monkeypatch.setattr(_reduced_model, "VOCABULARY", size)
    _reduced_model.reduce_model(data / "tokenizers" / "qwen3-vl", tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == size
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What, 你好?<|im_end|>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert max(ids) < size
    config = AutoConfig.from_pretrained(tmp_path / "model")
    for name, token in (
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ):
        assert getattr(config, name) == tokenizer.token_to_id(token)
    assert config.text_config.eos_token_id == tokenizer.token_to_id("<|im_end|>")
