"""Asynchronous SGD. Every worker computes gradients at its own speed, and parameter servers apply
these in order of arrival.

An iteration is a push: `optimizer.step()` sends this worker's gradient to the servers, which run
the optimizer, and receives the latest values, which include the updates of all workers. No worker
waits (`consistency="asp"`), or workers wait only for those that are too far behind ("ssp"), or
every worker waits for all others ("bsp"). A worker that fails or joins does not disturb the others.
A failed worker's batch is leased to another worker and applied once to each partition, whatever the
failed worker had already pushed (docs/explanation/parameter-servers.md#leased-batches). In return,
a gradient is computed on values that others have changed meanwhile (staleness), so the result is
not that of one process. (Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section
4.1; Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server",
NIPS 2013, on the bound.)

Cost per worker: memory for parameters and gradients; the optimizer's state is on the servers.
Traffic per step: 2P bytes, for sent gradients and received values. With `gradient_compression=`
gradients are sent compressed; values are received uncompressed.

With `inner_steps=H` a worker takes H steps with its own optimizer, and pushes the total change as
one gradient. With this gradient, the servers' outer optimizer takes one step (DiLoCo; Douillard et
al., 2023; Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024). The
optimizer's state is then on the worker, and 2P bytes are sent every H steps. H batches are leased
together and commit together (docs/explanation/parameter-servers.md#outer-steps).

Local to each worker: buffers (BatchNorm statistics), random numbers, registered state,
`clip_grad_norm_` (of the worker's own gradient), `evaluate` (every worker evaluates all batches,
with the values that it pulled last) and `should_early_stop`. Workers start with rank 0's buffers. A
joiner's buffers, registered state and schedule continue from a peer's.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, cast

from shoal_worker.asynchronous.engine import AsyncEngine
from shoal_worker.parameter_servers.options import AsyncOptions
from shoal_worker.strategies.declaration import Strategy
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer


class AsyncSGDModel(ShardedModel):
    """A worker's copy of the model, with values from the parameter servers.

    When the first step begins, the servers receive rank 0's values, or those of a checkpoint that
    `shoal.resume` has loaded. From then on, the servers' values are the model's values.
    """

    declaration: ClassVar[Strategy] = Strategy(
        name="async_sgd",
        engine=AsyncEngine,
        memory="P + G, and (P + O)/S on each of S servers",
        sent="2P",
        a_death="its batch is dealt again",
        options=frozenset(field.name for field in dataclasses.fields(AsyncOptions)),
        compressor="topk",
        sparse_tables=True,
        why_one_model="parameter servers apply each update as it arrives, and could not undo that "
        "of one model if another model's did not arrive. Over slow links, gradient_compression= "
        "with ddp also sends little",
    )

    @property
    def steps_in_round(self) -> int:
        """Number of steps since the last push, with `inner_steps=`. 0: this worker has the values
        that it pulled last."""
        return cast(AsyncEngine, self.engine).steps_in_round


class AsyncSGDOptimizer(ShardedOptimizer):
    """The user's optimizer, run by the servers: `step` pushes gradients and pulls values. The
    optimizer's state stays empty on the worker.

    With `inner_steps=` the optimizer runs on this worker, and every `inner_steps` steps `step` also
    pushes and pulls.

    Settings changed in `param_groups`, for example by schedulers, are sent to the servers with the
    next push. If workers' schedules differ, the one that has advanced furthest applies.
    """

    @property
    def last_staleness(self) -> float:
        """Staleness of the last push: the number of versions that other workers' pushes created
        since the pull on which it was computed. The maximum over partitions."""
        return self._session.progress.staleness
