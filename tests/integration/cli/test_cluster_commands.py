"""`shoal status`, `kill`, `drain` and `up` on a running cluster whose workers do not use torch."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from shoal.launcher.clusters.registry import Registration
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1.coordinator_pb2 import JobSpec, TensorSpec

Shell = Any  # of tests/integration/conftest.py
Command = Any


@pytest.fixture(scope="module")
def cluster(shared_shell: Shell, elastic_worker: Path) -> Command:
    """Three workers with ranks, under `shared_shell`. Tests must not end them."""
    return start(shared_shell, elastic_worker)


def start(shell: Shell, worker: Path) -> Command:
    command = shell.start(
        "run",
        "--standalone",
        "--nproc-per-node",
        "3",
        "--rdzv-id",
        "digits",
        worker,
        shell.directory / "finish",
    )
    command.wait_for_output(*(f"[{rank}]: generation 1" for rank in range(3)))
    shell.cluster()  # waits until the cluster is registered
    return command


def status_of(shell: Shell, *flags: str) -> dict[str, Any]:
    status, out, err = shell.run("status", "--json", *flags)
    assert status == 0, err
    return dict(json.loads(out))


def test_status_shows_the_members_of_the_newest_cluster(
    shared_shell: Shell, cluster: Command
) -> None:
    cluster.wait_for(
        lambda: all(member["step"] > 0 for member in status_of(shared_shell)["members"]), "progress"
    )
    job = status_of(shared_shell)
    assert (job["job_id"], job["phase"], job["generation"], job["world_size"]) == (
        "digits",
        "running",
        1,
        3,
    )
    assert [(member["rank"], member["phase"]) for member in job["members"]] == [
        (rank, "ranked") for rank in range(3)
    ]
    assert {member["pid"] for member in job["members"]} <= {
        process.pid for process in cluster.family()
    }

    status, out, _ = shared_shell.run("status", COLUMNS="160")
    assert status == 0
    assert "job digits  running, generation 1, 3 of 3 workers have a rank" in out
    rows = [line.split() for line in out.splitlines() if re.match(r" *\d", line)]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert {"rank", "phase", "host", "pid", "generation", "step", "samples/s", "loss"} <= set(
        out.split()
    )


def test_named_coordinator_is_used_and_a_launchers_job_is_distinguished_from_workers(
    shared_shell: Shell, cluster: Command
) -> None:
    (record,) = (shared_shell.directory / "runtime" / "shoal").glob("*.json")
    address = json.loads(record.read_text())["coordinator"]
    elsewhere = {"XDG_RUNTIME_DIR": str(shared_shell.directory / "other")}
    with CoordinatorClient(ChannelSettings(address=address)) as client:  # as with --nnodes
        client.create_job(JobSpec(job_id="digits.nodes", min_workers=1, max_workers=2))
    assert shared_shell.run("status", "--coordinator", address, **elsewhere)[0] == 0
    assert (
        shared_shell.run("status", "--job", "digits", SHOAL_COORDINATOR=address, **elsewhere)[0]
        == 0
    )
    status, _, err = shared_shell.run(
        "status", "--coordinator", address, "--job", "other", **elsewhere
    )
    assert (status, "other" in err, "Traceback" in err) == (1, True, False)


def test_kill_sends_sigkill_to_the_named_process(shell: Shell, elastic_worker: Path) -> None:
    cluster = start(shell, elastic_worker)
    pid = shell.pids()[1]
    status, out, err = shell.run("kill", "1")
    assert (status, err) == (0, "")
    assert out == f"killed rank 1 of job digits: SIGKILL to pid {pid} (generation 1)\n"
    cluster.wait_for(
        lambda: f"pid {pid}) ended with SIGKILL" in cluster.stderr, "the launcher's notice"
    )


def test_drain_lets_a_worker_leave(shell: Shell, elastic_worker: Path) -> None:
    cluster = start(shell, elastic_worker)
    status, out, err = shell.run("drain", "2")
    assert (status, err) == (0, "")
    assert out.startswith("rank 2 of job digits will leave after the current step (member ")
    cluster.wait_for_output("[2]: left", "[0]: generation 2 rank 0 of 2")
    with CoordinatorClient(ChannelSettings(address=shell.cluster().coordinator)) as client:
        for member in client.get_job("digits").members:
            client.drain_member("digits", member_id=member.member_id)
    assert cluster.wait() == 75
    assert "ended with" not in cluster.stderr
    assert (
        "is not finished: the last workers on this machine left because they were asked to"
        in cluster.stderr
    )


@pytest.mark.slow
@pytest.mark.fresh
def test_drained_parameter_server_is_not_restarted_by_its_launcher(
    shell: Shell, elastic_worker: Path
) -> None:
    flags = ("--standalone", "--servers", "2", "--max-servers", "3", "--rdzv-id", "digits")
    cluster = shell.start("run", *flags, elastic_worker, shell.directory / "finish")
    cluster.wait_for_output("[0]: generation 1")
    cluster.wait_for(lambda: len(shell.job().servers) == 2, "both servers to be registered")
    status, out, err = shell.run("drain", "server-0")
    assert (status, out) == (1, "")
    assert "has declared its tensors" in err
    with CoordinatorClient(ChannelSettings(address=shell.cluster().coordinator)) as client:
        client.declare_tensors("digits", [TensorSpec(name="w", shape=[2], dtype="float32")])
    assert shell.job().spec.max_parameter_servers == 3
    shares = {server.server_id: server.partitions for server in shell.job().servers}
    assert sorted(shares.values()) == [0, 1], "one of them has nothing to give away"
    leaves, stays = sorted(shares, key=lambda server_id: shares[server_id])
    status, out, err = shell.run("drain", leaves)
    assert (status, err) == (0, "")
    assert out.startswith(
        f"parameter server {leaves} of job digits will hand its partitions over to the others"
    )
    cluster.wait_for(
        lambda: [server.server_id for server in shell.job().servers] == [stays],
        "the server to have ended",
    )
    status, _, err = shell.run("drain", stays)
    assert status == 1
    assert "not draining" in err
    (shell.directory / "finish").touch()
    assert cluster.wait() == 0
    assert "was restarted" not in cluster.stderr


def test_killed_parameter_server_is_restarted_by_its_launcher(
    shell: Shell, elastic_worker: Path
) -> None:
    flags = ("--standalone", "--servers", "1", "--rdzv-id", "digits")
    cluster = shell.start("run", *flags, elastic_worker, shell.directory / "finish")
    cluster.wait_for_output("[0]: generation 1")
    coordinator = shell.cluster().coordinator
    # another cluster on this machine, with a job of the same name
    other = shell.start("run", *flags, elastic_worker, shell.directory / "finish")
    other.wait_for_output("[0]: generation 1")
    status, out, err = shell.run("kill", "server-0", "--coordinator", coordinator)
    assert (status, out, err) == (
        0,
        "killed parameter server server-0 of job digits: SIGKILL\n",
        "",
    )
    cluster.wait_for(
        lambda: "ended (SIGKILL) and was restarted" in cluster.stderr, "the server to be back"
    )
    assert "was restarted" not in other.stderr
    status, _, err = shell.run("kill", "server-7")
    assert status == 1
    assert "job digits has no parameter server 'server-7'" in err
    (shell.directory / "finish").touch()
    assert (cluster.wait(), other.wait()) == (0, 0)


@pytest.mark.parametrize("command", ["kill", "drain"])
def test_unknown_rank_is_refused(shared_shell: Shell, cluster: Command, command: str) -> None:
    status, out, err = shared_shell.run(command, "7")
    assert (status, out) == (1, "")
    assert "rank 7" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [["status"], ["kill", "0"], ["drain", "0"]])
def test_command_without_a_cluster_names_the_remedy(shell: Shell, arguments: list[str]) -> None:
    status, out, err = shell.run(*arguments)
    assert (status, out) == (1, "")
    assert (
        "no cluster of yours is running on this machine; start one (shoal run --standalone" in err
    )


def test_unassigned_ranks_are_shown_as_pending(shared_shell: Shell, cluster: Command) -> None:
    with CoordinatorClient(ChannelSettings(address=shared_shell.cluster().coordinator)) as client:
        client.create_job(JobSpec(job_id="starting", min_workers=2, max_workers=2))
    for command in ("kill", "drain"):
        status, out, err = shared_shell.run(
            command, "1", "--job", "starting", "--coordinator", shared_shell.cluster().coordinator
        )
        assert (status, out) == (1, "")
        assert ("it has no ranks yet" if command == "kill" else "no rank is assigned yet") in err
        assert "its workers are still starting" in err


def test_newest_of_several_clusters_is_shown_and_the_others_are_named(
    shared_shell: Shell, cluster: Command
) -> None:
    newest = Registration(
        job_id="newest",
        coordinator="127.0.0.1:9",
        http="127.0.0.1:9",
        redis="redis://127.0.0.1:9",
        command="train.py",
        directory=shared_shell.directory / "runtime" / "shoal",
    )
    try:
        status, _, err = shared_shell.run("status")
        assert status == 1
        received, error = err.splitlines()
        assert (
            received
            == "shoal: showing job newest of the newest of 2 clusters on this machine; choose "
            "another with --job digits"
        )
        assert error.startswith("shoal: cannot reach a coordinator at 127.0.0.1:9 (")
        assert error.endswith(f"); its launcher (pid {os.getpid()}) may be exiting, so try again")
        status, out, err = shared_shell.run("status", "--job", "digits")
        assert (status, err) == (0, "")
        assert "job digits" in out
    finally:
        newest.close()


def test_address_without_a_coordinator_is_reported_with_the_remedy(shell: Shell) -> None:
    status, out, err = shell.run("status", "--coordinator", "127.0.0.1:9", "--job", "x")
    assert (status, out) == (1, "")
    assert re.fullmatch(
        r"shoal: cannot reach a coordinator at 127\.0\.0\.1:9 \(.+\); check --coordinator \(or "
        r"SHOAL_COORDINATOR\),.*\n",
        err,
    )


@pytest.mark.parametrize("arguments", [["kill"], ["kill", "-1"], ["statu"], ["status", "--jsn"]])
def test_invalid_command_lines_exit_with_status_2(shell: Shell, arguments: list[str]) -> None:
    assert shell.run(*arguments)[0] == 2


def test_version_and_help(shell: Shell) -> None:
    status, out, _ = shell.run("--version")
    assert status == 0
    assert re.fullmatch(r"shoal \d+\.\d+\.\d+\n", out)
    status, out, _ = shell.run("--help")
    assert status == 0
    assert {
        "run",
        "up",
        "submit",
        "jobs",
        "status",
        "top",
        "events",
        "logs",
        "drain",
        "stop",
        "kill",
        "demo",
    } <= set(out.split())


def test_ctrl_c_while_the_program_is_loading_ends_it_without_a_traceback(shell: Shell) -> None:
    script = shell.script("""
import os, signal, sys

class Interrupter:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
from shoal.cli import main
main()
""")
    command = shell.start_program(sys.executable, script, "--help")
    assert (command.wait(), command.stdout, command.stderr) == (130, "", "")


def test_killed_demo_takes_its_run_with_it(shell: Shell) -> None:
    demo = shell.start("demo", "--sync-epochs", "10000")
    children = psutil.Process(demo.process.pid).children
    demo.wait_for(children, "the demo's run to start")
    run = children()[0]
    demo.process.kill()
    run.wait(30)


def test_up_without_a_terminal_runs_until_the_script_ends(shell: Shell) -> None:
    script = shell.script(
        "import os\nprint('rank', os.environ['RANK'])\nraise SystemExit(4 * (os.environ['RANK'] == "
        "'1'))"
    )
    status, out, err = shell.run("up", "--workers", "2", script)
    assert (status, "[1]: rank 1" in out) == (4, True), err


@pytest.mark.slow
def test_up_on_a_terminal_shows_the_members_below_the_output(
    shell: Shell, elastic_worker: Path
) -> None:
    """This includes output that the terminal's encoding cannot express, and lines that overwrite
    one another."""
    worker = shell.script(
        "import os, runpy\nos.write(1, b'\\xe2\\x86\\x92\\n 50%\\r100%\\n')\n"
        f"runpy.run_path({str(elastic_worker)!r}, run_name='__main__')\n"
    )
    finish = shell.directory / "finish"
    ours, theirs = pty.openpty()
    environment = {
        **shell.environment,
        "COLUMNS": "120",
        "LINES": "40",
        "TERM": "xterm",
        "PYTHONIOENCODING": "ascii",
    }
    command = subprocess.Popen(
        [sys.executable, "-m", "shoal", "up", "--workers", "2", str(worker), str(finish)],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    seen, deadline = b"", time.monotonic() + 60
    while any(
        expected not in seen
        for expected in (b"samples/s", b"2 of 2 workers have a rank", b"generation 1 rank 1 of 2")
    ):
        assert time.monotonic() < deadline, seen[-2000:].decode()  # the table is drawn repeatedly
        seen += os.read(ours, 65536)
    finish.touch()
    seen += read_to_end(ours)
    assert command.wait(90) == 0, seen.decode()
    assert seen.count(b" 100%\r\n") == 2
    assert b" 50%" not in seen
    assert re.search(rb"(100%|of 2)\r\n\r\n", seen) is None, "a blank line after a worker's"


def test_stalled_terminal_does_not_delay_the_end(shell: Shell) -> None:
    script = shell.script("print('x' * 1_000_000)")
    shortly = (
        "from datetime import timedelta; import shoal.cli.terminal.console as c; "
        "c._LAST_OUTPUT_TIMEOUT = timedelta(seconds=1)"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"{shortly}; from shoal.cli import main; main()",
            "up",
            "--workers",
            "1",
            str(script),
        ],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**shell.environment, "TERM": "xterm"},
    )
    os.close(theirs)
    try:
        assert process.wait(60) == 1
    finally:
        process.kill()
        os.close(ours)


def test_blocked_standard_output_at_the_end_of_a_run_is_reported_on_standard_error(
    shell: Shell,
) -> None:
    script = shell.script("print('x' * 1_000_000)")
    shortly = (
        "from datetime import timedelta\n"
        "import shoal.cli.terminal.console as c, shoal.launcher.workers.output as o\n"
        "c._LAST_OUTPUT_TIMEOUT, o._SILENT_S = timedelta(seconds=1), 0.5\n"
        "from shoal.cli import main\n"
        "main()"
    )
    flags = ("run", "--standalone", "--tee", "3", "--log-dir", "memory://bucket/logs")
    ours, theirs = pty.openpty()
    errors = shell.directory / "errors"
    with errors.open("wb") as error:
        process = subprocess.Popen(
            [sys.executable, "-c", shortly, *flags, str(script)],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=error,
            env={**shell.environment, "TERM": "xterm"},
        )
    os.close(theirs)
    try:
        assert process.wait(60) == 1
    finally:
        process.kill()
        os.close(ours)
    said = errors.read_text()
    assert "the run has ended; waiting up to 0.5 s for the terminal to accept" in said
    assert "shoal: logs: memory://bucket/logs/" in said
    assert "did not accept the workers' last output within 1 s" in said


def read_to_end(terminal: int) -> bytes:
    """Reads a terminal until its other side is closed, which raises EIO."""
    seen = b""
    try:
        while data := os.read(terminal, 65536):
            seen += data
    except OSError:
        pass
    finally:
        os.close(terminal)
    return seen
