"""Operations of all ranks between steps: evaluation and early stopping. Also determines whether an
action that is repeated every k steps is due.

Each batch is evaluated once, even if a rank fails during the evaluation. Every rank keeps the
results of its batches, and if the membership changes, only the failed ranks' batches are
redistributed. The totals are added in the order of the batches, so they do not depend on the number
of ranks.

The state of early stopping is part of the session, so joiners receive it and checkpoints contain
it. Actions that are repeated every k steps (`every_steps=`) count the run's committed steps,
because a counter in the script would start from zero in a joining process.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import xxhash
from shoal_common.errors import ConfigurationError, PreconditionError
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shoal_worker.elastic.contract.loader_interface import StepStatus
from shoal_worker.elastic.group.divergence import evaluations_apart
from shoal_worker.modes import evaluating
from shoal_worker.randomness import generators_kept, seed_generators
from shoal_worker.state.digest import DRAWN, SAMPLES, STREAMED, identity_of

if TYPE_CHECKING:
    from shoal_worker.elastic.contract.channel import Channel
    from shoal_worker.elastic.session.session import Session


def is_due(session: Session, every_steps: int, what: str) -> bool:
    """Returns whether an action that is repeated every `every_steps` steps is due: the script's
    last step was committed, and its number in the run is a multiple of `every_steps`. `what`: name
    of the action, for error messages. The result is the same on all ranks, including joiners, and
    an action is not due again after an aborted step.

    Raises:
        ConfigurationError: `every_steps` is not a positive integer.
        PreconditionError: a batch has been handed out, and its step has not finished."""
    if type(every_steps) is not int or every_steps < 1:
        raise ConfigurationError(
            f"{what}(every_steps={every_steps!r}): expected a positive integer"
        )
    step = session.step
    if step is not None and step.source is not None and step.handed_out:
        if step.left:
            # the script has only looked at the batch; a rank that joined here has not finished a
            # step before it
            return False
        raise PreconditionError(
            f"{what}(every_steps={every_steps}) was called inside a step; call it between "
            "optimizer.step() and the next batch, so that it refers to the finished step",
            reason="STEP_NOT_FINISHED",
        )
    return (
        session.lifecycle.outcome is StepStatus.COMMITTED
        and not session.is_redoing
        and session.steps % every_steps == 0
    )


_NAME = "shoal.early_stop"


class Patience:
    """State of early stopping: the best metric so far, and the number of calls since it
    improved."""

    def __init__(self) -> None:
        self.best: float | None = None
        self.bad_calls = 0
        self.site: object = None
        """Position of the call to `should_early_stop` in the script; None if not known yet."""

    def observe(self, metric: float, *, mode: str, patience: int, min_delta: float) -> bool:
        """Records a metric. Returns whether the metric has not improved in `patience` consecutive
        calls. NaN never counts as an improvement."""
        gain = (
            math.inf
            if self.best is None
            else (self.best - metric if mode == "min" else metric - self.best)
        )
        if not math.isnan(metric) and gain > min_delta:
            self.best, self.bad_calls = metric, 0
        else:
            self.bad_calls += 1
        return self.bad_calls >= patience

    def state_dict(self) -> dict[str, Any]:
        """Returns the best metric and the number of calls without improvement, for joiners and
        checkpoints."""
        return {"best": self.best, "bad_calls": self.bad_calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a state returned by `state_dict`."""
        self.best, self.bad_calls = state["best"], state["bad_calls"]


def should_early_stop(
    session: Session,
    metric: float,
    *,
    mode: str,
    patience: int,
    min_delta: float,
    name: str | None,
    optimizer: int,
    site: object,
) -> bool:
    """Averages the metric across ranks, and returns whether to stop early
    (`ShardedOptimizer.should_early_stop`). `optimizer`: index of the optimizer in the run. `site`:
    position in the script from which the function is called."""
    if mode not in ("min", "max"):
        raise ConfigurationError(f'should_early_stop(mode={mode!r}): expected "min" or "max"')
    if patience < 1:
        raise ConfigurationError(f"should_early_stop(patience={patience}): expected at least 1")
    if min_delta < 0:
        raise ConfigurationError(f"should_early_stop(min_delta={min_delta}): expected at least 0")
    try:
        value = float(metric)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: several elements
        raise ConfigurationError(
            f"should_early_stop(metric={metric!r}): expected one number ({error})"
        ) from error
    parts = (str(optimizer) if optimizer else "", mode if mode != "min" else "", name or "")
    known_as = ".".join([_NAME, *(part for part in parts if part)])
    counter = session.registered.find(known_as)
    if counter is None:
        counter = Patience()
        session.registered.register(known_as, counter)
    assert isinstance(counter, Patience)
    if counter.site is None:
        counter.site = site
    elif counter.site != site:
        raise ConfigurationError(
            f"should_early_stop(mode={mode!r}, name={name!r}) is called at two places in the "
            "script for the same optimizer, but calls are counted separately for each metric; "
            'give each call its own name, such as should_early_stop(loss, name="loss")'
        )

    def average(channel: Channel) -> float:
        values = [json.loads(v) for v in channel.exchange(json.dumps(value).encode())]
        return float(sum(values) / len(values))

    mean = session.operation("should_early_stop", average)
    if session.is_joining or session.is_redoing:
        return False
    stop = counter.observe(mean, mode=mode, patience=patience, min_delta=min_delta)
    session.early_stop.answered(stop, step=session.steps)
    return stop


Sums = dict[str, float]


class Batches(Protocol):
    """Batches of an evaluation, which can be read by number."""

    @property
    def dealing(self) -> str:
        """JSON object with the settings that determine the batches; must be the same on all
        ranks."""
        ...

    def __len__(self) -> int:
        """Returns the number of batches, which are numbered from 0."""
        ...

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """Yields the batches with these numbers, ascending."""
        ...


@runtime_checkable
class StreamedBatches(Protocol):
    """Batches of a stream in an evaluation. Their numbers have gaps, and their count is known only
    at the end."""

    @property
    def dealing(self) -> str:
        """JSON object with the settings that determine the batches; must be the same on all
        ranks."""
        ...

    @property
    def ended(self) -> str:
        """Sources that this rank has read to the end, as a JSON object: source -> [number of items,
        text]. The text must be the same on all ranks that have read the source."""
        ...

    def deal(self, held: Collection[int], ended: Iterable[str], rank: int, world_size: int) -> Any:
        """Returns the argument of `read` for the batches that `rank` must compute. `held`: numbers
        of the batches that any rank has already computed. `ended`: the value of `ended` on each
        rank."""
        ...

    def read(self, parts: Any) -> Iterator[tuple[int, Any]]:
        """Yields the batches described by `parts` (a result of `deal`), with their numbers."""
        ...


def _order_of(loader: Any) -> str | None:
    """Returns a digest of the order in which a torch DataLoader yields its samples. Returns None if
    the loader does not shuffle, or is of a different kind.

    Raises:
        ConfigurationError: the order is different each time.
    """
    batches, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
    samples = getattr(batches if batches is not None else loader, "sampler", None)
    drawn = batches if batches is not None else samples
    in_order = type(samples) is SequentialSampler and type(batches) in (BatchSampler, type(None))
    if (
        drawn is None
        or in_order
        or not isinstance(dataset, Sized)
        or isinstance(dataset, IterableDataset)
    ):
        return None
    known_to_draw = isinstance(
        samples, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
    )
    with generators_kept():  # restored only after both draws
        orders = [] if known_to_draw else [_drawn_from(drawn) for _ in range(2)]
    if len(set(orders)) != 1:
        raise ConfigurationError(
            "evaluate: the loader draws its samples with "
            f"{type(drawn if samples is None else samples).__name__}, so each rank has different "
            "batches, and some samples would count twice or not at all; create it with "
            "shuffle=False and without a sampler, or use ElasticDataLoader(train=False)"
        )
    return orders[0]


def _drawn_from(sampler: Iterable[Any]) -> str:
    digest = xxhash.xxh3_64()
    for drawn in sampler:
        digest.update(repr(drawn).encode())
    return digest.hexdigest()


class IteratedBatches:
    """Batches of any iterable with a length, such as a torch DataLoader. Reading skips the batches
    that this rank does not need."""

    def __init__(self, loader: Any) -> None:
        if not hasattr(loader, "__len__"):
            raise ConfigurationError(
                f"evaluate: {type(loader).__name__} has no length, so its batches cannot be dealt "
                "to ranks; use ElasticDataLoader(train=False)"
            )
        self._loader = loader
        dataset = getattr(loader, "dataset", None)
        known = identity_of(dataset) if hasattr(dataset, "__len__") else None
        self.dealing = json.dumps(
            {"number of batches": len(loader), SAMPLES: known, DRAWN: _order_of(loader)}
        )

    def __len__(self) -> int:
        return len(self._loader)

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, Any]]:
        """Yields (number, batch) for each of the given numbers, in ascending order.

        Raises:
            ConfigurationError: the loader yields more batches than its length.
        """
        wanted = set(numbers)
        for number, batch in enumerate(self._loader):
            if number == len(self):
                raise ConfigurationError(
                    f"evaluate: {type(self._loader).__name__} reports a length of {len(self)} "
                    "batches but yields more, which no rank would process; make its __len__ "
                    "return the actual number, or use ElasticDataLoader(train=False)"
                )
            if number in wanted:
                yield number, batch
                wanted.discard(number)
            if not wanted and number != len(self) - 1:
                return


def evaluate(
    session: Session,
    model: nn.Module,
    batches: Batches | StreamedBatches,
    fn: Callable[[nn.Module, Any], Mapping[str, Any]],
) -> Sums:
    """Returns the sums of the results of `fn(model, batch)` over all `batches`, computed in
    evaluation mode and without gradients.

    A joiner that is still replaying its script computes only the first batch, because its result is
    not needed. Random numbers drawn by `fn` depend on the evaluation and the batch's number, not on
    the rank that computes the batch. The script's own random state does not change."""
    key = (session.steps, session.operations.position)
    results: dict[int, Sums] = {}
    computed_at = session.steps

    def dealt(held: Collection[int], ended: Iterable[str], rank: int, world_size: int) -> Any:
        if isinstance(batches, StreamedBatches):
            return batches.deal(held, ended, rank, world_size)
        return itertools.islice(
            (n for n in range(len(batches)) if n not in held), rank, None, world_size
        )

    def compute(wanted: Any, most: int | None = None) -> None:
        with generators_kept():
            seed_generators(key)  # datasets may draw too: all ranks must read the same batches
            for number, batch in itertools.islice(batches.read(wanted), most):
                with generators_kept():
                    seed_generators((*key, number))
                    results[number] = _sums(fn(model, batch))
                session.progress.entered()

    def ended() -> str:
        return batches.ended if isinstance(batches, StreamedBatches) else "{}"

    def body(channel: Channel) -> Sums:
        nonlocal computed_at
        if computed_at != session.steps:
            # the ranks have returned to a checkpoint, so the results so far belong to a different
            # model
            results.clear()
            computed_at = session.steps
        own = json.dumps([batches.dealing, sorted(results), ended()]).encode()
        everyones_own = [json.loads(received) for received in channel.exchange(own)]
        dealings = [dealing for dealing, _, _ in everyones_own]
        if len(set(dealings)) > 1:
            raise evaluations_apart(dealings)
        held = {n for _, numbers, _ in everyones_own for n in numbers}
        with session.unsharded_for(channel), evaluating(model):
            # a module's eval() may use its parameters
            compute(
                dealt(held, [end for _, _, end in everyones_own], channel.rank, channel.world_size)
            )
        everyones: dict[int, Sums] = {}
        received = [
            json.loads(each)
            for each in channel.exchange(json.dumps([list(results.items()), ended()]).encode())
        ]
        _check_ends([json.loads(end) for _, end in received])
        for own, _ in received:
            everyones.update((number, sums) for number, sums in own)
        return _total(everyones[n] for n in sorted(everyones))

    with torch.no_grad(), session.evaluations.dealt():
        if session.is_joining:
            with evaluating(model):
                compute(dealt((), (), 0, sys.maxsize), most=1)
            return _total(results.values())
        total: Sums = session.operation("evaluate", body)
        return total


def _check_ends(ends: Sequence[Mapping[str, Any]]) -> None:
    """Checks that all ranks that have read a source to the end found the same contents; otherwise
    raises PreconditionError (RANKS_DIVERGED). `ends`: for each rank, the sources that it has
    read."""
    for name in {name: None for each in ends for name in each}:
        first = next(each[name] for each in ends if name in each)
        found = [each.get(name, first) for each in ends]
        if any(each != first for each in found):
            raise evaluations_apart([json.dumps({STREAMED: each[1]}) for each in found])


def _sums(returned: Any) -> Sums:
    try:
        return {name: float(value) for name, value in returned.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"evaluate: fn returned {returned!r}; expected a dict of sums over the batch, such as "
            f'{{"correct": 12, "samples": 32}}'
        ) from error


def _total(all_sums: Iterable[Sums]) -> Sums:
    total: Sums = {}
    for sums in all_sums:
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + value
    return total
