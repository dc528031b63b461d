"""Asynchronous SGD: every worker computes gradients at its own speed, and parameter servers apply them in the order in which they come.

An iteration is a push. `optimizer.step()` sends this worker's gradient to the servers, which run the optimizer, and brings back the values that
all workers have reached meanwhile. Nobody waits for anybody (`consistency="asp"`), or only for those that are too far behind ("ssp"); a worker that dies
or joins disturbs no other. The price: a gradient is computed on values that others have changed since (its staleness), so the result is not
that of one process. (Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1; Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server", NIPS 2013, on the bound.)

Cost per worker: parameters and gradients; the optimizer's state lies on the servers. 2P bytes per step: the gradient out, the values back.

What is each worker's own: buffers (BatchNorm statistics), random numbers, schedulers, `clip_grad_norm_` (of its own gradient), `evaluate` (every rank
computes all of it, with the values that it pulled last) and `should_early_stop`.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from shoal_common.errors import ConfigurationError, CorruptDataError, PreconditionError
from shoal_common.rpc.channel import ChannelSettings
from torch import nn

from shoal_worker.asynchronous.hyperparameters import ServerOptimizer
from shoal_worker.asynchronous.job import Job
from shoal_worker.asynchronous.leases import CoordinatorLeases, LeaseSource, LocalLeases
from shoal_worker.asynchronous.options import AsyncOptions, check_configuration
from shoal_worker.asynchronous.own_cluster import OwnCluster
from shoal_worker.asynchronous.server_link import Iteration
from shoal_worker.asynchronous.servers import ParameterServers
from shoal_worker.asynchronous.tensors import HostTensor, check_gradients, gradients
from shoal_worker.elastic.contract import Leases, StepStatus, StopTraining
from shoal_worker.state.serial import dump_tensors, load_tensors
from shoal_worker.strategies.base import ShardedModel, ShardedOptimizer, call_module, check_optimizer_covers, loss_of


class AsyncSGDModel(ShardedModel):
    """A worker's copy of the model, whose values come from the parameter servers.

    The servers get rank 0's values, or those of a checkpoint that `shoal.resume` loads before, when the first step begins. From then on the servers'
    values are the model's.
    """

    strategy = "async_sgd"
    asynchronous = True
    options = frozenset({"consistency", "staleness_bound", "pull_every", "server_timeout"})

    # ------------------------------------------------------------------------------------------------------------ beginning

    def initialize_sharding(self) -> None:
        """Nothing is sharded on the workers."""
        check_configuration(self.config, self.backend_name)
        self._async_options = AsyncOptions(**self._options)
        self._servers: ParameterServers | None = None
        self._server_optimizer: ServerOptimizer | None = None
        self._leases: LeaseSource = LocalLeases()
        self._job: Job | None = None
        self._own_cluster: OwnCluster | None = None
        self._tensors: list[HostTensor] = []
        self._started = False
        self._clock = 0
        """Iterations finished, as the servers are told; the idle ones of a worker that found no batch count too."""
        self._placed = False
        """The first loader knows which epoch the others are in."""
        if not any(p.requires_grad for p in self.module.parameters()):
            raise ConfigurationError("the model has no parameter with requires_grad=True: there is nothing to train")
        if any(buffer.is_meta for buffer in self.module.buffers()):
            raise ConfigurationError(
                "the model has buffers on the meta device: with async_sgd buffers are each worker's own, and come from nowhere else; build it with values"
            )

    def attach(self, optimizer: torch.optim.Optimizer | None) -> None:
        """See `ShardedModel`. Lays the tensors out over the servers, and waits for these."""
        if optimizer is None:
            raise ConfigurationError('strategy="async_sgd" needs the optimizer, which the servers run: as_distributed(model, optimizer, ...)')
        check_optimizer_covers(self.module, optimizer)
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._server_optimizer = ServerOptimizer(optimizer, names)
        self._tensors = [HostTensor(name, p, trained=id(p) in trained) for name, p in self.module.named_parameters()]
        self._session.attach(self)
        atexit.register(self.close)
        self._session.on_close(self.close)
        self._job = self._open_job()
        shard_map = self._job.declare([tensor.spec for tensor in self._tensors])
        self._servers = ParameterServers(
            self._job, shard_map, self._tensors, self._server_optimizer, self._async_options, self._session.metrics
        )
        self._servers.configure()

    def _open_job(self) -> Job:
        membership, settings = self._session.membership, self._session.settings
        if membership is None:
            self._own_cluster = OwnCluster()
            link, channel = self._own_cluster.link, self._own_cluster.channel
        else:
            link, channel = membership.link, settings.channel
        job = Job(link, channel, patience=settings.rendezvous_timeout, straggler_patience=settings.collective_timeout)
        if membership is not None:
            self._leases = CoordinatorLeases(job)
        return job

    def start(self) -> None:
        """Takes over the servers' values, and gives them rank 0's if they have none. Happens by itself when the first step begins."""
        if self._started:
            return
        has_values = self.has_values()
        if not has_values:
            self.module.to_empty(device=self._session.device)
        self._require_servers().start(has_values=has_values)
        self._started = True

    def close(self) -> None:
        """Takes leave of the servers; stops those that are this process's own. Idempotent; happens by itself when the process ends."""
        atexit.unregister(self.close)
        if self._servers is not None:
            self._servers.close()
        if self._own_cluster is not None:
            self._own_cluster.close()
