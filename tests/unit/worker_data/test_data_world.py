"""Whole runs of simulated ranks that die, join and lose steps at random. Every sample counts
exactly once according to their records."""

import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shoal_worker.data.loader import ElasticDataLoader
from shoal_worker.data.record import audit
from shoal_worker.elastic.contract.loader_interface import Placement

EVENTS = st.sampled_from(
    ["commit", "commit", "commit", "kill behind", "kill ahead", "fall behind", "lost", "join"]
)
EPOCHS = 2


class World:
    """Ranks in lock-step, with faults that follow the session's rules: the highest state wins, and
    a step that no survivor has applied is repeated."""

    def __init__(self, directory, make_rank, n, options):
        self._directory = directory
        self._make_rank = make_rank
        self._n = n
        self._options = options
        self._members = itertools.count()
        self._generation = 0
        self.ranks = []
        self._join(None)

    def run(self, events):
        while True:
            taken = self._take_all()
            if taken[0] is None:
                assert taken == [None] * len(taken), "some ranks have a step and others have none"
                return
            self._happen(next(events, "commit"))

    def _happen(self, event):
        if event == "lost":
            self._reform()
        elif event == "kill behind" and len(self.ranks) > 1:
            # before its contribution arrived, so the step is aborted everywhere
            self._kill(self.ranks[-1])
        elif event == "kill ahead" and len(self.ranks) > 1:
            # it alone applied the step, which is lost with it
            self._commit(self.ranks[-1:])
            self._kill(self.ranks[-1])
        # the first rank applied the step, and the others take its state
        elif event == "fall behind":
            self._commit(self.ranks[:1])
            for behind in self.ranks[1:]:
                behind.loader.load_state_dict(self.ranks[0].loader.state_dict())
            self._reform()
        else:
            self._commit(self.ranks)
            if event == "join" and len(self.ranks) < 5:
                self._join(self.ranks[0].loader.state_dict())

    def _make_loader(self):
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("SHOAL_RECORD_DIR", str(self._directory))
            environment.setenv("SHOAL_MEMBER_ID", f"member-{next(self._members)}")
            return ElasticDataLoader(self._make_dataset(), **self._options)

    def _make_dataset(self):
        return list(range(self._n))

    def _join(self, state):
        self.ranks.append(self._make_rank(self._make_loader, None, state))
        self._reform()

    def _kill(self, rank):
        self.ranks.remove(rank)
        self._reform()

    def _reform(self):
        self._generation += 1
        for number, rank in enumerate(self.ranks):
            rank.session.placement = Placement(
                generation=self._generation, rank=number, world_size=len(self.ranks)
            )

    def _commit(self, ranks):
        for rank in ranks:
            rank.commit()

    def _take_all(self):
        return [self._take(rank) for rank in self.ranks]

    def _take(self, rank):
        """Takes the next batch of the first epochs. Returns None when they have ended. A joiner
        skips epochs before its cursor."""
        while rank.loader.state_dict()["epoch"] < EPOCHS:
            if (got := rank.take()) is not None:
                return got
        return None


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    n=st.integers(1, 40),
    batch=st.integers(1, 12),
    micro=st.none() | st.integers(1, 12),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    drawn=st.booleans(),
    events=st.lists(EVENTS, max_size=25),
)
def test_every_sample_counts_exactly_once_whatever_happens_to_the_ranks(
    make_rank, n, batch, micro, shuffle, drop_last, drawn, events
):
    batch = min(batch, n)
    options = {
        "global_batch_size": batch,
        "micro_batch_size": micro and min(micro, batch),
        "shuffle": shuffle,
        "drop_last": drop_last,
        "sampler": [(7 * i) % n for i in range(n)] if drawn else None,
    }
    with tempfile.TemporaryDirectory() as directory:
        World(Path(directory), make_rank, n, options).run(iter(events))
        verdict = audit(Path(directory))
    whole = n // batch * batch if drop_last else n
    assert [(epoch.epoch, epoch.expected, epoch.once) for epoch in verdict.epochs] == [
        (e, whole, whole) for e in range(EPOCHS)
    ]
    assert verdict.exactly_once
