"""Settings of ``packtool inspect``."""

from __future__ import annotations

from dataclasses import dataclass

from packtool.config.settings import REQUIRED, option
from packtool.constants import TRAIN_SPLIT


@dataclass(frozen=True, kw_only=True)
class InspectConfig:
    """What ``packtool inspect`` needs to know."""

    directory: str = option(REQUIRED, "The cache; may stand without the option's name.")
    row: int | None = option(None, "Show this sample of the split, as a person can read it.", minimum=0)
    split: str = option(TRAIN_SPLIT, "Split that --row counts in.")
    model: str | None = option(None, "Directory of the tokenizer and config.json; by default the export's model.")
    plan: str | None = option(None, "A plan of the cache, from packtool plan --save.")
    pack: int | None = option(None, "Show this pack of --plan; samples that share a prefix as a tree.", minimum=0)
    verify: bool = option(False, "Read the whole cache, and say which files are damaged and how to mend them.")

    def problems(self) -> list[str]:
        """Mistakes that only show when settings are seen together."""
        if (self.plan is None) != (self.pack is None):
            return ["--plan and --pack go together: pack k of a plan"]
        return []
