"""``packtool verify`` on the command line: the report, its JSON, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3NextForCausalLM, Qwen3VLConfig

import packtool
from packtool.attention.choose import KERNELS
from packtool.attention.kernel import Varlen
from packtool.cli.main import run
from packtool.errors import EXIT_MISMATCH, EXIT_OK, EXIT_USAGE
from tests.attention.hybrids import hybrid_config
from tests.train.conftest import tiny as tiny
from tests.train.tiny import TinyWorld, export_rows


def words(tiny: TinyWorld, *more: str) -> list[str]:
    arguments = ["verify", "--model", tiny.model, "--cached-dataset", tiny.cache, "--packing_length", "256"]
    return [*arguments, "--num-packs", "1", *more]


def test_the_report(tiny: TinyWorld, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words(tiny)) == EXIT_OK
    message = capsys.readouterr().out
    assert "packed samples give the same outputs as unpacked ones" in message
    for word in ("affects no other", "logits", "loss", "gradients", "allowed", "float32", "sdpa", "ok"):
        assert word in message


def test_a_page_of_the_report(
    tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, trained = str(tmp_path / "page.html"), str(tmp_path / "trained.html")
    assert run(words(tiny, "--html", page)) == EXIT_OK
    assert f"written: {page}" in capsys.readouterr().out
    text = Path(page).read_text()
    verdict = "packed samples give the same outputs as unpacked ones"
    for word in (verdict, "4 of 4", "largest error", "This page was made by"):
        assert word in text
    assert text.count(">ok<") == 4
    packtool.verify(model=tiny.model, cached_dataset=tiny.cache, trajectory=2, samples_per_step=4, html=trained)
    text = Path(trained).read_text()
    assert "packed steps train the same as unpacked steps" in text
    assert text.count('data-name="loss packed"') == 2
    # A leak is on the page, too.
    attend = KERNELS["sdpa"].attend
    leak = lambda q, k, v, varlen, **kwargs: attend(q, k, v, Varlen.of_lengths([len(q)]), **kwargs)  # noqa: E731
    monkeypatch.setattr(KERNELS["sdpa"], "attend", leak)
    assert run(words(tiny, "--html", page, "--json")) == EXIT_MISMATCH
    assert "0 of 4" in Path(page).read_text()
    assert "packed samples leak: changing sample 0 (" in Path(page).read_text()


def test_one_json_document(tiny: TinyWorld, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words(tiny, "--json", "--attn-impl", "sdpa")) == EXIT_OK
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is True
    assert document["attention"] == "sdpa"
    assert [check["name"] for check in document["checks"]] == ["isolation", "logits", "loss", "gradients"]
    assert all(check["error"] <= check["allowed"] and check["passed"] for check in document["checks"])


@pytest.mark.parametrize("as_json", [False, True])
def test_a_leak_is_described_and_exits_with_4(
    as_json: bool, tiny: TinyWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With attention that ignores sample boundaries."""
    attend = KERNELS["sdpa"].attend

    def leak(q: Any, k: Any, v: Any, varlen: Varlen, **kwargs: Any) -> Any:
        return attend(q, k, v, Varlen.of_lengths([len(q)]), **kwargs)

    monkeypatch.setattr(KERNELS["sdpa"], "attend", leak)
    assert run(words(tiny, *(["--json"] if as_json else []))) == EXIT_MISMATCH
    message = capsys.readouterr()
    assert "packed samples leak: changing sample 0 (" in message.err
    assert "changes the logits of sample" in message.err
    assert "--packing false" in message.err
    if as_json:
        document = json.loads(message.out)
        assert document["passed"] is False
        assert document["checks"][0]["where"].startswith("changing sample 0")
    else:
        assert "NOT" in message.out
        assert message.out.count("FAILED") == 4


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--attn-impl", "varlen"], EXIT_USAGE, "CUDA"),
        (["--attn-impl", "fastest"], EXIT_USAGE, "none of auto, sdpa"),
        (["--packing-length", "1"], EXIT_USAGE, "is below the minimum of 2"),
        (["--torch-dtype", "float16"], EXIT_USAGE, "needs a GPU"),
        (["--cached-dataset", "nowhere"], EXIT_MISMATCH, "no finished cache"),
        (["--cached-dataset", "nowhere#20%"], EXIT_MISMATCH, "this command reads whole caches"),
    ],
)
def test_wrong_options(
    more: list[str], code: int, message: str, tiny: TinyWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words(tiny, *more)) == code
    assert message in capsys.readouterr().err


def test_hybrid_model_is_isolated(tiny: TinyWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Qwen3-Next with the same tokenizer and template, on the rows without images."""
    vocabulary = Qwen3VLConfig.from_pretrained(tiny.model).text_config.vocab_size
    config = hybrid_config("qwen3_next")
    config.vocab_size = vocabulary
    torch.manual_seed(0)
    Qwen3NextForCausalLM(config).save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "model" / name).write_text((Path(tiny.model) / name).read_text())
    rows = [row for row in json.loads(Path(tiny.rows).read_text()) if not row["images"]]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    hybrid = TinyWorld(str(tmp_path / "model"), str(tmp_path / "cache"), str(tmp_path / "rows.json"))
    export_rows(hybrid, hybrid.cache)
    assert run(words(hybrid, "--json")) == EXIT_OK
    assert json.loads(capsys.readouterr().out)["passed"] is True


def test_a_trajectory(tiny: TinyWorld, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "--model", tiny.model, "--cached-dataset", tiny.cache, "--packing-length", "128"]
    arguments += ["--trajectory", "1", "--samples-per-step", "6"]
    assert run(arguments) == EXIT_OK
    message = capsys.readouterr().out
    for word in ("loss packed", "loss unpacked", "packed steps train the same as unpacked steps", "final weights"):
        assert word in message
    assert run([*arguments, "--json"]) == EXIT_OK
    document = json.loads(capsys.readouterr().out)
    (step,) = document["trajectory"]
    assert abs(step["packed"] - step["unpacked"]) < 1e-5
    assert step["num_samples"] == 6
    assert [check["name"] for check in document["checks"]] == ["losses", "weights"]
