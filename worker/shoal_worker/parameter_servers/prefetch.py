"""Pulls values while the worker computes (`AsyncOptions.prefetch`).

Values must not change during a computation, so they are received in separate memory and copied to
the module at a step boundary. The error of a failed pull is ignored: the next push contacts the
same server and reports the problem."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import torch
from shoal_protos.v1 import parameter_server_pb2 as pb

from shoal_worker.parameter_servers.background import in_background, wait_for_all
from shoal_worker.parameter_servers.ledger import Ledger
from shoal_worker.parameter_servers.tensors import HostTensor, Partition

_log = logging.getLogger(__name__)

Pulled = Sequence[tuple[Partition, pb.PullHeader]]
"""Result of a pull: the received values of one server's partitions."""


class Source(Protocol):
    """Interface of a parameter server from which values can be prefetched."""

    def pull_ahead(self, memory: dict[str, torch.Tensor]) -> Pulled:
        """Pulls newer values into flat host tensors (name -> tensor). May be called from any
        thread, but not concurrently."""
        ...


class Prefetch:
    """One pull from all servers in the background. May be used only on the training thread, which
    must not make other calls to servers during the pull."""

    def __init__(self, tensors: Sequence[HostTensor], ledger: Ledger) -> None:
        """Creates a prefetch that is not pulling yet. `tensors`: the trained tensors. `ledger`:
        ledger of all partitions."""
        self._tensors = tensors
        self._ledger = ledger
        self._memory: dict[str, torch.Tensor] = {}
        self._pulls: list[Future[Pulled]] = []

    def begin(self, servers: Sequence[Source]) -> None:
        """Starts a pull from all servers. If there was a pull before, `land` or `drop` must have
        been called for it."""
        assert not self._pulls, "a prefetch is still in progress; call land() or drop() first"
        if not self._memory:
            self._memory = {
                tensor.name: torch.empty_like(tensor.target(), device="cpu")
                for tensor in self._tensors
            }
        self._pulls = [
            in_background(partial(server.pull_ahead, self._memory), name="shoal-prefetch")
            for server in servers
        ]

    @property
    def is_there(self) -> bool:
        """True if a pull has been started and is complete, so `land` would not wait."""
        return bool(self._pulls) and all(pull.done() for pull in self._pulls)

    def wait(self) -> None:
        """Waits until the pull, if any, is complete."""
        wait_for_all(self._pulls)

    @torch.no_grad()
    def land(self) -> bool:
        """Waits for the pull and writes the received values to the tensors' receive buffers.
        Returns False if there was no pull, or if it failed."""
        pulls, self._pulls = self._pulls, []
        wait_for_all(pulls)
        for pull in pulls:
            if (error := pull.exception()) is not None:
                _log.debug("a prefetch of values failed: %s", error)
                return False
        targets = {tensor.name: tensor.target() for tensor in self._tensors}
        for pull in pulls:
            for partition, header in pull.result():
                if not header.unchanged:
                    torch._foreach_copy_(
                        [piece.of(targets) for piece in partition.pieces],
                        [piece.of(self._memory) for piece in partition.pieces],
                    )
                self._ledger.pulled([header])
        return bool(pulls)

    def drop(self) -> None:
        """Waits for the pull and discards its result. Called if an ordinary pull fetches newer
        values."""
        self.wait()
        self._pulls = []
