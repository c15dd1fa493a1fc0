"""The environment becomes a torchrun command line, or a list of what is wrong with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtool.errors import ConfigError
from packtool.launch import torchrun
from packtool.launch.processes import Processes, exec_torchrun, launch_command
from tests.forked import forked_process
from tests.waiting import PATIENCE_S, wait_for

ARGUMENTS = ["train", "--model", "a b", "--packing", "true"]
ON_TWO_NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}


def command(**environ: str) -> list[str]:
    return launch_command(ARGUMENTS, environ)


def test_one_machine_finds_a_free_port() -> None:
    assert command(NPROC_PER_NODE="2") == [
        *(sys.executable, "-m", "packtool.launch.torchrun"),
        *("--nnodes", "1", "--nproc-per-node", "2", "--local-addr", "127.0.0.1", "--standalone"),
        *("--module", "packtool", "train", "--model", "a b", "--packing", "true"),
    ]


def test_one_machine_with_a_port() -> None:
    launch = command(NPROC_PER_NODE="2", MASTER_PORT="29501", MASTER_ADDR="a-name-that-need-not-resolve")
    assert "--standalone" not in launch
    assert launch[5:15] == [
        *("--nproc-per-node", "2", "--local-addr", "127.0.0.1", "--node-rank", "0"),
        *("--master-addr", "127.0.0.1", "--master-port", "29501"),
    ]


def test_several_machines() -> None:
    launch = command(**ON_TWO_NODES, NPROC_PER_NODE="8", MASTER_PORT="1234")
    assert launch[3:15] == [
        *("--nnodes", "2", "--nproc-per-node", "8", "--rdzv-conf", "timeout=1800"),
        *("--node-rank", "1", "--master-addr", "10.0.0.1", "--master-port", "1234"),
    ]
    patient = launch_command(ARGUMENTS, ON_TWO_NODES, max_wait=60)
    assert patient[patient.index("--rdzv-conf") + 1] == "timeout=60"
    one_each = command(**ON_TWO_NODES)
    assert one_each[one_each.index("--nproc-per-node") + 1] == "1"
    assert one_each[one_each.index("--master-port") + 1] == "29500"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"NPROC_PER_NODE": "two"}, "NPROC_PER_NODE=two: expected a whole number of at least 1"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE=0"),
        ({"NPROC_PER_NODE": "-1"}, "NPROC_PER_NODE=-1"),
        ({"NNODES": "1.5"}, r"NNODES=1\.5"),
        ({**ON_TWO_NODES, "NODE_RANK": "2"}, "NODE_RANK=2: with NNODES=2 it must be below 2"),
        ({"NNODES": "2", "MASTER_ADDR": "h"}, "NODE_RANK is missing"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "MASTER_ADDR is missing"),
        ({"NPROC_PER_NODE": "2", "MASTER_PORT": "65536"}, "MASTER_PORT=65536: expected a whole number from 1 to 65535"),
        ({"NPROC_PER_NODE": "2", "MASTER_PORT": "0"}, "MASTER_PORT=0"),
    ],
)
def test_wrong_values_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command(**environ)


def test_all_wrong_values_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)3 settings.*NPROC_PER_NODE=x.*MASTER_PORT=y.*MASTER_ADDR is missing"):
        command(NPROC_PER_NODE="x", MASTER_PORT="y", NNODES="2", NODE_RANK="0")


@given(per_node=st.integers(1, 64), num_nodes=st.integers(1, 64), data=st.data())
def test_the_total_number_of_processes(per_node: int, num_nodes: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, num_nodes - 1))
    environ = {"NPROC_PER_NODE": str(per_node), "NNODES": str(num_nodes), "NODE_RANK": str(rank), "MASTER_ADDR": "h"}
    assert Processes.from_environment(environ).total == per_node * num_nodes


@pytest.mark.parametrize(
    ("num_cores", "omp_num_threads", "expected"), [(16, None, "4"), (2, None, "1"), (16, "7", "7")]
)
def test_cores_are_divided_unless_omp_num_threads_is_set(
    num_cores: int, omp_num_threads: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda *call: calls.append(call))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(num_cores)))
    for name in ("OMP_NUM_THREADS", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    settings = {"NPROC_PER_NODE": "4", "HOME": "/h"} | (
        {} if omp_num_threads is None else {"OMP_NUM_THREADS": omp_num_threads}
    )
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    exec_torchrun(ARGUMENTS)
    ((_, _, environ),) = calls
    assert environ["OMP_NUM_THREADS"] == expected
    assert {name: environ[name] for name in ("NPROC_PER_NODE", "HOME")} == {"NPROC_PER_NODE": "4", "HOME": "/h"}


def test_process_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda *call: calls.append(call))
    for name in ("NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    exec_torchrun(ARGUMENTS)
    assert calls.pop()[1][3:8] == ["--nnodes", "1", "--nproc-per-node", "1", "--local-addr"]
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    exec_torchrun(ARGUMENTS)
    ((program, arguments, environ),) = calls
    assert program == arguments[0] == sys.executable
    assert arguments == launch_command(ARGUMENTS, os.environ)
    assert int(environ["OMP_NUM_THREADS"]) >= 1


def test_the_exit_code_is_that_of_the_process_that_failed_first(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        textwrap.dedent("""
            import os, sys, time
            if os.environ["RANK"] == "1":
                sys.exit(int(sys.argv[1]))
            time.sleep(600)
        """)
    )
    options = ["--standalone", "--nproc-per-node", "2", str(script), "4"]
    with forked_process(torchrun.run_torchrun, options, output_path=tmp_path / "output.txt") as launcher:
        launcher.join(PATIENCE_S)
    assert launcher.exitcode == 4
    assert "Traceback" not in (tmp_path / "output.txt").read_text()


def test_killed_rank_is_named_and_ends_the_others(tmp_path: Path) -> None:
    """Without a word of its own, as the kernel does it when memory runs out; the other rank waits in a collective."""
    script = tmp_path / "dies.py"
    script.write_text(
        textwrap.dedent("""
            import os, signal, torch, torch.distributed as dist
            dist.init_process_group("gloo")
            dist.barrier()
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.zeros(1))
        """)
    )
    options = ["--standalone", "--nproc-per-node", "2", str(script)]
    with forked_process(torchrun.run_torchrun, options, output_path=tmp_path / "output.txt") as launcher:
        launcher.join(PATIENCE_S)
    assert launcher.exitcode == 128 + 9
    output = (tmp_path / "output.txt").read_text()
    assert "rank 1 (process" in output
    assert "was ended by SIGKILL (out of memory?)" in output


def is_gone(process: int) -> bool:
    """Whether a process has ended, even if nobody has asked how."""
    stat = Path(f"/proc/{process}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_a_rank_ends_with_a_launcher_that_is_killed(platform: str) -> None:
    """By the kernel, and where the kernel cannot by looking."""
    rank = f"""
        import os, sys, time
        from packtool.launch.processes import end_with_launcher
        sys.platform = {platform!r}
        end_with_launcher()
        print(os.getpid(), flush=True)
        time.sleep(600)
    """
    launcher = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    with subprocess.Popen(
        [sys.executable, "-c", launcher, textwrap.dedent(rank)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "LOCAL_RANK": "0"},
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
        wait_for(lambda: is_gone(pid))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_rank_of_an_ended_launcher_does_not_start() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended_process:
        pass
    script = "import os; from packtool.launch.processes import end_with_launcher; end_with_launcher(); print('began')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "LOCAL_RANK": "0", "PACKTOOL_LAUNCHER": str(ended_process.pid)},
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_sigusr1_ends_the_launcher_and_its_ranks(tmp_path: Path) -> None:
    script = tmp_path / "sleeps.py"
    script.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    with subprocess.Popen(
        [sys.executable, "-m", "packtool.launch.torchrun", "--standalone", "--nproc-per-node", "1", str(script)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.send_signal(signal.SIGUSR1)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGUSR1
        wait_for(lambda: is_gone(pid))


def test_a_used_port_is_an_error_of_two_lines() -> None:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = str(server.getsockname()[1])
        command = [sys.executable, "-m", "packtool.launch.torchrun", "--nnodes", "1", "--nproc-per-node", "2"]
        command += ["--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port, "--module", "json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == ConfigError.exit_code
    assert port in done.stderr
    assert "MASTER_PORT" in done.stderr
    assert "Traceback" not in done.stderr
