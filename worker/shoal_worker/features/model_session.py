"""The session as seen by the engine of one of several models. `several_models.py` describes the
joint step of the models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

import torch
from shoal_common.errors import ConfigurationError, InternalError, PreconditionError
from shoal_common.failpoints import failpoint

from shoal_worker.elastic.contract.loader_interface import StepStatus
from shoal_worker.elastic.contract.step import Step, StepPhase
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.group.operations import Body
from shoal_worker.elastic.recovery.step_commit import reduce_and_commit
from shoal_worker.elastic.session.session import Session
from shoal_worker.elastic.state.schedulers_and_scalers import RegisteredState
from shoal_worker.elastic.state.strategy_interface import TrainingEngine
from shoal_worker.engine.base import Engine
from shoal_worker.engine.state.hidden_parameters import inside
from shoal_worker.engine.step.passes import when_gradients_come
from shoal_worker.engine.step.tentative_update import TentativeUpdate


class ModelSession:
    """Implements `StrategySession` and `StepControl` for one of several models."""

    def __init__(
        self,
        session: Session,
        peers: list[ModelSession],
        together: Callable[[Session, Sequence[ModelSession]], TrainingEngine],
    ) -> None:
        """`peers`: list of all models' sessions in order; this session is appended to it.
        `together`: combines the models' engines."""
        self.engine: Engine | None = None
        """Engine of the model; None until it is attached."""
        self.stepped = False
        """True if the model's optimizer has been called in the run's current step."""
        self.update: TentativeUpdate | None = None
        """Copy of the model's values and optimizer state from before its update in the run's
        current step; None if the model has not been updated."""
        self.passed = False
        """True if a training forward pass has used the model in the run's current step."""
        self.number = len(peers)
        self._updates = 0
        """Number of steps of the model's optimizer so far."""
        self._thaw: Callable[[], None] | None = None
        self._session = session
        self._peers = peers
        self._together = together
        self._own: Step | None = None
        self._trained: Sequence[bool] = ()
        peers.append(self)

    # ---------------------------------------------------------------------- per model

    def attach(self, engine: TrainingEngine) -> None:
        """Attaches the model's engine. Once all models have an engine, attaches their combined
        engine to the run."""
        assert isinstance(engine, Engine)
        self.engine = engine
        if all(peer.engine is not None for peer in self._peers):
            self._session.attach(self._together(self._session, self._peers))

    def trains(self, engine: object) -> bool:
        """Returns whether `engine` is this model's own engine, and not the engine of a clone."""
        return engine is self.engine

    @property
    def step(self) -> Step | None:
        """This model's own step within the run's current step, if any."""
        step, own = self._session.step, self._own
        if step is None or own is None:
            return None
        own.handed_out, own.taken, own.micro_batch = step.handed_out, step.taken, step.micro_batch
        own.samples = step.samples
        if step.share is not None:
            own.assign(step.share)
        if step.lost is not None:
            own.lost = own.lost or step.lost
        return own

    @property
    def lifecycle(self) -> ModelSession:
        """This object, which controls the model's own steps."""
        return self

    def ensure_step(self) -> Step:
        """Returns this model's own step, beginning the run's step if necessary. Raises
        ConfigurationError in a step with micro-batches, because each model would need its own loop
        over them."""
        step = self._session.lifecycle.ensure_step()
        self.passed = True
        if step is not self._session.step:
            return step  # a joiner's pass before its training loop
        if step.in_micro_batches:
            raise no_micro_batches()
        own = self.step
        assert own is not None
        return own

    def begin(self, step: Step) -> None:
        """Begins this model's own step within the run's step."""
        self.forget()
        self._own = Step(
            placement=step.placement,
            source=step.source,
            of=f"model {self.number}",
            trace=step.trace,
        )

    def forget(self) -> None:
        """Ends this model's own step."""
        if self._thaw is not None:
            self._thaw()
        self.stepped, self.update, self.passed, self._thaw = False, None, False, None

    @property
    def frozen(self) -> bool:
        """True if no parameter of the model may receive a gradient, because the model has been
        updated for this batch or the script has frozen it."""
        assert self.engine is not None
        with inside():
            return self.stepped or not any(
                parameter.requires_grad for parameter in self.engine.module.parameters()
            )

    def refuse_stale(self, output: Any) -> None:
        """Makes a backward pass raise an error if it reaches `output`, the result of a forward
        pass, after the model's next update. The update replaces the values that the forward pass
        used, and autograd does not detect this for sharded parameters. For consistency, the error
        is raised under every strategy."""
        updates = self._updates

        def check(_: Any) -> None:
            if self._updates != updates:
                raise PreconditionError(
                    f"a backward pass goes through a forward pass of model {self.number} that ran "
                    "before its optimizer's step: as in plain PyTorch, the values used there no "
                    "longer exist. Call the model again after the step, or run both backward "
                    "passes before it"
                )

        when_gradients_come(output, check, mode="any")

    def note_trained(self, trained: Sequence[bool]) -> None:
        self._trained = trained
        self._session.note_trained([wanted for peer in self._peers for wanted in peer._trained])

    def step_vote(self, step: Step) -> list[float]:
        """Returns the step vote of the run's step, which includes this model's loss."""
        return self._session.lifecycle.step_vote(step)

    def settle_collectives(self) -> None:
        self._session.lifecycle.settle_collectives()

    def prepare_step(self) -> None:
        self._session.lifecycle.settle_collectives()
        if (own := self.step) is not None:
            own.prepare()

    def mark_lost(self, error: BaseException) -> None:
        self._session.lifecycle.mark_lost(error)
        if (own := self.step) is not None:
            own.fail(str(error))

    def abort_step(self, reason: str) -> None:
        self._session.lifecycle.abort_step(reason)

    def settle_step(self, step: Step) -> None:
        """Aborts this model's own step if its outcome is unknown. This is safe: no rank can have
        committed the run's step, because this rank has not prepared it."""
        own = self.step
        if own is not None and own.unresolved and own.phase is not StepPhase.COMMITTED:
            own.abort()

    def reduce_and_commit(self) -> None:
        assert self.engine is not None
        if (own := self.step) is not None:
            reduce_and_commit(self, self.engine, own)

    def reduce_if_complete(self) -> None:
        if self.step is not None:
            self.reduce_and_commit()

    def finish_step(self, apply: Callable[[], None]) -> StepStatus:
        """Updates the model, and ends the run's step if all other optimizers have stepped. Must be
        called when the model's optimizer steps."""
        session = self._session
        step = session.step
        if step is None:
            # a joiner's pass before its training loop, or a step without a batch
            return session.lifecycle.finish_step(apply)
        if self.stepped:
            raise PreconditionError(
                "an optimizer's step() was called a second time for one batch: with several "
                "models, each optimizer steps at most once per batch; take a new batch for each "
                "of its steps",
                reason="STEP_NOT_FINISHED",
            )
        if step.left and any(not peer.stepped for peer in self._peers if peer is not self):
            raise PreconditionError(
                "an optimizer's step() was called for a batch whose loop has ended: with several "
                "models, call all steps for a batch within the loop over the loader",
                reason="STEP_NOT_FINISHED",
            )
        self.reduce()
        self.stepped = True
        self._updates += 1
        if all(peer.stepped for peer in self._peers):
            return session.lifecycle.finish_step(apply)
        if step.lost is None:
            session.lifecycle.apply_within(lambda: self._update(apply))
            assert self.engine is not None
            self._thaw = self.engine.freeze()
            failpoint("several_models.updated")
        return StepStatus.PENDING

    def reduce(self) -> None:
        """Ends the model's own step: sums its gradients and buffer changes across ranks. If that
        fails, the run's step is aborted."""
        assert self.engine is not None
        self.reduce_and_commit()
        step, own = self._session.step, self.step
        if step is None or own is None or step.lost is not None:
            return
        self._session.lifecycle.check_agreement(own, self.engine)

    @property
    def reported_loss(self) -> SupportsFloat | None:
        """Loss reported by `train_step` in the model's own step."""
        return self._own.loss if self._own is not None else None

    def _update(self, apply: Callable[[], None]) -> None:
        assert self.engine is not None
        self.update = self.engine.apply_tentatively(apply)

    def keep(self, replica: Mapping[str, Any]) -> None:
        raise InternalError(
            "several models were passed to a strategy that keeps copies of the state"
        )

    def release(self) -> None:
        raise InternalError(
            "several models were passed to a strategy that keeps copies of the state"
        )

    # ---------------------------------------------------------------------- shared by all models

    @property
    def elastic(self) -> bool:
        return self._session.elastic

    @property
    def group(self) -> Group | None:
        return self._session.group

    @property
    def device(self) -> torch.device:
        return self._session.device

    @property
    def rank(self) -> int:
        return self._session.rank

    @property
    def world_size(self) -> int:
        return self._session.world_size

    @property
    def begins(self) -> bool:
        return self._session.begins

    @property
    def ranks_may_come(self) -> bool:
        return self._session.ranks_may_come

    @property
    def steps(self) -> int:
        return self._session.steps

    @property
    def is_joining(self) -> bool:
        return self._session.is_joining

    @property
    def registered(self) -> RegisteredState:
        return self._session.registered

    def operation(self, kind: str, body: Body) -> Any:
        return self._session.operation(kind, body)


def no_micro_batches() -> ConfigurationError:
    """Returns the error for several models in a step with micro-batches."""
    return ConfigurationError(
        "several models do not support loader.steps(), where each would need its own loop over a "
        "step's micro-batches; iterate over the loader itself, and create it without "
        "micro_batch_size="
    )
