"""The run's state in this process: model and optimizer, registered objects, the loaders' cursors,
and the state's name.

Joiners and ranks that have fallen behind receive the captured state, and checkpoints contain it.
This module does not communicate with peers. Used only by the training thread.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import xxhash
from shoal_common.errors import ConfigurationError, CorruptDataError, PreconditionError

from shoal_worker.elastic.contract.last_state import LastState
from shoal_worker.elastic.contract.loader_interface import Placement, StepSource
from shoal_worker.elastic.contract.phase import Phase, ScriptPhase
from shoal_worker.elastic.contract.reconcile import Interrupted, RankStatus, StateName
from shoal_worker.elastic.contract.step import (
    CollectiveTrace,
    ScriptPosition,
    Step,
    not_repeated,
)
from shoal_worker.elastic.group.operations import Operations
from shoal_worker.elastic.state.batches_compared import BatchComparison, EvaluationComparison
from shoal_worker.elastic.state.early_stop import EarlyStop
from shoal_worker.elastic.state.schedulers_and_scalers import Place, RegisteredState
from shoal_worker.elastic.state.strategy_interface import TrainingEngine
from shoal_worker.state.digest import describe_values
from shoal_worker.state.serial import dump_tensors, load_tensors
from shoal_worker.state.tree import flatten, unflatten

_log = logging.getLogger(__name__)

_MOST_STEPS: Final = 2**62
"""Minimum total number of steps of training that counts as endless, as with
`epochs(sys.maxsize)`."""


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """Copy of the state, to be restored if a step is aborted."""

    name: StateName | None
    captured: dict[str, Any]
    operations: bytes


class CommittedState:
    """The run's state in this process, after the last committed step."""

    def __init__(self, *, live: bool) -> None:
        self.phase = ScriptPhase(live=live)
        self.name: StateName | None = None
        """Name of the state; None if it has no name yet and therefore does not count as a state of
        the run."""
        self.run = ""
        """Name of the state's run, preserved by joins and checkpoints. Empty before training
        begins, or after loading a checkpoint without a run."""
        self.samples = 0
        """Number of samples in the run's committed steps over all ranks; only this rank's samples
        if ranks take independent steps. It is part of the state."""
        self.interrupted: Interrupted | None = None
        """Activity of this rank when its last group failed, until the next group is formed; see
        `RankStatus`."""
        self.step: Step | None = None
        """The step in progress."""
        self._trace = CollectiveTrace()
        self.outcomes = 0
        """Number of steps whose outcome the script has received. A joiner continues with its peers'
        number."""
        self.compared = 0
        """Number of committed steps when `compare_after_step` was last called, or when the state
        was loaded."""
        self.frozen: tuple[str, ...] = ()
        """Names, in the flattened state, of the parameters that are not trained."""
        self.built: Mapping[str, Mapping[str, Any]] = {}
        """Descriptions of the frozen parameters' values as the run's script created them, before
        any other state was loaded; empty if the model was on the meta device."""
        self.agreed = 0
        """Step after which this rank last found that all ranks agree; 0 if never. It is not part of
        the state, because after a failed comparison, only some ranks know the result."""
        self.last_state: LastState | None = None
        """Digests of the state when the script left its last loop, for the comparison at the end of
        the run."""
        self.control: list[float] = []
        """Step vote of the last step committed in this process."""
        self.registered = RegisteredState()
        self.operations = Operations()
        self.early_stop = EarlyStop()
        self.batches = BatchComparison()
        self.evaluations = EvaluationComparison()
        self.attached: TrainingEngine | None = None
        """The engine; None before `as_distributed`."""
        self._sources: weakref.WeakValueDictionary[str, StepSource] = weakref.WeakValueDictionary()
        self._waiting: dict[str, Any] = {}
        """Cursors in the loaded state, for loaders that the script has not created yet."""
        self._ended: dict[str, Any] = {}
        """Last cursors of loaders that the script no longer references. A resumed script creates
        these loaders again and must not train on their samples again."""
        self._warned = set[str]()
        """Names of loaders whose warning about an abandoned epoch has been logged."""
        self._own_loop_began = False
        """True if a step without a Shoal loader has been committed."""
        self._numbers: dict[str, int] = {}
        self._loops: dict[str, Any] = {}
        """Loader whose `epochs()` was entered -> the loop's current epoch, and the iteration counts
        of the other loaders when that epoch began."""
        self._loops_to_enter: dict[str, Any] = {}
        self._calls: dict[str, str] = {}
        """Loader -> call of `epochs()` in the loaded state, until the script makes the same call or
        another call hands out an epoch."""
        self._kept: _Kept | None = None
        self._to_repeat = ""
        """Name of the loader whose step was aborted; empty if the last step was committed."""
        self._resumes = False
        """True if a state has been loaded and the script has not reached it yet."""

    # ---------------------------------------------------------------------------------------- parts

    @property
    def engine(self) -> TrainingEngine:
        """The engine of model and optimizer. Raises PreconditionError before `as_distributed`."""
        if self.attached is None:
            raise PreconditionError(
                "as_distributed has not been called; call shoal.as_distributed(model, optimizer, "
                "...) before the training loop"
            )
        return self.attached

    @property
    def has_engine(self) -> bool:
        """True after `as_distributed` has been called."""
        return self.attached is not None

    def refuse_second_engine(self) -> None:
        """Raises PreconditionError if there is an engine."""
        if self.attached is not None:
            raise PreconditionError(
                "as_distributed was called twice; call it once per process. For several models "
                "with one optimizer each, pass tuples: as_distributed((model_a, model_b), "
                "(optimizer_a, optimizer_b)). Put modules that share one optimizer into one "
                "nn.Module"
            )

    def set_engine(self, engine: TrainingEngine) -> None:
        """Sets the engine. Raises PreconditionError if there already is an engine."""
        self.refuse_second_engine()
        self.attached = engine
        held = weakref.ref(self)
        self.registered.number_by(
            lambda: held_now.place_in_epochs() if (held_now := held()) is not None else Place()
        )

    def note_built(self) -> None:
        """Records the names of the frozen parameters of the engine's model, and describes their
        values. A joiner receives the descriptions from its peers instead."""
        self.frozen = tuple(self.engine.frozen())
        if self.phase.holds_state:
            self.built = {
                name: describe_values(value) for name, value in self.frozen_values().items()
            }

    def frozen_values(self) -> Mapping[str, torch.Tensor]:
        """Returns the current values of the frozen parameters; empty if this rank does not have all
        of them. The tensors share memory with the model."""
        if not self.frozen or self.engine.is_sharded or not self.engine.has_values():
            return {}
        current = self.engine.frozen()
        return {name: current[name] for name in self.frozen if name in current}

    @property
    def sources(self) -> list[StepSource]:
        """The script's training loaders that still exist."""
        return list(self._sources.values())

    def add_source(self, source: StepSource) -> None:
        """Registers a training loader, as `LoaderSession.register_source` describes."""
        if self._sources.get(source.name, source) is not source:
            raise ConfigurationError(
                f"two training loaders are named {source.name!r}; give each loader its own name: "
                "ElasticDataLoader(..., name=...)"
            )
        if source.name in self._ended:
            raise ConfigurationError(
                f"a training loader named {source.name!r} already existed in this script, "
                "yielded steps and was deleted; a resumed script could not tell the two loaders' "
                "cursors apart. Create one loader and iterate over it in each epoch, or give "
                "each loader its own name: ElasticDataLoader(..., name=...)"
            )
        if self._sources.get(source.name) is not source:
            weakref.finalize(
                source, _note_end, weakref.ref(self), source.name, source.cursor_reader()
            ).atexit = False
        self._sources[source.name] = source
        self._numbers.setdefault(source.name, len(self._numbers) + 1)
        if source.name in self._waiting:
            source.load_state_dict(self._waiting.pop(source.name))

    # ---------------------------------------------------------------------------------------- steps

    def begin(self, generation: int, run: str | None) -> StateName:
        """Begins training from scratch. `run`: a unique name, the same on all ranks. None: training
        restarts in an existing run and may overwrite newer checkpoints, so the run has no name.
        Returns the state's name."""
        self.name, self.run = (
            StateName(generation, 0),
            "" if run is None else f"{xxhash.xxh3_64_intdigest(run.encode()):016x}",
        )
        return self.name

    @property
    def in_round(self) -> bool:
        """True if this rank is within a round, that is, has committed steps since `keep` that other
        ranks have not confirmed."""
        return self._kept is not None and self._kept.name != self.name

    def begin_step(self, placement: Placement, source: StepSource | None) -> Step:
        """Begins a step in the group of `placement`."""
        self._trace.begin(placement.generation, self.steps, self.operations.position)
        self.step = Step(placement=placement, source=source, trace=self._trace)
        return self.step

    def committed(self, step: Step) -> None:
        """Records that `step` was applied: names the resulting state, and updates the counts of
        outcomes and samples."""
        self.name = StateName(step.placement.generation, self.steps + 1)
        self.step, self.control = None, step.control or self.control
        self.last_state, self._to_repeat = None, ""
        self._own_loop_began = self._own_loop_began or step.source is None
        self.samples += step.source.step_samples if step.source is not None else 0
        self.outcomes += 1

    def lost(self, step: Step) -> None:
        """Records that `step` was aborted."""
        self.step = None
        self.outcomes += 1
        if step.source is not None and not self.engine.asynchronous:
            self._to_repeat = step.source.name

    def check_repeated(self, step: Step) -> None:
        """Raises PreconditionError if `step` is a step of one loader although the script must first
        repeat an aborted step of another loader."""
        lost, taken = self._to_repeat, step.source
        if lost in self._sources and taken is not None and taken.name != lost:
            raise not_repeated(lost, taken.name)

    def commit_payload(self) -> bytes:
        """Returns the result of the last committed step's commit all-reduce, for a rank that missed
        it."""
        structure, tensors = flatten(
            {"control": self.control, "closing": self.engine.commit_payload()}
        )
        return dump_tensors(tensors, {"structure": structure})

    def decide(self, commit_payload: bytes) -> None:
        """Commits the current step. `commit_payload`: result of the commit all-reduce, received
        from a peer."""
        assert self.step is not None
        tensors, metadata = load_tensors(commit_payload)
        result = unflatten(metadata["structure"], tensors)
        self.step.decide(result["control"])
        self.engine.take_commit(result["closing"])

    # ---------------------------------------------------------------------------------------- place

    def place(self, source: StepSource | None) -> ScriptPosition:
        """Returns the script's position in a step of `source`."""
        if source is None:
            return ScriptPosition("", 0, 0, 0)
        name, step = source.name, source.step
        dealing = xxhash.xxh3_64_intdigest(f"{source.dealing} {step}".encode())
        return ScriptPosition(name, self._numbers[name], source.epoch, step, dealing)

    def place_in_epochs(self) -> Place:
        """Returns the script's position in its loops over epochs, limited to what is the same in a
        resumed script and in a joiner."""
        inside = [
            source
            for source in sorted(self.sources, key=lambda each: each.name)
            if source.within is not None
        ]
        return Place(
            epochs=",".join(f"{source.name}@{source.within}" for source in inside),
            after_batches=any(
                source.within is not None and source.next_iteration > source.within
                for source in inside
            ),
            within_batches=any(source.under_way for source in self.sources)
            or (not self._numbers and self._own_loop_began),
        )

    def warn_of_given_up(self) -> None:
        """Logs a warning, once per loader, if a run resumed from a state saved at this point would
        skip the rest of an epoch, or repeat its finished part."""
        for source in self.sources:
            if source.repeats is not None and source.name not in self._warned:
                self._warned.add(source.name)
                _log.warning(
                    "save_checkpoint was called within epoch %d of loader %r: under async_sgd a "
                    "checkpoint does not record which batches are finished, so a run that "
                    "resumes from it repeats the epoch from its beginning. To train on each "
                    "sample once, save after the loop over the batches has ended",
                    source.repeats,
                    source.name,
                )
            if (
                source.gives_up is not None
                and not source.under_way
                and source.name not in self._warned
            ):
                self._warned.add(source.name)
                _log.warning(
                    "save_checkpoint was called after the loop over loader %r was left early, in "
                    "epoch %d at step %d. A run that resumes from this checkpoint continues with "
                    "the next epoch, as this script would, and skips the rest of this one. To "
                    "stop the run here, also leave `for epoch in loader.epochs(n)` before "
                    "saving, or save inside the loop over the batches",
                    source.name,
                    source.gives_up,
                    source.step,
                )

    def enter_epochs(self, source: StepSource, call: str) -> int:
        """Enters a loop over epochs of `source` and returns the loop's first epoch. `call`: the
        script's call.

        If the loop continues at an epoch that a loaded state has reached, sets the other loaders'
        iteration counts to the counts saved with that epoch, because earlier iterations belong to
        epochs that are skipped.
        """
        loop = self._loops_to_enter.pop(source.name, None)
        if loop is not None and "call" in loop:  # missing in checkpoints of earlier releases
            self._calls[source.name] = loop["call"]
        if self._calls.get(source.name) == call:
            del self._calls[source.name]
        if loop is None:
            return source.epoch
        first: int = loop["epoch"] if loop["inside"] else max(source.epoch, source.next_epoch)
        for other in self.sources:
            if other is not source:
                other.count_from(loop["others"].get(other.name) if loop["epoch"] == first else None)
        return first

    def epoch_opens(self, source: StepSource, epoch: int, call: str) -> str:
        """Records that the next epoch in a loop over epochs of `source` begins. `call`: the
        script's call of `epochs()`. Returns a warning, once, if the call in the loaded state was
        different and there is a schedule that may depend on it; otherwise an empty string."""
        others = {other.name: other.next_epoch for other in self.sources if other is not source}
        self._loops[source.name] = {"epoch": epoch, "others": others, "call": call}
        saved = self._calls.pop(source.name, call)
        schedules = self.registered.schedules_of_a_length() if saved != call else []
        if not schedules:
            return ""
        return (
            f"the checkpoint was saved in a loop over {source.name}.{saved}, but this script calls "
            f"{source.name}.{call}, so learning rates may differ from those of a run without the "
            f"interruption: {', '.join(schedules)} may depend on the length of the run. If you "
            "extend the run on purpose, check its learning rates; otherwise make the same call"
        )

    def steps_in_all(self, source: StepSource, epochs: int, *, known: int) -> int:
        """Returns the number of steps that the run will have taken after `epochs` epochs of
        `source`. Called when the loop begins an epoch. Returns 0 if the number is unknown, because
        other loaders take steps too, or a stream has no known end. `known`: the previous result. If
        ranks take independent steps, it remains valid, because it counts the steps of all ranks."""
        if len(self._sources) != 1:
            return 0
        until = source.steps_until(epochs)
        if until is None or until > _MOST_STEPS:
            return 0
        return known or until if self.engine.asynchronous else self.steps + until

    def reached(self, at: StepSource | None) -> None:
        """Records that the script begins a step. The first step after a resume is at the position
        of the loaded state."""
        if self._resumes:
            self.arrived(at)

    def arrived(self, at: StepSource | None) -> None:
        """Records that a joiner has reached its peers' position, or a resumed script that of the
        loaded state. `at`: loader of the step at that position. Sets the iteration counts of all
        other loaders to the counts in the last loaded state."""
        self._resumes = False
        for source in self.sources:
            if source is not at:
                source.count_from(None)

    # ---------------------------------------------------------------------------------------- state

    @property
    def steps(self) -> int:
        """Number of steps that the run has committed."""
        return self.name.step if self.name is not None else 0

    def capture(self, replica: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the committed state. It shares memory with the model and other objects.
        `replica`: state of model and optimizer to include; None: this rank's own."""
        # Without a loop in progress, the script appears to be between two epochs.
        inside = any(source.under_way for source in self.sources)
        return {
            "replica": replica if replica is not None else self.engine.capture(),
            "registered": self.registered.capture(),
            "sources": self._ended
            | {source.name: source.state_dict() for source in self.sources}
            | self._waiting,
            # A loop in the loaded state that this script has not entered yet is captured unchanged,
            # because peers must enter it in the same way as this script will.
            "loops": {
                name: self._loops_to_enter.get(name, loop | {"inside": inside})
                for name, loop in self._loops.items()
            },
            "steps": self.steps,
            "batches_compared": self.batches.checked,
            "samples": self.samples,
            "run": self.run,
        }

    def restore(self, captured: Mapping[str, Any]) -> None:
        """Loads a captured state, except its name. If an object or loader refuses its part, the
        previous state is restored."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.registered.restoring())
            self.registered.restore(captured["registered"])
            self._restore_rest(captured, undo)
            undo.pop_all()
        self._resumes = True

    def _restore_rest(self, captured: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
        """Restores everything except the registered objects. The replica (model and optimizer) is
        restored last, because it is too large to keep a copy for undoing."""
        waiting = dict(captured["sources"])
        for source in self.sources:
            if source.name in waiting:
                undo.callback(source.load_state_dict, source.state_dict())
                source.load_state_dict(waiting.pop(source.name))
        self._check_models(captured["replica"])
        self.engine.restore(captured["replica"])
        self.registered.restored()
        self._kept = None
        self.phase.replace()
        self.batches.begin(captured.get("batches_compared", 0))
        self.compared, self.run = captured["steps"], captured.get("run", "")
        self.agreed = min(self.agreed, self.compared)
        self.last_state = None
        self.samples = captured.get("samples", 0)  # missing in checkpoints of earlier releases
        self._waiting, self._ended = waiting, {}
        self._loops, self._loops_to_enter = dict(captured["loops"]), dict(captured["loops"])

    def with_own_tables(self, captured: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a checkpoint's state in which the non-persistent buffers (persistent=False) are
        replaced by this process's own. As in plain torch, the values of these buffers come from the
        script, and must be the same on all ranks."""
        if self.engine.asynchronous or not self.engine.has_values():
            return captured
        own, replica = self.engine.capture(), captured["replica"]
        if "models" in own and len(own["models"]) == len(replica.get("models", ())):
            pairs = zip(replica["models"], own["models"], strict=True)
            return {
                **captured,
                "replica": {
                    **replica,
                    "models": [_with_tables(saved, here) for saved, here in pairs],
                },
            }
        return captured if "models" in own else {**captured, "replica": _with_tables(replica, own)}

    def _check_models(self, replica: Mapping[str, Any]) -> None:
        found, here = len(replica.get("models", [replica])), self.engine.models
        if found != here:
            raise CorruptDataError(
                f"the state contains {found} {'model' if found == 1 else 'models'}, but "
                f"as_distributed received {here}; pass the same models as in the run that saved it",
                reason="MODEL_DIFFERS",
            )

    def keep(self, replica: Mapping[str, Any]) -> None:
        """Copies the committed state, so that it can be restored if a step is aborted. The copy is
        kept until `release`. `replica`: state of this rank's model and optimizer."""
        self._kept = _Kept(
            name=self.name,
            captured=copy.deepcopy(self.capture(replica)),
            operations=self.operations.encode(),
        )

    def release(self) -> None:
        """Discards the copy made by `keep`, because all ranks have confirmed the steps since
        then."""
        self._kept = None

    def go_back(self) -> None:
        """Restores the state copied by `keep`, if any, after an aborted step. Called on every rank
        at the same position in its script."""
        kept, loops = self._kept, self._loops_to_enter
        if kept is None:
            return
        self.registered.restore(kept.captured["registered"])
        self._restore_rest(kept.captured, contextlib.ExitStack())
        self._loops_to_enter = loops
        self.operations.restart(kept.operations, passed=True)
        self.name = kept.name

    def cannot_return(self, captured: Mapping[str, Any]) -> str | None:
        """Returns why the script cannot continue from an earlier captured state; None if it can. A
        script can only repeat steps of its current loop. If the captured state is the current one,
        there are no steps to repeat."""
        if captured["steps"] == self.steps:
            return None
        if not any(source.under_way for source in self.sources):
            return "it is not in a loop over an ElasticDataLoader"
        for source in self.sources:
            then = captured["sources"].get(source.name)
            if source.under_way and (then is None or then["epoch"] != source.epoch):
                return (
                    f"it is in epoch {source.epoch} of loader {source.name!r}, but the checkpoint "
                    f"is from epoch {then and then['epoch']}"
                )
            if not source.under_way and then is not None and then != source.state_dict():
                return f"loader {source.name!r} has advanced since the checkpoint"
        return None

    @contextlib.contextmanager
    def going_back(self) -> Iterator[None]:
        """Context for restoring a state that the script has already passed. The script keeps its
        position in its loops. A script that is in a step continues at the end of that step, and
        then repeats it."""
        loops = self._loops_to_enter
        yield
        self._loops_to_enter, self._resumes = loops, False
        self.registered.step_aborted()
        self.registered.keep_for_redo()
        self.phase.go_back()

    def unclaimed(self) -> list[str]:
        """Returns the names of objects and loaders that are in the loaded state, but that the
        script has not created."""
        return [
            *self.registered.unclaimed(),
            *(f"the loader {name!r}" for name in sorted(self._waiting)),
        ]

    def status(self) -> RankStatus:
        """Returns this rank's status, for the formation of a generation."""
        step, name = self.step, self._kept.name if self._kept is not None else self.name
        in_doubt = step is not None and step.in_doubt
        return RankStatus(
            state=name if self.phase.holds_state else None,
            doubt=StateName(step.placement.generation, self.steps + 1)
            if step is not None and in_doubt
            else None,
            outcomes=self.outcomes + (step is not None and step.handed_out),
            attached=self.has_engine,
            learner=not self.phase.holds_state,
            poisoned=self.phase.now is Phase.TORN,
            operations=self.operations.finished,
            rewinds=self.in_round and step is not None and step.handed_out,
            interrupted=self.interrupted,
        )


def _note_end(
    held: weakref.ref[CommittedState], name: str, read_cursor: Callable[[], dict[str, Any]]
) -> None:
    """Records the last cursor of a loader that the script no longer references. `name`: name of the
    loader."""
    if (state := held()) is not None and (cursor := read_cursor()).get("global_step"):
        state._ended[name] = cursor


def _with_tables(replica: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        **replica,
        "buffers": {**replica.get("buffers", {}), **own.get("unsaved", own.get("buffers", {}))},
    }
