"""Environment of a worker process: torchrun's variables, so that scripts for torchrun run
unchanged, and Shoal's own."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal_common.formats.runs import Run


@dataclass(frozen=True, kw_only=True)
class NodePlacement:
    """Position of this launcher's workers among the workers of all nodes. It is valid for one start
    of all workers."""

    node_rank: int
    node_count: int
    master_address: str
    master_port: int
    """Free port on the node of rank 0, for the first worker of that node to listen on."""


@dataclass(frozen=True, kw_only=True)
class WorkerPlacement:
    """Position of one worker process among all workers. It is valid for one start of all
    workers."""

    index: int
    """Local rank of the worker."""
    workers: int
    """Number of workers on each node."""
    node: NodePlacement

    @property
    def rank(self) -> int:
        return self.node.node_rank * self.workers + self.index

    @property
    def world_size(self) -> int:
        return self.node.node_count * self.workers


@dataclass(frozen=True, kw_only=True)
class WorkerIdentity:
    """Identity of one worker process, as known to the coordinator."""

    coordinator: str
    """Address of the coordinator (host:port)."""
    job_id: str
    run: Run | None
    """Run that the worker takes part in; None: the newest run."""
    member_id: str
    member_key: str
    launcher_id: str
    member_file: Path
    """File for the worker to record that it has joined the job, and that its script has
    finished."""
    tally_file: Path
    """File with the worker's counts of its commits."""
    metrics_listen: str | None
    """Address (host:port) for the worker's metrics; None: no metrics."""
    record_directory: Path | None
    allow_restart_from_scratch: bool
    local_address: str | None = None
    """Value of `--local-addr`: the address that other machines use to reach this one; None if not
    given."""
    listen_address: str | None = None
    """Value of `--listen-addr`: the address that workers on this machine listen on; None if not
    given."""


def torchrun_variables(
    placement: WorkerPlacement,
    *,
    run_id: str,
    role: str,
    restarts: int,
    max_restarts: int,
    error_file: Path,
) -> dict[str, str]:
    """Returns torchrun's variables, with the same meanings as in torchrun."""
    node = placement.node
    return {
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.index),
        "GROUP_RANK": str(node.node_rank),
        "ROLE_RANK": str(placement.rank),
        "ROLE_NAME": role,
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_WORLD_SIZE": str(placement.workers),
        "GROUP_WORLD_SIZE": str(node.node_count),
        "ROLE_WORLD_SIZE": str(placement.world_size),
        "MASTER_ADDR": node.master_address,
        "MASTER_PORT": str(node.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        # The store of init_method="env://" is hosted by rank 0 and not by the launcher, which does
        # not import torch.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
    }


def shoal_variables(identity: WorkerIdentity, *, index: int) -> dict[str, str]:
    """Returns the variables read by shoal.init()."""
    variables = {
        "SHOAL_COORDINATOR": identity.coordinator,
        "SHOAL_JOB_ID": identity.job_id,
        "SHOAL_MEMBER_ID": identity.member_id,
        "SHOAL_MEMBER_KEY": identity.member_key,
        "SHOAL_LAUNCHER_ID": identity.launcher_id,
        "SHOAL_LOCAL_INDEX": str(index),
        "SHOAL_MEMBER_FILE": str(identity.member_file),
        "SHOAL_TALLY_FILE": str(identity.tally_file),
    }
    if identity.run is not None:
        variables["SHOAL_RUN"] = str(identity.run)
    if identity.allow_restart_from_scratch:
        variables["SHOAL_ALLOW_RESTART_FROM_SCRATCH"] = "1"
    if identity.local_address:
        variables["SHOAL_LOCAL_ADDR"] = identity.local_address
    if identity.listen_address:
        variables["SHOAL_LISTEN_ADDR"] = identity.listen_address
    if identity.metrics_listen is not None:
        variables["SHOAL_METRICS_LISTEN"] = identity.metrics_listen
    if identity.record_directory is not None:
        variables["SHOAL_RECORD_DIR"] = str(identity.record_directory)
    return variables


def machine_name(environment: Mapping[str, str]) -> str:
    """Returns the name that this machine's workers report when they join: SHOAL_HOST, or the host
    name."""
    return environment.get("SHOAL_HOST") or socket.gethostname()


def inherited(environment: Mapping[str, str], *, workers: int, local: bool) -> dict[str, str]:
    """Returns the variables that workers inherit from the launcher's environment.

    If a node has several workers and OMP_NUM_THREADS is not set, each worker gets one thread, as
    with torchrun. `local`: True if the cluster belongs to this launcher, uses neither tokens nor
    certificates, and is reached only from this machine.
    """
    of_others = ("SHOAL_TOKEN", "SHOAL_TLS_", "SHOAL_LOCAL_ADDR", "SHOAL_LISTEN_ADDR")
    kept = {
        name: value
        for name, value in environment.items()
        if not (local and name.startswith(of_others))
    }
    kept.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if workers > 1:
        kept.setdefault("OMP_NUM_THREADS", "1")
    return kept


_OWN: Final = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
    }
    | {"ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE"}
)
_OWN_PREFIXES: Final = ("SHOAL_", "TORCHELASTIC_")


def is_own_of_worker(name: str) -> bool:
    """Returns whether a variable may have different values in the workers of a run. Such variables
    are not read by any code before the script runs."""
    return name in _OWN or name.startswith(_OWN_PREFIXES)


def interface_variables(environment: Mapping[str, str], interface: str | None) -> dict[str, str]:
    """Returns the variables that make Gloo and NCCL use a network interface, except variables that
    are already set."""
    if interface is None:
        return {}
    wanted = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    return {name: value for name, value in wanted.items() if not environment.get(name)}


def visible_slices(environment: Mapping[str, str]) -> list[str]:
    """Returns the GPU slices (NVIDIA's MIG) listed in CUDA_VISIBLE_DEVICES; empty if the variable
    also lists complete devices, or no slices."""
    listed = [each.strip() for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    return listed if all(each.startswith("MIG-") for each in listed) else []


def slice_variables(environment: Mapping[str, str], *, index: int) -> dict[str, str]:
    """Returns the variable that makes only one slice visible to worker `index`, if the launcher
    sees several slices. Otherwise, CUDA would give every process the first listed slice."""
    slices = visible_slices(environment)
    return {"CUDA_VISIBLE_DEVICES": slices[index % len(slices)]} if slices else {}


def metrics_listen(environment: Mapping[str, str], *, index: int, enabled: bool) -> str | None:
    """Returns the address for the metrics of worker `index`: SHOAL_METRICS_LISTEN with `index`
    added to its port, or any loopback port if the variable is not set. Returns None if metrics are
    disabled."""
    if not enabled:
        return None
    host, _, port = environment.get("SHOAL_METRICS_LISTEN", "127.0.0.1:0").rpartition(":")
    return f"{host}:{int(port) + index}" if port.isdigit() and int(port) else f"{host}:{port}"
