"""The acceptance of a GPU, where none is: it says so, its parts run, and its report has what they found."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.forked import forked_process
from tests.scripts.loading import load_script
from tests.waiting import PATIENCE_S, wait_for


@pytest.fixture(scope="module")
def acceptance() -> ModuleType:
    return load_script("_gpu_acceptance")


def test_missing_gpu_is_reported(
    acceptance: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert acceptance.main(["--out", str(tmp_path / "report")]) == 2
    assert "torch sees no GPU; nothing was run" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


@pytest.mark.skipif(
    any(Path(device).exists() for device in ("/dev/nvidia0", "/dev/kfd", "/dev/dxg")), reason="there is a GPU here"
)
def test_missing_gpu_is_reported_without_an_environment(repository: Path, tmp_path: Path) -> None:
    """From a copy without .venv, which would be made."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    for name in ("gpu_acceptance", "_gpu_acceptance.py"):
        (scripts / name).write_bytes((repository / "scripts" / name).read_bytes())
    command = ["bash", str(scripts / "gpu_acceptance")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert "There is no GPU on this machine; nothing was run." in done.stderr
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert helped.returncode == 0
    assert "Exit code: 0 all passed" in helped.stdout
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["_gpu_acceptance.py", "gpu_acceptance", "scripts"]


def test_acceptance_script_runs_on_a_cpu(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(repository / "scripts" / "_gpu_acceptance.py"), "--cpu", "--parts", "tests"]
    command += ["--select", "tests/attention/test_on_gpu.py", "--out", str(tmp_path)]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout[-3000:]
    report = json.loads((tmp_path / "cpu.json").read_text())
    (tests,) = report["parts"]
    assert (tests["name"], tests["outcome"]) == ("tests", "passed")
    assert {(test["outcome"], test["reason"]) for test in tests["tests"]} == {("skipped", "no GPU here")}
    assert torch.__version__.startswith(report["versions"]["torch"])
    page = (tmp_path / "cpu.md").read_text()
    assert page.startswith("# CPU\n")
    assert re.search(rf"^\| tests \| passed \| 0 \| 0 \| {len(tests['tests'])} \|", page, re.MULTILINE)
    assert re.search(r"^\| no GPU here \| \d+ \| tests\.attention\.test_on_gpu::", page, re.MULTILINE)


def part_of(code: str) -> list[str]:
    """A command that runs a few lines of Python."""
    return [sys.executable, "-c", textwrap.dedent(code)]


def test_failed_parts_are_reported_and_the_others_run(
    acceptance: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="one"/><testcase classname="tests.a" name="two">'
        '<failure message="assert 1 == 2&#10;more">trace</failure></testcase></testsuite></testsuites>'
    )
    bad = {"kernel": "varlen", "name": "varlen: out", "error": None, "allowed": None, "note": "RuntimeError: a | b"}
    memory = {"what": "8b text", "traced": 10.0, "measured": 12.0, "passing": 2.0, "ratio": 0.83, "passed": False}
    bench_file = tmp_path / "bench.json"
    row = {"what": "8b text", "way": "packed", "ms": 12.5, "tflops": 300.0, "mfu": 0.4, "gib": 60.0, "ratio": 1.9}
    rows = [{**row, "note": ""}]
    bench_file.write_text(json.dumps({"checks": [{**bad, "passed": False}], "rows": rows, "memory": [memory]}))
    commands = {
        "tests": acceptance.Command(
            part_of("raise SystemExit(1)"), read=lambda part: acceptance.read_tests(part, junit)
        ),
        "bench": acceptance.Command(
            part_of("raise SystemExit(1)"), read=lambda part: acceptance.read_bench(part, bench_file)
        ),
        "shared": acceptance.Command([], missing="it needs two GPUs, and there is one"),
        "demo": acceptance.Command(part_of("print('exact: 97 %')")),
    }
    monkeypatch.setattr(acceptance, "commands", lambda *_: commands)
    assert acceptance.main(["--cpu", "--out", str(tmp_path)]) == 1
    page = (tmp_path / "cpu.md").read_text()
    for line in (
        "| tests | failed: exit code 1 | 1 | 1 | 0 |",
        "| assert 1 == 2 | 1 | tests.a::two |",
        "| varlen: out |  |  | RuntimeError: a \\| b |",
        "| 8b text | 10.00 | 12.00 | 0.83 | FAILED |",
        "| 8b text | packed | 12.50 | 300.0 | 40.0% | 60.0 | 1.90 |",
        "| shared | skipped: it needs two GPUs, and there is one |",
        "| demo | passed |",
        "exact: 97 %",
    ):
        assert line in page


def interrupted(acceptance: ModuleType, folder: Path) -> int:
    """The first part leaves something when it is told to end, the second never begins."""
    waiting = """
        import json, pathlib, sys, time
        print("begun", flush=True)
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            found = {"checks": [], "memory": [], "rows": [], "missing_kernels": {"flex": "slow"}}
            pathlib.Path(sys.argv[1]).write_text(json.dumps(found))
    """
    bench_file = folder / "bench.json"
    acceptance.commands = lambda *_: {  # type: ignore[attr-defined]
        "bench": acceptance.Command(
            [*part_of(waiting), str(bench_file)], read=lambda part: acceptance.read_bench(part, bench_file)
        ),
        "demo": acceptance.Command(part_of("raise SystemExit(1)")),
    }
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return int(acceptance.main(["--cpu", "--parts", "bench", "demo", "--out", str(folder)]))


def test_ctrl_c_writes_the_partial_report(acceptance: ModuleType, tmp_path: Path) -> None:
    output_path = tmp_path / "output"
    with forked_process(interrupted, acceptance, tmp_path, output_path=output_path) as process:
        wait_for(lambda: output_path.exists() and "  begun" in output_path.read_text(), lambda: not process.is_alive())
        os.kill(process.pid or 0, signal.SIGINT)
        process.join(PATIENCE_S)
        assert process.exitcode == 130
    bench, demo = json.loads((tmp_path / "cpu.json").read_text())["parts"]
    assert (bench["outcome"], bench["found"]["missing_kernels"]) == ("interrupted", {"flex": "slow"})
    assert demo["outcome"] == "not run"
    assert "| flex |  |  | not here: slow |" in (tmp_path / "cpu.md").read_text()


def test_every_gpu_test_is_included(repository: Path) -> None:
    for file in sorted((repository / "tests").rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        wanting = re.findall(r"skipif\(\s*(?:not torch\.cuda|.*find_spec\(\"deepspeed\"\))", text)
        assert len(wanting) == len(re.findall(r"^\s*@?pytest\.mark\.gpu|\[pytest\.mark\.gpu", text, re.MULTILINE)), file
