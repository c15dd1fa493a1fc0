"""YAML and JSON of files and options; whatever they hold, what cannot be read raises the parser's own error.

YAML is as ``--config`` and ``--set`` have it: numbers and booleans as people write them.

PyYAML follows YAML 1.1, which takes ``1e-6`` for a text and ``no`` for a boolean. YAML 1.2 (core schema, section 10.3)
says what is meant: ``1e-6`` is a number, ``no`` a word (as are ``12:30`` and ``2024-01-01``), and only ``true`` and
``false`` are booleans; where an option wants a boolean, the word is turned into one by its declared type.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

_DEEP = "lists and objects nest too deeply"
_BOOL, _INT, _FLOAT, _TIME = (f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "timestamp"))
_IS_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)$")
_IS_INT = re.compile(r"[-+]?(?:0x[0-9a-fA-F]+|[0-9][0-9_]*)$")
_IS_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.(?:nan|NaN|NAN)$"
)


def parse_yaml(text: str) -> Any:
    """The value of a YAML text.

    Raises:
        yaml.YAMLError: if it is none.
    """
    import yaml  # here, because most runs need none of it

    try:
        return yaml.load(text, Loader=_loader())  # a SafeLoader with other resolvers
    except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
        raise yaml.YAMLError(_DEEP if isinstance(error, RecursionError) else str(error)) from error


def load_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: if it is none, or nests too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(_DEEP) from error


@functools.cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """PyYAML's with the plain scalars of YAML 1.2."""

    # A table of its own, for PyYAML's is shared by all loaders.
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if tag not in (_BOOL, _INT, _FLOAT, _TIME)]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(_BOOL, _IS_BOOL, list("tTfF"))
    Loader.add_implicit_resolver(_INT, _IS_INT, list("-+0123456789"))
    Loader.add_implicit_resolver(_FLOAT, _IS_FLOAT, list("-+.0123456789"))
    return Loader
