"""Turns multimodal conversations into packed training steps.

The names below are the library: they change only with the version, as CHANGELOG.md says, and nothing else of the
package is stable. ``docs/any-trainer.md`` shows how they are used, ``docs/api.md`` what each takes and returns. Nothing
heavy is imported before one of them is asked for.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from packtool.constants import VERSION

if TYPE_CHECKING:
    import inspect

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

# Where each name of the library is at home.
_HOMES = {
    "Batches": "batches",
    "Cache": "cache",
    "Plan": "planned",
    "Targets": "training",
    "evaluate": "commands",
    "export": "commands",
    "loss": "training",
    "prepare_model": "training",
    "verify": "commands",
}


def __getattr__(name: str) -> Any:
    """What is asked for, imported now (PEP 562)."""
    if name in ("errors", "plan"):
        return importlib.import_module(f"packtool.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'packtool' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"packtool.library.{_HOMES[name]}"), name)
    setattr(sys.modules[__name__], name, found)
    return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class CallableRoom(ModuleType):
    """A room of the package that has the name of a function of the library, and can be called as that function.

    Python makes every subpackage an attribute of its package once something imports it: ``packtool.plan`` is the room
    of the planners, whatever this file says. So it is both.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        """See ``packtool.library.planned.plan``."""
        return importlib.import_module("packtool.library.planned").plan(*args, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        """What the function takes and returns, for ``help`` and notebooks."""
        import inspect

        return inspect.signature(importlib.import_module("packtool.library.planned").plan)

    def __reduce__(self) -> tuple[Any, ...]:
        """How another process finds it: a function can be given to workers, and so can this."""
        return importlib.import_module, (self.__name__,)
