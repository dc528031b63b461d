"""Plan of a run on Ray: validates the arguments of `shoal.ray.run` and converts them to commands
for Ray's machines. It does not use Ray itself, only its names of resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shoal_common.errors import ConfigurationError

from shoal.launcher.workers.settings import NodeRange
from shoal.ray.command import HERE, SUMMARY, Command

TOKENS: Final = "tokens"
"""Name of the file, in a parameter server's directory, that lists the tokens accepted by the
server."""
_JOIN_GRACE_S: Final = 30
_STRATEGIES: Final = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
_SET_HERE: Final = frozenset(
    {
        *(
            "--rdzv-endpoint",
            "--rdzv-id",
            "--rdzv-backend",
            "--rdzv-conf",
            "--standalone",
            "--run",
            "--resume",
            "--nnodes",
        ),
        *(
            "--nproc-per-node",
            "--node-rank",
            "--master-addr",
            "--master-port",
            "--servers",
            "--server-backups",
            "--max-servers",
        ),
        *("--no-fail-fast", "--module", "-m"),
    }
)
"""Flags of `shoal run` that are set here and must not be given by the user."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of one run. An invalid argument of `shoal.ray.run` raises a ConfigurationError that
    names it."""

    job_id: str
    script: tuple[str, ...]
    """The script and its arguments, to be placed after the flags of `shoal run`."""
    files: Mapping[str, bytes] = field(repr=False)
    """Name -> content of files that are written to each launcher's directory."""
    workers: int | tuple[int, int]
    workers_per_bundle: int = 1
    resources: Mapping[str, float]
    strategy: str = "PACK"
    servers: int = 0
    server_backups: int = 0
    server_resources: Mapping[str, float]
    environment: Mapping[str, str] = field(repr=False)
    flags: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._check_workers()
        for name, resources in (
            ("resources", self.resources),
            ("server_resources", self.server_resources),
        ):
            if not resources or any(amount <= 0 for amount in resources.values()):
                raise ConfigurationError(
                    f"{name}={dict(resources)}: expected one or more of Ray's resource names, each "
                    "with an amount above 0, as in {'CPU': 1, 'GPU': 1}"
                )
        if self.strategy not in _STRATEGIES:
            raise ConfigurationError(
                f"strategy={self.strategy!r}: expected one of Ray's placement strategies "
                f"({', '.join(_STRATEGIES)})"
            )
        if (
            self.servers < 0
            or self.server_backups not in (0, 1)
            or (self.server_backups and not self.servers)
        ):
            raise ConfigurationError(
                f"servers={self.servers}, server_backups={self.server_backups}: expected 0 servers "
                "or more, and 0 or 1 backup of each"
            )
        for flag in self.flags:
            name = str(flag).partition("=")[0].replace("_", "-")
            if name in _SET_HERE:
                raise ConfigurationError(
                    f"flags: {flag!r} is set by shoal.ray.run itself; use the arguments of "
                    "shoal.ray.run instead"
                )

    def _check_workers(self) -> None:
        least, most = (
            self.workers if isinstance(self.workers, tuple) else (self.workers, self.workers)
        )
        if not 1 <= least <= most:
            raise ConfigurationError(
                f"workers={self.workers!r}: expected a number of at least 1, or (FEWEST, MOST) as "
                "in (2, 4)"
            )
        if (
            self.workers_per_bundle < 1
            or least % self.workers_per_bundle
            or most % self.workers_per_bundle
        ):
            raise ConfigurationError(
                f"workers={self.workers!r}, workers_per_bundle={self.workers_per_bundle}: expected "
                "workers in multiples of workers_per_bundle"
            )

    @property
    def nodes(self) -> NodeRange:
        """Number of launchers, one per bundle. A single launcher is enough to continue, unless a
        minimum was given."""
        if isinstance(self.workers, tuple):
            least, most = self.workers
            return NodeRange(least // self.workers_per_bundle, most // self.workers_per_bundle)
        return NodeRange(1, self.workers // self.workers_per_bundle)

    @property
    def gang(self) -> int:
        """Number of launchers that Ray must place before any of them starts."""
        return self.nodes.least if isinstance(self.workers, tuple) else self.nodes.most

    @property
    def server_processes(self) -> int:
        return self.servers * (1 + self.server_backups)

    def launcher(self, coordinator: str, *, secrets: Mapping[str, str]) -> Command:
        """Returns the `shoal run` command of a launcher. `--run 1` keeps a launcher that starts
        late from starting a second run of the job, since each job id has only one run."""
        nodes = self.nodes
        flags: dict[str, str | int] = {
            "--rdzv-endpoint": coordinator,
            "--rdzv-id": self.job_id,
            "--run": 1,
            "--nnodes": f"{nodes.least}:{nodes.most}",
            "--nproc-per-node": self.workers_per_bundle,
            "--servers": self.servers,
            "--server-backups": self.server_backups,
        }
        if (
            self.gang == nodes.most
        ):  # Ray places all launchers together, so it is worth waiting for the last one
            flags["--rdzv-conf"] = f"last_call_timeout={_JOIN_GRACE_S}"
        settled = [str(word) for pair in flags.items() for word in pair]
        arguments = (f"{HERE}/{SUMMARY}", "run", *map(str, self.flags), *settled, *self.script)
        return Command(
            module="shoal.cli.summarized",
            arguments=arguments,
            environment={**self.environment, **secrets},
            files=self.files,
        )

    def server(self, index: int, coordinator: str, *, token: str, tokens: bytes) -> Command:
        """Returns the `shoal-ps-server` command of a server. The server's data is stored on its
        machine: it survives a restart of the process, but not the loss of the machine."""
        identity = (
            "--listen",
            "0.0.0.0:0",
            "--insecure",
            "--coordinator",
            coordinator,
            "--job",
            self.job_id,
            "--server-id",
            f"ps-{index}",
        )
        data = ("--tokens", f"{HERE}/{TOKENS}", "--data-dir", f"{HERE}/data")
        arguments = (*identity, *data)
        environment = {**self.environment, "SHOAL_PS_SERVER_TOKEN": token}
        return Command(
            module="shoal_ps_server",
            arguments=arguments,
            environment=environment,
            files={TOKENS: tokens},
        )
