"""Who may call what: every method of the service, with a token of every role, with a wrong one and with none; and TLS."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import pytest
import trustme
from shoal_common.clients import CoordinatorClient
from shoal_common.errors import UnavailableError
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.security import Role, TlsSettings
from shoal_coordinator.service.methods import ALLOWED_ROLES, SERVICE
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.integration.coordinator.harness import Coordinator
from tests.zygote.children import Zygote

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Coordinator"].methods]

# As coordinator.proto says; "admin" may do everything.
PROTO_SAYS = {
    "CreateJob": {"worker"},
    "GetJob": {"worker", "server", "viewer"},
    "ListJobs": {"worker", "server", "viewer"},
    "JoinSession": {"worker"},
    "ReportExit": {"worker"},
    "DrainMember": set(),
    "DrainServer": set(),
    "StopJob": set(),
    "ServerSession": {"server"},
    "DeclareTensors": {"worker"},
    "GetRanks": {"worker"},
    "GetShardMap": {"worker", "server", "viewer"},
    "LeaseBatches": {"worker"},
    "WatchEvents": {"worker", "server", "viewer"},
}


@pytest.fixture(scope="module")
def guarded(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator with a token for each role."""
    directory = tmp_path_factory.mktemp("guarded")
    (directory / "tokens").write_text("".join(f"{role}: {role}-secret\n" for role in Role))
    coordinator = Coordinator(zygote, directory, "--tokens", str(directory / "tokens")).start()
    yield coordinator
    coordinator.close()


@pytest.fixture(scope="module")
def channel(guarded: Coordinator) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(guarded.ports["grpc"]) as channel:
        yield channel


def status_of_empty_call(channel: grpc.Channel, method: str, *metadata: tuple[str, str]) -> grpc.StatusCode:
    """Calls with an empty message: whoever is let in gets another status than a refusal of theirs."""
    descriptor = pb.DESCRIPTOR.services_by_name["Coordinator"].methods_by_name[method]
    kind = f"{'stream' if descriptor.client_streaming else 'unary'}_{'stream' if descriptor.server_streaming else 'unary'}"
    call: Any = getattr(channel, kind)(f"/{SERVICE}/{method}", bytes, bytes)
    request = iter([b""]) if descriptor.client_streaming else b""
    try:
        answer = call(request, metadata=metadata, timeout=60)
        if descriptor.server_streaming:
            list(answer)
    except grpc.RpcError as error:
        return error.code()  # type: ignore[no-any-return, attr-defined]
    return grpc.StatusCode.OK


def test_every_method_is_in_the_table() -> None:
    assert set(PROTO_SAYS) == set(METHODS) == {name.rpartition("/")[2] for name in ALLOWED_ROLES}


@pytest.mark.parametrize("method", METHODS)
def test_each_role_may_call_what_the_proto_says(channel: grpc.Channel, method: str) -> None:
    for role in Role:
        status = status_of_empty_call(channel, method, ("authorization", f"Bearer {role}-secret"))
        if role in PROTO_SAYS[method] or role is Role.ADMIN:
            assert status in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), role
        else:
            assert status is grpc.StatusCode.PERMISSION_DENIED, role


@pytest.mark.parametrize("method", METHODS)
def test_nobody_is_let_in_without_a_known_token(channel: grpc.Channel, method: str) -> None:
    assert status_of_empty_call(channel, method) is grpc.StatusCode.UNAUTHENTICATED
    assert status_of_empty_call(channel, method, ("authorization", "Bearer guess")) is grpc.StatusCode.UNAUTHENTICATED


def test_http_asks_for_a_token_except_for_health(guarded: Coordinator) -> None:
    base = f"http://{guarded.ports['http']}"
    assert urlopen(f"{base}/healthz", timeout=60).status == 200
    for page in ("metrics", "sd"):
        with pytest.raises(HTTPError) as refused:
            urlopen(f"{base}/{page}", timeout=60)
        assert refused.value.code == 401
        refused.value.close()
        with urlopen(Request(f"{base}/{page}", headers={"Authorization": "Bearer viewer-secret"}), timeout=60) as answer:
            assert answer.status == 200


def test_mutual_tls_lets_in_only_those_with_a_certificate(zygote: Zygote, tmp_path: Path) -> None:
    authority = trustme.CA()
    served, mine = authority.issue_cert("127.0.0.1"), authority.issue_cert("worker")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name, certificate in (("server", served), ("client", mine)):
        certificate.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    flags = ("--tls-certificate", tmp_path / "server.pem", "--tls-key", tmp_path / "server.key", "--tls-authority", tmp_path / "ca.pem")
    coordinator = Coordinator(zygote, tmp_path, *map(str, flags), "--tls-require-client-certificate").start()
    try:
        with_certificate = TlsSettings(certificate=tmp_path / "client.pem", key=tmp_path / "client.key", authority=tmp_path / "ca.pem")
        with coordinator.client(tls=with_certificate) as client:
            assert not client.list_jobs().jobs
        for tls in (TlsSettings(authority=tmp_path / "ca.pem"), None):
            settings = ChannelSettings(address=coordinator.ports["grpc"], tls=tls, attempts=1, deadline=timedelta(seconds=60))
            with CoordinatorClient(settings) as client, pytest.raises(UnavailableError):
                client.list_jobs()
    finally:
        coordinator.close()
