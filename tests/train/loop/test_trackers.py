"""Trackers of ``--report-to`` get the metric names of transformers' Trainer."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from transformers.integrations import integration_utils

from packtool.errors import ConfigError
from packtool.progress import SilentProgress
from packtool.train.loop.checks import _check_reports
from packtool.train.run import train
from tests.train.tiny import TinyWorld, read_metrics

_MODULES = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "trackio": "trackio",
}


def _logged(tracker: str, module: MagicMock) -> dict[int, dict[str, Any]]:
    """Return the metrics that a tracker received, by step."""
    metrics: dict[int, dict[str, Any]] = {}
    if tracker == "tensorboard":
        for call in module.SummaryWriter.return_value.add_scalar.call_args_list:
            name, value, step = call.args
            metrics.setdefault(step, {})[name] = value
    elif tracker == "mlflow":
        for call in module.log_metrics.call_args_list:
            metrics.setdefault(call.kwargs["step"], {}).update(call.kwargs["metrics"])
    else:
        for call in module.log.call_args_list:
            metrics.setdefault(call.args[0]["train/global_step"], {}).update(call.args[0])
    return metrics


@pytest.mark.parametrize("tracker", _MODULES)
def test_trackers_get_the_names_of_the_trainer(
    tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tracker: str
) -> None:
    module = MagicMock()
    module.__spec__, module.__version__ = ModuleSpec(_MODULES[tracker], None), "99.0"
    monkeypatch.setitem(sys.modules, _MODULES[tracker], module)
    monkeypatch.setitem(sys.modules, "wandb.sdk.lib.config_util", MagicMock(ConfigError=RuntimeError))
    module.utils.validation = MagicMock(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100)
    if tracker == "tensorboard":
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    train(tiny.config(tmp_path / "run", report_to=(tracker,), logging_steps=1, max_steps=2), SilentProgress())
    prefix = "" if tracker == "mlflow" else "train/"  # transformers' callback for MLflow adds none
    logged = _logged(tracker, module)
    for line in read_metrics(tmp_path / "run"):
        metrics = logged[line["step"]]
        names = ("loss", "grad_norm", "learning_rate", "epoch", "token_accuracy")
        assert {name: metrics[prefix + name] for name in names} == {name: line[name] for name in names}
        assert metrics[f"{prefix}samples_per_second"] > 0


def test_a_tracker_that_cannot_be_imported_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ModuleNotFoundError("No module named 'httpx'")

    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "trackio", fail)
    with pytest.raises(ConfigError, match=r"--report-to trackio: cannot use trackio: No module named 'httpx'"):
        _check_reports(SimpleNamespace(report_to=["trackio"]))  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["add_scalar", "flush"])
def test_an_error_of_a_tracker_names_it(
    tiny: TinyWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Not an unexpected error of packtool, whether the tracker fails when it starts or later."""
    module = MagicMock()
    module.__spec__ = ModuleSpec("tensorboardX", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    getattr(module.SummaryWriter.return_value, method).side_effect = OSError("server gone")
    config = tiny.config(tmp_path / "run", report_to=("tensorboard",), logging_steps=1, max_steps=2)
    with pytest.raises(ConfigError, match="--report-to tensorboard: OSError: server gone"):
        train(config, SilentProgress())
