"""A session with only the parts that a loader uses, and a world of simulated ranks in one
thread."""

import contextlib
from dataclasses import dataclass, field

import pytest
from shoal_worker.data.loader import ElasticDataLoader
from shoal_worker.elastic.contract.loader_interface import Leases, Placement, StopTraining
from shoal_worker.elastic.session.worker_process import set_session


class FakeSession:
    """Grants step boundaries as a test says, and records the loader's calls."""

    def __init__(self, placement=None):
        self.placement = placement or Placement(generation=0, rank=0, world_size=1)
        self.calls = []
        self.sources = {}
        self.waiting = {}
        """States that a joiner or a lagging rank receives from its peers. begin_step loads them
        into their sources."""
        self.stopped = False
        self.coordinator = None
        self.sums = None
        self.waited_s = 0.0
        self.speed = None
        self.steps_alone = False
        self.offered = ()
        """Numbers offered in the current step for the sum at the end of a round."""

    @property
    def lifecycle(self):
        return self

    def register_source(self, source):
        self.sources[source.name] = source
        self.calls.append(("register", source.name))

    def begin_step(self, source):
        self.calls.append(("begin",))
        if self.stopped:
            raise StopTraining("stopped")
        if source.name in self.waiting:
            source.load_state_dict(self.waiting.pop(source.name))
        return self.placement

    def assign(self, share):
        self.calls.append(("assign", share))

    def sum_numbers(self, values, *, or_own=False):
        """Sums over the ranks of a simulated world, which all call it (see `test_stream_world.py`).
        Without a world, returns the given values."""
        return [*values] if self.sums is None or or_own else self.sums(values)

    def offer_numbers(self, values):
        self.offered = values

    def begin_micro_batch(self, *, index, weight, samples, key, weigh):
        self.calls.append(("micro", index, weight, tuple(key)))

    def end_micro_batch(self):
        self.calls.append(("end_micro",))

    def finish_batches(self):
        self.calls.append(("finish",))

    def batch_passed(self, source):
        """Does nothing, because there is only one model."""

    def loop_left(self, source):
        pass

    def loop_ended(self):
        pass

    def enter_epochs(self, source, *, call):
        self.begin_step(source)
        return source.epoch

    def epochs_left(self, source):
        self.calls.append(("epochs_left",))

    def epoch_opens(self, source, epoch, *, epochs, call):
        pass

    def is_elsewhere(self, source, epoch):
        return False

    def passed_over(self, source):
        """Does nothing, because nothing is registered."""

    def end_epoch(self, source):
        self.calls.append(("end_epoch",))

    def lease_batches(self, *, loader, epoch, batches_in_epoch, finished, want, at_hand=None):
        self.calls.append(("lease", epoch, tuple(finished), want))
        return self.coordinator.lease(self, epoch, batches_in_epoch, finished, want, at_hand)

    def wait_for_others(self, what):
        if what is not None:
            self.calls.append(("wait", what))

    def calls_of(self, kind):
        return [call for call in self.calls if call[0] == kind]

    @contextlib.contextmanager
    def current(self):
        """Makes this session the process's current one."""
        set_session(self)
        try:
            yield self
        finally:
            set_session(None)


class FakeCoordinator:
    """Leases batches in the order of requests."""

    def __init__(self):
        self.free = {}
        self.held = {}

    def lease(self, holder, epoch, batches, finished, want, at_hand=None):
        free = self.free.setdefault(epoch, list(range(batches)))
        held = self.held.setdefault(epoch, {})
        for batch in finished:
            held.pop(batch, None)
        if want == 0:
            free[:0] = [batch for batch, by in held.items() if by is holder and batch != at_hand]
            for batch in free:
                held.pop(batch, None)
        taken, free[:] = free[:want], free[want:]
        held.update(dict.fromkeys(taken, holder))
        return Leases(batches=tuple(taken), epoch_done=not free and not held, retry_after_s=0.0)

    def drop(self, holder):
        """Frees the batches of a member that has died."""
        for epoch, held in self.held.items():
            lost = [batch for batch, by in held.items() if by is holder]
            self.free[epoch] += lost
            for batch in lost:
                del held[batch]


@dataclass
class Rank:
    """One rank of a simulated world: its session, its loader, and the position of its training
    loop."""

    session: FakeSession
    loader: ElasticDataLoader
    iterator: object = None
    seen: list = field(default_factory=list)

    def take(self):
        """Takes the loop's next batch (or batches, with steps()). Returns None at the end of the
        iteration."""
        with self.session.current():
            if self.iterator is None:
                micro = self.loader.plan.micro_batch_size is not None
                self.iterator = self.loader.steps() if micro else iter(self.loader)
            got = next(self.iterator, None)
            if got is None:
                self.iterator = None
                return None
            return (
                [sample for batch in got for sample in batch.tolist()]
                if hasattr(got, "number")
                else got.tolist()
            )

    def commit(self, summed=None):
        with self.session.current():
            return self.loader.committed(self.session.placement, summed=summed)

    def rest_of_first_epoch(self, most=None):
        """Takes and commits the remaining steps of the first epoch, at most `most`. Returns the
        samples of each."""
        taken = []
        while self.loader.epoch == 0 and (most is None or len(taken) < most):
            taken.append(self.take())
            self.commit()
        return taken


@pytest.fixture
def session():
    """The session of this test."""
    with FakeSession().current() as session:
        yield session


@pytest.fixture(scope="session")
def make_rank():
    """Returns a function that creates a rank of a simulated world."""

    def make(make_loader, placement, state=None):
        session = FakeSession(placement)
        with session.current():
            loader = make_loader()
        if state is not None:
            session.waiting[loader.name] = state
        return Rank(session, loader)

    return make


@pytest.fixture
def coordinator():
    """Leases batches."""
    return FakeCoordinator()
