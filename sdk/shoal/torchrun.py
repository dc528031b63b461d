"""Rendezvous of torchrun's agents at Shoal's coordinator: `torchrun --rdzv-backend=shoal
--rdzv-endpoint=COORDINATOR:7000`.

torchrun starts and restarts the workers; the coordinator determines the participating agents and
their order. The death of an agent is detected immediately, because its connection breaks. Any agent
may die, since none has a special role. torch finds this module through the entry point group
`torchrun.handlers`.

Agents are members of a separate job, `<run id>.torchrun`, like launchers of `shoal run`
(`launcher/run/nodes.py`). The workers receive only torch's variables; scripts that call
`shoal.init()` need `shoal run` instead.

A handler belongs to the agent's thread; the session's thread only wakes the handler.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import DeadlineError, ShoalError, UnavailableError
from shoal_common.security.secrets import take_secrets
from shoal_common.settings import Address, parse_address
from shoal_common.system.own_address import OwnAddress
from shoal_protos.v1 import coordinator_pb2 as pb
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from shoal.launcher.clusters.jobs import JobSettings
from shoal.launcher.processes.credentials import member_channel
from shoal.launcher.run.node_session import NodeSession
from shoal.launcher.workers.environment import NodePlacement

BACKEND: Final = "shoal"
_JOIN_TIMEOUT_S: Final = 600.0
_LAST_CALL_S: Final = 30.0
_RETRY_S: Final = 0.2
_CALL_DEADLINE: Final = timedelta(seconds=2)
_STORE_TIMEOUT: Final = timedelta(minutes=5)


def get_creator() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Returns the function that creates a handler from torchrun's parameters. torch calls this
    function through the entry point."""
    return ShoalRendezvous


class ShoalRendezvous(RendezvousHandler):
    """Rendezvous handler for torch. Like `shoal run`, it accepts `join_timeout` and
    `last_call_timeout`, in seconds, in `--rdzv-conf`."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        """Connects to the coordinator. Raises ConfigurationError for an invalid endpoint or
        certificates."""
        take_secrets()  # the workers do not need the secrets
        self._parameters = parameters
        self._join_timeout_s = float(parameters.get("join_timeout", _JOIN_TIMEOUT_S))
        endpoint = parse_address(parameters.endpoint)
        # torchrun's workers and stores listen on all addresses, because other machines may reach
        # them at an address that this machine itself does not have.
        everywhere = "0.0.0.0" if parameters.local_addr else None  # noqa: S104
        self._own_address = OwnAddress.find(
            parameters.local_addr, everywhere, towards=(endpoint.host, endpoint.port)
        ).announced
        self._client = CoordinatorClient(member_channel(parameters.endpoint))
        self._job = JobSettings(
            job_id=f"{parameters.run_id}.torchrun",
            min_workers=parameters.min_nodes,
            max_workers=parameters.max_nodes,
            join_grace=timedelta(seconds=float(parameters.get("last_call_timeout", _LAST_CALL_S))),
        )
        # Torch's agents communicate through the store of the first agent. Any agent may become the
        # first, so each one has a store.
        self._own_store = TCPStore(
            "0.0.0.0",  # noqa: S104
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=_STORE_TIMEOUT,
        )
        self._launcher_id = uuid.uuid4().hex
        self._session: NodeSession | None = None
        self._placed: tuple[str, ...] = ()
        """Value of `NodeStatus.starts` when the workers were last started."""
        self._changed = threading.Condition()

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return str(self._parameters.run_id)

    def next_rendezvous(self) -> RendezvousInfo:
        deadline = time.monotonic() + self._join_timeout_s
        if self._session is None:
            self._create_job(deadline)
            self._join()
        placement = self._place(deadline)
        mine = placement.node_rank == 0
        home: Store = self._own_store
        if not mine:
            home = TCPStore(
                placement.master_address,
                placement.master_port,
                is_master=False,
                timeout=_STORE_TIMEOUT,
            )
        # The prefix is specific to this start, so that data of earlier starts is ignored.
        store = PrefixStore(hashlib.sha256("".join(self._placed).encode()).hexdigest()[:32], home)
        bootstrap = RendezvousStoreInfo.build(placement.node_rank, store, self._own_address)
        return RendezvousInfo(store, placement.node_rank, placement.node_count, bootstrap)

    def num_nodes_waiting(self) -> int:
        """Returns a number above 0 if agents have joined or left; torchrun then restarts all
        workers."""
        node_status = self._session.node_status if self._session is not None else None
        return int(
            node_status is not None
            and node_status.placement is not None
            and node_status.starts != self._placed
        )

    def is_closed(self) -> bool:
        return self._session is not None and (
            self._session.is_closed or self._session.stopped is not None
        )

    def set_closed(self) -> None:
        with contextlib.suppress(ShoalError):
            # e.g. the coordinator is unreachable; the other agents notice the end through their
            # workers
            self._client.stop_job(
                self._job.job_id,
                reason="torchrun ended on another machine",
                deadline=_CALL_DEADLINE,
            )

    def shutdown(self) -> bool:
        """Ends the rendezvous for all agents, as torch's own handlers do. Each agent continues
        until its workers have exited."""
        self.set_closed()
        if self._session is not None:
            self._session.leave(pb.Leave.REASON_FINISHED, "")
        self._client.close()
        return True

    def _create_job(self, deadline: float) -> None:
        """Creates the job at the coordinator. Waits for the coordinator, which may start later than
        the agents."""
        began = time.monotonic()
        while True:
            try:
                self._client.create_job(self._job.message())
            except (UnavailableError, DeadlineError) as error:
                obstacle = self._client.find_obstacle()
                if time.monotonic() > deadline or (obstacle is not None and obstacle.permanent):
                    raise RendezvousConnectionError(
                        f"no coordinator responded at {self._parameters.endpoint} "
                        f"(--rdzv-endpoint) for {time.monotonic() - began:.0f} s: "
                        f"{error if obstacle is None else obstacle.cause}"
                    ) from error
                time.sleep(_RETRY_S)
            else:
                return

    def _join(self) -> None:
        """Joins the agents' job as a new member, so that the other agents see that this agent's
        workers are new."""
        self._session = NodeSession(
            self._client,
            job_id=self._job.job_id,
            launcher_id=self._launcher_id,
            address=str(Address(self._own_address, self._own_store.port)),
            on_change=self._wake,
            on_job_lost=self._create_lost,
        )

    def _create_lost(self) -> None:
        """Creates the job again after the coordinator has lost its data. Any agent may do this."""
        self._client.create_job(self._job.message(), deadline=_CALL_DEADLINE)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _place(self, deadline: float) -> NodePlacement:
        """Waits for a new placement (node rank, number of nodes, master address): one that differs
        from the last, because agents have joined, left or restarted their workers."""
        while True:
            session = self._session
            assert session is not None, "joined before"
            node_status = session.node_status
            if session.stopped is not None or session.is_closed:
                raise RendezvousClosedError(
                    f"run {self._parameters.run_id} is over: {session.stopped or session.error}"
                )
            if session.error is not None:
                raise RendezvousConnectionError(str(session.error)) from session.error
            if node_status.placement is not None and node_status.starts != self._placed:
                self._placed = node_status.starts
                session.works_in = node_status.generation
                return node_status.placement
            if node_status.placement is not None:
                # Workers of this agent failed, but its place is unchanged. To make the other agents
                # restart their workers too, this agent joins as a new member.
                session.leave(pb.Leave.REASON_FAILED, "its workers are being restarted")
                self._join()
                continue
            with self._changed:
                if time.monotonic() > deadline:
                    raise RendezvousTimeoutError(
                        f"{self._parameters.min_nodes} agents of run {self._parameters.run_id} did "
                        f"not all join within {self._join_timeout_s:g} s "
                        f"({node_status.why or 'no place'})"
                    )
                self._changed.wait(_RETRY_S)
