"""What the ranks are given from outside, and must be given alike: a file's content, another model's values.

Ranks that hold copies of one state do not notice when one of them is given something else: they train on, each on its own. So what is given
goes through an operation first, in which the ranks compare digests. What one rank cannot read, none takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from shoal_common.errors import ConfigurationError, ShoalError

from shoal_worker.state.digest import state_digest

if TYPE_CHECKING:
    from shoal_worker.elastic.group import Channel
    from shoal_worker.elastic.replica import StrategySession

T = TypeVar("T")


def agreed(session: StrategySession, kind: str, read: Callable[[], T]) -> T:
    """What `read` gives, if it gives the same on all ranks; an operation. `kind`: the call, for errors. Nothing is changed.

    Raises:
        ConfigurationError: the ranks have read different things, or another rank could read nothing.
        ShoalError: what `read` raised here.
    """
    value, refused, told = None, None, {}
    try:
        value = read()
        told = {"digest": f"{state_digest(value):016x}"}
    except ShoalError as error:
        refused, told = error, {"error": str(error)}

    def body(channel: Channel) -> list[Any]:
        return [json.loads(each) for each in channel.exchange(json.dumps(told).encode())]

    everyones = session.operation(kind, body)
    if refused is not None:
        raise refused
    for rank, other in enumerate(everyones):
        if "error" in other:
            raise ConfigurationError(f"{kind}: rank {rank} was given what it cannot take, so no rank takes anything: {other['error']}")
        if other != everyones[0]:
            raise ConfigurationError(
                f"{kind}: rank {rank} was given other values than rank 0 (their digests: {other['digest']}, {everyones[0]['digest']}); "
                "give all ranks the same"
            )
    assert value is not None
    return value
