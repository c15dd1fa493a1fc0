"""Keeps transformers from talking beside packtool's own progress."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger
from typing import Any

from transformers.utils import logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers inside; warnings stay, but for those that only peft or torch could heed."""
    bars: Any = logging
    # torch says how experts that are spread could be gathered faster.
    getLogger("torch.distributed.tensor._redistribute").setLevel(ERROR)
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
            yield
    finally:
        if shown:
            bars.enable_progress_bar()
