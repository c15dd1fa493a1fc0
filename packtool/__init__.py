"""Turns multimodal conversations into packed training steps.

The names below are the library: they change only with the version, as CHANGELOG.md says, and nothing else of the
package is stable. ``docs/any-trainer.md`` shows how they are used, ``docs/api.md`` what each takes and returns. Nothing
heavy is imported before one of them is asked for.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from packtool.constants import VERSION

if TYPE_CHECKING:
    from packtool import errors
    from packtool.library.batches import Batches
    from packtool.library.cache import Cache
    from packtool.library.commands import evaluate, export, verify
    from packtool.library.planned import Plan, plan
    from packtool.library.training import Targets, loss, prepare_model

__version__ = VERSION

__all__ = [
    "Batches",
    "Cache",
    "Plan",
    "Targets",
    "errors",
    "evaluate",
    "export",
    "loss",
    "plan",
    "prepare_model",
    "verify",
]

# Modules of `packtool.library`, and the names that each defines.
_MODULES = {
    "batches": ("Batches",),
    "cache": ("Cache",),
    "commands": ("evaluate", "export", "verify"),
    "planned": ("Plan", "plan"),
    "training": ("Targets", "loss", "prepare_model"),
}


def __getattr__(name: str) -> Any:
    """Import a name of the library on first access (PEP 562)."""
    if name == "errors":
        return importlib.import_module("packtool.errors")
    module = next((module for module, names in _MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module 'packtool' has no attribute {name!r}")
    member = getattr(importlib.import_module(f"packtool.library.{module}"), name)
    setattr(sys.modules[__name__], name, member)
    return member


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
