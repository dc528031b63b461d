"""Shows how a training step survives the death of a worker: Shoal's commit protocol in isolation,
with threads as workers.

    python examples/how_a_step_survives.py

Data-parallel workers sum their gradients and apply the sum. If a worker dies in the process, only
some of the others may have received the sum. These workers must not apply it while the others
discard it, because the replicas would then differ. The protocol avoids a restart of all workers
from a checkpoint:

1. **Reduce.** An all-reduce sums the gradients. A worker that has the sum is *prepared*: it could
   apply the step without any further message.
2. **Commit.** A second, tiny all-reduce follows. A worker that receives its result knows what the
   sum alone does not show: all workers are prepared, and nobody needs a dead worker any more. The
   step is now *committed*: it will be applied, no matter what fails next.
3. **Recover.** A worker whose all-reduce failed does not know what the others saw: it is *in
   doubt*. The survivors form the next *generation*, a new group, and exchange their statuses. If
   one of them saw the commit, the workers in doubt apply the sum that they have received. If none
   did, the step is *aborted*: no worker has applied it, and the survivors repeat it with the same
   samples.
4. **Answer.** `take_step()` returns only then, so all survivors get the same answers in order.

A new worker receives the state at a *step boundary*, where no step is in progress. The commit
all-reduce also sums the *step vote*: whether any worker has noticed that a new worker is waiting.
All workers receive the same sum, so all of them go to the rendezvous after the same step.

Shoal implements this in worker/shoal_worker/elastic: `step_lifecycle.py` (1, 2 and 4),
`formation.py` and `reconcile.py` (3). tests/simulation/test_protocol_alone.py compares the answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

COMMITTED, LOST = "committed", "lost"
DEADLINE_S = 60.0  # maximum time that a worker waits for its peers


@dataclass(frozen=True)
class Fault:
    """A fault that breaks a group during an all-reduce: only some workers receive the result."""

    step: int
    """Step of the run, counted from 1."""
    phase: str
    """All-reduce of the step that is interrupted: "reduce" or "commit"."""
    dies: str | None
    """Worker that is killed; None: only the connections break."""
    contributes: bool = True
    """True if the killed worker has sent its part. Otherwise no worker can receive the result."""
    received: tuple[str, ...] = ()
    """Workers that receive the result although the group breaks."""


class PeerLost(Exception):
    """Raised if a collective fails. Its group is broken; only a new generation can continue."""


class Killed(BaseException):
    """Terminates a worker as SIGKILL would, without cleanup and without notice to other workers."""


class Group:
    """Connections between the workers of one generation. A broken group stays broken."""

    def __init__(self, number: int, members: list[str], faults: dict[Any, Fault]) -> None:
        self.number, self.members, self.broken, self._faults = number, members, False, faults
        self._torn: dict[Any, Fault | None] = {}
        self._parts: dict[Any, dict[str, Any]] = {}
        self._changed = threading.Condition()

    def gather(self, name: str, key: Any, part: Any) -> dict[str, Any]:
        """Returns the contributions of all members, by name. Every member must call it with the
        same `key`, which identifies the all-reduce. `part`: contribution of this worker. Raises
        PeerLost if the group is broken, or breaks before this worker has the result."""
        with self._changed:
            if self.broken:
                raise PeerLost
            fault = self._torn.setdefault(key, self._faults.pop(key, None))
            size, parts = len(self.members), self._parts.setdefault(key, {})
            if fault is not None and fault.dies == name and not fault.contributes:
                await_that(self._changed, lambda: self.broken or len(parts) == size - 1, f"{key}")
                self.end()
                raise Killed
            parts[name] = part
            self._changed.notify_all()
            await_that(self._changed, lambda: self.broken or len(parts) == size, f"{key}")
            if len(parts) < size:
                raise PeerLost
            if fault is not None:
                self.end()
                if name == fault.dies:
                    raise Killed
                if name not in fault.received:
                    raise PeerLost
            return dict(parts)

    def end(self) -> None:
        """Breaks the connections, because a member has died or has left for a newer generation."""
        with self._changed:
            self.broken = True
            self._changed.notify_all()


class Coordinator:
    """Keeps track of the living workers, and forms their generations one after another."""

    def __init__(self, members: Iterable[str], faults: Iterable[Fault] = ()) -> None:
        self._faults: dict[Any, Fault] = {(fault.step, fault.phase): fault for fault in faults}
        self.group = Group(0, [], self._faults)
        self._living = set(members)
        self.joining = set[str]()
        """New workers that are waiting for a step boundary."""
        self._arrived: dict[str, bool] = {}
        self._changed = threading.Condition()

    def rendezvous(self, name: str, *, admits: bool) -> Group:
        """Waits until all living members have called this, and returns the next generation's group.
        `admits`: True if this worker is at a step boundary, where new workers may join."""
        with self._changed:
            before = self.group
            self._arrived[name] = admits
            self._form()
            await_that(
                self._changed,
                lambda: self.group is not before and name in self.group.members,
                f"the members of the generation after {before.number}",
            )
            return self.group

    def bury(self, name: str) -> None:
        """Records that a worker is dead, so that no other worker waits for it any longer."""
        with self._changed:
            self._living.discard(name)
            self._arrived.pop(name, None)
            self.group.end()
            self._form()

    def _form(self) -> None:
        if not self._living or not self._living <= set(self._arrived):
            return
        if any(self._arrived[name] for name in self._living):
            self._living, self.joining = self._living | self.joining, set()
        self.group.end()
        self.group = Group(self.group.number + 1, sorted(self._living), self._faults)
        self._arrived.clear()
        self._changed.notify_all()


def await_that(changed: threading.Condition, holds: Callable[[], bool], what: str) -> None:
    """Waits until `holds()` returns True. Raises a TimeoutError that mentions `what`."""
    if not changed.wait_for(holds, DEADLINE_S):
        raise TimeoutError(f"waited {DEADLINE_S:.0f} s for {what}")


@dataclass(frozen=True)
class State:
    """State shared by all replicas."""

    weight: float = 0.0
    steps: int = 0
    """Number of committed steps; -1: this worker is new and has no state yet."""


@dataclass
class Worker:
    """One data-parallel replica and its training loop."""

    name: str
    coordinator: Coordinator
    last_step: int
    state: State = State()
    answers: list[tuple[int, str]] = field(default_factory=list)
    """One entry for each call to `take_step()`: the number of steps committed so far, and the
    outcome."""
    prepared: State | None = None
    """State after the step in progress, to be adopted if the step is committed."""
    after_step: Callable[[Worker], object] = lambda worker: None

    def run(self) -> None:
        """Trains until the run is finished or this worker is killed."""
        try:
            self.enter_generation(admits=True)
            while self.state.steps < self.last_step:
                outcome = self.take_step()
                self.answers.append((self.state.steps, outcome))
                self.after_step(self)
        except Killed:
            self.coordinator.bury(self.name)

    def take_step(self) -> str:
        """Trains on one batch with the others. All survivors return the same outcome."""
        step, votes = self.state.steps + 1, False
        rank, world_size = self.group.members.index(self.name), len(self.group.members)
        mine = batch_of(step)[rank::world_size]
        gradients = {sample: gradient(self.state.weight, sample) for sample in mine}
        try:
            everyones = self.group.gather(self.name, (step, "reduce"), gradients)
            self.prepared = updated(self.state, everyones.values())
            vote = bool(self.coordinator.joining)
            votes = any(self.group.gather(self.name, (step, "commit"), vote).values())
            self.commit()
        except PeerLost:
            pass  # in doubt, or not even prepared: the other workers decide whether the step counts
        if self.group.broken or votes:
            self.enter_generation(admits=self.state.steps == step)
        return COMMITTED if self.state.steps == step else LOST

    def commit(self) -> None:
        """Applies the step in progress."""
        assert self.prepared is not None
        self.state, self.prepared = self.prepared, None

    def enter_generation(self, *, admits: bool) -> None:
        """Forms new groups until all members of a group have the same state."""
        while True:
            self.group = self.coordinator.rendezvous(self.name, admits=admits)
            try:
                return self.reconcile()
            except PeerLost:  # another worker has died
                admits = False

    def reconcile(self) -> None:
        """Compares statuses with the other members, commits or aborts a step in doubt, and sends
        the state to new workers."""
        number = self.group.number
        steps = self.group.gather(self.name, ("status", number), self.state.steps)
        newest = max(steps.values())
        is_new = self.state.steps < 0
        if not is_new and self.state.steps < newest:
            self.commit()  # a peer saw the commit, so all workers were prepared
        self.prepared = None  # otherwise no worker saw the commit, so the step is aborted
        if min(steps.values()) < 0:
            given = self.group.gather(self.name, ("state", number), self.state)
            if is_new:
                self.state = next(state for state in given.values() if state.steps == newest)


def batch_of(step: int, size: int = 12) -> list[int]:
    """Returns the samples of a step, which are the same for any assignment to workers."""
    return [(step * size + index) % 97 for index in range(size)]


def gradient(weight: float, sample: int) -> float:
    """Returns the gradient of (weight x - 3 x)^2 / 2 at x = sample / 100."""
    x = sample / 100
    return (weight * x - 3 * x) * x


def updated(state: State, everyones: Iterable[dict[int, float]]) -> State:
    """Returns the state after one step of gradient descent. The order of the samples fixes the
    order of summation, so the result has the same bits for any number of workers."""
    gradients = {sample: value for part in everyones for sample, value in part.items()}
    total = sum(gradients[sample] for sample in sorted(gradients))
    return State(state.weight - 0.5 * total / len(gradients), state.steps + 1)


def train(
    names: str, steps: int, faults: Iterable[Fault] = (), joiner: tuple[str, int] | None = None
) -> dict[str, Worker]:
    """Trains to the end, and returns all workers, including dead ones.

    `names`: a letter for each initial worker. `joiner`: name of a new worker, and the number of
    steps that the first worker has committed when the new one starts.
    """
    coordinator = Coordinator(names, faults)
    workers = {name: Worker(name, coordinator, steps) for name in names}
    threads = [threading.Thread(target=worker.run) for worker in workers.values()]
    if joiner is not None:
        late = workers[joiner[0]] = Worker(joiner[0], coordinator, steps, State(steps=-1))
        coming = threading.Thread(target=late.run)
        threads.append(coming)

        def starts(worker: Worker) -> None:
            if worker.state.steps == joiner[1] and not coming.ident:
                coordinator.joining.add(late.name)
                coming.start()

        workers[names[0]].after_step = starts
    for thread in threads[: len(names)]:
        thread.start()
    for thread in threads:
        thread.join()
    return workers


def main() -> None:
    """Shows three runs. In each of them, a new worker, d, starts after step 5."""
    for title, faults in {
        "no faults": [],
        "b dies in the commit of step 3; nobody sees its result": [Fault(3, "commit", "b")],
        "b dies there; only c sees the result": [Fault(3, "commit", "b", received=("c",))],
    }.items():
        print(f"\n{title}")
        for name, worker in train("abc", 8, faults, joiner=("d", 5)).items():
            took = " ".join("LOST" if said == LOST else str(step) for step, said in worker.answers)
            print(f"  {name}: weight {worker.state.weight:.17f} after steps {took}")


if __name__ == "__main__":
    main()
