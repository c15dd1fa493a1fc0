"""``packtool inspect`` of a run: what it has trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from packtool.config.inspect import InspectConfig
from packtool.errors import ConfigError
from packtool.visible import show, show_json


def shows_run(config: InspectConfig) -> bool:
    """Whether it is a run that is looked at, and not a cache.

    Raises:
        ConfigError: for an option that looks at the other.
    """
    from packtool.report.trained import is_run

    of_run = config.trained or config.step is not None
    if not is_run(config.directory):
        if of_run:
            name = "--trained" if config.trained else f"--step {config.step}"
            raise ConfigError(
                f"{name}: {config.directory} is not the --output-dir of a run", "packtool inspect OUTPUT_DIR " + name
            )
        return False
    if config.run is not None:
        raise ConfigError(f"--run goes with a cache, and {config.directory} is itself a run", "Leave --run out.")
    if not of_run and config.row is None:
        raise ConfigError(
            f"{config.directory} is the --output-dir of a run, and no cache",
            "--trained shows what it has trained, --step N what a step held, --row N when a sample was trained.",
        )
    return True


def run_inspect_run(config: InspectConfig, as_json: bool) -> None:
    """Print what a run has trained, a step, or when a sample was trained."""
    from packtool.report import trained

    if config.trained:
        figures = trained.trained_figures(config.directory)
        _tell(figures, trained.trained_lines(figures), as_json)
    elif config.step is not None:
        figures = trained.step_figures(config.directory, config.step, config.model)
        _tell(figures, trained.step_lines(figures), as_json)
    else:
        assert config.row is not None, "nothing else is shown of a run"
        figures = trained.row_figures(config.directory, None, config.row, config.model)
        _tell(figures, trained.row_lines(figures), as_json)


def tell_when_trained(config: InspectConfig) -> dict[str, Any]:
    """When the sample of ``--row`` was trained in ``--run``."""
    from packtool.report import trained

    assert config.run is not None, "asked for"
    assert config.row is not None, "goes with it"
    return trained.row_figures(config.run, config.directory, config.row)


def lines_of(figures: Mapping[str, Any]) -> Iterator[str]:
    """Lines that tell it on a terminal."""
    from packtool.report import trained

    return trained.row_lines(figures)


def _tell(figures: Mapping[str, Any], lines: Iterator[str], as_json: bool) -> None:
    if as_json:
        show_json(figures)
    else:
        show("\n".join(lines))
