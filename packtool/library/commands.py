"""Functions for the commands export, verify and eval, with the same options and checks."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from packtool.config.commands import EvalConfig, VerifyConfig
from packtool.config.data import ExportConfig
from packtool.config.settings import resolve
from packtool.progress import Progress, SilentProgress

if TYPE_CHECKING:
    from packtool.cache.manifest import ExportSummary
    from packtool.library.options import EvalKeywords, ExportKeywords, VerifyKeywords
    from packtool.train.evaluate.run import EvalResult
    from packtool.train.verify.run import VerifyReport


T = TypeVar("T")


def settings_of(cls: type[T], options: Mapping[str, Any]) -> T:
    """Return the settings of a command from keyword arguments and, as on the command line, from the environment.

    In ``options``, None means not given, and a ``Cache`` stands for its directory.
    """
    return resolve(cls, {name: _as_text(value) for name, value in options.items()}, environ=os.environ)


def _as_text(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_as_text(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def export(*, progress: Progress | None = None, **options: Unpack[ExportKeywords]) -> ExportSummary:
    """Tokenize rows into a cache, as the command ``packtool export``.

        packtool.export(model="model", dataset="rows.json", output_dir="cache", max_length=2048)

    Args:
        progress: reports every shard; by default nothing is reported.
        options: those of ``packtool export``; ``model``, ``dataset`` and ``output_dir`` are required.

    Returns:
        counts of kept, truncated and dropped rows: ``rows``, ``kept``, ``dropped`` by reason, ``tokens``, ...

    Raises:
        ConfigError, DataError, RowError, StorageError: as the command; an existing finished cache is not changed.
    """
    from packtool.cache.export import export as export_rows
    from packtool.rows.hubs import with_local_copies

    return export_rows(with_local_copies(settings_of(ExportConfig, options)), progress or SilentProgress())


def verify(*, progress: Progress | None = None, **options: Unpack[VerifyKeywords]) -> VerifyReport:
    """Check that packed samples give the same outputs as unpacked ones, as the command ``packtool verify``.

        packtool.verify(model="model", cached_dataset="cache").raise_if_failed()

    Args:
        progress: reports every check; by default nothing is reported.
        options: those of ``packtool verify``; ``model`` and ``cached_dataset`` are required.

    Returns:
        the report, also if the checks failed: ``passed``, and ``checks`` with their errors and allowed rounding errors.

    Raises:
        ConfigError, DataError, MismatchError: if nothing can be compared.
    """
    from packtool.train.verify.run import verify as verify_caches

    config = settings_of(VerifyConfig, options)
    report = verify_caches(config, progress)
    if config.html is not None:
        from packtool.report.results import write_page
        from packtool.train.prepare.result import option_words

        command_line = shlex.join(["packtool", "verify", *option_words(config)])  # shown on the page
        write_page(report, config.html, command_line)
    return report


def evaluate(*, progress: Progress | None = None, **options: Unpack[EvalKeywords]) -> EvalResult:
    """Evaluate a model on each sample, as the command ``packtool eval``; every process of a torchrun job calls this.

        packtool.evaluate(model="output/last", cached_dataset="cache", output="eval.parquet").evaluation.total.loss

    Args:
        progress: reports every micro-batch; by default nothing is reported.
        options: those of ``packtool eval``; ``model``, ``cached_dataset`` and ``output`` are required.

    Returns:
        the figures of all samples (``evaluation.total``, ``evaluation.channel_totals``) and the path of the output.

    Raises:
        ConfigError, DataError, MismatchError, StorageError: if possible before the model is loaded.
    """
    from packtool.train.evaluate.run import evaluate_caches

    return evaluate_caches(settings_of(EvalConfig, options), progress or SilentProgress())
