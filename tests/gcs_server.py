"""Google Cloud Storage for tests: gcp-storage-emulator, in a process of its own, with the faults of
tests/storage_server.py.

The emulator checks no credentials. Requests are named as S3 names them, such as "PUT
/checkpoints/run/file", so that the same tests can be used for both.
"""

from __future__ import annotations

import io
import logging
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.storage_server import (
    BUCKET,
    FAULTS,
    Rules,
    StorageServer,
    await_close,
    serve_for_parent,
    started,
)


@contextmanager
def gcs_server() -> Iterator[StorageServer]:
    """Starts a server, and ends it."""
    with started("tests.gcs_server") as (port, process):
        yield StorageServer(
            port,
            process,
            {
                "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
                # gcsfs asks for a bucket's type by gRPC, which the emulator does not have
                "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            },
        )


# -------------------------------------------------------------------------------------- the process


def name_of(method: str, path: str, body: bytes) -> str:
    """Returns a request as S3 would name it. `path`: path and query of the JSON API."""
    plain, _, query = path.partition("?")
    place = re.search(r"/b/([^/]+)/o(?:/(?:.*/rewriteTo/b/[^/]+/o/)?(.+))?$", unquote(plain))
    if place is None:
        return f"{method} {path}"
    bucket, name = place[1], place[2] or ""
    if "/rewriteTo/" in plain:
        method = "PUT"
    elif "/upload/" in plain:
        given = parse_qs(query)
        named = re.search(rb'"name": "([^"]+)"', body[:4096])
        name = given["name"][0] if "name" in given else named[1].decode() if named else ""
        begins = given["uploadType"] == ["resumable"] and "upload_id" not in given
        method = "POST" if begins else "PUT"
    return f"{method} /{bucket}/{name}{'?' if query else ''}{query}"


def main() -> None:
    """Serves until the parent process ends."""
    from gcp_storage_emulator.handlers.buckets import create_bucket
    from gcp_storage_emulator.server import RequestHandler, Router, _read_raw_data
    from gcp_storage_emulator.storage import Storage

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    shortening = threading.local()

    class Stored(Storage):  # type: ignore[misc]
        """The emulator's storage, with the fault `shorten`."""

        def create_file(
            self, bucket: str, name: str, content: bytes, about: dict[str, Any], *rest: Any
        ) -> None:
            if getattr(shortening, "wanted", False):
                content = content[: len(content) // 2]
                about["size"] = str(len(content))
            super().create_file(bucket, name, content, about, *rest)

    class Handler(RequestHandler):  # type: ignore[misc]
        """The emulator's requests, with the rules."""

        def do_GET(self) -> None:
            self._handle("GET")

        def do_POST(self) -> None:
            self._handle("POST")

        def do_PUT(self) -> None:
            self._handle("PUT")

        def do_DELETE(self) -> None:
            self._handle("DELETE")

        def _handle(self, method: str) -> None:
            if self.path.startswith(FAULTS):
                self._answer(200, rules.control(self.path, _read_raw_data(self) or b""))
                return
            body = _read_raw_data(self) or b""
            request = name_of(method, self.path, body)
            rules.record(request)
            rule = rules.rule_for(request)
            action = rule["action"] if rule is not None else ""
            if action == "cut":
                self.connection.shutdown(socket.SHUT_RDWR)
            elif action == "hang":
                await_close(self.connection)
            elif action == "refuse":
                self._answer(503, b'{"error": {"code": 503, "message": "slow down"}}')
            elif action == "forbid":
                self._answer(403, b'{"error": {"code": 403, "message": "not for you"}}')
            else:
                self._let_pass(method, body, shorten=action == "shorten")

        def _let_pass(self, method: str, body: bytes, *, shorten: bool) -> None:
            self.rfile = io.BytesIO(body)
            del self.headers["Transfer-Encoding"], self.headers["Content-Length"]
            self.headers["Content-Length"] = str(len(body))
            with lock:  # the emulator serves one request at a time
                shortening.wanted = shorten
                Router(self).handle(method)

        def _answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    rules, lock = Rules(), threading.Lock()
    storage = Stored(use_memory_fs=True)
    create_bucket(BUCKET, storage)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, storage))
    server.daemon_threads = True
    server.handle_error = lambda *about: None  # type: ignore[method-assign]  # clients cancel
    threading.Thread(target=server.serve_forever, daemon=True).start()
    serve_for_parent(server.server_port)


if __name__ == "__main__":
    main()
