"""A local cluster as used by tests, demos and notebooks."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from shoal.launcher.clusters.cluster import LocalCluster
from shoal.launcher.clusters.jobs import JobSettings
from shoal.launcher.clusters.registry import running_clusters
from shoal_common.clients.parameter_server import ParameterServerClient
from shoal_common.errors import UnavailableError
from shoal_common.rpc.channel import ChannelSettings


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))


def test_cluster_serves_is_registered_and_leaves_no_trace(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    job = JobSettings(job_id="job", min_workers=1, max_workers=2, parameter_servers=2)
    with LocalCluster(job, command="a test", log_directory=tmp_path / "logs") as cluster:
        answer = cluster.client.get_job("job")
        assert (answer.spec.max_workers, answer.spec.parameter_servers) == (2, 2)
        for server in cluster.servers:
            with ParameterServerClient(ChannelSettings(address=server.address)) as client:
                assert client.get_server().server_id == server.name
        (record,) = running_clusters()
        assert (record.job_id, record.coordinator, record.command) == (
            "job",
            cluster.coordinator.address,
            "a test",
        )
        processes = set(psutil.Process().children(recursive=True)) - before
        assert len(processes) >= 4
        directory = cluster.directory
    assert not [process for process in processes if process.is_running()]
    assert running_clusters() == []
    assert not directory.exists()
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        "coordinator.log",
        "server-0.log",
        "server-1.log",
    }
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(
            ("127.0.0.1", int(cluster.coordinator.address.rpartition(":")[2])), timeout=5
        )


@pytest.fixture
def other_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with files named like modules that the services import."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in ("redis", "grpc", "torch", "types"):
        (folder / f"{name}.py").write_text(
            f"raise SystemExit('{name}.py of the working directory was imported')\n"
        )
    monkeypatch.chdir(folder)


@pytest.mark.usefixtures("other_modules")
def test_services_import_nothing_from_the_working_directory() -> None:
    with LocalCluster(
        JobSettings(job_id="job", min_workers=1, max_workers=1, parameter_servers=1)
    ) as cluster:
        assert cluster.client.get_job("job").spec.parameter_servers == 1


def test_a_proxy_in_the_environment_is_not_used_for_the_clusters_own_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    for name in (
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "grpc_proxy",
        "all_proxy",
    ):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with LocalCluster(
        JobSettings(job_id="job", min_workers=1, max_workers=1, parameter_servers=1)
    ) as cluster:
        assert cluster.client.get_job("job").spec.parameter_servers == 1
        with ParameterServerClient(ChannelSettings(address=cluster.servers[0].address)) as client:
            assert client.get_server().server_id == "server-0"


def test_cluster_without_a_home_directory_serves_and_reports_the_limitations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setenv("HOME", "/dev/null/nobody")
    cluster = LocalCluster(JobSettings(job_id="job", min_workers=1, max_workers=1))
    try:
        cluster.start_coordinator()
        cluster.coordinator.wait_ready(timedelta(seconds=60))
        received = cluster.register()
    finally:
        cluster.close()
    assert received is not None
    assert f"pass --coordinator {cluster.coordinator.address} to shoal status" in received
    assert "/dev/null/nobody" in received


def test_service_that_cannot_start_is_reported_in_its_own_words_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = set(psutil.Process().children(recursive=True))
    cluster = LocalCluster(JobSettings(job_id="job", min_workers=1, max_workers=1))
    # A file in the place of Valkey's directory.
    (cluster.directory / "redis").touch()
    with pytest.raises(
        UnavailableError,
        match=r"coordinator did not start \(exit code \d+\); its last log lines: .*redis",
    ):
        cluster.open()
    assert not cluster.directory.exists()
    assert set(psutil.Process().children(recursive=True)) <= before


def test_closing_twice_or_before_opening_does_nothing() -> None:
    cluster = LocalCluster(JobSettings(job_id="job", min_workers=1, max_workers=1))
    cluster.close()
    cluster.close()
    assert os.getpid()
