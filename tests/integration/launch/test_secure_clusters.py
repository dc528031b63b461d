"""A cluster with mutual TLS and one token for each role and job, used through the commands of its
users."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import AuthenticationError, ShoalError, UnavailableError
from shoal_common.rpc.channel import ChannelSettings
from shoal_common.security.authentication import TlsSettings
from shoal_common.security.certificates import PairContexts
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.zygote.children import eventually

Shell = Any  # of tests/integration/conftest.py

Command = Any

# a process that is forked early keeps the variables that the launcher removes from its environment
pytestmark = pytest.mark.fresh

SCRIPT = """
import subprocess, sys, time
import shoal, torch
from torch import nn
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
shoal.init()
helper = subprocess.Popen(
    [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
)
torch.manual_seed(0)
net = nn.Linear(4, 1)
model, optimizer = shoal.as_distributed(
    net, torch.optim.SGD(net.parameters(), 1e-3), strategy=sys.argv[1]
)
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
options = {"batch_size": 4} if sys.argv[1] == "async_sgd" else {"global_batch_size": 16}
loader = shoal.ElasticDataLoader(TensorDataset(x, x.sum(1, keepdim=True)), **options)
said = False
for _ in loader.epochs(1_000_000):
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        if optimizer.step() and not said:
            said = True
            print("trains", flush=True)
        time.sleep(
            0.01
        )  # else it would take whole processors from the commands that it is looked at with
helper.stdin.close()
helper.wait()
print("after the loop", flush=True)
"""


FAMILY = """
import sys, time
import shoal, torch
from torch import nn
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
model, optimizer = shoal.as_distributed(
    net, torch.optim.SGD(net.parameters(), 1e-3), strategy=sys.argv[1]
)
x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
loader = shoal.ElasticDataLoader(TensorDataset(x, x.sum(1, keepdim=True)), global_batch_size=16)
said = False
for _ in loader.epochs(1_000_000):
    for inputs, targets in loader:
        optimizer.zero_grad()
        model.train_step(inputs, targets, nn.functional.mse_loss)
        if optimizer.step() and not said:
            said = True
            print("trains", flush=True)
        time.sleep(
            0.01
        )  # else it would take whole processors from the commands that it is looked at with
print("after the loop", flush=True)
"""

PLAIN = """
import os, sys, time
directory, rank = sys.argv[1], os.environ["RANK"]
if rank == "0":
    while not os.path.exists(f"{directory}/fail"):
        time.sleep(0.01)
    raise SystemExit("a failure")
open(f"{directory}/sleeps-{rank}", "w").close()
time.sleep(600)
"""


class Cluster:
    """A coordinator that requires a certificate and a token from every client, and the users'
    credential files."""

    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.directory = directory = shell.directory / "cluster"
        status, out, err = shell.run("certs", directory / "certs", "coordinator")
        assert status == 0, err
        assert "ca.pem" in out
        self.secrets: dict[str, str] = {}
        for holder in (
            "admin",
            "viewer",
            "worker@ddp",
            "worker@async",
            "worker@plain",
            "server@async",
            "admin@ddp",
        ):
            self.secrets[holder] = secrets.token_urlsafe(24)
            self.token(holder).write_text(f"{self.secrets[holder]}\n")
        (directory / "tokens").write_text(
            "".join(f"{holder}: {token}\n" for holder, token in self.secrets.items())
        )
        self.coordinator = self.service("coordinator", "shoal_coordinator")
        self.address: str = self.ports("coordinator", self.coordinator)["grpc"]

    def token(self, holder: str) -> Path:
        return self.directory / f"{holder}.token"

    def pem(self, name: str) -> Path:
        return self.directory / "certs" / name

    def service(self, name: str, module: str, *flags: str | Path) -> Command:
        own = (
            "--tls-cert",
            self.pem("server.pem"),
            "--tls-key",
            self.pem("server.key"),
            "--tls-client-ca",
            self.pem("ca.pem"),
        )
        common = (
            "--tokens",
            self.directory / "tokens",
            "--port-file",
            self.directory / f"{name}.json",
            *own,
        )
        return self.shell.start_program(sys.executable, "-m", module, *common, *flags)

    def ports(self, name: str, command: Command) -> dict[str, Any]:
        path = self.directory / f"{name}.json"
        command.wait_for(path.exists, "its port file")
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def flags(self, holder: str) -> tuple[str | Path, ...]:
        """Returns the flags that every command needs, with the token of `holder`."""
        shown = ("--tls-cert", self.pem("client.pem"), "--tls-key", self.pem("client.key"))
        return ("--tls-ca", self.pem("ca.pem"), *shown, "--token-file", self.token(holder))

    def asked(self, holder: str, command: str, *arguments: str) -> tuple[int, str, str]:
        """Runs a command on the cluster; returns its status, standard output and standard error."""
        found: tuple[int, str, str] = self.shell.run(
            command, "--coordinator", self.address, *self.flags(holder), *arguments
        )
        return found

    def run(self, job: str, *arguments: str | Path, **variables: str) -> Command:
        flags = (
            "--rdzv-endpoint",
            self.address,
            "--rdzv-id",
            job,
            "--nproc-per-node",
            "2",
            "--max-restarts",
            "3",
        )
        return self.shell.start("run", *flags, *arguments, **variables)

    def client(self, holder: str) -> CoordinatorClient:
        tls = TlsSettings(
            authority=self.pem("ca.pem"),
            certificate=self.pem("client.pem"),
            key=self.pem("client.key"),
        )
        return CoordinatorClient(
            ChannelSettings(address=self.address, tls=tls, token=self.secrets[holder])
        )

    def close(self) -> None:
        self.coordinator.close()


@pytest.fixture(scope="module")
def cluster(shared_shell: Shell) -> Iterator[Cluster]:
    running = Cluster(shared_shell)
    yield running
    running.close()


def workers(command: Command) -> list[psutil.Process]:
    """Returns the processes that run the script, without their children."""
    own = (process for process in command.family() if process.ppid() == command.process.pid)
    return [
        process for process in own if re.search("(script|family).py", " ".join(process.cmdline()))
    ]


def seen_of(process: psutil.Process) -> bytes:
    """Returns what other processes of this user can read of it: arguments and environment."""
    with contextlib.suppress(OSError):
        folder = Path(f"/proc/{process.pid}")
        return (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
    return b""


def test_run_trains_over_tls_and_a_replacement_receives_the_state(cluster: Cluster) -> None:
    """All credentials are in files that flags name. Neither the processes of the run nor the
    children of its script have a secret in their arguments or environment."""
    script = cluster.shell.script(SCRIPT)
    command = cluster.run("ddp", *cluster.flags("worker@ddp"), script, "ddp")
    command.wait_for(lambda: command.stdout.count("trains") == 2, "both workers to train")
    family = command.family()
    assert len(family) >= 5, "the launcher, two workers, and a process of each"
    for process in [*family, *cluster.coordinator.family()]:
        seen = seen_of(process)
        for token in cluster.secrets.values():
            assert token.encode() not in seen, process.cmdline()
    with cluster.client("admin") as client:
        for rank in client.get_job("ddp").generation.ranks:
            # peers serve their state at this address
            connection = socket.create_connection(rank.donor_address.rsplit(":", 1), timeout=60)
            with PairContexts.caller().wrap_socket(connection) as channel:
                assert channel.version() == "TLSv1.3"
    workers(command)[0].send_signal(signal.SIGKILL)
    command.wait_for(
        lambda: command.stdout.count("trains") == 3,
        "the replacement to train with what a peer has given it",
    )
    for holder, asked in (("viewer", "status"), ("viewer", "events"), ("worker@ddp", "status")):
        status, out, err = cluster.asked(holder, asked, "--job", "ddp")
        assert (status, bool(out)) == (0, True), err
    status, out, err = cluster.asked("viewer", "top", "--once", "--job", "ddp")
    assert (status, "ddp" in out) == (0, True), err
    status, out, err = cluster.asked("viewer", "jobs", "--json")
    assert {job["job_id"] for job in json.loads(out)} >= {"ddp"}, err
    for holder, said in (
        ("viewer", "role viewer may not call"),
        ("worker@async", "is for job 'async', not 'ddp'"),
    ):
        status, _, err = cluster.asked(
            holder, "status" if "@" in holder else "stop", "--job", "ddp"
        )
        assert (status, said in err) == (1, True), err
    status, _, err = cluster.asked("admin@ddp", "stop", "--job", "ddp")
    assert status == 0, err
    command.wait()
    assert command.stdout.count("after the loop") == 2, command.stderr
    command.wait_until_gone()


@pytest.mark.parametrize(
    ("strategy", "survives"),
    [
        ("zero2", True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("tensor", False), ("local_sgd", True), ("pipeline", False))
        ),
        pytest.param("fsdp", True, marks=pytest.mark.matrix),
    ],
)
def test_each_family_of_strategies_trains_over_tls(
    cluster: Cluster, strategy: str, survives: bool
) -> None:
    """`survives`: the state survives the loss of one of the two ranks."""
    script = cluster.shell.script(FAMILY, name="family.py")
    command = cluster.run("ddp", *cluster.flags("worker@ddp"), script, strategy)
    command.wait_for(lambda: command.stdout.count("trains") == 2, "both workers to train")
    if survives:
        workers(command)[0].kill()
        command.wait_for(lambda: command.stdout.count("trains") == 3, "the replacement to train")
    status, _, err = cluster.asked("admin@ddp", "stop", "--job", "ddp")
    assert status == 0, err
    command.wait()
    assert command.stdout.count("after the loop") == 2, command.stderr


@pytest.mark.slow
def test_asynchronous_training_over_tls_uses_servers_that_require_tokens(
    cluster: Cluster,
) -> None:
    """The worker's token is in a variable. The launcher's token stays in the launcher's process."""
    script = cluster.shell.script(SCRIPT)
    variables = {
        "SHOAL_TLS_CA": str(cluster.pem("ca.pem")),
        "SHOAL_TLS_CERT": str(cluster.pem("client.pem")),
        "SHOAL_TLS_KEY": str(cluster.pem("client.key")),
        "SHOAL_TOKEN": cluster.secrets["worker@async"],
    }
    command = cluster.run("async", "--servers", "1", script, "async_sgd", **variables)
    command.wait_for(lambda: "async" in cluster.asked("admin", "jobs")[1], "the job")
    calls = ("--tls-ca", cluster.pem("ca.pem"), "--token-file", cluster.token("server@async"))
    job = (
        "--coordinator",
        cluster.address,
        "--job",
        "async",
        "--server-id",
        "ps",
        "--snapshot-interval",
        "0s",
    )
    server = cluster.service("ps", "shoal_ps_server", *job, *calls)
    command.wait_for(lambda: command.stdout.count("trains") == 2, "both workers to push")
    family = command.family()
    assert len(family) >= 5
    for process in [*family, *server.family()]:
        seen = seen_of(process)
        for holder, token in cluster.secrets.items():
            own = process.pid == command.process.pid and holder == "worker@async"
            assert own or token.encode() not in seen, process.cmdline()
    for worker in workers(command):
        for child in worker.children():
            assert not {"SHOAL_TOKEN", "SHOAL_STORE_URL", "SHOAL_MEMBER_KEY"} & set(child.environ())
    workers(command)[0].send_signal(signal.SIGKILL)
    command.wait_for(
        lambda: command.stdout.count("trains") == 3,
        "the replacement, which is told the token as well",
    )
    status, _, err = cluster.asked("admin", "stop", "--job", "async")
    assert status == 0, err
    command.wait()
    assert command.stdout.count("after the loop") == 2, command.stderr
    server.wait()


@pytest.mark.slow
def test_submitted_runs_receive_the_flags_and_show_no_secret(cluster: Cluster) -> None:
    script = cluster.shell.script(SCRIPT)
    status, _, err = cluster.asked("worker@ddp", "submit", "--job", "ddp", str(script), "ddp")
    assert status == 0, err
    eventually(
        lambda: "trains" in cluster.asked("worker@ddp", "logs", "--job", "ddp")[1],
        "the submitted run to train",
    )
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.uids().real == os.getuid():
                assert cluster.secrets["worker@ddp"].encode() not in seen_of(process), (
                    process.cmdline()
                )
    status, _, err = cluster.asked("admin@ddp", "stop", "--job", "ddp")
    assert status == 0, err
    eventually(
        lambda: "after the loop" in cluster.asked("worker@ddp", "logs", "--job", "ddp")[1],
        "its end",
    )


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "events",
        "stop",
        *(
            pytest.param(each, marks=pytest.mark.matrix)
            for each in ("top", "jobs", "drain", "kill")
        ),
    ],
)
def test_command_without_a_certificate_is_refused(cluster: Cluster, command: str) -> None:
    more = {"drain": ("0",), "kill": ("0",), "top": ("--once",)}.get(command, ())
    job = () if command == "jobs" else ("--job", "ddp")
    flags = (
        "--coordinator",
        cluster.address,
        "--tls-ca",
        cluster.pem("ca.pem"),
        "--token-file",
        cluster.token("admin"),
        *job,
        *more,
    )
    status, out, err = cluster.shell.run(command, *flags)
    assert status != 0, out
    assert "Traceback" not in err


def test_failure_on_one_machine_reaches_the_other_with_a_workers_token(cluster: Cluster) -> None:
    """Workers of a plain script are not members of a job, so only their launchers can report a
    failure to each other."""
    script = cluster.shell.script(PLAIN, name="plain.py")
    started = [
        cluster.run(
            "plain",
            "--nnodes",
            "2",
            "--node-rank",
            str(rank),
            *cluster.flags("worker@plain"),
            script,
            cluster.shell.directory,
        )
        for rank in range(2)
    ]
    for command in started:
        command.wait_for(
            lambda: len(list(cluster.shell.directory.glob("sleeps-*"))) == 3, "the workers of both"
        )
    (cluster.shell.directory / "fail").touch()
    assert [command.wait() for command in started] == [1, 1]
    with cluster.client("admin") as client:
        assert client.get_job("plain").ending == pb.JOB_ENDING_FAILED


def test_neither_a_token_nor_a_certificate_suffices_alone(cluster: Cluster) -> None:
    client = {"certificate": cluster.pem("client.pem"), "key": cluster.pem("client.key")}
    for tls, token, refused in (
        (TlsSettings(authority=cluster.pem("ca.pem")), cluster.secrets["admin"], UnavailableError),
        (None, cluster.secrets["admin"], UnavailableError),
        (TlsSettings(authority=cluster.pem("ca.pem"), **client), None, AuthenticationError),
        (TlsSettings(authority=cluster.pem("ca.pem"), **client), "guess", AuthenticationError),
    ):
        with CoordinatorClient(
            ChannelSettings(address=cluster.address, tls=tls, token=token, attempts=1)
        ) as caller:
            with pytest.raises(ShoalError) as caught:
                caller.list_jobs()
            assert isinstance(caught.value, refused)


def test_a_token_among_the_arguments_is_refused_with_the_remedy(cluster: Cluster) -> None:
    status, _, err = cluster.shell.run(
        "status", "--coordinator", cluster.address, "--token", "hunter2"
    )
    assert (status, "--token-file" in err, "hunter2" in err) == (2, True, False), err
