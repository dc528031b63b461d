"""A real SLURM on machines that are network namespaces: slurmctld, slurmd and munge from Debian's
packages.

Each machine has an address, a host name that the others resolve, and its own processes. A machine
is also a process namespace, whose first process the kernel kills when the test run ends, so that
all of its processes die with it. All files are below one directory.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from shoal_common.system.processes import tied_to_parent

from benchmarks.machines import Machines, hindrance
from tests.zygote import children

CONTROL: Final = "control"
_PATIENCE_S: Final = 120.0
eventually = functools.partial(children.eventually, within_s=_PATIENCE_S)
_PROGRAMS: Final = ("slurmctld", "slurmd", "sbatch", "munged", "nsenter", "unshare")
# A machine's first process is a shell, which reaps orphans.
_MACHINE: Final = 'hostname "$0" && mount --bind "$HOSTS" /etc/hosts && { "$@" & wait; }'
_COMMAND: Final = 'mount --bind "$HOSTS" /etc/hosts && exec "$@"'
_CONFIGURATION: Final = """
ClusterName=shoal
SlurmctldHost={control}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=60
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=1,sched_interval=1
NodeName={nodes} CPUs=2 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 \\
 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str | None:
    """Returns why SLURM cannot run here; None: it can."""
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"it needs the programs {', '.join(missing)} (Debian: slurm-wlm, munge, util-linux)"
    return hindrance()


class Slurm:
    """A cluster of `nodes`, and one more machine that controls it. A context manager."""

    def __init__(self, directory: Path, nodes: tuple[str, ...]) -> None:
        self.directory = directory
        self.nodes = nodes
        self._machines = Machines(CONTROL, *nodes)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SHOAL_", "PET_", "SLURM_"))
        }
        self.environment = {
            **inherited,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_CONF": str(directory / "slurm.conf"),
            "HOSTS": str(directory / "hosts"),
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.enter_context(self._machines)
            undo.callback(self._stop)
            self._write_files()
            self._start_munge()
            self._start(CONTROL, "slurmctld", "-D")
            for node in self.nodes:
                self.start_node(node)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    def _write_files(self) -> None:
        machines = (CONTROL, *self.nodes)
        lines = [
            "127.0.0.1 localhost",
            *(f"{self._machines.address(machine)} {machine}" for machine in machines),
        ]
        (self.directory / "hosts").write_text("\n".join(lines) + "\n")
        key = self.directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        for name in ("state", *(f"spool-{node}" for node in self.nodes)):
            (self.directory / name).mkdir()
        (self.directory / "slurm.conf").write_text(
            _CONFIGURATION.format(
                control=CONTROL,
                address=self._machines.address(CONTROL),
                directory=self.directory,
                nodes=",".join(self.nodes),
            )
        )

    def _start_munge(self) -> None:
        files = {
            name: str(self.directory / f"munge.{name}") for name in ("socket", "pid", "log", "seed")
        }
        flags = [
            f"--socket={files['socket']}",
            f"--pid-file={files['pid']}",
            f"--log-file={files['log']}",
            f"--seed-file={files['seed']}",
        ]
        command = [
            "munged",
            "--foreground",
            "--force",
            f"--key-file={self.directory / 'munge.key'}",
            *flags,
        ]
        self._running["munge"] = self._popen(command, "munge")
        eventually(
            Path(files["socket"]).exists,
            lambda: f"munged: {(self.directory / 'munge.out').read_text()}",
        )

    def _popen(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.out").open("ab") as output:
            return subprocess.Popen(
                tied_to_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
                cwd=self.directory,
            )

    def _on(self, machine: str, *command: str) -> list[str]:
        return ["nsenter", f"--net={self._machines.namespace(machine)}", "--", *command]

    def _start(self, machine: str, *program: str) -> None:
        apart = (
            "unshare",
            "--uts",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount",
            "--mount-proc",
            "sh",
            "-c",
            _MACHINE,
            machine,
        )
        self._running[machine] = self._popen(self._on(machine, *apart, *program), machine)

    def _stop(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait(_PATIENCE_S)

    # ------------------------------------------------------------------------------------- machines

    def start_node(self, node: str) -> None:
        """Starts a machine's slurmd and waits until it accepts jobs."""
        self._start(node, "slurmd", "-D", "-N", node)
        eventually(
            lambda: (
                self.ask(
                    "sinfo", "--noheader", "--nodes", node, "--partition", "low", "--format", "%T"
                )
                == "idle"
            ),
            lambda: (
                f"{node} to be idle: "
                f"{self.ask('sinfo', '-Nl')}\n{(self.directory / f'{node}.out').read_text()}"
            ),
        )

    def kill_node(self, node: str) -> None:
        """Kills a machine instantly, with all of its processes."""
        self._running[node].kill()
        self._running[node].wait(_PATIENCE_S)

    # ----------------------------------------------------------------------------------------- jobs

    def ask(self, *command: str | Path, directory: Path | None = None) -> str:
        """Runs a SLURM command on the controlling machine and returns its output."""
        private = self._on(
            CONTROL, "unshare", "--mount", "sh", "-c", _COMMAND, "sh", *map(str, command)
        )
        answer = subprocess.run(
            private,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=self.environment,
            cwd=directory or self.directory,
        )
        return (answer.stdout + answer.stderr).strip()

    def submit(self, script: str, directory: Path, *flags: str) -> Job:
        """Runs sbatch in `directory`."""
        (directory / "job.sh").write_text(script)
        received = self.ask(
            "sbatch",
            "--parsable",
            "--output",
            directory / "job.out",
            *flags,
            directory / "job.sh",
            directory=directory,
        )
        assert received.isdecimal(), received
        return Job(self, received, directory / "job.out")


class Job:
    """A job that was submitted."""

    def __init__(self, slurm: Slurm, number: str, output: Path) -> None:
        self._slurm = slurm
        self.number = number
        self._output = output

    @property
    def said(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def field(self, name: str) -> str:
        """Returns a field of `scontrol show job`, such as JobState."""
        for word in self._slurm.ask("scontrol", "show", "job", self.number).split():
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
        return ""

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        eventually(
            condition,
            lambda: (
                f"{what}; {self._slurm.ask('scontrol', 'show', 'job', self.number)}\nit said: "
                f"{self.said}"
            ),
        )

    def wait_completed(self) -> None:
        """Waits until the job has ended with status 0."""
        self.wait_for(
            lambda: self.field("JobState") in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"),
            "its end",
        )
        assert (self.field("JobState"), self.field("ExitCode")) == ("COMPLETED", "0:0"), (
            f"{self._slurm.ask('scontrol', 'show', 'job', self.number)}\nit said: {self.said}"
        )

    def start_again_now(self) -> None:
        """Starts a requeued job in 3 s; SLURM would wait for two minutes. It does not start now,
        because a machine refuses a job that was killed there in the same second ("already killed,
        do not launch")."""
        self.wait_for(
            lambda: self.field("Restarts") == "1" and self.field("JobState") == "PENDING",
            "the requeue",
        )
        self._slurm.ask("scontrol", "update", f"jobid={self.number}", "starttime=now+3")

    def cancel(self) -> None:
        """Ends the job immediately; has no effect if it has already ended."""
        self._slurm.ask("scancel", "--full", "--signal=KILL", self.number)
        self._slurm.ask("scancel", self.number)
        eventually(
            lambda: not self._slurm.ask("squeue", "--noheader"),
            lambda: f"job {self.number} to be gone",
        )
