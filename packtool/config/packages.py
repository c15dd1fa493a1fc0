"""Optional packages that options need, checked before anything is read."""

from __future__ import annotations

import importlib.util

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


class PackageOptions:
    """Base class of settings with options that need optional packages."""

    def missing_packages(self) -> list[str]:
        """Return a message for each missing package of the given options, with the command that installs it."""
        value_of = vars(self).get  # None for an option that the command does not have
        # (option, modules of which one suffices, subject of the message, package to install)
        needs: list[tuple[str, tuple[str, ...], str, str]] = []
        bitsandbytes = (("bitsandbytes",), "bitsandbytes is", "bitsandbytes")
        if value_of("deepspeed") is not None:
            needs.append((f"--deepspeed {value_of('deepspeed')}", ("deepspeed",), "DeepSpeed is", "deepspeed"))
        if value_of("use_liger_kernel"):
            needs.append(("--use-liger-kernel true", ("liger_kernel",), "Liger's kernels are", "liger-kernel"))
        if value_of("quant_bits") is not None:
            needs.append((f"--quant-bits {value_of('quant_bits')}", *bitsandbytes))
        if (value_of("optim") or "").startswith(_BITSANDBYTES_OPTIMIZERS):
            needs.append((f"--optim {value_of('optim')}", *bitsandbytes))
        for option in ("qat", "fp8"):
            if value_of(option):
                needs.append((f"--{option} {str(value_of(option)).lower()}", ("torchao",), "torchao is", "torchao"))
        if value_of("optim") == "adam_mini":
            needs.append(("--optim adam_mini", ("adam_mini",), "adam-mini is", "adam-mini"))
        if value_of("chat_template") == "mistral-common":
            needs.append(("--chat-template mistral-common", ("mistral_common",), "mistral-common is", "mistral-common"))
        for tracker in value_of("report_to") or ():
            if tracker in TRACKERS:
                modules, package = TRACKERS[tracker]
                needs.append((f"--report-to {tracker}", modules, f"{package} is", package))
        if value_of("executor") == "ray":
            needs.append(("--executor ray", ("ray",), "Ray is", '"packtool[ray]"'))
        return [
            f"{option}: {subject} not installed: pip install {package}"
            for option, modules, subject, package in needs
            if not any(map(_is_installed, modules))
        ]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # imported by other means
        return True
