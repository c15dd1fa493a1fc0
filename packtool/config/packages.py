"""Optional packages that options need, checked before anything is read."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import NamedTuple

# Trackers: modules, one of which is enough, and the package that provides the first.
TRACKERS: dict[str, tuple[tuple[str, ...], str]] = {
    "azure_ml": (("azureml",), "azureml-core"),
    "comet_ml": (("comet_ml",), "comet-ml"),
    "flyte": (("flytekit",), "flytekit"),
    "tensorboard": (("tensorboard", "tensorboardX"), "tensorboard"),
    **{
        name: ((name,), name)
        for name in ("clearml", "codecarbon", "dagshub", "dvclive", "mlflow", "neptune", "swanlab", "trackio", "wandb")
    },
}
_BITSANDBYTES_OPTIMIZERS = ("paged_", "adamw_bnb", "adamw_8bit", "ademamix", "lion_8bit", "rmsprop_bnb")


class _Need(NamedTuple):
    """A package that an option needs.

    Args:
        modules: modules of which one suffices.
        subject: subject and verb of the message "... not installed".
        package: package to install.
    """

    option: str
    modules: tuple[str, ...]
    subject: str
    package: str

    @classmethod
    def of_module(cls, option: str, module: str, package: str | None = None) -> _Need:
        """Return the need for a module, whose ``package`` has the same name by default."""
        return cls(option, (module,), f"{package or module} is", package or module)


class PackageOptions:
    """Base class of settings with options that need optional packages."""

    def missing_packages(self) -> list[str]:
        """Return a message for each missing package of the given options, with the command that installs it."""
        return [
            f"{need.option}: {need.subject} not installed: pip install {need.package}"
            for need in self._needs()
            if not any(map(_is_installed, need.modules))
        ]

    def _needs(self) -> Iterator[_Need]:
        """Yield the optional packages that the options need."""
        value_of = vars(self).get  # None for an option that the command does not have
        optim = value_of("optim") or ""
        if value_of("deepspeed") is not None:
            option = f"--deepspeed {value_of('deepspeed')}"
            yield _Need(option, ("deepspeed",), subject="DeepSpeed is", package="deepspeed")
        if value_of("use_liger_kernel"):
            option = "--use-liger-kernel true"
            yield _Need(option, ("liger_kernel",), subject="Liger's kernels are", package="liger-kernel")
        if value_of("quant_bits") is not None:
            yield _Need.of_module(f"--quant-bits {value_of('quant_bits')}", "bitsandbytes")
        if optim.startswith(_BITSANDBYTES_OPTIMIZERS):
            yield _Need.of_module(f"--optim {optim}", "bitsandbytes")
        for name in ("qat", "fp8"):
            if value_of(name):
                yield _Need.of_module(f"--{name} {str(value_of(name)).lower()}", "torchao")
        if optim == "adam_mini":
            yield _Need.of_module("--optim adam_mini", "adam_mini", package="adam-mini")
        if value_of("chat_template") == "mistral-common":
            yield _Need.of_module("--chat-template mistral-common", "mistral_common", package="mistral-common")
        for tracker in value_of("report_to") or ():
            if tracker in TRACKERS:
                modules, package = TRACKERS[tracker]  # one of the modules suffices
                yield _Need(f"--report-to {tracker}", modules, subject=f"{package} is", package=package)
        if value_of("executor") == "ray":
            yield _Need("--executor ray", ("ray",), subject="Ray is", package='"packtool[ray]"')


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # imported by other means
        return True
