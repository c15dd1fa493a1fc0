"""GPUs by what their driver writes down."""

from __future__ import annotations

from pathlib import Path

from packtool.launch.world import gpu_names


def test_names_are_those_of_the_driver(tmp_path: Path) -> None:
    for index, name in enumerate(("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")):
        (tmp_path / str(index)).mkdir()
        (tmp_path / str(index) / "information").write_text(f"Model: \t\t {name}\nIRQ:   \t\t 17\n")
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "information").write_text("nothing known\n")
    assert gpu_names(f"{tmp_path}/*/information") == ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB")
    assert gpu_names(f"{tmp_path}/none/*/information") == ()
