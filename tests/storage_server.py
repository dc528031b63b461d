"""Parts that the object stores for tests share. Each is a server in a process of its own, with
faults on request.

Faults are rules in the order of arrival; the first rule that matches a request is used, at most
`times` times. They are set by POST to `/-/faults`. Actions:

    refuse    answers 503, as storages do under load
    forbid    answers 403, as if the credential did not permit the request
    hang      receives the body and does not answer until the client closes the connection
    cut       receives half of the body and closes the connection
    shorten   stores half of the body and answers as if all was stored
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

BUCKET: Final = "checkpoints"
"""Name of the only bucket."""
FAULTS: Final = "/-/"
"""Beginning of the paths with which tests control a server."""


@dataclass(frozen=True)
class StorageServer:
    """A running server with the bucket BUCKET."""

    port: int
    process: subprocess.Popen[str]
    environment: Mapping[str, str]
    """Variables with which a client uses this server."""

    def set_faults(self, *rules: dict[str, Any]) -> None:
        """Replaces the rules. Each has "action", and optionally "method", "text" (part of the path
        and query) and "times"."""
        self._post("faults", json.dumps(rules).encode())

    def requests(self, method: str = "", text: str = "") -> list[str]:
        """Returns all requests so far, such as "PUT /checkpoints/a?partNumber=1", of a method and
        with a text in them."""
        everything: list[str] = json.loads(self._post("requests", b""))
        return [each for each in everything if each.startswith(method) and text in each]

    def _post(self, what: str, body: bytes) -> bytes:
        url = f"http://127.0.0.1:{self.port}{FAULTS}{what}"
        with urllib.request.urlopen(
            urllib.request.Request(url, data=body, method="POST"), timeout=600
        ) as response:
            content: bytes = response.read()
            return content


@contextmanager
def started(module: str, **variables: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Starts `python -m MODULE`, which calls `serve_for_parent`, and ends it. Yields the port and
    the process."""
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.strip().isdigit(), f"{module} printed {line!r}"
        yield int(line), process
    finally:
        process.kill()
        process.communicate()


# -------------------------------------------------------------------------------------- the process


class Rules:
    """The faults and the requests of a server. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[dict[str, Any]] = []
        self._requests: list[str] = []

    def record(self, request: str) -> None:
        """Records a request, such as "PUT /checkpoints/a"."""
        with self._lock:
            self._requests.append(request)

    def rule_for(self, request: str) -> dict[str, Any] | None:
        """Returns the rule for a request; None if there is none."""
        method = request.partition(" ")[0]
        with self._lock:
            for rule in self._rules:
                fits = rule.get("method", method) == method and rule.get("text", "") in request
                if fits and rule.get("times", 1) > 0:
                    rule["times"] = rule.get("times", 1) - 1
                    return rule
        return None

    def control(self, path: str, body: bytes) -> bytes:
        """Answers a request of a test."""
        with self._lock:
            if path.endswith("faults"):
                self._rules = json.loads(body)
            return json.dumps(self._requests).encode()


def await_close(connection: socket.socket) -> None:
    """Blocks until the client closes the connection, for up to ten minutes."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        select.select([connection], [], [], 1)
        try:
            if not connection.recv(1 << 16):
                return
        except OSError:
            return


def serve_for_parent(port: int) -> None:
    """Prints the port, and returns when the parent process ends."""
    print(port, flush=True)
    sys.stdin.read()
