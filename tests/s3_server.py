"""A real S3 server for tests: moto's, in a process of its own, with faults on request.

`python -m tests.s3_server` prints its port. Faults are rules in the order of arrival; the first
rule that matches a request is used, at most `times` times. They are set by POST to `/-/faults`.
Actions:

    refuse    answers 503 SlowDown, as S3 does under load
    hang      receives the body, announces an answer (100 Continue), which ends the read timeout of
              aiohttp, and does not answer until the client closes the connection
    cut       receives half of the body and closes the connection
    shorten   stores half of the body and answers as if all was stored
    hide      removes keys that contain `hidden` from a list, as a list that lags behind does

A request without the right access key is answered with 403, as by S3.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

KEY, SECRET = "the-right-key", "the-right-secret"
BUCKET = "checkpoints"


@dataclass(frozen=True)
class S3Server:
    """A running server with the bucket BUCKET."""

    port: int
    process: subprocess.Popen[str]

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a client uses this server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

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
        url = f"http://127.0.0.1:{self.port}/-/{what}"
        with urllib.request.urlopen(
            urllib.request.Request(url, data=body, method="POST"), timeout=600
        ) as response:
            content: bytes = response.read()
            return content


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Starts a server, and ends it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.s3_server"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MOTO_S3_CUSTOM_ENDPOINTS": ""},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.strip().isdigit(), f"the S3 server printed {line!r}"
        yield S3Server(int(line), process)
    finally:
        process.kill()
        process.communicate()


# -------------------------------------------------------------------------------------- the process


class Faults:
    """A WSGI application around moto's, with the rules."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._rules: list[dict[str, Any]] = []
        self._requests: list[str] = []

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path, query = environ["PATH_INFO"], environ.get("QUERY_STRING", "")
        if path.startswith("/-/"):
            return self._control(path, environ, start_response)
        what = f"{environ['REQUEST_METHOD']} {path}{'?' if query else ''}{query}"
        with self._lock:
            self._requests.append(what)
        if f"Credential={KEY}/" not in environ.get("HTTP_AUTHORIZATION", ""):
            return self._error(
                start_response, "403 Forbidden", "InvalidAccessKeyId", environ["REQUEST_METHOD"]
            )
        rule = self._rule(environ["REQUEST_METHOD"], what)
        action = rule["action"] if rule is not None else ""
        if action == "refuse":
            return self._error(
                start_response, "503 Slow Down", "SlowDown", environ["REQUEST_METHOD"]
            )
        if action == "hang":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            environ["werkzeug.socket"].sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            _await_close(environ["werkzeug.socket"])
            raise ConnectionError
        if action == "cut":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0) // 2)
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError
        if action == "shorten":
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            environ["wsgi.input"] = io.BytesIO(body[: len(body) // 2])
            environ["CONTENT_LENGTH"] = str(len(body) // 2)
            for header in [name for name in environ if "CHECKSUM" in name or "MD5" in name]:
                del environ[header]
        answered: Iterable[bytes] = self._inner(environ, start_response)
        if action == "hide":
            assert rule is not None
            return self._hidden(b"".join(answered), rule["hidden"])
        return answered

    def _rule(self, method: str, what: str) -> dict[str, Any] | None:
        with self._lock:
            for rule in self._rules:
                fits = rule.get("method", method) == method and rule.get("text", "") in what
                if fits and rule.get("times", 1) > 0:
                    rule["times"] = rule.get("times", 1) - 1
                    return rule
        return None

    def _control(self, path: str, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        with self._lock:
            if path.endswith("faults"):
                self._rules = json.loads(body)
            answer = json.dumps(self._requests).encode()
        start_response("200 OK", [("Content-Length", str(len(answer)))])
        return [answer]

    @staticmethod
    def _error(start_response: Any, status: str, code: str, method: str) -> Iterable[bytes]:
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
        body = b"" if method == "HEAD" else text.encode()
        start_response(status, [("Content-Type", "application/xml")])
        return [body]

    @staticmethod
    def _hidden(answer: bytes, hidden: str) -> Iterable[bytes]:
        length = len(answer)  # as announced; white space may follow a document
        for tag in ("Contents", "CommonPrefixes"):
            pattern = rf"<{tag}>(?:(?!</{tag}>).)*{re.escape(hidden)}(?:(?!</{tag}>).)*</{tag}>"
            answer = re.sub(pattern.encode(), b"", answer, flags=re.DOTALL)
        return [answer.ljust(length)]


def _await_close(connection: socket.socket) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        select.select([connection], [], [], 1)
        try:
            if not connection.recv(1 << 16):
                return
        except OSError:
            return


def main() -> None:
    """Serves until the parent process ends."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    inner = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, Faults(inner), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made = urllib.request.Request(
        f"http://127.0.0.1:{server.server_port}/{BUCKET}",
        method="PUT",
        headers={"Authorization": f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/x"},
    )
    urllib.request.urlopen(made, timeout=600).close()  # moto loads its models first
    print(server.server_port, flush=True)
    sys.stdin.read()  # until the parent process ends


if __name__ == "__main__":
    main()
