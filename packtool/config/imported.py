"""What ``packtool import`` needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from packtool.config.export import ExportConfig
from packtool.config.settings import REQUIRED, option
from packtool.config.sizes import Tokens


@dataclass(frozen=True, kw_only=True)
class ImportConfig(ExportConfig):
    """What ``packtool import`` needs to know: what export does, but for the options below."""

    TAKES_TOKENS: ClassVar[bool] = True

    dataset: tuple[str, ...] = option(
        REQUIRED,
        "What another tool has prepared: a saved dataset, its files, or an .idx file of Megatron; it may stand without "
        "the option's name.",
        panel="Rows",
    )
    max_length: Tokens = option(
        0, "Most tokens of a sample; 0 takes what the model says that it takes (max_position_embeddings).", minimum=0
    )

    def problems(self) -> list[str]:
        """Mistakes that only show when settings are seen together."""
        found = super().problems()
        if self.max_length == 1:
            found.append("--max-length 1: a sample of one token has nothing to predict")
        return found
