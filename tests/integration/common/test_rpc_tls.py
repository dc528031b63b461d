"""TLS and mutual TLS on real sockets, with certificates made for the test."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest
import trustme
from shoal_common.clients import CoordinatorClient
from shoal_common.errors import AuthenticationError, ConfigurationError, UnavailableError
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.security.authentication import TlsSettings, TokenTable
from shoal_common.security.certificates import expiry_of
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_protos.v1 import coordinator_pb2_grpc

QUICK = {"attempts": 1, "deadline": timedelta(seconds=60)}


class Answering(coordinator_pb2_grpc.CoordinatorServicer):
    async def GetJob(self, request, context):
        return pb.GetJobResponse(now_unix_ms=7)


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """Files of two authorities, each with a server certificate and a client certificate."""
    directory = tmp_path_factory.mktemp("pki")
    for name in ("ours", "theirs"):
        authority = trustme.CA()
        authority.cert_pem.write_to_path(directory / f"{name}.pem")
        for holder, identity in (
            ("server", "127.0.0.1"),
            ("named", "coordinator.test"),
            ("client", "worker.test"),
        ):
            issued = authority.issue_cert(identity)
            issued.private_key_pem.write_to_path(directory / f"{name}-{holder}.key")
            issued.cert_chain_pems[0].write_to_path(directory / f"{name}-{holder}.pem")
    return directory


def _pair(pki, holder, **more):
    return TlsSettings(certificate=pki / f"{holder}.pem", key=pki / f"{holder}.key", **more)


def test_a_client_that_trusts_the_authority_gets_an_answer_over_tls(serve, pki):
    running = serve(Answering(), tls=_pair(pki, "ours-server"))
    with running.client(tls=TlsSettings(authority=pki / "ours.pem"), **QUICK) as client:
        assert client.get_job("mnist").now_unix_ms == 7


def test_a_proxy_in_the_environment_is_not_used_for_tls_either(serve, pki, monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    running = serve(Answering(), tls=_pair(pki, "ours-server"))
    with running.client(tls=TlsSettings(authority=pki / "ours.pem"), **QUICK) as client:
        assert client.get_job("mnist").now_unix_ms == 7


def test_tokens_are_required_over_tls_too(serve, pki):
    running = serve(Answering(), tls=_pair(pki, "ours-server"), tokens=TokenTable({"t": "viewer"}))
    trusting = TlsSettings(authority=pki / "ours.pem")
    with running.client(tls=trusting, token="t", **QUICK) as client:
        assert client.get_job("mnist").now_unix_ms == 7
    with running.client(tls=trusting, **QUICK) as client, pytest.raises(AuthenticationError):
        client.get_job("mnist")


@pytest.mark.parametrize(
    "trusted", ["theirs.pem", None], ids=["another authority", "the system's authorities"]
)
def test_server_of_an_unknown_authority_is_refused(serve, pki, trusted):
    running = serve(Answering(), tls=_pair(pki, "ours-server"))
    tls = TlsSettings(authority=None if trusted is None else pki / trusted)
    with running.client(tls=tls, **QUICK) as client, pytest.raises(UnavailableError):
        client.get_job("mnist")


def test_plain_text_does_not_reach_a_tls_server_nor_tls_a_plain_one(serve, pki):
    secure, plain = serve(Answering(), tls=_pair(pki, "ours-server")), serve(Answering())
    with secure.client(**QUICK) as client, pytest.raises(UnavailableError):
        client.get_job("mnist")
    with (
        plain.client(tls=TlsSettings(authority=pki / "ours.pem"), **QUICK) as client,
        pytest.raises(UnavailableError),
    ):
        client.get_job("mnist")


def test_servers_name_is_checked_and_can_be_overridden(serve, pki):
    running = serve(Answering(), tls=_pair(pki, "ours-named"))
    trusting = TlsSettings(authority=pki / "ours.pem")
    with running.client(tls=trusting, **QUICK) as client, pytest.raises(UnavailableError):
        client.get_job("mnist")
    with running.client(tls=trusting, server_name="coordinator.test", **QUICK) as client:
        assert client.get_job("mnist").now_unix_ms == 7


@pytest.mark.parametrize(
    ("certificate", "let_in"),
    [("ours-client", True), ("theirs-client", False), (None, False)],
    ids=["of our authority", "of another authority", "none"],
)
def test_mutual_tls_admits_clients_with_a_certificate_of_the_authority(
    serve, pki, certificate, let_in
):
    running = serve(Answering(), tls=_pair(pki, "ours-server", client_authority=pki / "ours.pem"))
    authority = pki / "ours.pem"
    tls = (
        TlsSettings(authority=authority)
        if certificate is None
        else _pair(pki, certificate, authority=authority)
    )
    with running.client(tls=tls, **QUICK) as client:
        if let_in:
            assert client.get_job("mnist").now_unix_ms == 7
        else:
            with pytest.raises(UnavailableError):
                client.get_job("mnist")


def test_channel_names_a_wrong_file_when_it_is_created(pki):
    settings = ChannelSettings(
        address="127.0.0.1:7000", tls=TlsSettings(authority=pki / "nowhere.pem")
    )
    with pytest.raises(ConfigurationError, match=r"TLS authority .*nowhere\.pem"):
        CoordinatorClient(settings)


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (timedelta(days=29), "expires on"),
        (timedelta(days=-1), "expired on"),
        (timedelta(days=31), None),
    ],
    ids=["29 days before its end", "after its end", "31 days before its end"],
)
def test_a_server_warns_of_a_certificate_that_expires_within_30_days(
    serve, tmp_path, caplog, left, expected
):
    issued = trustme.CA().issue_cert("127.0.0.1", not_after=datetime.now(UTC) + left)
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    serve(Answering(), tls=TlsSettings(certificate=certificate, key=key))
    said = [
        record.getMessage() for record in caplog.records if str(certificate) in record.getMessage()
    ]
    assert [expected in line for line in said] == [True] * (expected is not None)


def test_server_warns_of_the_certificate_in_use_and_not_of_the_file(
    serve, tmp_path, caplog, monkeypatch
):
    """The certificate file is renewed, but the service is not restarted."""
    monkeypatch.setattr("shoal_common.rpc.server._A_DAY_S", 0.05)
    authority = trustme.CA()
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"
    issued = authority.issue_cert("127.0.0.1", not_after=datetime.now(UTC) + timedelta(days=1))
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    serve(Answering(), tls=TlsSettings(certificate=certificate, key=key))
    authority.issue_cert("127.0.0.1").cert_chain_pems[0].write_to_path(certificate)
    renewed_at, deadline = time.time(), time.monotonic() + 30

    def warned_since() -> bool:
        return any(
            "expires on" in each.getMessage() and each.created > renewed_at + 0.2
            for each in caplog.records
        )

    while not warned_since():
        assert time.monotonic() < deadline, "no warning of the certificate that is served"
        time.sleep(0.01)


def test_a_certificate_that_only_openssl_can_read_does_not_stop_its_service() -> None:
    assert expiry_of(b"-----BEGIN TRUSTED CERTIFICATE-----") is None
