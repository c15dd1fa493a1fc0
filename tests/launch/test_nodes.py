"""Launchers of several machines, all on this one: forks that run torchrun with ranks that import no torch."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from packtool.errors import ConfigError
from packtool.launch import torchrun
from packtool.launch.processes import launch_command
from tests.forked import forked_process
from tests.waiting import PATIENCE_S, wait_for

PLENTY_S = 300
RUNS = "pass"
WAITS = "print('rank runs', flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BEAT": 0.05, "SILENT": 1.0, "FIRST_LINE": 0.3, "GRACE": 0.5, "LEAVE": 5.0}.items():
        monkeypatch.setattr(torchrun, f"_{name}_SECONDS", seconds)
    monkeypatch.setattr(torchrun, "_STUCK_SECONDS", 0.2)


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as server_socket:
        # Bound, so that nothing else is given the port, but not listening.
        server_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server_socket.bind(("127.0.0.1", 0))
        yield server_socket.getsockname()[1]


Node = Callable[..., AbstractContextManager[BaseProcess]]


@pytest.fixture
def node(tmp_path: Path, port: int) -> Node:
    """Start the launcher of a machine; it writes to ``output-RANK.txt``."""

    @contextmanager
    def start(
        rank: int,
        rank_code: str = RUNS,
        *,
        num_nodes: int = 2,
        limit: float = PLENTY_S,
        place: tuple[str, int] = ("127.0.0.1", port),
        per_node: int = 1,
    ) -> Iterator[BaseProcess]:
        script = tmp_path / f"rank-{rank}.py"
        header = "import os, signal, sys, time\nfrom packtool.launch.processes import end_with_launcher\n"
        script.write_text(f"{header}end_with_launcher()\n{textwrap.dedent(rank_code)}\n")
        options = ["--nnodes", str(num_nodes), "--nproc-per-node", str(per_node), "--rdzv-conf", f"timeout={limit:g}"]
        options += ["--node-rank", str(rank), "--master-addr", place[0], "--master-port", str(place[1]), str(script)]
        with forked_process(torchrun.run_launcher, options, output_path=tmp_path / f"output-{rank}.txt") as process:
            yield process

    return start


@pytest.fixture
def output_of(tmp_path: Path) -> Callable[[int], str]:
    """What a machine's launcher and ranks have printed so far."""

    def read(rank: int) -> str:
        path = tmp_path / f"output-{rank}.txt"
        return path.read_text() if path.exists() else ""

    return read


ReadOutput = Callable[[int], str]


def exit_code_of(process: BaseProcess) -> int | None:
    process.join(PATIENCE_S)
    return process.exitcode


def test_missing_peer_is_an_error(node: Node, output_of: ReadOutput, port: int) -> None:
    with node(0, limit=1.5) as master:
        assert exit_code_of(master) == ConfigError.exit_code
    line = f"node 0 of 2: waiting at 127.0.0.1:{port} for 1 of 2 nodes: NODE_RANK 1 ("
    assert output_of(0).count(line) >= 2
    assert "gave up: waiting at" in output_of(0)
    assert f"a firewall may block port {port}. --ddp-timeout sets the limit, now 1.5 s" in output_of(0)
    assert "Traceback" not in output_of(0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_ends_a_launcher_that_waits(node: Node, output_of: ReadOutput, rank: int, signum: int) -> None:
    with node(rank) as process:
        wait_for(lambda: "waiting" in output_of(rank), lambda: not process.is_alive())
        os.kill(process.pid or 0, signum)
        assert exit_code_of(process) == 128 + signum


def test_late_peer_is_awaited_and_both_print_start_and_end(node: Node, output_of: ReadOutput, port: int) -> None:
    with node(0, per_node=2) as master:
        wait_for(lambda: "waiting" in output_of(0), lambda: not master.is_alive())
        with node(1, per_node=2) as peer:
            assert (exit_code_of(master), exit_code_of(peer)) == (0, 0)
    for rank, ranks in enumerate(("ranks 0 to 1 of 4", "ranks 2 to 3 of 4")):
        assert f"packtool: node {rank} of 2: {ranks}, master 127.0.0.1:{port}\n" in output_of(rank)
        assert f"packtool: node {rank} of 2: ended with exit code 0 after" in output_of(rank)


def test_peer_killed_before_the_meeting_can_be_restarted(node: Node, output_of: ReadOutput) -> None:
    with node(0, num_nodes=3) as master:
        with node(1, num_nodes=3) as peer:
            wait_for(lambda: "for 1 of 3 nodes: NODE_RANK 2" in output_of(0), lambda: not master.is_alive())
            peer.kill()
        wait_for(lambda: "for 2 of 3 nodes: NODE_RANK 1, 2" in output_of(0), lambda: not master.is_alive())
        with node(1, num_nodes=3) as peer, node(2, num_nodes=3) as third:
            assert [exit_code_of(each) for each in (master, peer, third)] == [0, 0, 0]


def test_master_restarted_while_others_wait(node: Node, output_of: ReadOutput, port: int) -> None:
    with node(1, num_nodes=3) as peer:
        with node(0, num_nodes=3) as master:
            wait_for(lambda: "for 1 of 3 nodes: NODE_RANK 2" in output_of(1), lambda: not peer.is_alive())
            master.kill()
        wait_for(lambda: f"waiting for node 0 at 127.0.0.1:{port}" in output_of(1).rstrip().rpartition("\n")[2])
        with node(0, num_nodes=3) as master, node(2, num_nodes=3) as third:
            assert [exit_code_of(each) for each in (master, peer, third)] == [0, 0, 0]


@pytest.mark.parametrize("signum", [None, signal.SIGTERM])
def test_peer_killed_between_meeting_and_torchruns_rendezvous(
    node: Node, output_of: ReadOutput, signum: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread of the other one is inside torch's store, where Python handles no signal."""
    meet = torchrun.LauncherGroup.meet

    def meet_and_die(self: torchrun.LauncherGroup) -> None:
        meet(self)
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(torchrun.LauncherGroup, "meet", meet_and_die)
    if signum:
        monkeypatch.setattr(torchrun, "_GRACE_SECONDS", PLENTY_S)
    with node(0) as master, node(1) as peer:
        assert exit_code_of(peer) == -signal.SIGKILL
        if signum:
            wait_for(lambda: "has not answered" in output_of(0), lambda: not master.is_alive())
            os.kill(master.pid or 0, signum)
        assert exit_code_of(master) == (128 + signum if signum else ConfigError.exit_code)
    assert re.search(r"node 1 \(\S+, rank 1 of 2\) has not answered for \d+ s: killed, or disconnected", output_of(0))


@pytest.mark.parametrize("killed", [0, 1])
def test_node_killed_while_ranks_run(node: Node, output_of: ReadOutput, port: int, killed: int) -> None:
    """Ranks that do not notice it themselves are ended after the limit."""
    other = 1 - killed
    with node(killed, WAITS) as dying:
        wait_for(lambda: "waiting" in output_of(killed), lambda: not dying.is_alive())
        with node(other, WAITS, limit=2) as surviving:
            wait_for(lambda: all("rank runs" in output_of(n) for n in (0, 1)), lambda: not surviving.is_alive())
            dying.kill()
            assert exit_code_of(surviving) == 128 + signal.SIGTERM
    messages = [f"node 1 of 2: node 0 at 127.0.0.1:{port} has ended: ", "rank 1 of 2) has not answered for"]
    assert messages[killed] in output_of(other)


@pytest.mark.parametrize("failing", [0, 1])
def test_failed_node_is_named_on_the_other_node(
    node: Node, output_of: ReadOutput, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine the other rank may start, or its launcher leave, long after this one has failed.
    monkeypatch.setattr(torchrun, "_GRACE_SECONDS", PLENTY_S)
    monkeypatch.setattr(torchrun, "_LEAVE_SECONDS", PLENTY_S)
    other = 1 - failing
    codes = {failing: "os.kill(os.getpid(), signal.SIGKILL)", other: "time.sleep(1); sys.exit(1)"}
    with node(0, codes[0]) as master, node(1, codes[1]) as peer:
        processes = master, peer
        assert (exit_code_of(processes[failing]), exit_code_of(processes[other])) == (128 + signal.SIGKILL, 1)
    assert re.search(
        rf"node {failing} \(\S+, rank {failing} of 2\) failed with exit code 137: rank {failing} \(process \d+\) was ",
        output_of(other),
    )
    assert "failed with exit code" not in output_of(failing)


def test_ranks_waiting_for_a_failed_node_are_ended(node: Node, output_of: ReadOutput) -> None:
    with node(0, WAITS) as master, node(1, "sys.exit(3)") as peer:
        assert (exit_code_of(peer), exit_code_of(master)) == (3, 128 + signal.SIGTERM)
    assert "rank 1 of 2) failed with exit code 3" in output_of(0)


@pytest.mark.parametrize("listens", [False, True])
def test_wrong_port_is_named(node: Node, output_of: ReadOutput, port: int, listens: bool) -> None:
    """Nobody listens there, or something that is no store."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listens:
            other.listen()
        place = other.getsockname()
        with node(1, limit=1, place=place) as process:
            assert exit_code_of(process) == ConfigError.exit_code
    assert f"waiting for node 0 at 127.0.0.1:{place[1]}: " in output_of(1)
    assert listens or "Connection refused" in output_of(1)
    assert "Is packtool running where NODE_RANK=0, and is MASTER_ADDR an address of that machine?" in output_of(1)


def test_unresolvable_master_name_is_an_error(node: Node, output_of: ReadOutput) -> None:
    with node(1, limit=1, place=("nowhere.invalid", 29500)) as process:
        assert exit_code_of(process) == ConfigError.exit_code
    with pytest.raises(socket.gaierror) as unknown:
        socket.getaddrinfo("nowhere.invalid", 29500)
    assert f"waiting for node 0 at nowhere.invalid:29500: {unknown.value.strerror}" in output_of(1)


def test_wrong_master_address_is_an_error(node: Node, output_of: ReadOutput, port: int) -> None:
    """192.0.2.0/24 is for documentation: nobody has it."""
    with node(0, place=("192.0.2.1", port)) as process:
        wait_for(lambda: "waiting for MASTER_ADDR=192.0.2.1 to lead to this machine: " in output_of(0))
        os.kill(process.pid or 0, signal.SIGTERM)
        assert exit_code_of(process) == 128 + signal.SIGTERM
    assert "Exception raised" not in output_of(0)


def test_used_port_on_the_master_is_an_error(node: Node, output_of: ReadOutput) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with node(0, place=server.getsockname()) as process:
            assert exit_code_of(process) == ConfigError.exit_code

    assert "is in use on this machine" in output_of(0)


def test_different_numbers_of_processes_are_named(node: Node, output_of: ReadOutput) -> None:
    with node(0), node(1, per_node=2):
        wait_for(lambda: "has NNODES=2 NPROC_PER_NODE=2, node 0 (" in output_of(0))
        wait_for(lambda: "has NNODES=2 NPROC_PER_NODE=2, node 0 (" in output_of(1))


def test_duplicate_node_rank_is_an_error(node: Node, output_of: ReadOutput, tmp_path: Path) -> None:
    with node(0, WAITS) as master, node(1, WAITS):
        wait_for(lambda: "rank runs" in output_of(0) and "rank runs" in output_of(1), lambda: not master.is_alive())
        (tmp_path / "output-1.txt").rename(tmp_path / "output-taken.txt")
        with node(1, limit=1) as third:
            assert exit_code_of(third) == ConfigError.exit_code
    assert "has started with another NODE_RANK=1" in output_of(1)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs Linux' unshare")
def test_single_node_with_unresolvable_name_works(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text('import os; os.write(1, f\'rank {os.environ["RANK"]} {os.environ["MASTER_ADDR"]}\\n\'.encode())')
    renamed = ["unshare", "--user", "--map-root-user", "--uts", "sh", "-c", 'hostname nowhere.invalid; exec "$@"', "sh"]
    if subprocess.run([*renamed, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no namespaces")
    command = launch_command([], {"NPROC_PER_NODE": "2"})
    command[command.index("--module") :] = [str(script)]
    done = subprocess.run([*renamed, *command], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, sorted(done.stdout.split("\n"))) == (0, ["", "rank 0 127.0.0.1", "rank 1 127.0.0.1"])
