"""The three scripts that images and compose depend on: loading secrets into the environment, health
checks, and making the secrets."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
import yaml
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from shoal_common.redis.embedded import find_server_binary
from shoal_common.security.authentication import Role, TokenTable
from shoal_worker.store.redis_store import RedisStore

ROOT = Path(__file__).resolve().parents[3]
ENTRYPOINT = ROOT / "docker/entrypoint.sh"
HEALTHCHECK = ROOT / "docker/healthcheck.py"
MAKE_SECRETS = ROOT / "docker/make_secrets.py"


def entrypoint(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ENTRYPOINT), *command],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_entrypoint_exports_a_secret_files_content_and_execs_the_command(
    tmp_path: Path,
) -> None:
    secret = tmp_path / "token"
    secret.write_text("s3cret '$HOME' \"x\"\n")
    ended = entrypoint({"SHOAL_TOKEN__FILE": str(secret), "SHOAL_JOB": "digits"}, "env")
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert "SHOAL_TOKEN=s3cret '$HOME' \"x\"" in lines
    assert "SHOAL_JOB=digits" in lines
    assert not [line for line in lines if "__FILE" in line]


def test_entrypoint_preserves_the_commands_arguments_and_exit_status() -> None:
    ended = entrypoint({}, "sh", "-c", 'printf "<%s>" "$@"; exit 7', "sh", "two words", "*")
    assert ended.returncode == 7
    assert ended.stdout == "<two words><*>"


def test_entrypoint_names_an_unreadable_secret(tmp_path: Path) -> None:
    ended = entrypoint({"SHOAL_TOKEN__FILE": str(tmp_path / "missing")}, "env")
    assert ended.returncode == 1
    assert f"SHOAL_TOKEN__FILE={tmp_path / 'missing'} cannot be read" in ended.stderr


@pytest.fixture
def answering() -> Iterator[HTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/healthz" else 503)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def health(url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", str(HEALTHCHECK), url],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_the_health_check_passes_on_200_and_fails_on_503_and_on_silence(
    answering: HTTPServer,
) -> None:
    base = f"http://127.0.0.1:{answering.server_port}"
    assert health(f"{base}/healthz").returncode == 0
    refused = health(f"{base}/other")
    assert refused.returncode == 1
    assert "503" in refused.stderr
    assert health("http://127.0.0.1:9/healthz").returncode == 1


def made(script: Path) -> dict[str, str]:
    subprocess.run([sys.executable, str(script)], check=True, timeout=30, capture_output=True)
    return {path.name: path.read_text() for path in (script.parent / "secrets").iterdir()}


@pytest.fixture
def make_secrets(tmp_path: Path) -> Path:
    """The script in a temporary folder, because it writes beside itself."""
    return Path(shutil.copy(MAKE_SECRETS, tmp_path))


def test_generated_tokens_are_in_the_table_with_their_role(make_secrets: Path) -> None:
    secrets = made(make_secrets)
    table = TokenTable.from_file(make_secrets.parent / "secrets/tokens")
    for role in Role:
        assert table.holder_of(f"Bearer {secrets[f'{role}_token']}").role is role


def test_existing_secrets_are_never_overwritten(make_secrets: Path) -> None:
    assert made(make_secrets) == made(make_secrets)


def test_container_user_can_read_the_secrets_and_only_their_owner_the_folder(
    make_secrets: Path,
) -> None:
    made(make_secrets)
    folder = make_secrets.parent / "secrets"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o444}


def _check_worker(url: str) -> None:
    """Checks that a worker can use the store, but cannot access the coordinator's keys."""
    for prefix in (
        "shoal:{train}:store:1-abc",
        "shoal:{train}:group:abc",
        "shoal:{train}:rendezvous",
    ):
        store = RedisStore(url, prefix)
        with store.watch_writes("key") as written:
            assert written.wait(60), "it may not listen"
            written.clear()
            store.set("key", "1")
            assert written.wait(60), "it hears nothing"
        store.queue_push("queue", "item")
        assert (
            store.queue_pop("queue"),
            store.add("number", 2),
            store.num_keys(),
            store.delete_key("key"),
        ) == (b"item", 2, 2, True)
        store.discard()
        store.close()
    with redis.Redis.from_url(url) as worker:
        for forbidden in ("shoal:{train}:state", "shoal:{train}:events", "shoal:jobs"):
            for command in (
                ("GET", forbidden),
                ("DEL", forbidden),
                ("EVAL", "return redis.call('TYPE', KEYS[1])", "1", forbidden),
            ):
                with pytest.raises(
                    redis.exceptions.ResponseError, match=r"(?i)no permission|can't access|NOPERM"
                ):
                    worker.execute_command(*command)
        for command in ("FLUSHALL", "CONFIG GET *", "ACL LIST", "KEYS *"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                worker.execute_command(*command.split())


def test_redis_started_as_in_compose_keeps_writes_and_only_answers_pings_without_a_password(
    make_secrets: Path, tmp_path: Path
) -> None:
    secrets = made(make_secrets)
    command = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["redis"]["command"]
    acl = str(make_secrets.parent / "secrets/redis_acl")
    arguments = [acl if part == "/run/secrets/redis_acl" else part for part in command[1:]]
    listen = ["--port", "0", "--unixsocket", str(tmp_path / "socket"), "--dir", str(tmp_path)]
    server = subprocess.Popen(
        [str(find_server_binary()), *arguments, *listen], stdout=subprocess.DEVNULL
    )
    try:
        stranger = redis.Redis(
            unix_socket_path=str(tmp_path / "socket"), retry=Retry(ConstantBackoff(0.05), 200)
        )
        assert stranger.ping(), "which is the health check"
        with pytest.raises(redis.exceptions.NoPermissionError):
            stranger.get("shoal")
        user = redis.Redis(
            unix_socket_path=str(tmp_path / "socket"),
            username="shoal",
            password=urlsplit(secrets["redis_url"]).password,
        )
        assert user.config_get("append*")["appendfsync"] == "always"
        assert user.set("shoal", "1")
        _check_worker(
            f"unix://{tmp_path / 'socket'}?username=worker"
            f"&password={urlsplit(secrets['redis_worker_url']).password}"
        )
    finally:
        server.terminate()
        server.wait(timeout=30)
    assert b"shoal" in b"".join(
        path.read_bytes() for path in (tmp_path / "appendonlydir").iterdir()
    )
