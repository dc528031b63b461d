"""One rank's view of a model's current mesh: the groups along the axes that the rank belongs to,
and the objects that run passes and sum gradients on these groups.

A new one is created for each generation. May be used only on the training thread.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from shoal_common.failpoints import failpoint

from shoal_worker.elastic.contract.generation import Generation, Peer
from shoal_worker.elastic.contract.step import Step
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.state.strategy_interface import StrategySession
from shoal_worker.engine.state.extremes import Kind
from shoal_worker.engine.state.hidden_parameters import drop_gradient
from shoal_worker.engine.step.buffers import CommittedBuffers
from shoal_worker.engine.step.failed_collectives import come_after
from shoal_worker.mesh.data_axis import InShards
from shoal_worker.mesh.layouts import Axes, Sharding
from shoal_worker.mesh.parts import ModelParts, Shard
from shoal_worker.mesh.resharding import MeshCut, WholeTensor
from shoal_worker.mesh.step_group import GroupMesh, StepGroup
from shoal_worker.pipelining.executor import Loss
from shoal_worker.pipelining.micro_batches import MicroBatch
from shoal_worker.pipelining.rank_pipeline import Pipeline, shared_exist, sum_shared
from shoal_worker.randomness import seed_generators
from shoal_worker.sharding.collectives import PartCollectives
from shoal_worker.sharding.execution import ShardedExecution
from shoal_worker.sharding.layout import Division, among_all
from shoal_worker.sharding.unit import taken_gradient
from shoal_worker.tensor_parallel.layers import run_inside, unparallelize


def alone() -> Group:
    """Returns a group that contains only this rank."""
    me = Peer(rank=0, member_id="", host="", donor_address="", joining=False)
    return Group(
        Generation(number=0, nonce="", peers=(me,), rank=0, interrupts_below=0), None, None
    )


class RankMesh:
    """One rank's view of its generation's mesh: the groups along the axes that the rank belongs to,
    and the objects that run passes and sum gradients on these groups. A spare has no `RankMesh`."""

    def __init__(
        self, group: Group, axes: Axes, session: StrategySession, sharding: Sharding | None
    ) -> None:
        """Connects the groups along the axes. Must be called on all ranks of `group` except spares.
        `sharding`: options for sharding along the data axis, or None.

        Raises:
            MembershipChanged: the group has ended.
        """
        at = axes.at(group.rank)
        assert at is not None
        self.group = group
        self._session = session
        self._groups: dict[str, Group] = {}
        failpoint("mesh.dividing")
        lines = list(axes.lines())
        for axis, name, ranks in lines:
            part = (
                group.subgroup(ranks, name, [each for along, _, each in lines if along == axis])
                if group.rank in ranks
                else None
            )
            if part is not None:
                self._groups[axis] = part
        seeds = self.all.all_gather_integers([torch.initial_seed() >> 1])
        self._seed = seeds[axes.rank(0, 0, at.data)][0]
        self.tensor_mesh: GroupMesh | None = None
        if axes.tensor > 1:
            self.tensor_mesh = GroupMesh(
                StepGroup(self._groups["tensor"], session), session.device.type
            )
        self.cut = MeshCut(number=group.generation.number, axes=axes, at=at)
        self._shard: Shard | None = None
        if sharding is not None:
            line = among_all(self.replicas.generation.topology)
            self.cut = replace(self.cut, shards=line.shards, mirrored=line.mirrored(at.data))
            self._shard = functools.partial(
                _in_shards, sharding, line, PartCollectives(session, self.replicas)
            )
        self._weighed_changes: torch.Tensor | None = None

    @property
    def all(self) -> Group:
        """Group of the ranks that are not spares."""
        return self._groups["all"]

    @property
    def replicas(self) -> Group:
        """Group of the ranks that have the same part of the model."""
        return self._groups["data"]

    @contextlib.contextmanager
    def drawing_alike(self) -> Iterator[None]:
        """Context in which the ranks of a tensor-parallel group draw the same random numbers. Does
        not affect the numbers that each rank draws after the context has been left.

        Raises:
            MembershipChanged: the group has ended.
        """
        line, device = self._groups.get("tensor"), self._session.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            drawn = int(torch.empty((), dtype=torch.int64).random_())
            torch.manual_seed(drawn if line is None else line.all_gather_integers([drawn])[0][0])
            yield

    def lay_out(
        self,
        parts: ModelParts,
        taken: Sequence[WholeTensor],
        *,
        averages: bool,
        extremes: Mapping[str, Kind],
    ) -> None:
        """Splits the model for this mesh with `ModelParts.lay_out`, and creates everything needed
        for its passes. `taken`: the result of `ModelParts.take`. `averages`: see `MeshGradients`.
        `extremes`: see `CommittedBuffers` (`kinds`)."""
        before = parts.data_axis.execution
        parts.lay_out(self.cut, self.tensor_mesh, taken, self._shard)
        blueprint = parts.blueprint
        assert blueprint is not None
        self._parts = parts
        self.buffers = CommittedBuffers(parts.module, extremes)
        self.gradients = parts.data_axis.gradients(
            counts=parts.counts,
            first=self.cut.at.data == 0,
            buffers=self.buffers,
            averages=averages,
            device=self._session.device,
        )
        if self.execution is not None and before is not None:
            self.execution.passed = before.passed
        self.pipeline: Pipeline | None = None
        if blueprint.split is not None:
            line = self._groups["pipeline"]
            self.pipeline = Pipeline(
                parts.module,
                parts.template.pipeline,
                # only this method is used
                group=line.process_group if line.world_size > 1 else _OneRank(),  # type: ignore[arg-type]
                device=self._session.device,
                end=line.abort,
                come_after=functools.partial(come_after, self._session, line),
                observe=self._observe,
                split=blueprint.split,
                plain=unparallelize,
                inside=lambda run, last: run_inside(parts.module, run, last=last),
            )
        parts.data_axis.free()
        parts.hide()

    @property
    def execution(self) -> ShardedExecution | None:
        """Object that gathers and frees the pieces block by block; None if there is none
        (`DataAxis.execution`)."""
        return self._parts.data_axis.execution

    def release(self) -> None:
        """Removes the groups from torch's registries."""
        if self.tensor_mesh is not None:
            self.tensor_mesh.release()

    # --------------------------------------------------------------------------------------- passes

    def seed_step(self) -> None:
        """Gives all ranks of a replica the same random seed for this step, derived from the first
        rank's seed, the step and the replica. Called only for steps without a Shoal loader, because
        a loader seeds each batch itself."""
        if self.cut.axes.replica_size > 1:
            seed_generators((self._seed, self._session.steps, self.cut.at.data))

    def begin_step(self, number: int) -> None:
        """Begins a step: discards gradients, and records the buffers' starting values. `number`:
        number of this model's step."""
        self.forget()
        self.gradients.begin()
        self.buffers.step_begins()
        if self.execution is not None:
            self.execution.begin_step(number)

    def begin_pass(self, step: Step) -> None:
        """Prepares a pass of this replica in a step, or its participation in a pass of other
        replicas. Does not communicate if the step has failed, because the step's gradients will not
        be used.

        Raises:
            MembershipChanged: the group has ended.
        """
        if self.execution is None:
            return
        weight = (
            step.micro_batch if step.in_micro_batches or step.share is None else step.share.weight
        )
        self.execution.reduces_in_backward = True
        self.execution.factor = self.gradients.factor(weight or 0.0)
        if step.lost is None and step.in_micro_batches and self.replicas.world_size > 1:
            # otherwise only some groups of replicas might learn about the passes
            self.execution.learn_passes(self.all)

    def train_on(
        self, micro_batches: Sequence[MicroBatch], loss: Loss | None, *, everywhere: bool
    ) -> torch.Tensor | None:
        """Runs the forward and backward passes of a batch in the pipeline, and accumulates
        gradients and changes to buffers. Returns the batch's loss. If `everywhere` is False, only
        ranks that run the last stage return the loss, and all others return None.

        Raises:
            MembershipChanged: a rank failed or left.
        """
        assert self.pipeline is not None
        self._micro_batches, self._weighed_changes = (
            micro_batches,
            torch.zeros(self.buffers.size, dtype=torch.float64),
        )
        self._parts.data_axis.gather()
        take = self.pipeline.train_on if everywhere else self.pipeline.take_through
        return take(micro_batches, loss)

    def _observe(self, moment: str, stage: int, index: int) -> None:
        """Makes each micro-batch start from the committed buffers, regardless of the order in which
        the pipeline runs micro-batches. Called by the pipeline before and after each stage of a
        micro-batch."""
        if self._weighed_changes is None or not self._parts.module.training:
            return
        if moment == "before":
            self.buffers.put_back()
        elif self.buffers.size or self.buffers.extremes:
            one = self._micro_batches[index]
            weight = one.weight
            self._weighed_changes += self.buffers.changes(
                self._weighed_changes, weight, weight=weight, samples=one.samples
            )
            if weight > 0:
                self.buffers.extremes.micro_batch_ends()

    def add(self, weight: float, samples: int) -> None:
        """Adds the gradients and buffer changes of all passes since the last call to the step's
        sums. `weight`, `samples`: weight and number of samples of these passes.

        Raises:
            MembershipChanged: a rank failed or left.
        """
        if self._weighed_changes is None:
            changes = self.buffers.changes(
                self.gradients.like, weight, weight=weight, samples=samples
            )
        else:
            total = sum(one.weight for one in self._micro_batches)
            changes = self.buffers.reweighted(self._weighed_changes, weight / (total or 1.0))
            self._weighed_changes = None
        self.gradients.add(weight, self._collected(), changes)
        if self.gradients.sums_passes:
            self._sum_shared()
            self.gradients.sum_pass()
        if self.pipeline is not None:
            self._parts.data_axis.free()

    def take_part(self) -> None:
        """Participates in the collectives of a pass that only other replicas have samples for."""
        if self.pipeline is not None:
            self._parts.data_axis.gather()
            self._parts.data_axis.free()
        self.gradients.take_part()

    def predict(self, inputs: Any) -> Any:
        """Runs inputs through the pipeline and returns its output. Raises MembershipChanged."""
        assert self.pipeline is not None
        self._parts.data_axis.gather()
        try:
            return self.pipeline.predict(inputs)
        finally:
            self._parts.data_axis.free()

    def sum_gradients(self) -> None:
        """Sums gradients across stages that share a parameter, and across replicas.

        Raises:
            MembershipChanged: a rank failed or left.
        """
        if not self.gradients.sums_passes:
            self._sum_shared()
        self.gradients.sum_over(self.replicas)

    def _sum_shared(self) -> None:
        pipeline, pieces, gradients = self.pipeline, self._parts.pieces, self.gradients
        if pipeline is None:
            return
        shared, present = pipeline.split.shared, gradients.present
        names = [one.names[0] for one in shared if one.names[0] in present]
        for name in names:
            pieces[name].grad = (
                gradients.added(name).to(pieces[name].dtype) if present[name] else None
            )
        trained = [one for one in shared if self._parts.is_trained(one.names[0])]
        exist = shared_exist(trained, pieces, pipeline.links)
        sum_shared(trained, pipeline.rank_of, pieces, pipeline.links, exist)
        for name in names:
            gradient, pieces[name].grad = pieces[name].grad, None
            if gradient is not None:
                gradients.added(name).copy_(gradient)
                gradients.use([name])

    def forget(self) -> None:
        """Discards the step's gradients, both the optimizer's and those in the module's parameters.
        Does not communicate, because the group may have ended."""
        for parameter in self._parts.parameters.values():
            drop_gradient(parameter)
        self.gradients.forget()
        self._parts.data_axis.free()

    def drop_gradients(self) -> None:
        """Discards all gradients of the current step, including the optimizer's."""
        self.forget()
        self.gradients.begin()
        if self.execution is not None:
            self.execution.drop_gradients()

    def _collected(self) -> Mapping[str, torch.Tensor | None]:
        """Removes the gradients from the module's parameters and returns them."""
        return {
            name: taken_gradient(parameter) for name, parameter in self._parts.parameters.items()
        }


def _in_shards(
    sharding: Sharding, line: Division, collectives: PartCollectives, parts: ModelParts
) -> InShards:
    assert parts.blueprint is not None
    blocks = None
    if sharding.blocks is not None:
        # types in the user's module, because each tensor-parallel layer has a class of its own
        blocks = [
            (parts.module.get_submodule(one.name), one.names)
            for one in sharding.blocks(parts.template.module)
        ]
    return InShards(
        parts.pieces,
        parts.parameters,
        parts.blueprint.kind,
        stage=sharding.stage,
        division=line,
        collectives=collectives,
        bucket_bytes=sharding.bucket_bytes,
        blocks=blocks,
        prefetch=sharding.prefetch,
        whereabouts=parts.whereabouts,
    )


class _OneRank:
    """Replaces the process group of a pipeline that has only one rank."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1
