"""Early stopping: one decision for all ranks, kept in the session so that joiners and checkpoints carry it."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from shoal_common.errors import ConfigurationError

if TYPE_CHECKING:
    from shoal_worker.elastic.group import Channel
    from shoal_worker.elastic.session import Session

_NAME = "shoal.early_stop"


class Patience:
    """How often in a row a metric did not improve."""

    def __init__(self) -> None:
        self.best: float | None = None
        self.bad_calls = 0

    def observe(self, metric: float, *, mode: str, patience: int, min_delta: float) -> bool:
        """Counts one value; True if it is time to stop. NaN never improves."""
        gain = math.inf if self.best is None else (self.best - metric if mode == "min" else metric - self.best)
        if not math.isnan(metric) and gain > min_delta:
            self.best, self.bad_calls = metric, 0
        else:
            self.bad_calls += 1
        return self.bad_calls >= patience

    def state_dict(self) -> dict[str, Any]:
        """For joiners and checkpoints."""
        return {"best": self.best, "bad_calls": self.bad_calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self.best, self.bad_calls = state["best"], state["bad_calls"]


def should_early_stop(session: Session, metric: float, *, mode: str, patience: int, min_delta: float) -> bool:
    """See `ShardedOptimizer.should_early_stop`."""
    if mode not in ("min", "max"):
        raise ConfigurationError(f'should_early_stop(mode={mode!r}): expected "min" or "max"')
    if patience < 1:
        raise ConfigurationError(f"should_early_stop(patience={patience}): expected at least 1")
    if min_delta < 0:
        raise ConfigurationError(f"should_early_stop(min_delta={min_delta}): expected at least 0")
    try:
        value = float(metric)
    except (TypeError, ValueError, RuntimeError) as error:  # the last: a tensor of several elements
        raise ConfigurationError(f"should_early_stop(metric={metric!r}): expected one number ({error})") from error
    counter = session.registered.find(_NAME)
    if counter is None:
        counter = Patience()
        session.registered.register(_NAME, counter)
    assert isinstance(counter, Patience)

    def average(channel: Channel) -> float:
        values = [json.loads(v) for v in channel.exchange(json.dumps(value).encode())]
        return float(sum(values) / len(values))

    mean = session.operation("should_early_stop", average)
    if session.is_joining or session.is_redoing:
        return False
    return counter.observe(mean, mode=mode, patience=patience, min_delta=min_delta)
