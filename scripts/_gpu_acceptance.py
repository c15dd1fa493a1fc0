"""Everything that is skipped where no GPU is, and the benchmarks of one, in one command with one report.

- tests: those marked ``gpu``: attention kernels, flash-attn and DeepSpeed where they are installed, no waiting of the
  host in a packed step, copies on their own stream;
- bench: ``bench_gpu.py``: kernels against the reference, packs against samples alone, packed against padded, memory
  told beforehand against memory measured (within 10 %);
- shared: ``bench_sequence_parallel.py`` over NCCL, where there are two GPUs or more;
- demo: ``packtool demo``: export, training and evaluation of a small model that has to learn.

The report (Markdown, and JSON with every figure) goes to docs/gpu/, named after the GPU, to be committed. It is written
after every part, so that Ctrl-C leaves what is there. flash-attn, kernels and deepspeed are not installed by this
command: what is in .venv is checked.

Exit code: 0 all passed, 1 something failed, 2 no GPU, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("packtool", "torch", "transformers", "accelerate", "peft", "flash-attn", "flash-attn-3", "kernels")
PACKAGES += ("deepspeed", "liger-kernel", "flash-linear-attention")
PARTS = ("tests", "bench", "shared", "demo")
_LOOK = """
import json, torch
devices = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
found = {"devices": [(each.name, each.total_memory) for each in devices]}
print(json.dumps(found | {"cuda": torch.version.cuda or torch.version.hip}))
"""
_PATIENCE_S = 60
_TAIL = 60


@dataclass
class Part:
    """What one part of the acceptance found.

    Args:
        outcome: passed, failed, skipped, interrupted or "not run".
        reason: why it was skipped or failed.
        tests: outcome, name and reason of each.
        found: what ``bench_gpu.py --json`` has.
        told: the last lines of what it printed.
    """

    name: str
    outcome: str = "not run"
    reason: str = ""
    seconds: float = 0.0
    tests: list[dict[str, str]] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        """Tests that ended so."""
        return sum(test["outcome"] == outcome for test in self.tests)


@dataclass(frozen=True)
class Command:
    """How a part is run.

    Args:
        arguments: of the command.
        missing: why it cannot run here; "" if it can.
        read: takes in what the command left.
    """

    arguments: Sequence[str]
    missing: str = ""
    read: Callable[[Part], None] = lambda part: None


def commands(options: argparse.Namespace, num_gpus: int, scratch: Path) -> dict[str, Command]:
    """All parts by name."""
    python, scripts = sys.executable, ROOT / "scripts"
    junit, found = scratch / "junit.xml", scratch / "bench.json"
    tests = [python, "-m", "pytest", "-n0", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={junit}"]
    bench = [python, str(scripts / "bench_gpu.py"), "--json", str(found), "--size", *options.size]
    if options.cpu:
        bench += ["--tokens", "256", "--repeats", "1", "--warm-up", "0"]
    shared = [
        python,
        str(scripts / "bench_sequence_parallel.py"),
        *(["--quick"] if options.cpu else ["--device", "cuda"]),
    ]
    few = "" if options.cpu or num_gpus > 1 else "it needs two GPUs, and there is one"
    return {
        "tests": Command([*tests, *options.select], read=lambda part: read_tests(part, junit)),
        "bench": Command(bench, read=lambda part: read_bench(part, found)),
        "shared": Command(shared, missing=few),
        "demo": Command([python, "-m", "packtool", "demo", "--output-dir", str(scratch / "demo")]),
    }


def read_tests(part: Part, file: Path) -> None:
    """Take in pytest's XML."""
    if not file.exists():
        return
    for case in ElementTree.parse(file).iter("testcase"):
        kinds = {child.tag: child for child in case}
        bad = kinds.get("failure", kinds.get("error"))
        reason, outcome = "", "passed"
        if bad is not None:
            reason, outcome = str(bad.get("message", "")), "failed"
        elif "skipped" in kinds:
            reason, outcome = str(kinds["skipped"].get("message", "")), "skipped"
        part.tests.append(
            {"outcome": outcome, "name": f"{case.get('classname')}::{case.get('name')}", "reason": reason}
        )


def read_bench(part: Part, file: Path) -> None:
    """Take in the benchmark's JSON."""
    if file.exists():
        part.found = json.loads(file.read_text(encoding="utf-8"))


def run(part: Part, command: Command) -> None:
    """Run a part, printing what it prints, and note what came of it.

    Raises:
        KeyboardInterrupt: after the command has been told, and has ended.
    """
    begin = time.perf_counter()
    # In a group of its own: Ctrl-C reaches it once, from here, and it ends as it would by itself.
    process = subprocess.Popen(
        command.arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(f"  {line}", end="", flush=True)
            part.told = [*part.told, line.rstrip()][-_TAIL:]
        part.outcome = "failed" if process.wait() else "passed"
        part.reason = f"exit code {process.returncode}" if process.returncode else ""
    except KeyboardInterrupt:
        part.outcome = "interrupted"
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_PATIENCE_S)
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        part.seconds = round(time.perf_counter() - begin, 1)
        command.read(part)


def machine() -> dict[str, Any]:
    """Where this runs, and with what."""
    # Asked by another process: this one would keep some of a GPU's memory for itself.
    seen = json.loads(_said(sys.executable, "-c", _LOOK))
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _said("git", "describe", "--always", "--dirty"),
        "devices": [f"{name}, {size / 2**30:.0f} GiB" for name, size in seen["devices"]] or ["CPU"],
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "cuda": seen["cuda"],
        "python": platform.python_version(),
        "versions": versions,
    }


def _said(*command: str) -> str:
    """What a command prints; nothing where it is not there."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def report_lines(where: dict[str, Any], parts: Sequence[Part]) -> Iterator[str]:
    """The report as Markdown."""
    yield f"# {', '.join(dict.fromkeys(where['devices']))}"
    yield ""
    yield "Made by `scripts/gpu_acceptance`."
    yield ""
    yield from _table(
        ("what", "version"),
        [
            ("date", where["date"]),
            ("commit", where["commit"]),
            ("devices", f"{len(where['devices'])}: {'; '.join(dict.fromkeys(where['devices']))}"),
            ("driver, CUDA", ", ".join(filter(None, (where["driver"], where["cuda"])))),
            ("Python", where["python"]),
            *where["versions"].items(),
        ],
    )
    yield from _table(
        ("part", "outcome", "passed", "failed", "skipped", "seconds"),
        [
            (
                part.name,
                f"{part.outcome}: {part.reason}" if part.reason else part.outcome,
                *(part.count(outcome) if part.tests else "" for outcome in ("passed", "failed", "skipped")),
                f"{part.seconds:.0f}",
            )
            for part in parts
        ],
    )
    for part in parts:
        yield from _part_lines(part)


def _part_lines(part: Part) -> Iterator[str]:
    """What is to be said of a part beside its outcome."""
    for outcome in ("failed", "skipped"):
        by_reason: dict[str, list[str]] = {}
        for test in part.tests:
            if test["outcome"] == outcome:
                by_reason.setdefault(_first_line(test["reason"]), []).append(test["name"])
        if by_reason:
            yield f"## Tests that {'failed' if outcome == 'failed' else 'were skipped'}\n"
            rows = [(reason, len(names), "<br>".join(names[:5])) for reason, names in by_reason.items()]
            yield from _table(("reason", "tests", "the first of them"), rows)
    if part.found:
        yield from _bench_lines(part.found)
    elif part.outcome == "failed" or (part.told and part.name != "tests"):
        yield f"## {part.name}: what it printed last\n"
        yield from ("```text", *part.told, "```", "")


def _bench_lines(found: dict[str, Any]) -> Iterator[str]:
    """Tables of what ``bench_gpu.py`` found."""
    yield "## Checks of attention and packs\n"
    rows = [(name, "", "", f"not here: {reason}") for name, reason in found.get("missing_kernels", {}).items()]
    rows += [
        (each["name"], _number(each["error"], ".1e"), _number(each["allowed"], ".1e"), _verdict(each))
        for each in found["checks"]
    ]
    yield from _table(("check", "error", "allowed", ""), rows)
    if found["memory"]:
        yield "## Memory told beforehand and measured, in GiB\n"
        rows = [
            (
                each["what"],
                *(_number(each[name], ".2f") for name in ("traced", "measured", "ratio")),
                _verdict(each) if each["measured"] is not None else "not measured",
            )
            for each in found["memory"]
        ]
        yield from _table(("what", "traced", "measured", "ratio", "within 10 %"), rows)
    if found["rows"]:
        yield "## Speed\n"
        yield "A ratio is the speed over that of the first row of the same case.\n"
        rows = [
            (
                each["what"],
                each["way"],
                *(_number(each[name], spec) for name, spec in (("ms", ",.2f"), ("tflops", ".1f"), ("mfu", ".1%"))),
                *(_number(each[name], spec) for name, spec in (("gib", ".1f"), ("ratio", ".2f"))),
                each["note"],
            )
            for each in found["rows"]
        ]
        yield from _table(("what", "way", "ms", "TFLOP/s", "MFU", "GiB", "ratio", ""), rows)


def _verdict(each: dict[str, Any]) -> str:
    return each.get("note") or ("ok" if each["passed"] else "FAILED")


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0]


def _table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield "|---" * len(headings) + "|"
    for row in rows:
        yield f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def write_report(folder: Path, where: dict[str, Any], parts: Sequence[Part]) -> Path:
    """Write both forms; the Markdown's path."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", where["devices"][0].partition(",")[0].lower()).strip("-")
    page = folder / f"{name}.md"
    page.write_text("\n".join(report_lines(where, parts)), encoding="utf-8")
    whole = {**where, "parts": [asdict(part) for part in parts]}
    page.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return page


def main(arguments: list[str] | None = None) -> int:
    """Run the parts, write the report; the exit code."""
    parser = argparse.ArgumentParser(
        "scripts/gpu_acceptance", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="by default all")
    parser.add_argument("--size", nargs="+", help="of bench_gpu.py's models, by default 1b 4b 8b")
    parser.add_argument("--select", nargs="+", default=[], help="files or tests, by default all that are marked gpu")
    parser.add_argument("--out", type=Path, help="folder of the report, by default docs/gpu")
    parser.add_argument("--cpu", action="store_true", help="try the machinery without a GPU; report in build/gpu")
    options = parser.parse_args(arguments)
    if not options.cpu:
        import torch

        if not torch.cuda.is_available():
            print("torch sees no GPU; nothing was run. --cpu tries the machinery without one.", file=sys.stderr)
            return 2
    where = machine()
    options.size = options.size or (["tiny"] if options.cpu else ["1b", "4b", "8b"])
    folder = options.out or ROOT / ("build" if options.cpu else "docs") / "gpu"
    parts = [Part(name) for name in PARTS if name in options.parts]
    with tempfile.TemporaryDirectory(prefix="packtool-gpu-") as scratch:
        known = commands(options, 0 if options.cpu else len(where["devices"]), Path(scratch))
        try:
            for part in parts:
                print(f"{part.name} ...", flush=True)
                if known[part.name].missing:
                    part.outcome, part.reason = "skipped", known[part.name].missing
                else:
                    run(part, known[part.name])
                print(f"{part.name}: {part.outcome} {part.reason}", flush=True)
                write_report(folder, where, parts)
        except KeyboardInterrupt:
            print(f"interrupted; what there is: {write_report(folder, where, parts)}", file=sys.stderr)
            return 130
    print(f"report: {write_report(folder, where, parts)}")
    return int(any(part.outcome == "failed" for part in parts))


if __name__ == "__main__":
    sys.exit(main())
