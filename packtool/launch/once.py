"""What several processes of a run would say alike is said by one of them."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from datetime import timedelta

_SECONDS = 2.0


def is_said_elsewhere(message: str, environ: Mapping[str, str] | None = None) -> bool:
    """Whether another process of this run has said the same message already; if none has, this one is noted for it.

    The processes ask the store where torchrun lets them meet, which is there before they have met and after one has
    failed. Without torchrun, or if the store does not answer, every process speaks for itself.

    Args:
        environ: the environment, with what torchrun adds; by default that of this process.
    """
    environ = os.environ if environ is None else environ
    if environ.get("WORLD_SIZE") == "1" or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]  # here: most never need torch

    rank = environ.get("RANK", "")
    attempt = f"{environ.get('TORCHELASTIC_RUN_ID', '')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    key = f"packtool/said/{attempt}/{hashlib.sha256(message.encode()).hexdigest()}"
    try:
        place = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        with socket.create_connection(place, _SECONDS):  # where it fails, torch would print a stack
            pass
        store = TCPStore(
            *place,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_SECONDS),
        )
        return bool(store.compare_set(key, "", rank) != rank.encode())
    except (DistError, RuntimeError, KeyError, ValueError, OSError):
        return False  # rather twice than not at all
