"""The certificates that Shoal generates."""

from __future__ import annotations

import contextlib
import socket
import ssl
import stat
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from shoal_common.errors import ConfigurationError
from shoal_common.security.authentication import TlsSettings
from shoal_common.security.certificates import PairContexts, development_files, write_files


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates") / "here"
    write_files(
        directory,
        development_files(["localhost", "127.0.0.1", "coordinator"], lifetime=timedelta(days=1)),
    )
    return directory


def test_certificates_are_private_and_never_overwritten(made: Path) -> None:
    assert {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in made.iterdir()
    } == dict.fromkeys(("ca.pem", "server.pem", "server.key", "client.pem", "client.key"), 0o600)
    before = (made / "ca.pem").read_bytes()
    with pytest.raises(ConfigurationError, match=r"already contains ca\.pem"):
        write_files(made, development_files(["localhost"], lifetime=timedelta(days=1)))
    assert (made / "ca.pem").read_bytes() == before


def test_no_certificate_is_written_if_one_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot write the certificates"):
        write_files(tmp_path, {"one": b"1", "no/such/folder": b"2"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "two words", "über", "a/b"])
def test_invalid_host_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="expected the name or address of a machine"):
        development_files([name], lifetime=timedelta(days=1))


def handshake(
    server: ssl.SSLContext, client: ssl.SSLContext, name: str
) -> tuple[Exception | None, Exception | None]:
    """Performs a handshake and returns the errors of the server and the client."""
    here, there = socket.socketpair()
    problems: list[Exception | None] = [None, None]

    def serve() -> None:
        try:
            with server.wrap_socket(there, server_side=True) as connection:
                connection.sendall(b"!")
        except OSError as error:
            problems[0] = error

    here.settimeout(60)
    there.settimeout(60)
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(here, server_hostname=name) as connection:
            assert connection.recv(1) == b"!"
    except OSError as error:
        problems[1] = error
    here.close()
    thread.join(60)
    there.close()
    return problems[0], problems[1]


@pytest.mark.parametrize(
    ("name", "good"),
    [("localhost", True), ("127.0.0.1", True), ("coordinator", True), ("elsewhere", False)],
)
def test_services_are_valid_under_the_given_names(made: Path, name: str, good: bool) -> None:
    server = TlsSettings(certificate=made / "server.pem", key=made / "server.key").server_context()
    client = TlsSettings(authority=made / "ca.pem").client_context()
    _, problem = handshake(server, client, name)
    assert (problem is None) == good, problem


@pytest.mark.parametrize(("shown", "let_in"), [("client", True), ("server", True), (None, False)])
def test_mutual_tls_works_with_generated_certificates(
    made: Path, shown: str | None, let_in: bool
) -> None:
    """Mutual TLS accepts the client's and the server's certificate, and no missing one. A parameter
    server calls the coordinator with the certificate that it serves with."""
    server = TlsSettings(
        certificate=made / "server.pem", key=made / "server.key", client_authority=made / "ca.pem"
    ).server_context()
    own = (
        {}
        if shown is None
        else {"certificate": made / f"{shown}.pem", "key": made / f"{shown}.key"}
    )
    problem, _ = handshake(
        server, TlsSettings(authority=made / "ca.pem", **own).client_context(), "localhost"
    )
    assert (problem is None) == let_in, problem


def test_client_certificate_cannot_serve(made: Path) -> None:
    server = TlsSettings(certificate=made / "client.pem", key=made / "client.key").server_context()
    _, problem = handshake(
        server, TlsSettings(authority=made / "ca.pem").client_context(), "localhost"
    )
    assert problem is not None


@pytest.mark.parametrize(("known", "good"), [("a" * 32, True), ("b" * 32, False)])
def test_two_peers_recognize_each_other_by_a_shared_secret(known: str, good: bool) -> None:
    listener, caller = PairContexts.listener("a" * 32), PairContexts.caller()
    here, there = socket.socketpair()

    def serve() -> None:
        with (
            contextlib.suppress(OSError),
            listener.wrap_socket(there, server_side=True) as connection,
        ):
            connection.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    with caller.wrap_socket(here) as connection:
        with (
            contextlib.nullcontext()
            if good
            else pytest.raises(ssl.SSLError, match="does not have the shared secret")
        ):
            PairContexts.check(connection, known)
        assert connection.version() == "TLSv1.3"
    thread.join(60)
    there.close()
