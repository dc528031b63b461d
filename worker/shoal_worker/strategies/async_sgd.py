"""Asynchronous SGD: every worker computes gradients at its own speed, and parameter servers apply
them in the order in which they come.

An iteration is a push. `optimizer.step()` sends this worker's gradient to the servers, which run
the optimizer, and brings back the values that all workers have reached meanwhile. Nobody waits for
anybody (`consistency="asp"`), only for those that are too far behind ("ssp"), or all for all
("bsp"). A worker that dies or joins disturbs no other: its batch is leased to another one, and
applied once to each partition, whatever the dead one had pushed of it
(docs/explanation/parameter-servers.md#leased-batches). The price: a gradient is computed on values
that others have changed since (its staleness), so the result is not that of one process. (Dean et
al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1; Ho et al., "More Effective
Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS 2013, on the bound.)

Cost per worker: parameters and gradients; the optimizer's state lies on the servers. 2P bytes per
step: the gradient out, the values back. With `gradient_compression=` gradients go out compressed;
values come back as they are.

With `inner_steps=H` a worker takes H steps with the optimizer by itself, and pushes what they have
moved, as one gradient of which the servers' optimizer, the outer one, makes a step (DiLoCo;
Douillard et al., 2023; Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024).
Then the optimizer's state is the worker's, and 2P bytes are sent every H steps. H batches are
leased together, and count together (docs/explanation/parameter-servers.md#outer-steps).

What is each worker's own: buffers (BatchNorm statistics), random numbers, registered state,
`clip_grad_norm_` (of its own gradient), `evaluate` (every rank computes all of it, with the values
that it pulled last) and `should_early_stop`. Workers begin with rank 0's buffers. A joiner's
buffers, registered state and schedule go on from a peer's.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, cast

from shoal_worker.asynchronous.engine import AsyncEngine
from shoal_worker.asynchronous.options import AsyncOptions
from shoal_worker.strategies.declaration import Strategy
from shoal_worker.strategies.model import ShardedModel
from shoal_worker.strategies.optimizer import ShardedOptimizer


class AsyncSGDModel(ShardedModel):
    """A worker's copy of the model, whose values come from the parameter servers.

    The servers get rank 0's values, or those of a checkpoint that `shoal.resume` loads before, when
    the first step begins. From then on the servers' values are the model's.
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
        why_one_model="parameter servers apply an update as it comes, and could not take back that "
        "of one model where the others' did not "
        "come. Over slow links gradient_compression= with ddp sends little, too",
    )

    @property
    def steps_in_round(self) -> int:
        """With `inner_steps=`: those since the last push; 0: this worker has the values that it
        pulled last."""
        return cast(AsyncEngine, self.engine).steps_in_round


class AsyncSGDOptimizer(ShardedOptimizer):
    """The user's optimizer, as the servers run it: `step` pushes and pulls. Its state stays empty
    here.

    With `inner_steps=` it is this worker's own, and every so many steps `step` pushes and pulls as
    well.

    Settings changed in `param_groups`, by schedulers say, go to the servers with the next push. Of
    several workers' schedules the one that is furthest counts.
    """

    @property
    def last_staleness(self) -> float:
        """Versions that others' pushes made between the pull that the last push was computed on and
        that push; the most of any partition."""
        return self._session.progress.staleness
