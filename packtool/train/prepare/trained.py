"""A trained model: full weights, or an adapter of a base model."""

from __future__ import annotations

import os
from dataclasses import dataclass

from packtool.config.settings import load_json
from packtool.errors import ConfigError, MismatchError
from packtool.train.prepare.output_dir import LAST

ADAPTER_FILE = "adapter_config.json"


@dataclass(frozen=True)
class TrainedModel:
    """Directories of a trained model: its base (or hub id), with the processor; and its adapter, None without one."""

    base: str
    adapter: str | None

    @classmethod
    def find(cls, model: str, base_model: str | None = None) -> TrainedModel:
        """Find the weights that ``--model`` names: a full model, or an adapter and the base model that it belongs to.

        ``base_model`` replaces the base model that the adapter's settings name. Raises a ConfigError or MismatchError
        if it is not needed, or if the base model does not exist.
        """
        if not is_adapter(model):
            if base_model is not None:
                raise ConfigError(
                    f"--base-model {base_model}: {model} is not an adapter: it has no {ADAPTER_FILE}", "Leave it out."
                )
            return cls(model, adapter=None)
        if base_model is not None:
            if _is_missing_directory(base_model):
                raise ConfigError(f"--base-model {base_model}: there is no such directory")
            return cls(base_model, adapter=model)

        settings_path = os.path.join(model, ADAPTER_FILE)
        try:
            with open(settings_path, encoding="utf-8") as file:
                recorded_base = load_json(file.read())["base_model_name_or_path"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MismatchError(
                f"{settings_path} does not name a base model: {error!r}", "Save the adapter again."
            ) from error
        # Adapters of older runs may name a directory relative to where the run was started.
        if not isinstance(recorded_base, str) or _is_missing_directory(recorded_base):
            raise MismatchError(
                f"{settings_path} names {recorded_base!r} as its base model, which does not exist",
                "Give its new directory with --base-model DIR, or restore it.",
            )
        return cls(recorded_base, adapter=model)


def is_adapter(directory: str) -> bool:
    """Return whether a directory holds an adapter."""
    return os.path.exists(os.path.join(directory, ADAPTER_FILE))


def describe_non_adapter(directory: str) -> str:
    """A description of a directory without an adapter, for errors."""
    last = os.path.join(directory, LAST)
    if not os.path.isdir(directory):
        return "there is no such directory"
    if is_adapter(last):
        return f"it is the output of a run, whose last adapter is {last}"
    if os.path.exists(os.path.join(directory, "config.json")):
        return "it is a full model"
    return f"it has no {ADAPTER_FILE}"


def _is_missing_directory(base: str) -> bool:
    """Return whether a local directory is missing; ``owner/name`` may be an id of the hub."""
    is_local = os.path.isabs(base) or base.startswith(".") or base.count("/") != 1
    return is_local and not os.path.isdir(base)
