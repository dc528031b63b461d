"""A real S3 server for tests: moto's, in a process of its own, with the faults of
tests/storage_server.py and one more:

    hide      removes keys that contain `hidden` from a list, as a list that lags behind does

A request without the right access key is answered with 403, as by S3.
"""

from __future__ import annotations

import io
import logging
import re
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.storage_server import (
    BUCKET,
    FAULTS,
    Rules,
    StorageServer,
    await_close,
    serve_for_parent,
    started,
)

KEY, SECRET = "the-right-key", "the-right-secret"


@contextmanager
def s3_server() -> Iterator[StorageServer]:
    """Starts a server, and ends it."""
    with started("tests.s3_server", MOTO_S3_CUSTOM_ENDPOINTS="") as (port, process):
        yield StorageServer(
            port,
            process,
            {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                "AWS_ACCESS_KEY_ID": KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_EC2_METADATA_DISABLED": "true",
            },
        )


# -------------------------------------------------------------------------------------- the process


class Faults:
    """A WSGI application around moto's, with the rules."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._rules = Rules()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path, query = environ["PATH_INFO"], environ.get("QUERY_STRING", "")
        if path.startswith(FAULTS):
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            answer = self._rules.control(path, body)
            start_response("200 OK", [("Content-Length", str(len(answer)))])
            return [answer]
        what = f"{environ['REQUEST_METHOD']} {path}{'?' if query else ''}{query}"
        self._rules.record(what)
        if f"Credential={KEY}/" not in environ.get("HTTP_AUTHORIZATION", ""):
            return self._error(
                start_response, "403 Forbidden", "InvalidAccessKeyId", environ["REQUEST_METHOD"]
            )
        rule = self._rules.rule_for(what)
        action = rule["action"] if rule is not None else ""
        if action == "refuse":
            return self._error(
                start_response, "503 Slow Down", "SlowDown", environ["REQUEST_METHOD"]
            )
        if action == "forbid":
            return self._error(
                start_response, "403 Forbidden", "AccessDenied", environ["REQUEST_METHOD"]
            )
        if action == "hang":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            # this announcement of an answer ends the read timeout of aiohttp
            environ["werkzeug.socket"].sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            await_close(environ["werkzeug.socket"])
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
    serve_for_parent(server.server_port)


if __name__ == "__main__":
    main()
