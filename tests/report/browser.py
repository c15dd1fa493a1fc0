"""Headless Chromium, spoken to over two pipes: what a page looks like to a reader, without any further package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_S

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """Return a browser in PATH that starts, or None; Ubuntu has one that only prints how to install it."""
    for path in filter(None, map(shutil.which, _NAMES)):
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            version = subprocess.run([path, "--version"], capture_output=True, timeout=PATIENCE_S, check=False)
            if version.returncode == 0:
                return path
    return None


class Browser:
    """One tab of a browser.

    Args:
        path: of the program.
        profile: an empty folder.

    Raises:
        RuntimeError: from any method, if the browser refuses, ends or does not answer.
    """

    def __init__(self, path: str, profile: Path) -> None:
        self._id = 0
        self._rest = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        input_fd, self._out = _pipe(reader=True)
        self._in, answers = _pipe(reader=False)
        # The browser reads from 3 and writes to 4.
        shell = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        command = ["bash", "-c", shell, "browser", str(input_fd), str(answers), path, *_FLAGS]
        with (profile / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--user-data-dir={profile}", "about:blank"],
                pass_fds=(input_fd, answers),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        os.close(input_fd)
        os.close(answers)

    def attach(self) -> None:
        """Attach to the tab and subscribe to its events."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events received meanwhile are kept in ``events``."""
        self._id += 1
        message: dict[str, Any] = {"id": self._id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._id:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, url: str, width: int, height: int = 800, dark: bool = False, media: str = "screen") -> None:
        """Load a page on a screen of this size (CSS pixels) and color scheme."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, script: str) -> Any:
        """Return the value of a script as JSON."""
        reply = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(str(reply["exceptionDetails"]))
        return reply["result"].get("value")

    def errors(self) -> list[str]:
        """Return errors and warnings that the page has logged since it was opened."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in kinds]

    def requests(self) -> list[str]:
        """Return the addresses that the page has requested since it was opened, its own first."""
        sent = (event for event in self.events if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]

    def screenshot(self) -> bytes:
        """Return the full page as PNG."""
        reply = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(reply["data"])

    def close(self) -> None:
        """Stop the browser and all its processes."""
        self._session = None
        with contextlib.suppress(RuntimeError, OSError):
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE_S
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(end - time.monotonic(), 0))[0]:
                raise RuntimeError(f"the browser says nothing for {PATIENCE_S:.0f} s")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise RuntimeError("the browser has ended")
            self._rest += data
        line, self._rest = self._rest.split(b"\0", 1)
        return json.loads(line)


@contextlib.contextmanager
def running_browser(path: str, profile: Path) -> Iterator[Browser]:
    """Start a browser, and stop it afterwards in any case."""
    browser = Browser(path, profile)
    try:
        browser.attach()
        yield browser
    finally:
        browser.close()


def _pipe(reader: bool) -> tuple[int, int]:
    """Return a pipe whose end for the browser has a high number, so that 3 and 4 stay free."""
    read, write = os.pipe()
    own_fd = read if reader else write
    high = fcntl.fcntl(own_fd, fcntl.F_DUPFD, 64)
    os.close(own_fd)
    return (high, write) if reader else (read, high)
