"""Workers forked from a warm process behave like fresh interpreters, and do not depend on the life
of the warm process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from shoal.launcher.processes.process import Child, ExitStatus, stop_all, wait_all
from shoal.launcher.workers.warm import WarmWorkers

Shell = Any  # of tests/integration/conftest.py

pytestmark = [pytest.mark.timeout(400), pytest.mark.fresh]
DEADLINE = timedelta(seconds=120)
SEES = Path(__file__).with_name("visible_environment.py")


class Both:
    """Runs commands in a forked worker and in a fresh interpreter."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SHOAL_", "PET_", "PYTHON", "COV"))
        }
        self.environment = {**kept, "OMP_NUM_THREADS": "1", "GRPC_ENABLE_FORK_SUPPORT": "0"}
        self.notes: list[str] = []
        self.runner = asyncio.Runner()
        command = [sys.executable, "-u", str(SEES)]
        self.warm = WarmWorkers(command, self.environment, wanted=True, note=self.notes.append)
        self.runner.run(self._begin())
        assert self.warm.is_ready, self.notes

    async def _begin(self) -> None:
        self.warm.begin()
        await self.warm.settled()

    def close(self) -> None:
        self.runner.run(self.warm.close())
        self.runner.close()

    def start(self, *arguments: str, **variables: str) -> Child:
        """Starts `python -u ARGUMENTS` as a forked worker."""
        return self.warm.start(
            [sys.executable, "-u", *arguments], {**self.environment, "RANK": "3", **variables}
        )

    def start_fresh(self, *arguments: str, **variables: str) -> Child:
        """Starts `python -u ARGUMENTS` in a fresh interpreter."""
        environment = {**self.environment, "RANK": "3", **variables}
        return Child(
            [sys.executable, "-u", *arguments],
            environment=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def outcomes(self, *arguments: str) -> tuple[Any, Any]:
        """Returns status, standard output and standard error of the forked worker, and those of the
        fresh one."""
        return ended(self.start(*arguments)), ended(self.start_fresh(*arguments))

    def script(self, text: str, name: str = "script.py") -> str:
        (self.directory / name).write_text(text)
        return name


def ended(child: Child) -> tuple[ExitStatus, str, str]:
    """Waits for a process; returns its status, standard output and standard error."""
    assert child.stdout is not None
    assert child.stderr is not None
    with child.stdout, child.stderr:
        outputs = child.stdout.read().decode(), child.stderr.read().decode()
    assert wait_all([child], DEADLINE) == []
    assert child.status is not None
    return child.status, *outputs


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    directory = tmp_path_factory.mktemp("both")
    with contextlib.chdir(directory):
        both = Both(directory)
        yield both
        both.close()
    assert both.notes == [], "no worker of these tests was meant to start fresh"


def described(output: str) -> tuple[dict[str, Any], list[str]]:
    """Splits a worker's output into its observations, by name, and the other lines."""
    lines = [line.partition(" ") for line in output.splitlines()]
    names = {name: rest for name, _, rest in lines if rest.startswith(("{", "[", '"'))}
    return names, ["".join(line) for line in lines if not line[2].startswith(("{", "[", '"'))]


@pytest.mark.parametrize(
    "arguments",
    [
        (str(SEES), "--flag", "a b", ""),
        pytest.param(("-m", "visible_environment", "one"), marks=pytest.mark.slow),
    ],
    ids=["script", "module"],
)
def test_forked_worker_sees_the_same_environment_as_a_fresh_one(
    both: Both, arguments: tuple[str, ...]
) -> None:
    shutil.copy(SEES, both.directory)
    (warm, warm_out, warm_err), (fresh, fresh_out, fresh_err) = both.outcomes(*arguments)
    assert (warm, warm_err) == (fresh, fresh_err) == (ExitStatus(0), "")
    warm_seen, fresh_seen = dict(described(warm_out)[0]), dict(described(fresh_out)[0])
    random_warm, random_fresh = (
        json.loads(warm_seen.pop("random")),
        json.loads(fresh_seen.pop("random")),
    )
    assert warm_seen == fresh_seen
    assert described(warm_out)[1] == described(fresh_out)[1]
    assert "a thread outlives the script" in warm_out
    again = json.loads(described(ended(both.start(*arguments))[1])[0]["random"])
    for one, other, third in zip(random_warm, random_fresh, again, strict=True):
        assert len({str(each) for each in (one, other, third)}) == 3


ENDINGS = {
    "its exit code": "import sys; sys.exit(7)",
    "a text as the exit code": "import sys; sys.exit('the reason')",
    "an exception": "def inner():\n    return 1 / 0\ndef outer():\n    inner()\nouter()",
    "an exception with "
    "causes": "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('é') from "
    "error",
    "an error in its syntax": "import os\nprint('never')\nx = = 3",
    "Ctrl-C": "raise KeyboardInterrupt",
    "SIGINT": "import os, signal; os.kill(os.getpid(), signal.SIGINT); signal.pause()",
    "SIGTERM": "import os, signal; os.kill(os.getpid(), signal.SIGTERM); signal.pause()",
    "abort": "import os; os.abort()",
    "os._exit": "import os; print('unflushed', end=''); os._exit(3)",
    "a hook for "
    "exceptions": "import sys\nsys.excepthook = lambda *about: print(about[0], about[2].tb_lineno, "
    "about[2].tb_next)\n1 / 0",
    "an exception in a "
    "thread": "import threading\nthread = threading.Thread(target=lambda: 1 / 0)\nthread.start(); "
    "thread.join()",
    "an exit handler that raises": "import atexit\natexit.register(lambda: 1 / 0)",
    "a destructor at the "
    "end": "class A:\n    def __del__(self): print('gone', __name__)\nkept = A()",
    "the traceback of a caught "
    "exception": "import traceback\ntry:\n    1 / 0\nexcept Exception:\n    traceback.print_exc()",
    "a warning": "import warnings\nwarnings.warn('hear')",
    "memory that is "
    "limited": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << "
    "32))\nbytearray(1 << 33)",
}


@pytest.mark.parametrize("how", ENDINGS)
def test_forked_worker_ends_like_a_fresh_one(both: Both, how: str) -> None:
    script = both.script(ENDINGS[how])
    warm, fresh = (
        tuple(re.sub("0x[0-9a-f]+|Thread-[0-9]+", "", str(part)) for part in each)
        for each in both.outcomes(script)
    )
    assert warm == fresh


def test_tracebacks_name_the_script_as_on_the_command_line(both: Both) -> None:
    (both.directory / "folder").mkdir(exist_ok=True)
    both.script("raise ValueError", "folder/script.py")
    for name in (
        "folder/script.py",
        "./folder/../folder/script.py",
        str(both.directory / "folder" / "script.py"),
        "missing.py",
    ):
        warm, fresh = both.outcomes(name)
        assert warm == fresh
    for name in ("folder.script", "folder.missing", "missing"):
        warm, fresh = both.outcomes("-m", name)
        assert warm == fresh


def test_a_worker_starts_although_its_directory_was_deleted(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    with contextlib.chdir(gone):
        both = Both(tmp_path)
    script = tmp_path / both.script("print('here', __file__)")
    gone.rmdir()
    assert ended(both.start(str(script)))[:2] == (ExitStatus(code=0), f"here {script}\n")
    both.close()


def test_processes_left_by_a_worker_are_killed_with_its_group(both: Both) -> None:
    script = both.script(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(300)'], "
        "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(child.pid)\n"
    )
    status, out, _ = ended(both.start(script))
    assert status.ok
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(out)).wait(DEADLINE.total_seconds())


def test_script_folder_that_shadows_an_imported_module_makes_workers_start_fresh(
    both: Both,
) -> None:
    folder = both.directory / "hiding"
    folder.mkdir()
    both.script("import sympy\nprint(sympy.MINE)", "hiding/script.py")
    both.script("MINE = 'mine'", "hiding/sympy.py")
    assert ended(both.start("hiding/script.py"))[:2] == (ExitStatus(0), "mine\n")
    note = both.notes.pop()
    assert "hiding/sympy.py shadows the module 'sympy'" in note


def test_different_environment_makes_workers_start_fresh(both: Both) -> None:
    script = both.script("import sys\nprint(sys.flags.hash_randomization)")
    assert ended(both.start(script, PYTHONHASHSEED="0"))[:2] == (ExitStatus(0), "0\n")
    assert "PYTHONHASHSEED" in both.notes.pop()


def settled(both: Both, environment: dict[str, str]) -> tuple[bool, list[str]]:
    """Starts a warm process. Returns whether it can fork workers, and the launcher's notes."""
    notes: list[str] = []

    async def settle() -> bool:
        warm = WarmWorkers(
            [sys.executable, "-u", str(SEES)], environment, wanted=True, note=notes.append
        )
        warm.begin()
        try:
            async with asyncio.timeout(DEADLINE.total_seconds()):
                await warm.settled()
            return warm.is_ready
        finally:
            await warm.close()

    return both.runner.run(settle()), notes


@pytest.mark.parametrize(
    ("startup", "reason"),
    [
        (
            "import sys; sys.stderr.write('noise\\n' * 100_000)",
            "importing torch and Shoal printed output, .* \\(noise\\)$",
        ),
        (
            "import torch; torch.cuda._is_in_bad_fork = lambda: True",
            "called the CUDA runtime, which torch cannot use",
        ),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(300,), "
            "daemon=True).start()",
            "has 2 threads$",
        ),
        (
            "import sys; 'warm' in sys.orig_argv[2] and __import__('os')._exit(7)",
            "the warm process ended with exit code 7$",
        ),
    ],
    ids=["noise", "CUDA", "threads", "death"],
)
def test_environment_that_alters_interpreters_makes_workers_start_fresh(
    both: Both, tmp_path: Path, startup: str, reason: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(startup)
    environment = {**both.environment, "PYTHONPATH": str(tmp_path)}
    forks, notes = settled(both, environment)
    assert not forks
    assert re.search(reason, "\n".join(notes), re.MULTILINE), notes


@pytest.mark.parametrize(
    ("startup", "look_s", "forks"),
    [
        ("import time\nwhile time.process_time() < 3: pass", 10, True),
        ("import time\ntime.sleep(3600)", 2, False),
    ],
    ids=["slow", "stuck"],
)
def test_slow_import_is_awaited_while_it_is_in_progress(
    both: Both,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    startup: str,
    look_s: float,
    forks: bool,
) -> None:
    monkeypatch.setattr("shoal.launcher.workers.warm._IMPORT_TIMEOUT", timedelta(seconds=0.5))
    monkeypatch.setattr("shoal.launcher.workers.warm._LOOK", timedelta(seconds=look_s))
    (tmp_path / "sitecustomize.py").write_text(startup)
    environment = {**both.environment, "PYTHONPATH": str(tmp_path)}
    ready, notes = settled(both, environment)
    assert ready == forks
    assert any("did not import torch" in note for note in notes) != forks, notes


def test_workers_start_fresh_when_the_warm_process_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.launcher.workers.warm._FORK_TIMEOUT", timedelta(seconds=2))
    monkeypatch.chdir(tmp_path)
    others = set(psutil.Process().children())
    both = Both(tmp_path)
    try:
        script = both.script("print('ran')")
        (stopped,) = set(psutil.Process().children()) - others
        stopped.send_signal(signal.SIGSTOP)
        assert ended(both.start(script)) == (ExitStatus(0), "ran\n", "")
        assert "the warm process did not respond: TimeoutError" in both.notes[0]
    finally:
        both.close()
    assert not stopped.is_running()


def test_a_worker_ends_at_once_if_its_launcher_dies_before_adopting_it() -> None:
    script = """
        import os, select

        from shoal.warm.becoming import _follow_launcher
        launcher = os.getpid()  # no subreaper: the worker goes to init
        reading, writing = os.pipe()
        if os.fork() == 0:
            between = os.getpid()
            if os.fork() == 0:
                _follow_launcher(launcher, between=between)
            os._exit(0)
        os.close(writing)
        print(select.select([reading], [], [], 15)[0] == [reading])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=DEADLINE.total_seconds(),
        check=True,
    )
    assert done.stdout == "True\n", "it waited for a launcher that is gone"


RUNS = "import os, time, torch\nprint('pid', os.getpid(), flush=True)\nwhile True: time.sleep(0.01)"


def warm_process(launcher: int) -> psutil.Process | None:
    """Returns the warm process of a launcher, or None."""
    children = psutil.Process(launcher).children()
    return next(
        (
            each
            for each in children
            if any("shoal/warm/__main__" in word for word in each.cmdline())
        ),
        None,
    )


def sockets_of(process: psutil.Process) -> set[str]:
    """Returns the sockets that a process has opened."""
    links = {str(each.readlink()) for each in Path(f"/proc/{process.pid}/fd").iterdir()}
    return {link for link in links if link.startswith("socket:")}


def test_workers_depend_on_the_launcher_alone_and_not_on_its_warm_process(shell: Shell) -> None:
    command = shell.start("run", "--standalone", "--nproc-per-node=2", shell.script(RUNS))
    command.wait_for_output("[0]: pid", "[1]: pid")
    workers = [psutil.Process(int(pid)) for pid in re.findall(r"pid (\d+)", command.stdout)]
    first = warm_process(command.process.pid)
    assert first is not None

    assert len(sockets_of(first)) == 1, "only the launcher has the other end"
    assert not [each for each in first.net_connections("all") if each.laddr], (
        "it has no name that others could call"
    )
    assert [sockets_of(worker) for worker in workers] == [set(), set()]

    first.kill()
    command.wait_for(
        lambda: f"the warm process (pid {first.pid}) ended with SIGKILL" in command.stderr,
        "the notice",
    )
    command.wait_for(
        lambda: (again := warm_process(command.process.pid)) and again.pid != first.pid,
        "another one",
    )
    for worker in workers:
        assert worker.is_running()
        assert worker.ppid() == command.process.pid

    command.process.kill()
    command.wait()
    command.wait_until_gone()


def test_no_warm_starts_fresh_interpreters_silently(shell: Shell) -> None:
    command = shell.start("run", "--standalone", "--no-warm", shell.script(RUNS))
    command.wait_for_output("pid")
    assert warm_process(command.process.pid) is None
    assert "fresh" not in command.stderr


def test_the_reason_for_fresh_interpreters_is_reported(shell: Shell) -> None:
    script = shell.script(
        "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport "
        "torch\nprint(torch.get_num_threads())"
    )
    status, out, err = shell.run("run", "--standalone", script)
    assert (status, out) == (0, "[0]: 2\n")
    assert f"workers start in fresh interpreters: {script} sets OMP_NUM_THREADS" in err


def test_stop_all_ends_forked_workers(both: Both) -> None:
    children = [both.start(both.script("import time; time.sleep(300)")) for _ in range(2)]
    stop_all(children, grace=timedelta(seconds=30))
    for child in children:
        assert child.status == ExitStatus(143, 15)
        ended(child)


def test_killed_parameter_server_is_forked_again_and_serves(shell: Shell) -> None:
    command = shell.start("run", "--standalone", "--servers=1", shell.script(RUNS))
    command.wait_for_output("pid")
    (server,) = (
        each
        for each in psutil.Process(command.process.pid).children()
        if "shoal_ps_server" in each.cmdline()
    )
    words = server.cmdline()
    command.wait_for(Path(words[words.index("--port-file") + 1]).exists, "the first one")
    server.kill()
    command.wait_for(lambda: "was restarted as pid" in command.stderr, "another one")
    again = int(command.stderr.rpartition("was restarted as pid ")[2].split()[0])
    assert psutil.Process(again).ppid() == command.process.pid
    shared = [
        line.split()[1]
        for line in Path(f"/proc/{again}/smaps_rollup").read_text().splitlines()
        if line.startswith("Shared_Dirty")
    ]
    assert int(shared[0]) > 50_000, "kB of torch, written before the fork"
