"""Deals micro-batches in proportion to the ranks' speeds.

Each rank measures how long it works on a micro-batch, excluding waits for peers. At the end of some
steps (`exchanges_after`) the ranks exchange these times. Under local_sgd, where each rank takes the
steps of a round on its own, the times are exchanged with the averages at the end of each round.
From the times, all ranks compute the same shares: the numbers of micro-batches that let the slowest
rank finish as early as possible. The shares apply until the generation ends; a new generation
starts with equal shares. The shares do not affect the samples of a step or, with
`deterministic=True`, its result. Without `deterministic=True`, measured times would make the
results of two runs differ in their last digits, so dealing by speed must be requested.

Plain batches are always dealt evenly. If a rank got a larger plain batch, it might run out of
memory, and a loss that is not a mean over samples would depend on the batch's size. Micro-batches,
in contrast, have the same size on every rank. May be used only on the training thread."""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import torch

from shoal_worker.elastic.contract.loader_interface import LoaderSession, Placement

_log = logging.getLogger(__name__)

_EXCHANGE_EVERY: Final = 16
"""Number of steps between two exchanges."""
_EARLY_EXCHANGES: Final = (4, 8)
"""Numbers of steps after which there are additional exchanges, because a run starts with equal
shares."""
_LEAST_DIFFERENCE: Final = 1.15
"""Dealing by speed begins only if the slowest rank's time is at least this multiple of the fastest
rank's time."""
_PARTS: Final = 1_000_000_000
"""Units per second, and per unit of relative speed, in exchanged numbers: times are sent as integer
nanoseconds."""
_LEAST_GAIN: Final = 0.05
"""Minimum fraction of a step's time that new shares must save before they are adopted, so that
noise in the measurements has no effect."""
_BATCH_NORM: Final = (
    "loader %r: micro-batches are dealt by speed, and the model has batch normalization. Each "
    "rank's running statistics come from its own micro-batches, so the model in evaluation now "
    "depends on the measured speeds. To avoid this, remove balance=True, or use layers that "
    "normalize each sample (GroupNorm, LayerNorm)"
)


@functools.lru_cache(maxsize=8)
def divided(items: int, costs: tuple[float, ...]) -> tuple[int, ...]:
    """Divides micro-batches among ranks so that the slowest rank finishes as early as possible.

    Every rank gets at least one micro-batch if there are enough. With equal costs, the shares
    differ by at most one micro-batch, and the lower ranks get the larger shares.

    Args:
        items: number of micro-batches.
        costs: seconds per micro-batch of each rank; positive.

    Returns:
        The number of micro-batches of each rank."""
    least = 1 if items >= len(costs) else 0
    total = sum(1 / cost for cost in costs)
    parts = [max(least, int(items / cost / total)) for cost in costs]
    ranks = range(len(costs))
    while sum(parts) > items:  # because a rank's minimum of one may exceed its proportion
        more = [rank for rank in ranks if parts[rank] > least]
        parts[max(more, key=lambda rank: (parts[rank] * costs[rank], rank))] -= 1
    while sum(parts) < items:
        parts[min(ranks, key=lambda rank: ((parts[rank] + 1) * costs[rank], rank))] += 1
    return tuple(parts)


def exchanges_after(steps: int) -> bool:
    """Returns whether ranks exchange times at the end of a loader's step. `steps`: number of the
    loader's steps so far, including this one."""
    return steps in _EARLY_EXCHANGES or (steps > 0 and steps % _EXCHANGE_EVERY == 0)


class Times(NamedTuple):
    """One rank's contribution to an exchange of times."""

    seconds: float | None
    """Median time per micro-batch, in seconds; None if none was timed."""
    speed: float | None
    """Relative speed set by the user; None if the speed is to be measured."""


def agreed_costs(summed: Sequence[float], ranks: int) -> tuple[float, ...] | None:
    """Computes each rank's seconds per micro-batch from the sum of all ranks' results of
    `contribution`. Returns None if a rank has no measured time. If the user has set the speed of
    any rank, measured times are ignored, and ranks without a set speed have speed 1."""
    times, timed, speeds, given = (summed[i * ranks : (i + 1) * ranks] for i in range(4))
    if any(given):
        return tuple(
            n * _PARTS / speed if n else 1.0 for speed, n in zip(speeds, given, strict=True)
        )
    if not all(timed):
        return None
    return tuple(total / n / _PARTS for total, n in zip(times, timed, strict=True))


def contribution(times: Times, rank: int, ranks: int) -> list[float]:
    """Encodes one rank's contribution as numbers that are summed across ranks. They form four rows
    with one column per rank: the rank's time, 1 if it has a time, the speed that the user has set
    for it, and 1 if there is such a speed. All other numbers are 0. The processes of one model
    replica have the same `rank`; their times are averaged. All numbers are integers, so the sum
    does not depend on the order of the ranks."""
    rows = [[0.0] * ranks for _ in range(4)]
    for row, value in ((0, times.seconds), (2, times.speed)):
        if value is not None:
            rows[row][rank] = float(max(1, round(value * _PARTS)))
            rows[row + 1][rank] = 1.0
    return [number for row in rows for number in row]


class DealtToRank(Protocol):
    """The properties of a step that determine how it can be divided."""

    placement: Placement
    positions: range
    steps_before: int


class Balance:
    """Decides how a loader's steps are divided among ranks by speed."""

    def __init__(
        self, *, global_batch_size: int, micro_batch_size: int | None, wanted: bool
    ) -> None:
        """Starts with equal shares.

        Args:
            global_batch_size: number of samples in a step.
            micro_batch_size: number of samples in a micro-batch; None: the loader deals plain
                batches, always evenly.
            wanted: True to deal in proportion to speed; False to deal evenly.
        """
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._wanted = wanted
        self._generation = -1
        self._costs: tuple[float, ...] | None = None
        self._timed: list[tuple[float, bool]] = []
        """Seconds per full micro-batch, and True unless they were extrapolated from a shorter
        one."""
        self._offered = 0
        """Number of entries of `_timed` in the last offer."""
        self._began: tuple[float, float] | None = None
        self._items = 0
        """Number of micro-batches in the last step that may be divided; 0: none yet."""
        self._warned = False
        """True if a warning about batch normalization has been logged."""

    def costs(self, placement: Placement) -> tuple[float, ...] | None:
        """Returns each rank's seconds per micro-batch, as agreed in `placement`'s generation; None:
        equal shares."""
        if self._generation != placement.generation:
            self._generation, self._costs = placement.generation, None
            self._timed.clear()
        return self._costs

    def share(self, step: DealtToRank, blocks: int) -> float:
        """Returns this rank's share of the step in relation to an equal share, if steps are dealt
        by speed or may have fewer micro-batches than ranks; otherwise 0. `blocks`: this rank's
        number of micro-batches."""
        if self._micro_batch_size is None:
            return 0.0
        ranks, items = step.placement.world_size, self._micro_batches(step)
        too_few = self._global_batch_size <= (ranks - 1) * self._micro_batch_size
        return blocks * ranks / items if self._costs is not None or too_few else 0.0

    def begin(self, step: DealtToRank, session: LoaderSession) -> None:
        """Starts timing a micro-batch, before it is fetched. To avoid synchronizing the device in
        every step, times only the last two steps before an exchange. An exchange at the end of a
        round does not include the round's last step (see `offer`)."""
        steps = step.steps_before + 1 + session.steps_alone
        timed = (exchanges_after(steps) or exchanges_after(steps + 1)) and self._deals(step)
        self._began = (time.monotonic(), session.waited_s) if timed else None

    def end(self, samples: int, session: LoaderSession) -> None:
        """Stops timing a micro-batch of `samples` samples, after its backward pass. The time of one
        that is not full is extrapolated; it is used only if this rank has timed no full one."""
        if self._began is None or self._micro_batch_size is None or not samples:
            return
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # waits because the device may lag behind the script
        began_s, waited_s = self._began
        seconds = time.monotonic() - began_s - (session.waited_s - waited_s)
        size = self._micro_batch_size
        self._timed.append((seconds * size / samples, samples == size))

    def exchange(self, step: DealtToRank, session: LoaderSession, loader: str) -> None:
        """Exchanges times if an exchange is due after this step. Must be called on all ranks, when
        no collective of the step is pending. If a rank fails during the exchange, the shares do not
        change, and a new generation follows."""
        if (
            session.steps_alone
            or not exchanges_after(step.steps_before + 1)
            or not self._deals(step)
        ):
            return
        own = self._contribution(step, session)
        self._timed.clear()
        summed = session.sum_numbers(own)
        if summed is not None:
            self._agree(summed, step, loader, self._micro_batches(step))

    def offer(self, step: DealtToRank, session: LoaderSession) -> None:
        """Offers this rank's times for the exchange at the end of the step's round. Has an effect
        only if ranks take the steps of a round on their own (local_sgd). Called in each step,
        because only the engine knows which step ends the round. Called before the step's first
        micro-batch, so that all ranks offer their times even if their scripts leave the loop over
        micro-batches early."""
        if self._deals(step):
            self._items = self._micro_batches(step)
        # The step that ends a round may have few samples, as the last one of an epoch.
        if session.steps_alone and self._balances(step):
            self._offered = len(self._timed)
            session.offer_numbers(self._contribution(step, session))

    def round_ended(self, summed: Sequence[float], step: DealtToRank, loader: str) -> None:
        """Processes the sum of all ranks' offers. Called when a step that ends a round has been
        committed."""
        del self._timed[: self._offered]  # micro-batches of this step have not been offered yet
        if self._items:
            self._agree(summed, step, loader, self._items)

    def _contribution(self, step: DealtToRank, session: LoaderSession) -> list[float]:
        full = [seconds for seconds, is_full in self._timed if is_full]
        times = full or [seconds for seconds, _ in self._timed]
        own = Times(statistics.median(times) if times else None, session.speed)
        return contribution(own, step.placement.rank, step.placement.world_size)

    def _balances(self, step: DealtToRank) -> bool:
        """Returns whether the user has requested a division by speed, and there are several
        ranks."""
        return self._micro_batch_size is not None and self._wanted and step.placement.world_size > 1

    def _deals(self, step: DealtToRank) -> bool:
        """Returns whether a step may be divided by speed: `_balances` is true, and the step has
        more micro-batches than there are ranks."""
        return self._balances(step) and self._micro_batches(step) > step.placement.world_size

    def _micro_batches(self, step: DealtToRank) -> int:
        """Returns the step's number of micro-batches, over all ranks."""
        assert self._micro_batch_size is not None
        return -(-len(step.positions) // self._micro_batch_size)

    def _agree(self, summed: Sequence[float], step: DealtToRank, loader: str, items: int) -> None:
        costs = agreed_costs(summed, step.placement.world_size)
        if costs is not None:
            self._adopt(costs, step, loader, items)

    def _adopt(self, costs: tuple[float, ...], step: DealtToRank, loader: str, items: int) -> None:
        """Adopts the agreed costs if dealing by them would shorten a step of `items` micro-batches
        noticeably."""
        now = divided(items, self._costs or (1.0,) * len(costs))
        then = divided(items, costs)
        takes_s, would_take_s = (
            max(n * cost for n, cost in zip(parts, costs, strict=True)) for parts in (now, then)
        )
        if (max(costs) < _LEAST_DIFFERENCE * min(costs) and self._costs is None) or would_take_s > (
            1 - _LEAST_GAIN
        ) * takes_s:
            return
        self._costs = costs
        if step.placement.rank == 0 and step.placement.leads_replica:
            if step.placement.least_samples > 1 and not self._warned:
                self._warned = True
                _log.warning(_BATCH_NORM, loader)
            slowest = costs.index(max(costs))
            _log.info(
                "loader %r: rank %d takes %.1f times as long for a micro-batch as the median rank. "
                "The %d micro-batches of a step are now dealt by speed: %s; a step takes about "
                "%.0f %% less time",
                loader,
                slowest,
                costs[slowest] / statistics.median_low(costs),
                items,
                _shown(then),
                100 * (1 - would_take_s / takes_s),
            )


def _shown(parts: Sequence[int]) -> str:
    """Formats the ranks' numbers of micro-batches for log messages: "5, 5, 1"."""
    shown = ", ".join(map(str, parts[:16]))
    return shown if len(parts) <= 16 else f"{shown}, ..."
