"""Lock files: everything that determines the plan of a run, as JSON with one value per line.

``packtool plan --lock FILE`` writes one, and ``packtool train --locked FILE`` refuses a run that differs, by name.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from packtool import storage
from packtool.cache.evaluation_file import plain_json
from packtool.cache.manifest import PATH_SETTINGS, Manifest
from packtool.config.plan import PlanConfig
from packtool.config.settings import load_json
from packtool.config.train import TrainConfig
from packtool.constants import VERSION
from packtool.errors import ConfigError, MismatchError
from packtool.train.prepare.checkpoint import BatchShape
from packtool.train.prepare.inputs import Inputs
from packtool.train.prepare.result import non_default_options

_FORMAT = 1
_PACKAGES = ("accelerate", "numpy", "peft", "tokenizers", "torch", "transformers")
_KERNEL_PACKAGES = (
    *("bitsandbytes", "causal-conv1d", "deepspeed", "flash-attn", "flash-attn-3", "flash-linear-attention"),
    *("kernels", "liger-kernel", "torchao", "triton"),
)
_MODEL_FILE = re.compile(r".*\.(json|jinja|txt|model|safetensors|bin)")
_WEIGHT_FILE = re.compile(r".*\.(safetensors|bin)")
# Options that do not change a run, are recorded in other sections, or only packtool plan or packtool train has.
_LEFT_OUT = {
    *("cache_dir", "cache_dir_size", "cached_dataset", "gradient_checkpointing", "memory_budget", "mix", "model"),
    *("packing_num_proc", "plan", "verify_cache", "vit_gradient_checkpointing"),
}
_MAX_SHOWN = 20  # differences in an error
_SHOWN_DIGITS = 12  # of a SHA-256


def lock_file_content(inputs: Inputs, batch_shape: BatchShape) -> dict[str, Any]:
    """Return everything that determines the steps of a run, for a lock file: sections, each with values by name.

    A later run with the same content trains the same steps. ``batch_shape``: numbers of ranks and micro-batches.
    """
    config, reader, files = inputs.config, inputs.reader, inputs.files
    assert reader is not None, "a lock file needs caches"
    if files is None:
        raise ConfigError(
            "packtool plan --lock: the model of the caches cannot be read here", "Give --model.", code="M001"
        )
    content: dict[str, Any] = {
        "format": _FORMAT,
        "versions": {"packtool": VERSION, "python": platform.python_version(), **_versions(_PACKAGES)},
        "kernels": _versions(_KERNEL_PACKAGES),
        "options": _options(config),
        "model": _model_digests(files.directory),
        "caches": {str(number): _cache_values(manifest) for number, manifest in enumerate(reader.manifests)},
        "plan": _plan_values(inputs, batch_shape),
    }
    if config.mix is not None:
        content["mix"] = hashlib.sha256(storage.read_bytes(config.mix)).hexdigest()
    return content


def _plan_values(inputs: Inputs, batch_shape: BatchShape) -> dict[str, Any]:
    """Return fingerprints of packs and steps, and the ranks and micro-batches that they are assigned to."""
    packs, steps = inputs.fingerprints(batch_shape)
    return {"packs": packs, "steps": steps, **batch_shape._asdict()}


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _options(config: PlanConfig | TrainConfig) -> dict[str, Any]:
    """Return the options other than defaults that ``packtool plan`` and ``packtool train`` have in common."""
    common = set(PlanConfig.__dataclass_fields__) & set(TrainConfig.__dataclass_fields__) - _LEFT_OUT
    return {name: plain_json(value) for name, value in non_default_options(config).items() if name in common}


def _model_digests(directory: str) -> dict[str, str]:
    """Return the SHA-256 of the model's files by name; reads the weights completely."""
    digests = {}
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if _MODEL_FILE.fullmatch(name) and os.path.isfile(path):
            with open(path, "rb") as file:
                digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _cache_values(manifest: Manifest) -> dict[str, Any]:
    """Return fingerprint, settings and digests of rows of a cache, without paths that differ between machines."""
    identity = manifest.identity
    settings = {name: value for name, value in identity.spec.items() if name not in PATH_SETTINGS}
    num_same_name = Counter(storage.name(source.path) for source in manifest.sources)
    rows = {}
    for source in manifest.sources:
        name = storage.name(source.path)
        rows[name if num_same_name[name] == 1 else source.path] = source.digest
    return {
        "fingerprint": manifest.fingerprint,
        "settings": plain_json(settings),
        "tokenizer": identity.tokenizer_hash,
        "template": identity.template_hash,
        "processor": identity.processor_hash,
        "rows": rows,
    }


def write_lock(path: str, lock: Mapping[str, Any]) -> None:
    """Write a lock file with sorted keys."""
    storage.publish(path, (json.dumps(lock, indent=2, sort_keys=True) + "\n").encode())


def read_lock(path: str) -> dict[str, Any]:
    """Read a lock file; MismatchError if it is damaged, or a newer packtool wrote it."""
    remedy = "Write it again with packtool plan --lock."
    try:
        lock = load_json(storage.read_bytes(path))
    except ValueError as error:
        raise MismatchError(f"--locked {path} is not a lock file: {error}", remedy, code="P004") from error
    file_format = lock.get("format") if isinstance(lock, dict) else None
    if not isinstance(file_format, int):
        raise MismatchError(f"--locked {path} is not a lock file: it has no format", remedy, code="P004")
    if file_format != _FORMAT:
        problem = f"--locked {path} has format {file_format}, this packtool reads format {_FORMAT}"
        raise MismatchError(problem, f"Use the packtool that wrote it. {remedy}", code="P004")
    return lock


def check_locked(path: str, inputs: Inputs, batch_shape: BatchShape) -> None:
    """Raise a MismatchError with every difference between a run and its lock file."""
    locked = dict(_flat_values("", read_lock(path)))
    present = dict(_flat_values("", lock_file_content(inputs, batch_shape)))
    if not any(_is_weight(name) for name in locked):  # written before the weights were downloaded
        present = {name: value for name, value in present.items() if not _is_weight(name)}
    names = sorted(name for name in locked.keys() | present.keys() if locked.get(name) != present.get(name))
    if not names:
        return
    file = storage.name(path)
    lines = [
        f"  - {name}: {_shown(locked.get(name))} in {file}, {_shown(present.get(name))} in this run" for name in names
    ]
    if len(lines) > _MAX_SHOWN:
        lines[_MAX_SHOWN:] = [f"  and {len(lines) - _MAX_SHOWN} more"]
    remedy = "Restore these values, or accept them: write the file again with packtool plan --lock."
    raise MismatchError("\n".join([f"--locked {path}: this run differs:", *lines]), remedy, code="P003")


def _flat_values(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of the values in nested sections."""
    if not isinstance(value, Mapping):
        yield prefix, value
        return
    for name, item in value.items():
        yield from _flat_values(f"{prefix}.{name}" if prefix else str(name), item)


def _is_weight(name: str) -> bool:
    return name.startswith("model.") and _WEIGHT_FILE.fullmatch(name) is not None


def _shown(value: Any) -> str:
    """Return a value for an error; None is a value that is missing, or the default of an option."""
    text = "nothing" if value is None else str(value)
    return text[:_SHOWN_DIGITS] if re.fullmatch("[0-9a-f]{32,}", text) else text
