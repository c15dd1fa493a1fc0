"""What ``--dataset`` and ``--val-dataset`` name, as files."""

from __future__ import annotations

from packtool.config import ExportConfig
from packtool.rows.source import SourceSpec


def sources_of(config: ExportConfig) -> list[SourceSpec]:
    """Files of rows, in the order they were asked for."""
    return [SourceSpec(path, name=path, group=i) for i, path in enumerate(config.dataset)]
