"""``packtool import``."""

from __future__ import annotations

import dataclasses

from packtool.cli.export import run_export
from packtool.cli.invocation import Invocation
from packtool.config.imported import ImportConfig
from packtool.errors import ConfigError


def run_import(config: ImportConfig, invocation: Invocation) -> None:
    """Make a cache of what another tool has tokenized; export says what was taken over, and what nobody vouches for."""
    if not config.max_length:
        config = dataclasses.replace(config, max_length=_longest(config))
    run_export(config, invocation)


def _longest(config: ImportConfig) -> int:
    """The most tokens that the model takes.

    Raises:
        ConfigError: if it does not say so.
    """
    from packtool.encode.families import text_config_of
    from packtool.encode.model_files import ModelFiles
    from packtool.rows.modelscope import with_local_copies

    files = ModelFiles.load(with_local_copies(config).model, config.chat_template)
    found = text_config_of(files.config).get("max_position_embeddings")
    if not isinstance(found, int) or found < 2:
        raise ConfigError(
            f"--model {config.model}: its config.json says nothing of the longest sample (max_position_embeddings)",
            "Give --max-length.",
        )
    return found
