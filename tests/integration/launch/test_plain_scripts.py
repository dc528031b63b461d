"""`shoal run` with scripts that do not use Shoal behaves like torchrun."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from shoal.launcher.clusters.registry import running_clusters

Shell = Any  # of tests/integration/conftest.py

ALL_REDUCE = """
import json, os, sys, torch, torch.distributed as dist


def say(*words):  # torchrun lets the ranks' writes run into each other: one write a line
    sys.stdout.write(" ".join(map(str, words)) + "\\n")


dist.init_process_group("gloo")
total = torch.full((4,), float(dist.get_rank() + 1))
dist.all_reduce(total)
say(
    "sum",
    total.tolist(),
    "on",
    dist.get_rank(),
    "of",
    dist.get_world_size(),
    "local",
    os.environ["LOCAL_RANK"],
)
if dist.get_rank() == 1:
    own = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("TORCH", "OMP", "ROLE")) or name[-4:] in ("RANK", "SIZE")
    }
    say("environment", json.dumps(own))
dist.destroy_process_group()
"""


def lines_of(output: str) -> list[str]:
    """Returns the output's lines without rank prefixes, sorted."""
    return sorted(re.sub(r"^\[\d+\]: ", "", line) for line in output.splitlines())


def environment_of(lines: list[str]) -> dict[str, str]:
    return dict(
        json.loads(next(line for line in lines if line.startswith("environment")).partition(" ")[2])
    )


@pytest.mark.slow
@pytest.mark.fresh
def test_torchrun_script_runs_unchanged_with_the_same_output(shell: Shell) -> None:
    script = shell.script(ALL_REDUCE)
    torchrun = shell.start_program(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script
    )
    assert torchrun.wait() == 0, torchrun.stderr
    status, out, err = shell.run("run", "--standalone", "--nproc-per-node=2", script)
    assert status == 0, err
    theirs, ours = lines_of(torchrun.stdout), lines_of(out)
    assert [line for line in ours if line.startswith("sum")] == [
        line for line in theirs if line.startswith("sum")
    ]
    assert len([line for line in ours if line == "sum [3.0, 3.0, 3.0, 3.0] on 1 of 2 local 1"]) == 1

    their_variables, our_variables = environment_of(theirs), environment_of(ours)
    their_variables.pop("TORCHELASTIC_SIGNALS_TO_HANDLE")  # torchrun sets these for its own agent
    assert set(their_variables) <= set(our_variables)
    different = {name for name, value in their_variables.items() if our_variables[name] != value}
    assert different <= {
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_ERROR_FILE",
        "TORCHELASTIC_USE_AGENT_STORE",
    }


def test_output_is_prefixed_with_the_rank_and_keeps_its_stream(shell: Shell) -> None:
    script = shell.script(
        "import os, sys\nprint('to out', os.environ['RANK'])\nprint('to err', os.environ['RANK'], "
        "file=sys.stderr)"
    )
    status, out, err = shell.run("run", "--nproc-per-node", "2", script)
    assert status == 0, err
    assert sorted(out.splitlines()) == ["[0]: to out 0", "[1]: to out 1"]
    assert {"[0]: to err 0", "[1]: to err 1"} <= set(err.splitlines())


def test_the_first_failure_ends_the_run_with_its_code_and_is_reported(shell: Shell) -> None:
    script = shell.script(
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(60)"
    )
    command = shell.start("run", "--nproc-per-node", "3", script)
    assert command.wait() == 7
    assert re.search(
        r"First failure.*\n.*\n.*\n +rank +: 1 \(local_rank: 1\)\n +exit code : 7, pid \d+",
        command.stderr,
    )
    command.wait_until_gone()


def test_death_by_a_signal_exits_with_128_plus_the_signal(shell: Shell) -> None:
    script = shell.script("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    status, _, err = shell.run("run", script)
    assert status == 128 + signal.SIGSEGV
    assert "exit code : 139 (SIGSEGV)" in err


def test_traceback_in_torchs_error_file_is_reported(shell: Shell) -> None:
    script = shell.script(
        "import json, os\n"
        "message = {'message': 'x', 'extraInfo': {'py_callstack': 'Traceback: the very cause', "
        "'timestamp': '0'}}\n"
        "json.dump({'message': message}, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\n"
        "raise SystemExit(1)"
    )
    status, _, err = shell.run("run", script)
    assert status == 1
    assert "    Traceback: the very cause" in err


def test_all_workers_are_restarted_as_often_as_allowed(shell: Shell) -> None:
    script = shell.script(
        "import os, sys, time\n"
        "restart = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "print('restart', restart, 'of', os.environ['TORCHELASTIC_MAX_RESTARTS'], flush=True)\n"
        "if restart < 2 and os.environ['RANK'] == '0': sys.exit(3)\n"
        "if restart < 2: time.sleep(60)\n"
    )
    status, out, err = shell.run("run", "--nproc-per-node", "2", "--max-restarts", "2", script)
    assert status == 0, err
    assert {f"[{rank}]: restart 2 of 2" for rank in (0, 1)} <= set(out.splitlines())
    assert "restart 2 of 2" in err


def test_when_restarts_are_used_up_the_last_failure_counts(shell: Shell) -> None:
    script = shell.script(
        "import os, sys\nsys.exit(10 + int(os.environ['TORCHELASTIC_RESTART_COUNT']))"
    )
    status, _, err = shell.run("run", "--max-restarts", "1", script)
    assert status == 11, err
    assert err.count("rank      : 0") == 1


def test_arguments_after_the_script_are_passed_to_it(shell: Shell) -> None:
    script = shell.script("import sys\nprint(sys.argv[1:])")
    status, out, _ = shell.run("run", script, "--nproc-per-node", "9", "--my_flag", "-m", "--help")
    assert (status, out) == (0, "[0]: ['--nproc-per-node', '9', '--my_flag', '-m', '--help']\n")


def test_modules_and_programs_run_too(shell: Shell) -> None:
    (shell.directory / "package").mkdir()
    shell.script("import sys\nprint(__name__, sys.argv[1:])", "package/train.py")
    assert shell.run("run", "-m", "package.train", "1")[:2] == (0, "[0]: __main__ ['1']\n")
    assert shell.run("run", "--no_python", "/bin/echo", "plain")[:2] == (0, "[0]: plain\n")


def test_environment_variables_of_torchrun_replace_its_flags(shell: Shell) -> None:
    script = shell.script("import os\nprint(os.environ['ROLE_NAME'])")
    status, out, _ = shell.run("run", script, PET_NPROC_PER_NODE="2", PET_ROLE="trainer")
    assert (status, sorted(out.splitlines())) == (0, ["[0]: trainer", "[1]: trainer"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--nproc-per-nod", "2", "x.py"],
            "No such option: --nproc-per-nod (Possible options: --nproc-per-node)",
        ),
        (["--nproc-per-node", "two", "/bin/true"], "--nproc-per-node 'two': expected a number"),
        (["--nnodes", "2", "/bin/true"], "--nnodes 2:2 requires --rdzv-endpoint"),
        (["missing.py"], "the script 'missing.py' does not exist here"),
        ([], "Missing argument"),
    ],
)
def test_invalid_command_lines_are_refused_before_anything_starts(
    shell: Shell, arguments: list[str], message: str
) -> None:
    status, out, err = shell.run("run", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_output_files_keep_each_workers_output(shell: Shell) -> None:
    script = shell.script("import os\nprint('line of', os.environ['RANK'])")
    status, out, _ = shell.run(
        "run",
        "--nproc-per-node",
        "2",
        "--log-dir",
        "logs",
        "--redirects",
        "1:1",
        "--tee",
        "0:1",
        script,
    )
    assert (status, out) == (0, "[0]: line of 0\n")
    logs = {path.parts[-2]: path for path in (shell.directory / "logs").rglob("stdout.log")}
    assert {rank: path.read_text() for rank, path in logs.items()} == {
        "0": "line of 0\n",
        "1": "line of 1\n",
    }


SLEEPER = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
print("started", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_launcher_asked_to_end_takes_all_its_processes_with_it(
    shell: Shell, number: signal.Signals
) -> None:
    command = shell.start("run", "--standalone", "--nproc-per-node", "2", shell.script(SLEEPER))
    command.wait_for_output("[0]: started", "[1]: started")
    command.process.send_signal(number)
    assert command.wait() == 128 + number
    assert command.family() == []


def test_killed_launcher_leaves_no_worker_service_or_file(shell: Shell) -> None:
    temporary = shell.directory / "temporary"
    temporary.mkdir()
    script = shell.script("import time\nprint('started', flush=True)\ntime.sleep(300)")
    command = shell.start(
        "run", "--standalone", "--nproc-per-node", "2", script, TMPDIR=str(temporary)
    )
    command.wait_for_output("[0]: started", "[1]: started")
    runtime = shell.directory / "runtime" / "shoal"
    command.wait_for(lambda: list(runtime.glob("*.json")), "the cluster")
    assert {"valkey-server", "redis-server"} & {process.name() for process in command.family()}
    assert len(list(temporary.iterdir())) == 2
    command.process.kill()
    killed_at = time.monotonic()
    command.wait()
    command.wait_until_gone()
    assert time.monotonic() - killed_at < 60, "its workers would sleep for five minutes"
    assert running_clusters(runtime) == []
    status, out, _ = shell.run("status")
    assert (status, "killed" in out) == (0, True), out
    assert list(temporary.iterdir()) == []


def test_unresponsive_workers_are_killed_after_the_grace(shell: Shell) -> None:
    script = shell.script(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', "
        "flush=True)\nsignal.pause()"
    )
    command = shell.start("run", "--shutdown-timeout", "0", script)
    command.wait_for_output("[0]: deaf")
    command.process.send_signal(signal.SIGINT)
    assert command.wait() == 130


def test_a_second_interrupt_does_not_wait_for_the_grace(shell: Shell) -> None:
    script = shell.script(
        "import signal\n"
        "signal.signal(signal.SIGTERM, lambda *_: print('asked', flush=True))\n"
        "print('deaf', flush=True)\n"
        "while True: signal.pause()"
    )
    command = shell.start("run", script)
    command.wait_for_output("[0]: deaf")
    command.process.send_signal(signal.SIGINT)
    command.wait_for_output("[0]: asked")
    command.process.send_signal(signal.SIGINT)
    assert command.wait() == 130


def test_a_lost_terminal_does_not_end_the_workers(shell: Shell, tmp_path: Path) -> None:
    script = shell.script(
        "import pathlib, time\nfor _ in range(20000): print('x' * "
        "100)\npathlib.Path('done').touch()"
    )
    pipeline = shell.start_program(
        "bash", "-c", f"set -o pipefail; {sys.executable} -m shoal run {script} | head -1"
    )
    assert pipeline.wait() == 0, pipeline.stderr
    assert (tmp_path / "done").exists()


def test_workers_on_gpu_slices_each_see_their_own(shell: Shell) -> None:
    script = shell.script(
        "import os\nprint('sees', os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    status, out, err = shell.run(
        "run", "--standalone", "--nproc-per-node=gpu", script, CUDA_VISIBLE_DEVICES="MIG-aa,MIG-bb"
    )
    assert status == 0, err
    assert [line for line in lines_of(out) if line.startswith("sees")] == [
        "sees 0 MIG-aa",
        "sees 1 MIG-bb",
    ]
