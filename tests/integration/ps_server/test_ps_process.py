"""The server as a process: its command line, snapshots across restarts and kills, and its exit."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import numpy as np
import pytest
import shoal
from prometheus_client.parser import text_string_to_metric_families
from shoal_common.clients.parameter_server import ParameterServerClient
from shoal_common.errors import (
    AuthenticationError,
    ConfigurationError,
    CorruptDataError,
    DeadlineError,
    InvalidRequestError,
    PermissionDeniedError,
    PreconditionError,
    ShoalError,
    UnavailableError,
)
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_ps_server.settings import PsServerSettings, parse_command_line

from tests.integration.ps_server.conftest import ServerProcess, shard_map


def flags(cluster, *more: str) -> tuple[str, ...]:
    return ("--coordinator", cluster.address, "--job", "job", "--server-id", "server", *more)


def metric(process: ServerProcess, name: str) -> float:
    """Returns the value of the first sample of this name."""
    with urllib.request.urlopen(f"http://{process.http}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return next(
        sample.value for family in families for sample in family.samples if sample.name == name
    )


def test_metrics_report_disk_space_and_the_clock_bound(cluster, start, tmp_path) -> None:
    process = start(*flags(cluster, "--data-dir", str(tmp_path / "data")))
    client = process.client()
    cluster.coordinator.registrations.get(timeout=30)
    optimizer = pb.OptimizerSpec(name="sgd", hyperparameters={"lr": 0.1})
    client.configure_optimizer(
        "job", optimizer, pb.Consistency(mode=pb.Consistency.MODE_SSP, bound=7)
    )

    usage = shutil.disk_usage(tmp_path)
    assert metric(process, "shoal_ps_disk_bytes") == usage.total
    assert 0 < metric(process, "shoal_ps_disk_free_bytes") <= usage.total
    cluster.wait_until(
        lambda: metric(process, "shoal_ps_clock_bound") == 7,
        "a heartbeat, with which the gauges are set",
    )
    assert process.end() == 0


@pytest.mark.slow
def test_metrics_and_the_log_report_a_blocked_event_loop(cluster, start, tmp_path) -> None:
    process = start(
        *flags(cluster, "--data-dir", str(tmp_path / "data")),
        SHOAL_FAILPOINTS="journal.effect_made@1=hang",
    )
    address = process.address()
    before = metric(process, "shoal_event_loop_blocked_seconds_total")
    channel = ChannelSettings(address=address, deadline=timedelta(seconds=6))
    optimizer = pb.OptimizerSpec(name="sgd", hyperparameters={"lr": 0.1})
    with ParameterServerClient(channel) as client, pytest.raises(DeadlineError):
        client.configure_optimizer("job", optimizer, pb.Consistency(mode=pb.Consistency.MODE_ASP))
    cluster.wait_until(
        lambda: metric(process, "shoal_event_loop_blocked_seconds_total") > before + 5,
        "the blocked time to be counted",
    )
    cluster.wait_until(
        lambda: "the event loop of parameter server server has been blocked" in process.log,
        "the stack of the blocked loop",
    )
    assert "journal.py" in process.log


def test_restarted_server_resumes_where_it_stopped(cluster, start, tmp_path) -> None:
    """SIGTERM makes the server write a snapshot. The next process has its values, momentum,
    versions, sequence numbers and settings."""
    data = tmp_path / "data"
    client = cluster.server()  # the same pushes on a server that is not stopped
    process = start(*flags(cluster, "--data-dir", str(data)))
    stopped = process.client()
    cluster.coordinator.registrations.get(timeout=30)
    optimizer = pb.OptimizerSpec(name="sgd", hyperparameters={"lr": 0.1, "momentum": 0.9})
    ssp = pb.Consistency(mode=pb.Consistency.MODE_SSP, bound=100)
    members = [cluster.member(each) for each in (client, stopped)]
    for member in members:
        member.client.configure_optimizer("job", optimizer, ssp)
        member.initialize(np.arange(9.0))
        member.push(1.0)
        member.push(2.0)
        member.client.set_hyperparameters("job", revision=3, hyperparameters={"lr": 0.2})
    before = stopped.get_server(member_id="a")
    assert process.end() == 0
    assert "snapshot written" in process.log
    stopped.close()

    # The coordinator is away: a restarted server still knows its partitions and its members.
    cluster.coordinator.stop()
    restarted = cluster.unregistered(data_dir=data)
    after = restarted.get_server(member_id="a")
    assert dict(after.clocks) == {"a": 1, "b": 0}
    for ignored in ("pushes_applied", "pushes_deduplicated", "clocks"):
        before.ClearField(ignored)
        after.ClearField(ignored)
    assert after == before
    members[1].client = restarted
    assert not restarted.configure_optimizer("job", optimizer, ssp).configured
    assert not restarted.set_hyperparameters("job", revision=3, hyperparameters={"lr": 9.0}).applied
    assert all(each.duplicate for each in members[1].push(2.0, sequence=2))
    for member in members:
        member.push(3.0, sequence=3)
    left, right = members[0].pull(), members[1].pull()
    assert all(np.array_equal(left[number], right[number]) for number in left)


def test_killed_server_returns_with_everything_it_acknowledged(cluster, start, tmp_path) -> None:
    """Two members push continuously, and the server is killed several times meanwhile."""
    data = tmp_path / "data"
    cluster.declare(partition=300)
    generator = random.Random(0)
    acknowledged = {"a": 0, "b": 0}
    for kill in range(4):
        process = start(
            *flags(
                cluster,
                "--data-dir",
                str(data),
                "--snapshot-interval",
                "0.2s" if kill == 2 else "0s",
            )
        )
        client = process.client()
        if kill == 0:
            cluster.trainable(client)

        def train(name: str, client: ParameterServerClient = client) -> None:
            member = cluster.member(client, name)
            with suppress(ShoalError):  # until the server is killed
                while True:
                    sequence = acknowledged[name] + 1
                    results = member.push(1.0, sequence=sequence, base_version=1)
                    assert all(not each.duplicate for each in results)
                    acknowledged[name] = sequence

        known = {name: client.get_server(member_id=name) for name in acknowledged}
        for name, server in known.items():
            assert {each.sequence for each in server.partitions} <= {
                acknowledged[name],
                acknowledged[name] + 1,
            }
            acknowledged[name] = min(each.sequence for each in server.partitions)
            # repeats the part of the push that the server does not have yet
            cluster.member(client, name).push(1.0, sequence=acknowledged[name] + 1, base_version=1)
            acknowledged[name] += 1
        members = [threading.Thread(target=train, args=(name,)) for name in acknowledged]
        for each in members:
            each.start()
        goals = {name: count + generator.randint(6, 60) for name, count in acknowledged.items()}
        cluster.wait_until(
            lambda goals=goals: all(acknowledged[name] >= goals[name] for name in goals),
            "pushes to be acknowledged",
        )
        if kill == 2:
            cluster.wait_until(
                lambda process=process: "snapshot written" in process.log, "a snapshot"
            )
        process.end(signal.SIGKILL)
        for each in members:
            each.join()
        client.close()

    assert min(acknowledged.values()) > 20
    client = cluster.unregistered(data_dir=data)
    sequences = [
        [each.sequence for each in client.get_server(member_id=name).partitions]
        for name in acknowledged
    ]
    for name, found in zip(acknowledged, sequences, strict=True):
        assert all(acknowledged[name] <= each <= acknowledged[name] + 1 for each in found)
    versions = [each.version for each in client.get_server().partitions]
    assert versions == [1 + one + other for one, other in zip(*sequences, strict=True)]
    values = {number: raw.view(np.float32) for number, raw in cluster.member(client).pull().items()}
    assert all((values[number] == 1.0 - version).all() for number, version in enumerate(versions))


def test_damaged_snapshot_prevents_the_start_and_stays_unchanged(cluster, tmp_path) -> None:
    snapshot = tmp_path / "data" / "snapshot.safetensors"
    snapshot.parent.mkdir()
    snapshot.write_bytes(b"no snapshot at all")
    with pytest.raises(CorruptDataError, match=r"snapshot\.safetensors is damaged"):
        cluster.unregistered(data_dir=snapshot.parent)
    assert snapshot.read_bytes() == b"no snapshot at all"
    # it asked whether it is a backup, and it is not
    assert not cluster.coordinator.registrations.get(timeout=30).address
    cluster.coordinator.refusal = InvalidRequestError(
        "register.address='': this job has no backups", reason="REQUEST_INVALID"
    )
    with pytest.raises(CorruptDataError, match=r"snapshot\.safetensors is damaged"):
        cluster.unregistered(data_dir=snapshot.parent)
    assert snapshot.read_bytes() == b"no snapshot at all"


def test_startup_failure_is_reported_in_one_line(start) -> None:
    process = start("--job", "job")
    assert process.wait() == 1
    remedy = "(set --coordinator or SHOAL_PS_SERVER_COORDINATOR)"
    assert process.log == f"shoal-ps-server: coordinator: Field required {remedy}\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_torch_is_loading_ends_the_server_at_once(number) -> None:
    signalled_at_import = f"""
import os, signal, sys

class Signaller:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), {int(number)})

sys.meta_path.insert(0, Signaller())
from shoal_ps_server.__main__ import main
main(["--coordinator", "127.0.0.1:1", "--job", "job", "--server-id", "server"])
"""
    ended = subprocess.run(
        [sys.executable, "-c", signalled_at_import], capture_output=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--job", "job"],
            "coordinator: Field required (set --coordinator or SHOAL_PS_SERVER_COORDINATOR)",
        ),
        (["--coordinator", "nowhere", "--job", "job"], "address 'nowhere': expected HOST:PORT"),
        (["--coordinator", "h:1", "--job", "a b"], "job='a b'"),
        (["--coordinator", "h:1", "--job", "j", "--snapshot-interval", "soon"], "duration 'soon'"),
        (["--coordinator", "h:1", "--job", "j", "--threads", "0"], "threads='0'"),
    ],
)
def test_wrong_settings_name_the_setting_and_the_remedy(arguments, complaint, monkeypatch) -> None:
    monkeypatch.delenv("SHOAL_PS_SERVER_COORDINATOR", raising=False)
    with pytest.raises(ConfigurationError) as caught:
        parse_command_line(arguments)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"listen": "0.0.0.0:0"}, "without TLS or tokens"),
        ({"tokens": "/nonexistent"}, "cannot read the token file /nonexistent"),
        ({"tls_cert": "/nonexistent"}, "without its key"),
        ({"listen": "127.0.0.1:1", "http": "256.0.0.1:80"}, "cannot listen on 256.0.0.1:80"),
    ],
)
def test_unusable_settings_are_refused(cluster, settings, complaint) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        cluster.unregistered(**settings)


def test_refused_registration_ends_the_server(cluster) -> None:
    cluster.coordinator.refusal = PreconditionError(
        "the job takes no servers", reason="SERVERS_COMPLETE"
    )
    cluster.unregistered()
    cluster.running.thread.join(30)
    assert isinstance(cluster.running.failure, PreconditionError)
    assert str(cluster.running.failure) == "the job takes no servers"


def test_server_waits_for_its_place_until_its_predecessor_is_known_to_be_gone(
    cluster,
) -> None:
    cluster.coordinator.refusal = PreconditionError(
        "another process has this server_id", reason="SERVER_CONFLICT"
    )
    cluster.declare()
    client = cluster.unregistered()
    cluster.wait_until(
        lambda: cluster.coordinator.tokens.qsize() > 1, "a second attempt to register"
    )
    cluster.coordinator.refusal = None
    cluster.trainable(client).push(1.0)


def test_server_whose_place_was_taken_over_exits(cluster) -> None:
    cluster.server()
    cluster.coordinator.refusal = PreconditionError(
        "another process has this server_id", reason="SERVER_CONFLICT"
    )
    cluster.coordinator.stop()
    cluster.coordinator.start()
    cluster.running.thread.join(30)
    assert isinstance(cluster.running.failure, PreconditionError)
    assert cluster.running.failure.reason == "SERVER_CONFLICT"


def test_server_that_returns_to_a_finished_job_exits(cluster) -> None:
    cluster.server()
    cluster.coordinator.refusal = PreconditionError("the job is finished", reason="RUN_ENDED")
    cluster.coordinator.stop()
    cluster.coordinator.start()
    cluster.running.thread.join(30)
    assert not cluster.running.thread.is_alive()
    assert cluster.running.failure is None


def test_roles_are_enforced(cluster, tmp_path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("worker: wt\nreader: rt\n")
    cluster.server(tokens=tokens, token="st")
    worker, reader = (cluster.client(cluster.running, token=token) for token in ("wt", "rt"))
    cluster.trainable(worker)
    assert len(reader.get_server().partitions) == 3
    for call in (
        lambda: reader.snapshot("job"),
        lambda: cluster.member(reader).pull(),
        lambda: cluster.member(reader).push(1.0),
    ):
        with pytest.raises(PermissionDeniedError):
            call()
    assert len(cluster.member(reader).pull(member_id="")) == 3  # not as a member
    assert cluster.member(worker).pull()
    assert cluster.coordinator.tokens.get(timeout=30) == "Bearer st"


def test_readers_token_suffices_to_read_the_whole_model(cluster, tmp_path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("worker: wt\nreader: rt\n")
    cluster.server(tokens=tokens, token="st")
    cluster.trainable(cluster.client(cluster.running, token="wt")).push(1.0)
    cluster.coordinator.shard_map.servers.add(server_index=0, address=cluster.running.address)
    patience = timedelta(seconds=30)
    with shoal.ModelReader(
        ChannelSettings(address=cluster.address, token="rt"), "job", patience=patience
    ) as reader:
        assert reader.state_dict()["weight"].tolist() == [-1.0] * 600
        assert reader.versions == {0: 2, 1: 2, 2: 2}
    with pytest.raises(AuthenticationError):
        shoal.ParameterServerClient.state_dict(
            ChannelSettings(address=cluster.address, token="other"), "job", patience=patience
        )


def test_model_read_during_pushes_has_consistent_partitions(cluster) -> None:
    client = cluster.server()
    member = cluster.trainable(client)
    cluster.coordinator.shard_map.servers.add(server_index=0, address=cluster.running.address)
    ended = threading.Event()

    def push() -> None:
        while not ended.is_set():
            member.push(1.0)

    with (
        ThreadPoolExecutor(1) as pool,
        shoal.ModelReader(ChannelSettings(address=cluster.address), "job") as reader,
    ):
        pushing = pool.submit(push)
        try:
            for _ in range(30):
                weight = reader.state_dict()["weight"]
                for number, part in enumerate(weight.split(256)):
                    assert part.tolist() == [1.0 - reader.versions[number]] * len(part)
        finally:
            ended.set()
        pushing.result(60)


def test_snapshots_are_written_gradually_while_values_change(cluster, tmp_path) -> None:
    client = cluster.server(
        data_dir=tmp_path / "data", snapshot_interval=timedelta(milliseconds=20)
    )
    member = cluster.trainable(client)
    snapshot = tmp_path / "data" / "snapshot.safetensors"
    for _ in range(3):
        earlier = snapshot.stat().st_mtime_ns if snapshot.exists() else 0
        member.push(1.0)
        cluster.wait_until(
            lambda: snapshot.exists() and snapshot.stat().st_mtime_ns > earlier,  # noqa: B023
            "a newer snapshot",
        )


def test_health_reports_a_journal_that_cannot_be_written(cluster, start, tmp_path) -> None:
    cluster.declare(partition=300)
    process = start(
        *flags(cluster, "--data-dir", str(tmp_path / "data"), "--snapshot-interval", "0s")
    )
    client = process.client()
    member = cluster.trainable(client)

    def health() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{process.http}/healthz", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    assert health() == (200, "ok\n")
    journal = max(
        (tmp_path / "data").rglob("*"),
        key=lambda path: path.stat().st_size if path.is_file() else 0,
    )
    resource.prlimit(
        process.pid, resource.RLIMIT_FSIZE, (journal.stat().st_size + 4096, resource.RLIM_INFINITY)
    )

    def push_until_refused() -> None:
        for _ in range(1000):
            member.push(1.0)

    with pytest.raises(UnavailableError) as caught:
        push_until_refused()
    assert caught.value.reason == "JOURNAL_FAILED"
    status, reason = health()
    assert status == 503
    assert "cannot write the journal, so updates are refused" in reason
    resource.prlimit(
        process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    member.push(1.0)
    assert health() == (200, "ok\n")
    client.close()
    assert process.end() == 0
    assert "resumed writing the journal" in process.log


def test_unwritable_snapshot_is_an_error_and_training_continues(cluster, tmp_path) -> None:
    data = tmp_path / "data"
    client = cluster.server(data_dir=data, snapshot_interval=timedelta(milliseconds=20))
    (data / "snapshot.safetensors").mkdir()  # makes the rename fail, also for root
    member = cluster.trainable(client)
    with pytest.raises(UnavailableError) as caught:
        cluster.client(cluster.running, attempts=1).snapshot("job")
    assert caught.value.reason == "SNAPSHOT_FAILED"
    assert caught.value.retry_after == timedelta(seconds=2)
    member.push(1.0)
    cluster.running.stop()
    assert isinstance(cluster.running.failure, UnavailableError)


def test_help_names_every_setting() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "shoal_ps_server", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    for name, field in PsServerSettings.model_fields.items():
        assert (field.validation_alias or f"--{name.replace('_', '-')}") in shown


def test_the_port_file_names_both_addresses_and_the_process(cluster, tmp_path) -> None:
    cluster.server(port_file=tmp_path / "port", advertise="worker-host")
    port = json.loads((tmp_path / "port").read_text())
    assert port["grpc"].startswith("worker-host:")
    assert port["http"].startswith("worker-host:")
    assert port["pid"] > 0
    assert ChannelSettings(address=port["grpc"])


def test_server_assigned_another_place_exits_and_the_next_process_serves_there(
    cluster, tmp_path
) -> None:
    """Epochs of the two places are not comparable."""
    coordinator = cluster.coordinator
    coordinator.place = coordinator_pb2.ServerPlace(epoch=3)
    coordinator.shard_map = shard_map(("weight", 600, "float32"), owner=1)
    settings = {"data_dir": tmp_path / "data"}
    cluster.unregistered(**settings).get_server(member_id="a")  # it knows its place
    coordinator.stop()
    coordinator.server_index, coordinator.place = 2, coordinator_pb2.ServerPlace(epoch=1)
    coordinator.start()
    cluster.wait_until(lambda: cluster.running.failure, "the server to end")
    assert isinstance(cluster.running.failure, ConfigurationError)
    assert "registered this process as server 2 of job 'job', but it was server 0" in str(
        cluster.running.failure
    )
    client = cluster.unregistered(**settings)
    assert client.get_server(member_id="a").server_id == "server"
    coordinator.stop()  # the same place again is not a change
    coordinator.start()
    coordinator.heartbeats.queue.clear()
    coordinator.heartbeats.get(timeout=60)
    assert client.get_server(member_id="a").server_id == "server"
