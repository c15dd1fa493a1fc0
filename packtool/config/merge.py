"""What ``packtool merge`` needs to know."""

from __future__ import annotations

from dataclasses import dataclass

from packtool.config.model import DType
from packtool.config.settings import REQUIRED, option


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """What ``packtool merge`` needs to know."""

    adapter: str = option(REQUIRED, "Directory of an adapter: a checkpoint of packtool train, or one that peft saved.")
    output: str = option(REQUIRED, "Directory to write the merged model to; it must be empty or new.")
    base_model: str | None = option(None, "Where the adapter's base model is now, if it has moved.")
    torch_dtype: DType = option("auto", "Precision to write the weights in; auto is the base model's.")

    def problems(self) -> list[str]:
        """Mistakes that only show when settings are seen together."""
        return []
