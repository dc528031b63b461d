"""Asynchronous SGD. Every worker computes gradients at its own speed, and parameter servers apply
them in the order of arrival.

Each step is a push: `optimizer.step()` sends this worker's gradient to the servers, which run the
optimizer. It then receives the latest values, which include the updates of all workers.
`consistency` determines who waits: no worker ("asp"), only workers that are too far ahead of the
slowest ("ssp"), or every worker for all others ("bsp"). A worker that fails or joins does not
disturb the others. A failed worker's batch is leased to another worker and applied exactly once to
each partition, regardless of what the failed worker had already pushed
(docs/explanation/parameter-servers.md#leased-batches). The price is staleness: other workers change
the values while a worker computes its gradient, so the result differs from the result on a single
process. (Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1; Ho et al.,
"More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013, on the
bound.)

Cost per worker: memory for parameters and gradients; the optimizer's state is on the servers.
Traffic per step: 2P bytes, where P is the size of the parameters: P for the gradients sent and P
for the values received. With `gradient_compression=`, gradients are compressed; values are not.

With `inner_steps=H` a worker takes H steps with its own optimizer, and pushes the total change as
one gradient. The servers' outer optimizer takes one step with this gradient (DiLoCo; Douillard et
al., 2023; Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024). The
optimizer's state is then on the worker, and 2P bytes are sent every H steps. H batches are leased
together and committed together (docs/explanation/parameter-servers.md#outer-steps).

The following are local to each worker: buffers (BatchNorm statistics), random numbers, registered
state, `clip_grad_norm_` (of the worker's own gradient), `evaluate` (every worker evaluates all
batches, with its last pulled values) and `should_early_stop`. Workers start with rank 0's buffers.
A joiner copies the buffers, registered state and schedule of a peer.
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

    When the first step begins, the servers receive rank 0's values, or the values of a checkpoint
    that `shoal.resume` has loaded. From then on, the servers' values are the model's values.
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
        why_one_model="parameter servers apply each update when it arrives, and cannot undo the "
        "update of one model if that of another model never arrives. For slow links, ddp with "
        "gradient_compression= is an alternative",
    )

    @property
    def steps_in_round(self) -> int:
        """Number of steps since the last push, with `inner_steps=`; 0 if this worker has not
        changed the parameters since its last pull."""
        return cast(AsyncEngine, self.engine).steps_in_round


class AsyncSGDOptimizer(ShardedOptimizer):
    """The user's optimizer, which runs on the servers: `step` pushes gradients and pulls values.
    The worker has no optimizer state.

    With `inner_steps=H`, the optimizer runs on this worker, and only every H-th call to `step` also
    pushes and pulls.

    Settings changed in `param_groups`, for example by schedulers, are sent to the servers with the
    next push. If the workers' schedules have advanced to different points, the servers use the
    settings of the schedule that is furthest ahead.
    """

    @property
    def last_staleness(self) -> float:
        """Staleness of the last push (maximum over all partitions): the number of other workers'
        pushes that the servers applied after this worker's pull and before its push."""
        return self._session.progress.staleness
