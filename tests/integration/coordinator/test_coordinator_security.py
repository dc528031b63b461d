"""Permissions of every method: with a token of every role, with a wrong token, with none, and with
TLS."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import pytest
import trustme
from shoal_common.clients import CoordinatorClient
from shoal_common.errors import UnavailableError
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.security.authentication import Role, TlsSettings
from shoal_coordinator.service.methods import ALLOWED_ROLES, SERVICE
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.integration.coordinator.harness import Coordinator
from tests.zygote.children import Zygote

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Coordinator"].methods]

# The table of coordinator.proto; "admin" may call everything.
PROTO_SAYS = {
    "CreateJob": {"worker"},
    "GetJob": {"worker", "server", "viewer", "reader"},
    "ListJobs": {"worker", "server", "viewer", "reader"},
    "JoinSession": {"worker"},
    "ReportExit": {"worker"},
    "ReportMachine": {"worker"},
    "DrainMember": set(),
    "DrainServer": set(),
    "StopJob": {"worker"},
    "ServerSession": {"server"},
    "DeclareTensors": {"worker"},
    "GetRanks": {"worker"},
    "GetShardMap": {"worker", "server", "viewer", "reader"},
    "LeaseBatches": {"worker"},
    "WatchEvents": {"worker", "server", "viewer", "reader"},
}


@pytest.fixture(scope="module")
def guarded(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator with a token for each role."""
    directory = tmp_path_factory.mktemp("guarded")
    (directory / "tokens").write_text(
        "".join(f"{role}: {role}-secret\n{role}@mine: {role}-of-mine\n" for role in Role)
    )
    coordinator = Coordinator(zygote, directory, "--tokens", str(directory / "tokens")).start()
    yield coordinator
    coordinator.close()


@pytest.fixture(scope="module")
def channel(guarded: Coordinator) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(guarded.ports["grpc"]) as channel:
        yield channel


def status_of_empty_call(
    channel: grpc.Channel, method: str, *metadata: tuple[str, str]
) -> grpc.StatusCode:
    """Calls a method with an empty message and returns its status. A permitted caller gets a status
    other than those of refused callers."""
    return status_and_details(channel, method, b"", *metadata)[0]


def status_and_details(
    channel: grpc.Channel, method: str, message: bytes, *metadata: tuple[str, str]
) -> tuple[grpc.StatusCode, str]:
    """Calls a method with one message and returns status and details."""
    descriptor = pb.DESCRIPTOR.services_by_name["Coordinator"].methods_by_name[method]
    ways = (descriptor.client_streaming, descriptor.server_streaming)
    kind = "_".join("stream" if streaming else "unary" for streaming in ways)
    call: Any = getattr(channel, kind)(f"/{SERVICE}/{method}", bytes, bytes)
    request = iter([message]) if descriptor.client_streaming else message
    try:
        answer = call(request, metadata=metadata, timeout=60)
        if descriptor.server_streaming:
            list(answer)
    except grpc.RpcError as error:
        return cast(grpc.Call, error).code(), cast(grpc.Call, error).details() or ""
    return grpc.StatusCode.OK, ""


def test_every_method_is_in_the_table_of_roles() -> None:
    assert set(PROTO_SAYS) == set(METHODS) == {name.rpartition("/")[2] for name in ALLOWED_ROLES}


@pytest.mark.parametrize("method", METHODS)
def test_each_role_may_call_the_methods_that_the_proto_lists(
    channel: grpc.Channel, method: str
) -> None:
    for role in Role:
        status = status_of_empty_call(channel, method, ("authorization", f"Bearer {role}-secret"))
        if role in PROTO_SAYS[method] or role is Role.ADMIN:
            assert status in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT), role
        else:
            assert status is grpc.StatusCode.PERMISSION_DENIED, role


@pytest.mark.parametrize("method", METHODS)
def test_calls_without_a_known_token_are_refused(channel: grpc.Channel, method: str) -> None:
    assert status_of_empty_call(channel, method) is grpc.StatusCode.UNAUTHENTICATED
    assert (
        status_of_empty_call(channel, method, ("authorization", "Bearer guess"))
        is grpc.StatusCode.UNAUTHENTICATED
    )


# A request of each method that names a job.
def _naming(method: str, job_id: str) -> bytes:
    spec = pb.JobSpec(job_id=job_id, min_workers=1, max_workers=1)
    identity = {"job_id": job_id, "member_id": "m", "host": "h", "pid": 1, "local_index": 0}
    match method:
        case "CreateJob":
            return pb.CreateJobRequest(spec=spec).SerializeToString()
        case "JoinSession":
            return pb.MemberMessage(join=pb.Join(**identity)).SerializeToString()
        case "ServerSession":
            return pb.ServerMessage(
                register=pb.RegisterServer(
                    job_id=job_id, server_id="s", host="h", pid=1, address="h:1"
                )
            ).SerializeToString()
        case _:
            return bytes(getattr(pb, f"{method}Request")(job_id=job_id).SerializeToString())


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"ListJobs"}))
def test_token_for_one_job_is_refused_for_another(channel: grpc.Channel, method: str) -> None:
    role = "admin" if not PROTO_SAYS[method] else sorted(PROTO_SAYS[method])[0]
    metadata = ("authorization", f"Bearer {role}-of-mine")
    status, details = status_and_details(channel, method, _naming(method, "theirs"), metadata)
    assert status is grpc.StatusCode.PERMISSION_DENIED, details
    assert "is for job 'mine', not 'theirs'" in details
    for own in ("mine", "mine.nodes"):
        status, details = status_and_details(channel, method, _naming(method, own), metadata)
        assert status is not grpc.StatusCode.PERMISSION_DENIED, details


def test_token_for_one_job_lists_only_that_job(guarded: Coordinator) -> None:
    with guarded.client(token="admin-secret") as admin:
        for job_id in ("mine.torchrun", "others"):
            admin.create_job(pb.JobSpec(job_id=job_id, min_workers=1, max_workers=1))
        assert {"mine.torchrun", "others"} <= {job.job_id for job in admin.list_jobs().jobs}
    with guarded.client(token="viewer-of-mine") as viewer:
        listed = {job.job_id for job in viewer.list_jobs().jobs}
        assert "mine.torchrun" in listed
        assert listed <= {"mine", "mine.nodes", "mine.torchrun"}
    with pytest.raises(HTTPError) as refused:
        urlopen(
            Request(
                f"http://{guarded.ports['http']}/sd",
                headers={"Authorization": "Bearer viewer-of-mine"},
            ),
            timeout=60,
        )
    assert refused.value.code == 403
    refused.value.close()


def test_http_requires_a_token_except_for_health(guarded: Coordinator) -> None:
    base = f"http://{guarded.ports['http']}"
    assert urlopen(f"{base}/healthz", timeout=60).status == 200
    for page in ("metrics", "sd"):
        with pytest.raises(HTTPError) as refused:
            urlopen(f"{base}/{page}", timeout=60)
        assert refused.value.code == 401
        refused.value.close()
        with urlopen(
            Request(f"{base}/{page}", headers={"Authorization": "Bearer viewer-secret"}), timeout=60
        ) as answer:
            assert answer.status == 200


def test_mutual_tls_admits_only_clients_with_a_certificate(zygote: Zygote, tmp_path: Path) -> None:
    authority = trustme.CA()
    served, mine = authority.issue_cert("127.0.0.1"), authority.issue_cert("worker")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name, certificate in (("server", served), ("client", mine)):
        certificate.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    flags = (
        "--tls-cert",
        tmp_path / "server.pem",
        "--tls-key",
        tmp_path / "server.key",
        "--tls-client-ca",
        tmp_path / "ca.pem",
    )
    coordinator = Coordinator(zygote, tmp_path, *map(str, flags)).start()
    try:
        with_certificate = TlsSettings(
            certificate=tmp_path / "client.pem",
            key=tmp_path / "client.key",
            authority=tmp_path / "ca.pem",
        )
        with coordinator.client(tls=with_certificate) as client:
            assert not client.list_jobs().jobs
        for tls in (TlsSettings(authority=tmp_path / "ca.pem"), None):
            settings = ChannelSettings(
                address=coordinator.ports["grpc"],
                tls=tls,
                attempts=1,
                deadline=timedelta(seconds=60),
            )
            with CoordinatorClient(settings) as client, pytest.raises(UnavailableError):
                client.list_jobs()
    finally:
        coordinator.close()
