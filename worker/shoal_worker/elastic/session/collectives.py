"""Collectives for scripts, between steps: gather, all-reduce, broadcast and barrier of plain
values.

Each call is an operation of all ranks (`operations.py`). After a fault, it is repeated with the
remaining ranks, unless a rank already has the result and sends it to the others. Values are sent as
JSON, and the tensors in them as safetensors, without pickle. The results are bitwise the same on
all ranks, because each rank combines the same values on the CPU in rank order.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from shoal_common.errors import ConfigurationError, PreconditionError

from shoal_worker.state.serial import dump_tensors, load_tensors

if TYPE_CHECKING:
    from shoal_worker.elastic.contract.channel import Channel
    from shoal_worker.elastic.session.session import Session

OPERATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "sum": lambda values: values.sum(0),
    "mean": lambda values: values.mean(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
}
"""Reductions of `all_reduce` by name. Their argument is a stack of the ranks' values along the
first dimension."""

_WHOLE: Final[Mapping[str, Callable[[Sequence[int]], int]]] = {"sum": sum, "max": max, "min": min}
"""Reductions of `all_reduce` for Python integers, which are exact for integers of any size."""

_KINDS: Final = "plain tensors, numbers, strings, None, and lists, tuples and dictionaries of them"


def gather(
    session: Session, value: Any, *, kind: str = "gather", source: int | None = None
) -> list[Any]:
    """Returns the `value` of each rank, in rank order. `source`: if given, only rank `source` sends
    its value, and the other entries are None."""
    if session.elastic and session.is_asynchronous:
        raise PreconditionError(
            f"{kind} with strategy='async_sgd': workers take steps independently and have no "
            "collectives. Report values with shoal.report, and evaluate in another process, from "
            "the parameter servers"
        )
    data = packed(value, kind)

    def body(channel: Channel) -> list[str]:
        # In a world of one, the result is this rank's own value. This includes a process that has
        # not reached its peers' position (see `Session.operation`).
        sends = source is None or channel.rank == source or channel.world_size == 1
        return [
            base64.b64encode(each).decode() for each in channel.exchange(data if sends else b"")
        ]

    return [unpacked(base64.b64decode(each)) for each in session.operation(kind, body)]


def all_reduce(session: Session, value: Any, op: str) -> Any:
    """Combines all ranks' `value` with the reduction `op` (`shoal.all_reduce`). The result is the
    same on all ranks."""
    if op not in OPERATIONS:
        raise ConfigurationError(f"all_reduce(op={op!r}): expected one of {', '.join(OPERATIONS)}")
    return _reduced(gather(session, value, kind=f"all_reduce {op}"), value, op, "value")


def broadcast(session: Session, value: Any, from_rank: int) -> Any:
    """Returns the `value` of rank `from_rank`, on all ranks (`shoal.broadcast`)."""
    if from_rank < 0 or (from_rank >= session.world_size and not session.is_joining):
        raise ConfigurationError(
            f"broadcast(from_rank={from_rank}): expected 0 to {session.world_size - 1}"
        )
    everyones = gather(session, value, kind="broadcast", source=from_rank)
    if len(everyones) == 1:
        return everyones[0]
    if from_rank >= len(everyones):  # the rank existed when the operation began
        raise PreconditionError(
            f"broadcast(from_rank={from_rank}): that rank was lost during the call, and only "
            f"{len(everyones)} ranks are left; broadcast from rank 0, which always exists",
            reason="RANK_GONE",
        )
    return everyones[from_rank]


def barrier(session: Session) -> None:
    """Waits until all ranks have called this function (`shoal.barrier`)."""
    gather(session, None, kind="barrier")


def packed(value: Any, kind: str) -> bytes:
    """Encodes a value as bytes. `kind`: name of the operation, for error messages.

    Raises:
        ConfigurationError: `gather` does not support the value."""
    tensors: dict[str, torch.Tensor] = {}
    return dump_tensors(tensors, {"value": _plain(value, tensors, kind)})


def unpacked(payload: bytes) -> Any:
    """Decodes a value that `packed` has encoded. Returns None for empty bytes."""
    if not payload:
        return None
    tensors, document = load_tensors(payload)
    return _rebuilt(document["value"], tensors)


def _plain(value: Any, tensors: dict[str, torch.Tensor], kind: str) -> Any:
    """Converts a value to nested JSON lists, each of which begins with the kind of the value that
    it represents. Adds tensors to `tensors`; the JSON refers to them by their keys."""
    if (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
        and not value.is_meta
    ):
        name = str(len(tensors))
        tensors[name] = value.detach()
        return ["tensor", name]
    if value is None or type(value) in (bool, int, float, str):
        return ["value", value]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_plain(each, tensors, kind) for each in value]]
    if type(value) is dict and all(type(key) in (bool, int, float, str) for key in value):
        return ["dict", [[key, _plain(each, tensors, kind)] for key, each in value.items()]]
    raise ConfigurationError(f"{kind} of a value of {type(value).__name__}: expected {_KINDS}")


def _rebuilt(plain: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    what, inner = plain
    if what == "tensor":
        return tensors[inner]
    if what == "dict":
        return {key: _rebuilt(each, tensors) for key, each in inner}
    if what in ("list", "tuple"):
        return (list if what == "list" else tuple)(_rebuilt(each, tensors) for each in inner)
    return inner


def _reduced(everyones: Sequence[Any], own: Any, op: str, where: str) -> Any:
    """Combines the ranks' values with `op`. The result has the same type, and is on the same
    device, as this rank's own value."""
    if isinstance(own, torch.Tensor):
        _check_alike([_shape(each) for each in everyones], op, where)
        stacked = torch.stack(list(everyones))
        if not stacked.is_floating_point() and not stacked.is_complex():
            # for small integer types and bools, a sum must not overflow
            stacked = stacked.double() if op == "mean" else stacked.long()
        return OPERATIONS[op](stacked).to(own.device)
    if type(own) in (bool, int, float):
        _check_alike([_number(each) for each in everyones], op, where)
        if op == "mean" or any(type(each) is float for each in everyones):
            return float(OPERATIONS[op](torch.tensor(everyones, dtype=torch.float64)))
        return _WHOLE[op](everyones)
    _check_alike([_structure(each) for each in everyones], op, where)
    if type(own) is dict:
        return {
            key: _reduced([each[key] for each in everyones], own[key], op, f"{where}[{key!r}]")
            for key in own
        }
    if type(own) in (list, tuple):
        parts = enumerate(zip(zip(*everyones, strict=True), own, strict=True))
        return type(own)(_reduced(each, mine, op, f"{where}[{n}]") for n, (each, mine) in parts)
    raise ConfigurationError(
        f"all_reduce of {where}={own!r}: expected tensors and numbers, or lists, tuples and "
        "dictionaries of them"
    )


def _shape(value: Any) -> str:
    return (
        f"a tensor of {tuple(value.shape)}, {value.dtype}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
    )


def _number(value: Any) -> str:
    return "a number" if type(value) in (bool, int, float) else _shape(value)


def _structure(value: Any) -> str:
    if type(value) is dict:
        return f"a dictionary of {sorted(map(str, value))}"
    return (
        f"{type(value).__name__} of {len(value)}" if type(value) in (list, tuple) else _shape(value)
    )


def _check_alike(descriptions: Sequence[str], op: str, where: str) -> None:
    """Checks that all ranks have passed the same kind of value; otherwise raises PreconditionError,
    on all ranks."""
    if len(set(descriptions)) > 1:
        other = next(number for number, each in enumerate(descriptions) if each != descriptions[0])
        raise PreconditionError(
            f"all_reduce {op} of {where}: rank 0 passed {descriptions[0]}, but rank {other} "
            f"passed {descriptions[other]}; expected equal shapes and dtypes. Use gather for "
            "values that differ in shape"
        )
