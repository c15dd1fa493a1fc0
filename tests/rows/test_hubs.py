"""Names of ms-swift's registry in errors about datasets that cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from packtool.errors import DataError
from packtool.rows.hubs import hub_files, modelscope_remedy


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (
            "AI-ModelScope/alpaca-gpt4-data-zh:default",
            "on the Hugging Face hub it is llm-wizard/alpaca-gpt4-data-zh; or",
        ),
        ("swift/self-cognition", "--use-hf false, or download it with modelscope download --dataset swift/self-cogn"),
    ],
)
def test_error_says_where_the_dataset_is(
    name: str, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError) as exc_info:
        hub_files(name)
    assert remedy in str(exc_info.value)


def test_remedy_is_only_for_names_of_the_registry() -> None:
    assert modelscope_remedy("AI-ModelScope/captcha-images").startswith(
        " AI-ModelScope/captcha-images is a ModelScope id: add --use-hf false"
    )
    assert not modelscope_remedy("owner/set")
