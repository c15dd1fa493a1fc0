"""Optional packages that options need, checked before anything is read."""

from __future__ import annotations

import importlib.util
import re

from packtool.config.settings import flag

# Trackers: modules, one of which is enough, and the package that provides the first.
TRACKERS: dict[str, tuple[tuple[str, ...], str]] = {
    "azure_ml": (("azureml",), "azureml-core"),
    "comet_ml": (("comet_ml",), "comet-ml"),
    "flyte": (("flytekit",), "flytekit"),
    "tensorboard": (("tensorboard", "tensorboardX"), "tensorboard"),
    **{
        name: ((name,), name)
        for name in ("clearml", "codecarbon", "dagshub", "dvclive", "mlflow", "neptune", "trackio", "wandb")
    },
    "swanlab": (("swanlab",), "'swanlab<0.8'"),  # transformers 5.23 cannot start newer versions
}
_BITSANDBYTES_OPTIMIZERS = "(paged_|adamw_bnb|adamw_8bit|ademamix|lion_8bit|rmsprop_bnb).*"


# Options that need a package: name, values as a regular expression (None for any), module, subject of the message "...
# not installed", package to install.
_NEEDS = (
    ("deepspeed", None, "deepspeed", "DeepSpeed is", "deepspeed"),
    ("use_liger_kernel", None, "liger_kernel", "Liger's kernels are", "liger-kernel"),
    ("quant_bits", None, "bitsandbytes", "bitsandbytes is", "bitsandbytes"),
    ("optim", _BITSANDBYTES_OPTIMIZERS, "bitsandbytes", "bitsandbytes is", "bitsandbytes"),
    ("qat", None, "torchao", "torchao is", "torchao"),
    ("fp8", None, "torchao", "torchao is", "torchao"),
    ("optim", "adam_mini", "adam_mini", "adam-mini is", "adam-mini"),
    ("chat_template", "mistral-common", "mistral_common", "mistral-common is", "mistral-common"),
    ("near_duplicates", None, "datasketch", "datasketch is", "datasketch"),
    ("executor", "ray", "ray", "Ray is", '"packtool[ray]"'),
)


class PackageOptions:
    """Base class of settings with options that need optional packages."""

    def missing_packages(self) -> list[str]:
        """Return a message for each missing package of the given options, with the command that installs it."""
        messages = []
        for name, pattern, module, subject, package in _NEEDS:
            value = getattr(self, name, None)
            is_needed = re.fullmatch(pattern, value or "") if pattern else value not in (None, False)
            if is_needed and not _is_installed(module):
                text = str(value).lower() if isinstance(value, bool) else value
                messages.append(f"{flag(name)} {text}: {subject} not installed: pip install {package}")
        for tracker in getattr(self, "report_to", ()):
            modules, package = TRACKERS.get(tracker, ((), ""))
            if modules and not any(map(_is_installed, modules)):
                messages.append(f"--report-to {tracker}: {package} is not installed: pip install {package}")
        return messages


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # imported by other means
        return True
