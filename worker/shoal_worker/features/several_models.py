"""Several models in one loop, each with its own optimizer: a generator and a discriminator, an
actor and a critic.

A batch is one step of the run, as with one model. Each optimizer may step once per batch, in any
order. Either all of the step's updates take effect, or none:

- Each model has its own step within the run's step. The model's engine prepares and commits this
  step as if it were the run's step. Therefore, when an optimizer steps, all ranks have the same
  gradients. The optimizer updates its model immediately, because other models' passes must see the
  new values. A copy of the old values is kept (`tentative_update.py`).
- When the last optimizer has stepped, or the loop requests the next batch, the run's step is
  prepared and committed by one small all-reduce of the step vote. A rank that receives the result
  of this commit all-reduce knows that every rank has made every update.
- If a rank fails before that, every survivor undoes the updates, and the batch is dealt again. A
  rank that prepared the run's step but did not receive the result does not know the outcome. While
  it asks its peers for the outcome, it withdraws the updates, because it may have to send the
  committed state to them. It reinstates the updates if a peer has received the result.

After its update, a model may still be called, so that gradients flow through it to other models
(through the discriminator to the generator). Its own parameters then receive no gradients, and its
buffers do not change.

Each model's engine uses a `ModelSession` (`model_session.py`) as its session, and the session uses
`SeveralEngines` as its engine. The training thread owns both; a collective's callback may mark a
step as lost."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from shoal_common.errors import MembershipChanged, ShoalError
from shoal_common.failpoints import failpoint
from typing_extensions import override

from shoal_worker.elastic.contract.channel import Channel
from shoal_worker.elastic.contract.step import BATCH, Step, StepPhase
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.session.session import Session
from shoal_worker.elastic.state.strategy_interface import TrainingEngine
from shoal_worker.engine.base import Engine
from shoal_worker.features.model_session import ModelSession, no_micro_batches
from shoal_worker.state.tree import StatePart

_log = logging.getLogger(__name__)


class SeveralEngines(TrainingEngine):
    """Combined engine of several models that have the same strategy and mesh."""

    def __init__(self, session: Session, models: Sequence[ModelSession]) -> None:
        """`models`: sessions of the models. Their engines must be attached."""
        self._session = session
        self._models = models
        self._engines = [model.engine for model in models if model.engine is not None]
        self._first = self._engines[0]
        for engine in self._engines:
            engine.divide_alike(self._engines)
        self.strategy = self._first.strategy
        self.backend_name = self._first.backend_name
        self.least_samples = max(engine.least_samples for engine in self._engines)
        self._settings: list[list[dict[str, Any]]] = []
        """Settings of the optimizers' parameter groups when the step began or, while updates are
        withdrawn, after the updates."""
        self._withdrawn = False
        self._warned = False

    @property
    @override
    def models(self) -> int:
        return len(self._engines)

    # ---------------------------------------------------------------------- the same for all models

    @property
    @override
    def data_parallel_rank(self) -> int:
        return self._first.data_parallel_rank

    @property
    @override
    def data_parallel_size(self) -> int:
        return self._first.data_parallel_size

    @property
    @override
    def leads_replica(self) -> bool:
        return self._first.leads_replica

    @property
    @override
    def idle(self) -> bool:
        return all(engine.idle for engine in self._engines)

    @property
    @override
    def lacks_ranks(self) -> bool:
        return all(engine.lacks_ranks for engine in self._engines)

    @property
    @override
    def replica_size(self) -> int:
        return self._first.replica_size

    @override
    def issued(self) -> bytes:
        texts = [engine.issued().decode() for engine in self._engines]
        return json.dumps(texts).encode() if any(texts) else b""

    @override
    def compare_issued(self, issued: Sequence[bytes]) -> None:
        ranks = [json.loads(each) for each in issued if each]
        for number, engine in enumerate(self._engines):
            engine.compare_issued([each[number].encode() for each in ranks])

    @property
    @override
    def passes_with(self) -> str:
        return self._first.passes_with

    @override
    def working(self, group: Group) -> Group:
        return self._first.working(group)

    @property
    @override
    def is_sharded(self) -> bool:
        return any(engine.is_sharded for engine in self._engines)

    @property
    @override
    def holds(self) -> Sequence[str]:
        return self._first.holds

    @property
    @override
    def steps_alone(self) -> bool:
        return self._first.steps_alone

    @property
    @override
    def within_round(self) -> bool:
        return self._first.within_round

    @property
    @override
    def consistency_check_every(self) -> int:
        return self._first.consistency_check_every

    # ------------------------------------------------------------------------------- model by model

    @override
    def in_common(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        described = enumerate(engine.in_common() for engine in self._engines)
        return {
            f"{label}, of model {number}": tensors
            for number, each in described
            for label, tensors in each.items()
        }

    @override
    def check_optimizer_state(self) -> None:
        for engine in self._engines:
            engine.check_optimizer_state()

    @override
    def has_values(self) -> bool:
        return all(engine.has_values() for engine in self._engines)

    @override
    def capture(self) -> dict[str, Any]:
        return {"models": [engine.capture() for engine in self._engines]}

    @override
    def frozen(self) -> Mapping[str, torch.Tensor]:
        return {
            f"models/{number}/{name}": tensor
            for number, engine in enumerate(self._engines)
            for name, tensor in engine.frozen().items()
        }

    @override
    def assemble(self, channel: Channel) -> dict[str, Any]:
        return {"models": [engine.assemble(channel) for engine in self._engines]}

    @override
    def part(self, channel: Channel) -> StatePart | None:
        parts = [part for engine in self._engines if (part := engine.part(channel)) is not None]
        if len(parts) < len(self._engines):
            return None
        shards = {
            number: [run for part in parts for run in part.shards.get(number, ())]
            for part in parts
            for number in part.shards
        }
        return StatePart(
            state={"models": [part.state for part in parts]}, count=parts[0].count, shards=shards
        )

    @override
    @contextlib.contextmanager
    def unsharded_for(self, channel: Channel) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for engine in self._engines:
                stack.enter_context(engine.unsharded_for(channel))
            yield

    def check_state(self, state: Mapping[str, Any]) -> None:
        for engine, own in zip(self._engines, state["models"], strict=True):
            engine.check_state(own)

    @override
    def restore(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)
        self._forget_updates()
        for engine, own in zip(self._engines, state["models"], strict=True):
            engine.restore(own)

    @override
    def reshard(self, group: Group) -> None:
        for engine in self._engines:
            engine.reshard(group)

    @override
    def consolidate(self, channel: Channel) -> None:
        for engine in self._engines:
            engine.consolidate(channel)

    @override
    def keep_two_copies(self, channel: Channel, leaving: Collection[int] = ()) -> None:
        for engine in self._engines:
            engine.keep_two_copies(channel, leaving)

    # ---------------------------------------------------------------------------------------- steps

    @override
    def writes_apart(self) -> ShoalError:
        """Returns the first model's error. Each model has already compared its writes in its own
        step, so this method reports only differences that those comparisons did not find."""
        return self._first.writes_apart()

    @override
    def step_begins(self) -> None:
        step = self._session.step
        assert step is not None
        self._settings, self._withdrawn = [_settings_of(engine) for engine in self._engines], False
        for model, engine in zip(self._models, self._engines, strict=True):
            model.begin(step)
            engine.step_begins()

    @override
    def batch_begins(self) -> None:
        for engine in self._engines:
            engine.batch_begins()

    @override
    def micro_batch_begins(self) -> None:
        raise no_micro_batches()

    @override
    def micro_batch_ends(self, weight: float) -> None:
        raise no_micro_batches()

    @override
    def reduce(self, step: Step) -> None:
        for model, engine in zip(self._models, self._engines, strict=True):
            if step.lost is None and step.phase is StepPhase.OPEN and not model.stepped:
                self._end_without_update(model, engine)
        if step.phase is StepPhase.OPEN:
            step.of = "models " + ", ".join(
                str(model.number) for model in self._models if model.stepped
            )
            step.loss = next(
                (loss for model in self._models if (loss := model.reported_loss) is not None),
                step.loss,
            )
            if step.lost is None:
                self._session.lifecycle.prepare_step()

    @override
    def sum_commit(
        self, step: Step, vote: Sequence[float]
    ) -> tuple[list[float], Mapping[str, Any]]:
        step.issues(BATCH)
        if not self._session.elastic:
            return [*vote], {}
        group = self._session.group
        if group is None:
            raise MembershipChanged("there is no group")
        failpoint("several_models.prepared")
        summed = self.working(group).sum_numbers(vote)
        failpoint("several_models.summed")
        return summed, {}

    def _end_without_update(self, model: ModelSession, engine: Engine) -> None:
        """Ends the step of a model that is not updated for this batch. Changes to its buffers are
        still summed across ranks; its gradients are discarded."""
        if not self._warned and engine.has_gradients():
            self._warned = True
            _log.warning(
                "model %d has gradients, but its optimizer did not step for this batch, so they "
                "were dropped. Gradients are not carried over to the next batch: use larger "
                "batches instead of accumulating. If they are a by-product of another model's "
                "loss, detach() this model's output before that loss uses it",
                model.number,
            )
        if model.passed and engine.changing_buffers:
            engine.skip()
            model.reduce()

    @property
    @override
    def partly_updated(self) -> bool:
        return any(model.stepped for model in self._models) and not all(
            model.stepped for model in self._models
        )

    @override
    def withdraw_updates(self) -> None:
        if not self._withdrawn:
            self._exchange_updates()

    @override
    def reinstate_updates(self) -> None:
        if self._withdrawn:
            self._exchange_updates()

    def _exchange_updates(self) -> None:
        self._withdrawn = not self._withdrawn
        settings, self._settings = (
            self._settings,
            [_settings_of(engine) for engine in self._engines],
        )
        for model, engine, own in zip(self._models, self._engines, settings, strict=True):
            if model.update is not None:
                engine.exchange_update(model.update)
                _give_settings(engine, own)

    def _forget_updates(self) -> None:
        self._withdrawn = False
        for model in self._models:
            model.forget()

    @override
    def discard_step(self) -> None:
        updated = [
            engine
            for model, engine in zip(self._models, self._engines, strict=True)
            if model.update is not None
        ]
        self.withdraw_updates()
        self._forget_updates()  # first, because this unfreezes the models
        for engine in self._engines:
            engine.discard_step()
        step = self._session.step
        if step is not None and step.lost is None:  # the script left the step's loop, on all ranks
            for engine in updated:
                engine.fetch_put_back()

    @override
    def commit_step(self) -> None:
        for model, engine in zip(self._models, self._engines, strict=True):
            summed = model.stepped or (model.passed and engine.changing_buffers)
            model.forget()
            if summed:
                engine.commit_step()
            else:
                engine.discard_step()
        self._forget_updates()


def _settings_of(engine: Engine) -> list[dict[str, Any]]:
    """Returns the settings of all parameter groups of an engine's optimizer."""
    groups = engine.optimizer.param_groups if engine.optimizer is not None else []
    return [
        {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in groups
    ]


def _give_settings(engine: Engine, settings: Sequence[Mapping[str, Any]]) -> None:
    assert engine.optimizer is not None
    for group, own in zip(engine.optimizer.param_groups, settings, strict=True):
        group.update(own)
