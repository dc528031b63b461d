"""The causes that a client reports if it cannot reach its server, determined on real sockets."""

from __future__ import annotations

import re
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta

import pytest
import trustme
from shoal_common.exit_status import EVICTED
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.rpc.reach import find_obstacle
from shoal_common.security.authentication import TlsSettings
from shoal_protos.v1 import coordinator_pb2_grpc

SERVICE = coordinator_pb2_grpc.CoordinatorServicer


class Files:
    """Certificate files of one authority."""

    def __init__(self, directory, name):
        self._directory, self._authority = directory, trustme.CA()
        self.authority = directory / f"{name}.pem"
        self._authority.cert_pem.write_to_path(self.authority)

    def pair(self, identity="127.0.0.1", *, not_after=None, **more):
        issued = self._authority.issue_cert(identity, not_after=not_after)
        key, certificate = (
            self._directory / f"{id(issued)}.key",
            self._directory / f"{id(issued)}.pem",
        )
        issued.private_key_pem.write_to_path(key)
        issued.cert_chain_pems[0].write_to_path(certificate)
        return TlsSettings(certificate=certificate, key=key, **more)


@pytest.fixture
def ours(tmp_path):
    return Files(tmp_path, "ours")


@pytest.fixture
def theirs(tmp_path):
    return Files(tmp_path, "theirs")


def obstacle(port, *, tls=None, host="127.0.0.1"):
    return find_obstacle(
        ChannelSettings(address=f"{host}:{port}", tls=tls), timeout=timedelta(seconds=20)
    )


def listening(answer):
    """Listens on a port and answers its first connection with `answer`; None: does not answer."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = listener.accept()
        with listener, connection:
            if answer is not None:
                connection.sendall(answer)
            connection.settimeout(60)
            while connection.recv(1024):
                pass

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1]


def test_serving_server_has_no_obstacle(serve, ours):
    assert obstacle(serve(SERVICE()).port) is None
    assert (
        obstacle(serve(SERVICE(), tls=ours.pair()).port, tls=TlsSettings(authority=ours.authority))
        is None
    )


def test_a_closed_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    found = obstacle(port)
    assert found.cause == f"nothing listens at 127.0.0.1:{port} (connection refused)"
    assert not found.permanent


def test_unknown_name_is_named():
    found = obstacle(1, host="coordinator.invalid")
    assert "the host name 'coordinator.invalid' cannot be resolved" in found.cause
    assert not found.permanent


def test_silent_server_is_distinguished_from_an_absent_one():
    port = listening(None)
    found = find_obstacle(
        ChannelSettings(address=f"127.0.0.1:{port}"), timeout=timedelta(milliseconds=200)
    )
    assert "accepted a connection but did not respond within 0.2 s" in found.cause
    assert not found.permanent


def test_another_kind_of_server_is_recognized():
    found = obstacle(listening(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
    assert "is not a gRPC server" in found.cause


def test_an_expired_certificate_is_named(serve, ours):
    expired = ours.pair(not_after=datetime.now(UTC) - timedelta(days=1))
    found = obstacle(serve(SERVICE(), tls=expired).port, tls=TlsSettings(authority=ours.authority))
    assert "the server's certificate has expired" in found.cause
    assert found.permanent


def test_a_wrong_authority_is_named(serve, ours, theirs):
    found = obstacle(
        serve(SERVICE(), tls=ours.pair()).port, tls=TlsSettings(authority=theirs.authority)
    )
    assert f"not signed by the authority in {theirs.authority}" in found.cause
    assert "--tls-ca" in found.cause
    assert found.permanent


def test_a_certificate_for_another_name_is_named(serve, ours):
    found = obstacle(
        serve(SERVICE(), tls=ours.pair("elsewhere.test")).port,
        tls=TlsSettings(authority=ours.authority),
    )
    assert "the server's certificate is not valid for '127.0.0.1'" in found.cause
    assert found.permanent


def test_missing_and_foreign_client_certificates_are_named(serve, ours, theirs):
    running = serve(SERVICE(), tls=ours.pair(client_authority=ours.authority))
    missing = obstacle(running.port, tls=TlsSettings(authority=ours.authority))
    assert (
        "it may require a client certificate, but none is configured (--tls-cert" in missing.cause
    )
    foreign = theirs.pair(authority=ours.authority)
    found = obstacle(running.port, tls=foreign)
    assert f"it may have rejected the client certificate {foreign.certificate}" in found.cause
    assert obstacle(running.port, tls=ours.pair(authority=ours.authority)) is None


def test_tls_on_one_side_alone_is_named(serve, ours):
    secured = obstacle(serve(SERVICE(), tls=ours.pair()).port)
    assert "TLS" in secured.cause
    assert "--tls-ca" in secured.cause
    plain = obstacle(serve(SERVICE()).port, tls=TlsSettings(authority=ours.authority))
    assert "may not use TLS" in plain.cause or "does not use TLS" in plain.cause


@pytest.mark.parametrize(
    ("alert", "permanent"), [(80, False), (40, False), (116, True), (48, True)]
)
def test_only_alerts_about_certificates_end_the_wait_for_a_server(ours, alert, permanent):
    """A proxy sends alert 80 (internal_error) or 40 (handshake_failure) while its server
    restarts."""
    record = bytes([21, 3, 3, 0, 2, 2, alert])
    found = obstacle(listening(record), tls=TlsSettings(authority=ours.authority))
    assert "the server aborted the TLS handshake" in found.cause
    assert found.permanent is permanent


def test_certificates_are_checked_as_grpc_checks_them(ours):
    """Python 3.13 requires certificate extensions that gRPC does not."""
    assert (
        not TlsSettings(authority=ours.authority).client_context().verify_flags
        & ssl.VERIFY_X509_STRICT
    )


def test_worker_whose_launcher_is_not_admitted_is_evicted_and_does_not_fail(
    serve, ours, zygote, tmp_path
):
    """For example, a replacement starts after the certificate has expired. The other workers
    continue."""
    expired = ours.pair(not_after=datetime.now(UTC) - timedelta(days=1))
    script, account = tmp_path / "script.py", tmp_path / "error.json"
    script.write_text("import shoal\nshoal.init()\n")
    worker = zygote.start(
        "script",
        [str(script)],
        output=tmp_path / "output",
        SHOAL_COORDINATOR=f"127.0.0.1:{serve(SERVICE(), tls=expired).port}",
        SHOAL_TLS_CA=str(ours.authority),
        SHOAL_LAUNCHER_ID="launcher",
        TORCHELASTIC_ERROR_FILE=str(account),
    )
    assert worker.wait() == EVICTED
    assert "is unreachable: the server's certificate has expired; renew it" in worker.said()
    assert "Traceback" not in worker.said()
    assert "certificate has expired" in account.read_text()


def test_a_launcher_names_the_cause_of_a_tls_failure_within_5_seconds(serve, ours, theirs, shell):
    """Without a cause, a launcher waits a minute for a coordinator that may still start."""
    expired = ours.pair(not_after=datetime.now(UTC) - timedelta(days=1))
    failures = [
        (expired, ours.authority, "the server's certificate has expired; renew it"),
        (
            ours.pair(),
            theirs.authority,
            f"the server's certificate is not signed by the authority in {theirs.authority}",
        ),
    ]
    script = shell.script("print('ran')")
    started = []
    for certificate, authority, cause in failures:
        endpoint = f"127.0.0.1:{serve(SERVICE(), tls=certificate).port}"
        command = shell.start("run", "--rdzv-endpoint", endpoint, "--tls-ca", authority, script)
        started.append((command, endpoint, cause))
    for command, endpoint, cause in started:
        assert (command.wait(), command.stdout) == (1, "")
        said = re.fullmatch(
            rf"shoal: no coordinator responded at {endpoint} \(--rdzv-endpoint\) for (\d+) s: "
            r"(.*)\n",
            command.stderr,
        )
        assert said is not None, command.stderr
        assert cause in said[2]
        assert int(said[1]) <= 5
