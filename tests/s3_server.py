"""A real S3 server in a process of its own, and a proxy in front of it that breaks requests on purpose."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

FAULTS = ("500 InternalError", "drop request", "503 SlowDown", "drop answer", "lose answer", "stall", "short answer")
KEYS = {"AWS_ACCESS_KEY_ID": "test-key-id", "AWS_SECRET_ACCESS_KEY": "test-secret-key"}
ENVIRONMENT = {**KEYS, "AWS_REGION": "us-east-1"}


# On Linux it ends with the tests' process, however that ends.
_PROGRAM = """
import ctypes, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
from moto.server import main
main(["-p", "0"])
"""


class S3Server:
    """moto's S3 over HTTP, in a process of its own, on a port that was free."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _PROGRAM]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        output = ""
        for line in self._process.stderr:
            output += line
            if match := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.port = int(match[1])
                break
        else:
            raise RuntimeError(f"the S3 server did not start: {output}")
        # A full pipe would stop the server.
        threading.Thread(target=self._process.stderr.read, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self) -> Any:
        """boto3's, straight to the server: another hand than the code under test."""
        import boto3

        keys = {name.lower(): value for name, value in KEYS.items()}
        return boto3.client("s3", endpoint_url=self.url, region_name="us-east-1", **keys)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


@dataclass
class Proxy:
    """Passes requests on to a server and breaks some of them, counted, by a seed.

    Args:
        port: of the server.
        share: of the requests that go wrong.
        faults: what may happen to them, in turn: an HTTP status with S3's word for it, a connection that is closed in
            the middle of the request or of the answer or before the answer, one that falls silent, a changed byte, or a
            body that was cut, with a length to match.
        once: (pattern of a request line, fault) that befalls the first such request.
        stall_s: how long a stalled connection stays silent before it is closed.
    """

    port: int
    share: float = 0.0
    faults: Sequence[str] = FAULTS
    seed: int = 0
    stall_s: float = 30.0
    once: list[tuple[str, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    heads: list[str] = field(default_factory=list)

    def __enter__(self) -> Proxy:
        self._chance = random.Random(self.seed)
        self._turn = 0
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=2**20)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await self._end.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._request(reader, writer):
                pass
        writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; False when the connection is over."""
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head.decode())
        self.counts["requests"] += 1
        length = int(_header(head, "content-length") or 0)
        fault = self._next_fault(head.decode().partition("\r\n")[0])
        if _header(head, "expect") == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault == "drop request":
            await reader.readexactly(length // 2)
            return False
        body = await reader.readexactly(length)
        if fault and fault[0].isdigit():
            status, code = fault.split()
            text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>No.</Message></Error>"
            text = "" if head.startswith(b"HEAD") else text
            writer.write(f"HTTP/1.1 {status} No\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            await writer.drain()
            return True
        answer = await self._ask(head, body)
        if fault == "lose answer":
            return False
        if fault == "stall":
            writer.write(answer[: len(answer) // 2])
            await writer.drain()
            await asyncio.sleep(self.stall_s)
            return False
        if fault == "drop answer":
            writer.write(answer[: len(answer) * 3 // 4])
            await writer.drain()
            return False
        if fault == "short answer":
            answer = _shortened(answer)
        writer.write(answer[:-1] + bytes([answer[-1] ^ 1]) if fault == "change byte" else answer)
        await writer.drain()
        return False  # the server closes after each answer, and says so

    def requests(self, pattern: str) -> list[str]:
        """The request lines that fit a pattern."""
        lines = [head.partition("\r\n")[0] for head in self.heads]
        return [line for line in lines if re.match(pattern, line)]

    def _next_fault(self, line: str) -> str | None:
        for planned in self.once:
            if re.match(planned[0], line):
                self.once.remove(planned)
                self.counts[planned[1]] += 1
                return planned[1]
        if self._chance.random() >= self.share:
            return None
        fault = self.faults[self._turn % len(self.faults)]
        self._turn += 1
        self.counts[fault] += 1
        return fault

    async def _ask(self, head: bytes, body: bytes) -> bytes:
        head = re.sub(rb"(?i)\r\n(connection|expect): [^\r]*", b"", head)
        head = head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(_path_style(head) + body)
        answer = await reader.read()
        writer.close()
        return answer


def _shortened(answer: bytes) -> bytes:
    head, end, body = answer.partition(b"\r\n\r\n")
    body = body[: len(body) * 3 // 4]
    length = rb"\g<1>%d" % len(body)
    return (re.sub(rb"(?i)(\r\ncontent-length: )\d+", length, head) if body else head) + end + body


def _path_style(head: bytes) -> bytes:
    """A bucket in front of the host, as OSS has it, becomes one in the path."""
    bucket = re.match(rb"([^.]+)\.oss-", (_header(head, "host") or "").encode())
    if bucket is None:
        return head
    head = re.sub(rb"(?i)\r\nhost: [^\r]*", b"\r\nHost: 127.0.0.1", head)
    return re.sub(rb"^(\w+) /", rb"\1 /" + bucket[1] + rb"/", head)


def _header(head: bytes, name: str) -> str | None:
    match = re.search(rf"(?i)\r\n{name}: *([^\r]*)", head.decode())
    return match[1] if match else None
