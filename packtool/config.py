"""Settings: frozen dataclasses, and the one place where flags, environment and YAML become them.

A field is declared once, here, with its help; the command line builds its options from the same declarations. A value
is taken from the first of: a flag, ``--set key=value``, an environment variable, the file given with ``--config``, the
default. Every mistake found is reported in one ``ConfigError``.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, Literal, TypeVar, Union

import yaml

from packtool.errors import ConfigError

T = TypeVar("T")
REQUIRED: Any = MISSING

TruncationStrategy = Literal["delete", "left", "raise"]
TrainType = Literal["lora", "full"]
DType = Literal["auto", "float32", "bfloat16", "float16"]


def option(
    default: Any,
    help: str,
    *,
    panel: str = "Options",
    env: str | None = None,
    aliases: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    flag: bool = True,
) -> Any:
    """Declare a setting.

    Args:
        default: its value when nobody gives one, or ``REQUIRED``.
        help: one line for ``--help`` and the reference.
        panel: heading under which ``--help`` shows it.
        env: environment variable that sets it too.
        aliases: other option names (``--tuner-type`` for ``--train-type``).
        minimum, maximum: inclusive bounds of a number.
        flag: False for settings that only YAML and ``--set`` can give.
    """
    metadata = {
        "help": help,
        "panel": panel,
        "env": env,
        "aliases": aliases,
        "minimum": minimum,
        "maximum": maximum,
        "flag": flag,
    }
    return (
        dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
        if _unhashable(default)
        else (dataclasses.field(default=default, metadata=metadata))
    )


def _unhashable(default: Any) -> bool:
    return isinstance(default, dict)


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Limits on a picture's size. Unset ones come from the model's processor settings.

    The environment variables are the ones of the Qwen processors: N tokens are N x (patch x merge)^2 pixels.
    """

    max_pixels: int | None = option(
        None, "Most pixels of a picture; larger ones are shrunk.", panel="Pictures", env="MAX_PIXELS", minimum=1
    )
    min_pixels: int | None = option(
        None, "Fewest pixels of a picture; smaller ones are enlarged.", panel="Pictures", env="MIN_PIXELS", minimum=1
    )
    image_max_token_num: int | None = option(
        None, "Most tokens of a picture.", panel="Pictures", env="IMAGE_MAX_TOKEN_NUM", minimum=1
    )
    image_min_token_num: int | None = option(
        None, "Fewest tokens of a picture.", panel="Pictures", env="IMAGE_MIN_TOKEN_NUM", minimum=1
    )
    resize: int = option(
        0,
        "Only 0, ms-swift's 'keep the pictures as they are', is known; limits are set with --max-pixels.",
        panel="Pictures",
        minimum=0,
        maximum=0,
    )


@dataclass(frozen=True, kw_only=True)
class EncodeSpec(ImageOptions):
    """Everything that decides what a row becomes: two exports with the same spec write the same tokens."""

    model: str = option(
        REQUIRED, "Directory (or hub id) of the model: only its tokenizer, processor settings and config are read."
    )
    max_length: int = option(REQUIRED, "Most tokens of a sample.", minimum=2)
    truncation_strategy: TruncationStrategy = option(
        "delete", "What becomes of a longer row: left out, cut on the left with its media kept whole, or an error."
    )


@dataclass(frozen=True, kw_only=True)
class ExportConfig(EncodeSpec):
    """What ``packtool export`` needs to know."""

    dataset: tuple[str, ...] = option(REQUIRED, "Files of rows, .json or .jsonl; several may follow.")
    output_dir: str = option(REQUIRED, "Directory that becomes the cache.")
    split_dataset_ratio: float = option(
        0.0, "Share of the rows that goes to the val split.", minimum=0.0, maximum=0.999
    )
    seed: int = option(42, "Seed of the split.", minimum=0)
    strict: bool = option(False, "Stop at the first row that cannot be used, with exit code 3.")
    dataset_num_proc: int = option(1, "Worker processes; the output is the same for any number.", minimum=1)
    rows_per_shard: int | None = option(
        None, "Rows that one shard holds; by default total/64, between 256 and 16384.", minimum=1
    )
    to_cached_dataset: bool = option(True, "Accepted for ms-swift's sake: export always writes a cached dataset.")
    overwrite: bool = option(False, "Replace what is in the output directory.")
    dry_run: bool = option(False, "Encode and count, but write nothing.")

    @property
    def encode_spec(self) -> EncodeSpec:
        """The part that decides what a row becomes."""
        return EncodeSpec(**{field.name: getattr(self, field.name) for field in dataclasses.fields(EncodeSpec)})

    def problems(self) -> list[str]:
        """Mistakes that only show when settings are seen together."""
        found = image_limit_problems(self)
        if not self.to_cached_dataset:
            found.append("--to-cached-dataset false: export does nothing but write a cached dataset; leave it out")
        return found


@dataclass(frozen=True, kw_only=True)
class TrainConfig(ImageOptions):
    """What ``packtool train`` needs to know."""

    model: str = option(REQUIRED, "Directory (or hub id) of the model.", panel="Model and data")
    cached_dataset: tuple[str, ...] = option(
        REQUIRED, "Caches that packtool export made; several may follow.", panel="Model and data"
    )
    output_dir: str = option(REQUIRED, "Directory for checkpoints and figures.", panel="Model and data")
    torch_dtype: DType = option("auto", "Precision of the weights; auto is the checkpoint's.", panel="Model and data")

    packing: bool = option(False, "Pack samples without padding.", panel="Packing")
    max_length: int | None = option(
        None, "Samples longer than this are left out and counted; by default the export's.", panel="Packing", minimum=2
    )
    packing_length: int | None = option(
        None, "Tokens that a pack holds at most; by default --max-length.", panel="Packing", minimum=2
    )
    packing_num_proc: int = option(
        1,
        "Accepted for ms-swift's sake: packing 40 million lengths takes seconds in one process.",
        panel="Packing",
        minimum=1,
    )

    train_type: TrainType = option(
        "lora", "Low-rank adapters, or all weights.", panel="Training", aliases=("tuner_type",)
    )
    num_train_epochs: float = option(1.0, "Times that every sample is seen.", panel="Training", minimum=0.0)
    max_steps: int | None = option(None, "Stop after so many optimizer steps.", panel="Training", minimum=1)
    per_device_train_batch_size: int = option(
        1, "Packs (or padded rows) of a micro-batch.", panel="Training", minimum=1
    )
    gradient_accumulation_steps: int = option(
        1, "Micro-batches of an optimizer step on each rank.", panel="Training", minimum=1
    )
    learning_rate: float | None = option(
        None, "Peak learning rate; by default 1e-4 with lora and 1e-5 with full.", panel="Training", minimum=0.0
    )
    weight_decay: float = option(0.1, "AdamW's weight decay.", panel="Training", minimum=0.0)
    warmup_ratio: float = option(
        0.05, "Share of the steps in which the learning rate rises.", panel="Training", minimum=0.0, maximum=1.0
    )
    lr_scheduler_type: str = option(
        "cosine", "Schedule of the learning rate, by transformers' names.", panel="Training"
    )
    max_grad_norm: float = option(
        1.0, "Gradient norm above which gradients are scaled down.", panel="Training", minimum=0.0
    )
    gradient_checkpointing: bool = option(False, "Recompute activations to save memory.", panel="Training")
    seed: int = option(42, "Seed of packing, order and adapters.", panel="Training", minimum=0)

    lora_rank: int = option(8, "Rank of the adapters.", panel="Parameters", minimum=1)
    lora_alpha: int = option(32, "Scale of the adapters.", panel="Parameters", minimum=1)
    lora_dropout: float = option(0.05, "Dropout before the adapters.", panel="Parameters", minimum=0.0, maximum=1.0)
    target_modules: tuple[str, ...] = option(
        ("all-linear",), "Modules that get adapters: all-linear or names.", panel="Parameters"
    )
    freeze_vit: bool = option(True, "Keep the vision tower as it is.", panel="Parameters")
    freeze_aligner: bool = option(True, "Keep the projection from vision to text as it is.", panel="Parameters")
    freeze_llm: bool = option(False, "Keep the language model as it is.", panel="Parameters")

    logging_steps: int = option(5, "Optimizer steps between two log lines.", panel="Run", minimum=1)
    save_steps: int = option(500, "Optimizer steps between two checkpoints.", panel="Run", minimum=1)
    save_total_limit: int | None = option(None, "Checkpoints to keep.", panel="Run", minimum=1)
    dataloader_num_workers: int = option(
        1, "Processes a rank that load pictures ahead of the step.", panel="Run", minimum=0
    )
    resume_from_checkpoint: str | None = option(
        None, "true for the newest checkpoint in --output-dir, or the directory of one.", panel="Run"
    )
    dry_run: bool = option(False, "Plan, check and print, but do not train.", panel="Run")
    training: Mapping[str, Any] = option(
        {},
        "Further fields of transformers' TrainingArguments, as --set training.name=value.",
        flag=False,
    )

    def problems(self) -> list[str]:
        """Mistakes that only show when settings are seen together."""
        found = image_limit_problems(self)
        if self.packing_length is not None and self.max_length is not None and self.packing_length < self.max_length:
            found.append(
                f"--packing-length {self.packing_length} is smaller than --max-length {self.max_length}: "
                "a sample could be longer than a pack; raise the one or lower the other"
            )
        if self.freeze_vit and self.freeze_aligner and self.freeze_llm:
            found.append("--freeze-vit, --freeze-aligner and --freeze-llm together leave nothing to train")
        return found

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate, with the default that goes with the train type."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 1e-4 if self.train_type == "lora" else 1e-5


def image_limit_problems(options: ImageOptions) -> list[str]:
    """Limits that contradict each other."""
    found = []
    for kind, low, high in (
        ("pixels", options.min_pixels, options.max_pixels),
        ("tokens", options.image_min_token_num, options.image_max_token_num),
    ):
        if low is not None and high is not None and low > high:
            found.append(f"the least {kind} of a picture ({low}) are more than the most ({high})")
    for name, pixels, tokens in (
        ("max", options.max_pixels, options.image_max_token_num),
        ("min", options.min_pixels, options.image_min_token_num),
    ):
        if pixels is not None and tokens is not None:
            found.append(
                f"--{name}-pixels {pixels} and --image-{name}-token-num {tokens} (or {name.upper()}_PIXELS and "
                f"IMAGE_{name.upper()}_TOKEN_NUM) set the same limit: give one of them"
            )
    return found


def option_names(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    """The command line's names of a field, the main one first: ``("--train-type", "--tuner-type")``."""
    names = (field.name, *field.metadata["aliases"])
    return tuple("--" + name.replace("_", "-") for name in names)


@functools.cache
def _type_hints(owner: type) -> dict[str, Any]:
    return typing.get_type_hints(owner)


def value_type(field: dataclasses.Field[Any], owner: type) -> Any:
    """The declared type of a field without its ``None``."""
    hint = _type_hints(owner)[field.name]
    if typing.get_origin(hint) in (Union, types.UnionType):
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def resolve(
    cls: type[T],
    flags: Mapping[str, Any],
    *,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    file: Mapping[str, Any] | None = None,
) -> T:
    """Merge all sources into one checked ``cls``.

    Args:
        cls: ``ExportConfig`` or ``TrainConfig``.
        flags: values from the command line by field name; None means not given.
        sets: ``key=value`` strings, values in YAML's notation, dots for nested keys.
        environ: the environment.
        file: the parsed YAML file.

    Raises:
        ConfigError: naming every setting that is wrong, and where it came from.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    problems: list[str] = []
    values: dict[str, Any] = {}
    refused: set[str] = set()
    for origin, key, raw in _all_given(fields, flags, sets, environ or {}, file or {}, problems):
        name = key.replace("-", "_")
        name = next((f.name for f in fields.values() if name in f.metadata["aliases"]), name)
        if name not in fields:
            problems.append(f"{origin}: unknown setting {key!r}{_did_you_mean(name, fields)}")
            continue
        try:
            value = _convert(raw, value_type(fields[name], cls))
            _check_bounds(value, fields[name])
        except ValueError as error:
            problems.append(f"{origin}: {error}")
            refused.add(name)
            continue
        values[name] = {**values.get(name, {}), **value} if isinstance(value, dict) else value
    for name, field in fields.items():
        required = field.default is MISSING and field.default_factory is MISSING
        if required and name not in values and name not in refused:
            problems.append(f"{option_names(field)[0]} is missing: {field.metadata['help']}")
    if problems:
        raise ConfigError.from_problems(problems)
    config = cls(**values)
    if found := config.problems():  # type: ignore[attr-defined]
        raise ConfigError.from_problems(found)
    return config


def _all_given(
    fields: Mapping[str, dataclasses.Field[Any]],
    flags: Mapping[str, Any],
    sets: Sequence[str],
    environ: Mapping[str, str],
    file: Mapping[str, Any],
    problems: list[str],
) -> list[tuple[str, str, Any]]:
    """(where from, key, value) of everything given, the weakest source first."""
    given = [(f"--config, {key}", key, value) for key, value in file.items() if value is not None]
    for name, field in fields.items():
        env = field.metadata["env"]
        if env and environ.get(env):
            given.append((f"environment variable {env}", name, environ[env]))
    for item in sets:
        key, equals, text = item.partition("=")
        if not equals:
            problems.append(f"--set {item}: expected key=value")
            continue
        try:
            value = yaml.safe_load(text) if text else None
        except yaml.YAMLError as error:
            problems.append(f"--set {item}: {error}")
            continue
        *parents, last = key.split(".")
        nested: Any = {last: value} if parents else value
        for parent in reversed(parents[1:]):
            nested = {parent: nested}
        given.append((f"--set {key}", parents[0] if parents else key, nested))
    given += [
        (option_names(fields[name])[0] if name in fields else name, name, value)
        for name, value in flags.items()
        if value is not None and value != ()
    ]
    return given


def _did_you_mean(name: str, fields: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, fields, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _convert(raw: Any, hint: Any) -> Any:
    """Turn a YAML value or a string from the environment into the declared type.

    Raises:
        ValueError: with the value and what was expected.
    """
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = typing.get_args(hint)
        if raw not in choices:
            raise ValueError(f"{raw!r} is none of {', '.join(choices)}")
        return raw
    if origin is tuple:
        items = raw if isinstance(raw, (list, tuple)) else [raw]
        return tuple(str(item) for item in items)
    if hint is bool:
        if isinstance(raw, str) and raw.lower() in ("true", "false", "1", "0"):
            return raw.lower() in ("true", "1")
        if not isinstance(raw, bool):
            raise ValueError(f"{raw!r} is neither true nor false")
        return raw
    if hint in (int, float):
        return _to_number(raw, hint)
    if origin is not None:
        if not isinstance(raw, Mapping):
            raise ValueError(f"{raw!r} is not a mapping of names to values")
        return dict(raw)
    if isinstance(raw, bool):
        return str(raw).lower()
    if isinstance(raw, (Mapping, list, tuple)):
        raise ValueError(f"{raw!r} is not a single value")
    return str(raw)


def _to_number(raw: Any, hint: type[int] | type[float]) -> int | float:
    expected = "an integer" if hint is int else "a number"
    try:
        number = float(raw) if not isinstance(raw, bool) else None
    except (TypeError, ValueError):
        number = None
    if number is None or number != number or (hint is int and not number.is_integer()):
        raise ValueError(f"{raw!r} is not {expected}")
    if hint is float:
        return number
    return int(raw) if isinstance(raw, (int, str)) and not _has_fraction_form(raw) else int(number)


def _has_fraction_form(raw: int | str) -> bool:
    return isinstance(raw, str) and any(mark in raw for mark in ".eE")


def _check_bounds(value: Any, field: dataclasses.Field[Any]) -> None:
    low, high = field.metadata["minimum"], field.metadata["maximum"]
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return
    if low is not None and value < low:
        raise ValueError(f"{value} is below {low}, the least allowed")
    if high is not None and value > high:
        raise ValueError(f"{value} is above {high}, the most allowed")
