#!/usr/bin/env python3
"""Writes tests/attention/kernel_signatures.json: the signatures of the attention kernels of other packages.

Tests hold every call of ``packtool.attention`` against them, for none of these packages can be installed without a GPU
or in several versions. Nothing is built or imported: sources are read as text from

- wheels and source archives, as ``pip download --no-deps`` fetches them; a wheel of any platform does:
      pip download --no-deps --only-binary :all: --platform macosx_14_0_arm64 torch==2.12.0
      FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip download --no-deps --no-build-isolation --no-binary flash-attn flash-attn
- folders with a version before them, as a checkout of Dao-AILab/flash-attention or huggingface/kernels-community has
  them; what the hub calls a version is in the build.toml of each kernel.

What the file has of a package already stays, but for the versions that are read anew.

    python scripts/kernel_signatures.py torch-2.12.0-*.whl flash_attn-2.8.3.tar.gz 3=checkout/of/kernels-community
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from packaging.version import InvalidVersion, Version

FILE = Path(__file__).parent.parent / "tests" / "attention" / "kernel_signatures.json"
_OPERATORS = "torchgen/packaged/ATen/native/native_functions.yaml"
_VARLEN = "flash_attn_varlen_func"


Signatures = dict[str, dict[str, dict[str, str]]]
"""Signatures by package, function and version."""


@dataclass(frozen=True)
class Source:
    """Where the signature of a function is written.

    Args:
        package: whose versions are told apart; flash-attn's archives hold the sources of flash-attn-3, too.
        path: in an archive, below its own folder, or in a checkout; YAML for operators of torch.
        function: its name.
    """

    package: str
    path: str
    function: str

    def signature(self, text: str) -> str:
        """The function's parameters with their defaults, as Python writes them without types.

        Args:
            text: of the file.

        Raises:
            LookupError: if the function is not there.
        """
        return (_operator if self.path.endswith(".yaml") else _function)(text, self.function)


SOURCES = (
    Source("torch", "torch/nn/attention/varlen.py", "varlen_attn"),
    Source("torch", _OPERATORS, "_flash_attention_forward"),
    Source("torch", _OPERATORS, "_flash_attention_backward"),
    Source("flash-attn", "flash_attn/flash_attn_interface.py", _VARLEN),
    Source("flash-attn-3", "hopper/flash_attn_interface.py", _VARLEN),
    Source("kernels-community/flash-attn2", "flash-attn2/torch-ext/flash_attn2/flash_attn_interface.py", _VARLEN),
    Source(
        "kernels-community/vllm-flash-attn3",
        "vllm-flash-attn3/torch-ext/vllm_flash_attn3/flash_attn_interface.py",
        _VARLEN,
    ),
)


def _function(text: str, name: str) -> str:
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
            return ast.unparse(node.args)
    raise LookupError(name)


def _operator(text: str, name: str) -> str:
    found = re.search(rf"- func: ({name}\(.*)", text)
    if found is None:
        raise LookupError(name)
    parts: list[str] = []
    for argument in torch._C.parse_schema(f"aten::{found[1]}").arguments:
        if argument.kwarg_only and "*" not in parts:
            parts.append("*")
        parts.append(f"{argument.name}={argument.default_value!r}" if argument.has_default_value() else argument.name)
    return ", ".join(parts)


def signatures_in(given: str) -> Iterator[tuple[str, str, str, str]]:
    """Package, function, version and signature of everything that an argument of the command holds.

    Args:
        given: a wheel, a source archive, or ``VERSION=FOLDER``.

    Raises:
        SystemExit: if it is none of these, or none of the sources is in it.
    """
    version, texts = _opened(given)
    if not texts:
        raise SystemExit(f"{given}: none of the sources is in it")
    for source in SOURCES:
        if source.path in texts:
            yield source.package, source.function, version, source.signature(texts[source.path])


def _opened(given: str) -> tuple[str, dict[str, str]]:
    """The version, and the texts of the sources that are there by their paths."""
    file, paths = Path(given), {source.path for source in SOURCES}
    if given.endswith(".whl"):
        with zipfile.ZipFile(file) as wheel:
            return file.name.split("-")[1], {path: wheel.read(path).decode() for path in paths & {*wheel.namelist()}}
    if given.endswith(".tar.gz"):
        folder = file.name.removesuffix(".tar.gz")
        with tarfile.open(file) as archive:
            members = {member.name.removeprefix(f"{folder}/"): archive.extractfile(member) for member in archive}
            texts = {path: members[path].read().decode() for path in paths & members.keys()}  # type: ignore[union-attr]
        return folder.rsplit("-", 1)[1], texts
    version, _, directory = given.partition("=")
    if not directory or not Path(directory).is_dir():
        raise SystemExit(f"{given}: neither a wheel, nor a .tar.gz, nor VERSION=FOLDER with a folder that is there")
    there = (path for path in paths if Path(directory, path).exists())
    return version, {path: Path(directory, path).read_text(encoding="utf-8") for path in there}


def _place(version: str) -> tuple[int, Version | str]:
    try:
        return 0, Version(version)
    except InvalidVersion:
        return 1, version


def merged(known: Signatures, given: list[str]) -> Signatures:
    """``known`` with what is read from arguments of the command, versions in their order."""
    for argument in given:
        for package, function, version, signature in signatures_in(argument):
            known.setdefault(package, {}).setdefault(function, {})[version] = signature
    return {
        package: {
            function: {version: versions[version] for version in sorted(versions, key=_place)}
            for function, versions in functions.items()
        }
        for package, functions in sorted(known.items())
    }


def main(arguments: list[str]) -> None:
    """Read what was given, and write the file."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        return
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    FILE.write_text(json.dumps(merged(known, arguments), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
