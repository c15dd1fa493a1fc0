"""Packages that options need are found missing at once, together with all else that is wrong."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packtool.cli.main import run
from packtool.config import packages

SPLIT = "requires a val split: give --split-dataset-ratio 0.01, or --val-dataset"
WRONG = {
    "--deepspeed zero2": "DeepSpeed is not installed: pip install deepspeed",
    "--use-liger-kernel true": "Liger's kernels are not installed: pip install liger-kernel",
    "--quant-bits 4": "bitsandbytes is not installed: pip install bitsandbytes",
    "--optim paged_adamw_8bit": "bitsandbytes is not installed: pip install bitsandbytes",
    "--report-to tensorboard": "tensorboard is not installed: pip install tensorboard",
    "--report-to comet_ml": "comet-ml is not installed: pip install comet-ml",
    "--eval-strategy steps": SPLIT,
    "--load-best-model-at-end true": SPLIT,
    "--early-stop-interval 3": SPLIT,
    "--num-train-epochs 0": "trains nothing",
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(options=st.sets(st.sampled_from(sorted(WRONG)), min_size=1))
def test_missing_packages_are_reported_at_once_before_rows_are_read(
    options: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "_is_installed", lambda module: False)
    words = [word for option in sorted(options) for word in option.split()]
    # Reading would find that there are no such files.
    assert run(["train", "--model", "no-model", "--dataset", "no-rows.jsonl", "--output-dir", "o", *words]) == 2
    message = capsys.readouterr().err
    for option in options:
        name = option.removesuffix(" true") if option.startswith("--load") else option
        assert any(line.lstrip(" -").startswith(name.lstrip("-")) and WRONG[option] in line for line in _lines(message))


def _lines(text: str) -> list[str]:
    return text.replace("packtool: error: ", "").splitlines()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("export --model m --dataset r --max-length 8 --output-dir o --executor ray", "--executor ray: Ray is not"),
        ("export --model m --dataset r --output-dir o --near-duplicates 0.8", "0.8: datasketch is not installed"),
        ("eval --model m --cached-dataset c --output o.parquet --quant-bits 8", "--quant-bits 8: bitsandbytes is not"),
    ],
)
def test_missing_packages_of_export_and_eval(
    command: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(packages, "_is_installed", lambda module: False)
    assert run(command.split()) == 2
    assert message in capsys.readouterr().err


def test_installed_packages_are_found() -> None:
    assert packages._is_installed("pytest")
    assert not packages._is_installed("no_such_package_anywhere")
