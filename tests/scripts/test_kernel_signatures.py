"""Signatures are read from archives and folders as they stand there."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.scripts.loading import load_script


def test_the_script_reads_archives_and_folders(tmp_path: Path) -> None:
    script = load_script("kernel_signatures")
    operators = "".join(
        f"- func: _flash_attention_{name}(Tensor query, float dropout_p, *, float? scale=None) -> Tensor\n  tags: x\n"
        for name in ("forward", "backward")
    )
    wheel = tmp_path / "torch-2.99.0-cp311-cp311-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            "torch/nn/attention/varlen.py", "def varlen_attn(query: int, *, scale: float | None = None): 1"
        )
        archive.writestr("torchgen/packaged/ATen/native/native_functions.yaml", operators)
    interface = "def flash_attn_varlen_func(\n    q, k,\n    window_size=(-1, -1),  # all\n):\n    return q\n"
    source_folder = tmp_path / "flash_attn-9.0" / "hopper"
    source_folder.mkdir(parents=True)
    (source_folder / "flash_attn_interface.py").write_text(interface)
    with tarfile.open(tmp_path / "flash_attn-9.0.tar.gz", "w:gz") as sources:
        sources.add(source_folder.parent, "flash_attn-9.0")
    source_paths = [str(wheel), str(tmp_path / "flash_attn-9.0.tar.gz"), f"main={source_folder.parent}"]
    known = {"flash-attn-3": {"flash_attn_varlen_func": {"10.0": "q", "main": "old"}}}
    varlen, attention = "q, k, window_size=(-1, -1)", "query, dropout_p, *, scale=None"
    assert script.merged(known, source_paths) == {
        "flash-attn-3": {"flash_attn_varlen_func": {"9.0": varlen, "10.0": "q", "main": varlen}},
        "torch": {
            "varlen_attn": {"2.99.0": "query, *, scale=None"},
            "_flash_attention_forward": {"2.99.0": attention},
            "_flash_attention_backward": {"2.99.0": attention},
        },
    }
    for invalid_source in ("nothing.zip", f"1={tmp_path}"):
        with pytest.raises(SystemExit, match=r"neither a wheel|none of the sources"):
            script.merged({}, [invalid_source])
