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
_OF_BITSANDBYTES = ("paged_", "adamw_bnb", "adamw_8bit", "ademamix", "lion_8bit", "rmsprop_bnb")


class PackageOptions:
    """Base class of settings with options that need optional packages."""

    def missing_packages(self) -> list[str]:
        """Return a message for each missing package of the given options, with the command that installs it."""
        options = ("deepspeed", "use_liger_kernel", "quant_bits", "optim", "report_to", "executor")
        deepspeed, liger, quant_bits, optim, report_to, executor = (getattr(self, name, None) for name in options)
        bnb = (("bitsandbytes",), "bitsandbytes is", "bitsandbytes")
        trackers = [(name, *TRACKERS[name]) for name in report_to or () if name in TRACKERS]
        needs: list[tuple[bool, str, tuple[str, ...], str, str]] = [
            (deepspeed is not None, f"--deepspeed {deepspeed}", ("deepspeed",), "DeepSpeed is", "deepspeed"),
            (bool(liger), "--use-liger-kernel true", ("liger_kernel",), "Liger's kernels are", "liger-kernel"),
            (quant_bits is not None, f"--quant-bits {quant_bits}", *bnb),
            ((optim or "").startswith(_OF_BITSANDBYTES), f"--optim {optim}", *bnb),
            *((True, f"--report-to {name}", modules, f"{package} is", package) for name, modules, package in trackers),
            (executor == "ray", "--executor ray", ("ray",), "Ray is", '"packtool[ray]"'),
        ]
        return [
            f"{option}: {name} not installed: pip install {package}"
            for is_given, option, modules, name, package in needs
            if is_given and not any(map(_is_installed, modules))
        ]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # imported by other means
        return True
