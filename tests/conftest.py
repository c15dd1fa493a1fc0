"""What several folders of tests need."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Before the first import of torch, which reads both. One thread, whatever the environment says: a fork of a process
# that used several OpenMP threads would wait for them forever, and threads that wait take most of the CPU time.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer

from packtool import storage
from packtool.encode import encoder
from packtool.encode.model_files import ModelFiles
from tests.drawn_data import draw_data
from tests.s3_server import ENVIRONMENT, Proxy, S3Server

REPOSITORY = Path(__file__).parent.parent

# Nothing here may wait for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What is remembered of checked caches does not go to the home of whoever runs the tests.
_NOTES = tempfile.TemporaryDirectory(prefix="packtool-tests-")
os.environ.setdefault("PACKTOOL_CACHE_DIR", _NOTES.name)
# Tests press Ctrl-C, which a shell's background jobs and what they start would ignore.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how busy the machine is.
settings.register_profile("packtool", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("packtool")

# Memory that is given back to the system after every large tensor comes back as pages full of zeros, which takes a
# tenth of the time. (glibc's M_TRIM_THRESHOLD and M_MMAP_THRESHOLD; processes that are forked have it, too.)
if sys.platform == "linux":
    for option in (-1, -3):
        ctypes.CDLL(None).mallopt(option, 2**30)


# Python's own collections would take a sixth of the tests' time; the fixtures below are instead of them.
gc.disable()
_MOST_OBJECTS = 500_000


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_stays() -> None:
    """What was imported lives until the end: who collects garbage need not look at it.

    Much is imported by the tests themselves, so this is done before each file, and before a file has made anything.
    Every training would collect twice, by way of accelerate, which takes a sixth of the time of a small one.
    """
    gc.collect()
    gc.freeze()
    if memory := sys.modules.get("accelerate.utils.memory"):
        memory.gc = SimpleNamespace(collect=_collect_if_much)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _garbage_is_collected() -> None:
    """Once there may be much of it."""
    _collect_if_much()


def _collect_if_much() -> None:
    if gc.get_count()[0] > _MOST_OBJECTS:
        gc.collect()


NUM_SMOKE_VALUES = 3


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m smoke``, files without a smoke test are not imported."""
    is_file = collection_path.suffix == ".py" and config.option.markexpr == "smoke"
    return True if is_file and "pytest.mark.smoke" not in collection_path.read_text() else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A smoke test takes the first values of each of its parameters, and drawn data; the full run takes everything."""
    for item in items:
        case = getattr(item, "callspec", None)
        if case and (max(case.indices.values(), default=0) >= NUM_SMOKE_VALUES or case.params.get("data") == "real"):
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "smoke"]


def pytest_collection_finish() -> None:
    """Nothing may import torch before OMP_NUM_THREADS is set, or raise the number of its threads."""
    if torch := sys.modules.get("torch"):
        assert torch.get_num_threads() == 1


def pytest_sessionfinish() -> None:
    """Modules that count what was left over would complain."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _large_tokenizers_are_read_once() -> Iterator[None]:
    """Reading one of 150,000 tokens takes a third of a second, and tests make hundreds of encoders of a few models."""
    read = encoder._load_tokenizer

    @lru_cache(maxsize=6)
    def read_once(tokenizer_json: str, *_: str) -> Tokenizer:
        return Tokenizer.from_str(tokenizer_json)

    def known(files: ModelFiles) -> Tokenizer:
        if len(files.tokenizer_json) < 1_000_000:
            return read(files)
        # What an encoder tells its tokenizer of control tokens comes from template and configuration.
        return read_once(files.tokenizer_json, files.chat_template, json.dumps(files.config, sort_keys=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoder, "_load_tokenizer", known)
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    """The checkout's root."""
    return REPOSITORY


@pytest.fixture(scope="session")
def realdata() -> Path:
    """Real conversations, pictures and tokenizers beside the checkout, if there are any.

    For more runs of what drawn data have shown: a test that asks for them skips in most checkouts.
    """
    folder = REPOSITORY.parent / "shared" / "realdata"
    if not folder.is_dir():
        pytest.skip(f"no real data beside the checkout ({folder.name})")
    return folder


@pytest.fixture(scope="session")
def drawn_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small model directories, rows and media, at the paths that the real data have."""
    folder = tmp_path_factory.mktemp("drawn")
    draw_data(folder)
    return folder


@pytest.fixture(scope="session", params=["drawn", "real"])
def data(request: pytest.FixtureRequest) -> Path:
    """The drawn data, then the real data."""
    folder: Path = request.getfixturevalue("drawn_data" if request.param == "drawn" else "realdata")
    return folder


@pytest.fixture(autouse=True)
def _no_limits_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever runs the tests must not decide them."""
    for name in (
        "MAX_PIXELS",
        "MIN_PIXELS",
        "IMAGE_MAX_TOKEN_NUM",
        "IMAGE_MIN_TOKEN_NUM",
        "NPROC_PER_NODE",
        "NNODES",
        "ROOT_IMAGE_DIR",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server in a process of its own."""
    server = S3Server()
    yield server
    server.close()


_bucket_numbers = count()


@pytest.fixture
def bucket(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """``s3://`` and the name of a new, empty bucket that packtool reaches by the usual environment variables."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "OSS_", "PACKTOOL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": s3_server.url}.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{next(_bucket_numbers)}"
    s3_server.client().create_bucket(Bucket=bucket)
    # New connections take half a second.
    if storage.options() != storage.StorageOptions.from_environment(os.environ):
        storage.configure(None)
    return f"s3://{bucket}"


@pytest.fixture
def through_proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Proxy]]:
    """Puts a proxy with these faults between packtool and the server; pauses between tries are short.

    A connection that stays silent for ``timeout`` seconds is given up. Tests of stalls wait for that; the others leave
    it at what a server on a busy machine keeps.
    """
    with ExitStack() as stack:

        def start(retries: int = 20, timeout: float = 60.0, **settings: Any) -> Proxy:
            proxy = stack.enter_context(Proxy(s3_server.port, stall_s=4 * timeout, **settings))
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            monkeypatch.setenv("PACKTOOL_STORAGE_RETRIES", str(retries))  # for processes that are started
            monkeypatch.setenv("PACKTOOL_STORAGE_TIMEOUT", str(timeout))
            options = storage.StorageOptions.from_environment(os.environ)
            storage.configure(dataclasses.replace(options, first_pause=0.01))
            return proxy

        yield start
    storage.configure(None)
