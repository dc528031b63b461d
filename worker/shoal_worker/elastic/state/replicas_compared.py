"""Compares the state that must be the same on several ranks, and describes differences.

Ranks diverge when a script changes values on only some of them, or when memory or arithmetic fails
on one machine. They compare their state after every `consistency_check_every` steps. They also
compare it before an update if a script has written to parameters or buffers on only some ranks.
Such writes are detected from torch's write counters, or from samples of each parameter's elements.
Digests of groups of tensors are compared first. If these differ, ranks exchange digests of each
tensor in the group, and then of parts of the first differing tensor, which indicate the cause.

After the last step, ranks do not compare their state, because a rank may run alone for minutes and
may change its own copy. Instead, each rank computes digests when its script leaves the loop over a
loader, and reports them when it leaves the job, so that the coordinator can compare them
(docs/explanation/consistency.md#replicas).

Used by the training thread.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from shoal_common.errors import MembershipChanged

from shoal_worker.elastic.contract.last_state import LastState
from shoal_worker.elastic.contract.phase import Phase
from shoal_worker.elastic.group.group import Group
from shoal_worker.elastic.state.committed_state import CommittedState
from shoal_worker.elastic.state.strategy_interface import BUFFERS, TrainingEngine
from shoal_worker.state.digest import digest_in_place, digest_of

_PARTS: Final = 64
"""Number of parts into which a tensor is divided for the comparison. If only one part differs, only
one or a few elements are wrong."""


def note_last_state(held: CommittedState, group: Group | None) -> None:
    """Records digests of the state after the last committed step, unless ranks have already
    compared that state. Called before the script does anything after its loop's last iteration."""
    if (
        group is None
        or group.world_size == 1
        or not held.has_engine
        or held.phase.now is not Phase.TRAINING
    ):
        return
    engine, step = held.engine, held.step
    if engine.consistency_check_every == 0 or engine.asynchronous or held.in_round:
        return
    if held.agreed == held.steps or held.last_state is not None:
        return
    if held.name is None or held.name.generation != group.generation.number:
        return  # ranks of a different generation have different parts of the state
    if step is not None and step.touched:
        return  # the step's passes have changed the model
    # If a step has begun, passes that bypass `model(...)` may have changed buffers.
    in_common = {
        name: tensors
        for name, tensors in engine.in_common().items()
        if step is None or name != BUFFERS
    }
    digests = {name: digest_of(tensors.values()) for name, tensors in in_common.items()}
    if digests:
        held.last_state = LastState(
            generation=group.generation.number,
            step=held.steps,
            agreed=held.agreed,
            digests=digests,
        )


def apart_at_the_end(what: str) -> str:
    """Returns the error message for a rank whose state after the last step differs from another
    rank's state. `what`: text that names what differs, and between which ranks."""
    return (
        f"{what}. At least one of these models is wrong: find out which one before you use "
        f"either. {_MANY}. If no script does, memory or arithmetic has failed on a machine. "
        f"{_OFTEN}"
    )


Exchange = Callable[[bytes], Sequence[bytes]]
"""Function that sends a message to all ranks and returns every rank's message, in rank order."""


def compare_after_step(
    held: CommittedState, engine: TrainingEngine, group: Group | None
) -> str | None:
    """Compares the ranks' state if a comparison has become due since the last call. Returns a
    description of the difference, the same on all ranks; None if no difference was found."""
    every, before, steps = engine.consistency_check_every, held.compared, held.steps
    held.compared = steps
    if every == 0 or group is None or group.world_size == 1 or steps // every == before // every:
        return None
    try:
        return _compare(held, engine.in_common(), group.exchange)
    except MembershipChanged:
        return None  # the step still counts; its end notices the failure


def compare_before_update(
    held: CommittedState, whole: Mapping[str, Mapping[str, torch.Tensor]], group: Group
) -> str | None:
    """Compares unsharded state of all ranks before they apply a step. `whole`: tensors by group and
    name. Returns a description of the difference; None if no difference was found."""
    try:
        return _compare(held, whole, group.exchange)
    except MembershipChanged:
        return None  # same as after a step


def _compare(
    held: CommittedState, in_common: Mapping[str, Mapping[str, torch.Tensor]], exchange: Exchange
) -> str | None:
    digests = {group: digest_of(tensors.values()) for group, tensors in in_common.items()}
    received: list[dict[str, Any]] = [
        json.loads(each)
        for each in exchange(json.dumps({"agreed": held.agreed, "digests": digests}).encode())
    ]
    groups = [each["digests"] for each in received]
    apart = differing(groups)
    if not apart:
        held.agreed = held.steps
        return None
    agreed = max(each["agreed"] for each in received)  # the digests of all ranks
    since = (
        f"All ranks agreed after step {agreed}; return to a checkpoint of that step or an earlier "
        "one"
        if agreed
        else "All ranks began with equal values"
    )
    try:
        what = _describe(in_common, groups, apart, exchange)
    except MembershipChanged:
        # a peer has failed, or has already reported the difference; this rank's values may be wrong
        holders = {rank: each[apart[0]] for rank, each in enumerate(groups) if apart[0] in each}
        what = disagreement(holders, "a tensor", apart[0])
    return f"after step {held.steps} {what}. {since}. {_OFTEN}"


def _describe(
    in_common: Mapping[str, Mapping[str, torch.Tensor]],
    groups: Sequence[Mapping[str, int]],
    apart: Sequence[str],
    exchange: Exchange,
) -> str:
    """Describes a difference: the tensor, the affected ranks, and the likely cause. `apart`: names
    of the groups of tensors that differ. `groups`: for each rank, the digests of its groups by
    name."""
    own = {
        group: {name: digest_in_place(tensor) for name, tensor in in_common.get(group, {}).items()}
        for group in apart
    }
    received = [json.loads(each) for each in exchange(json.dumps(own).encode())]
    group = apart[0]
    holders = [rank for rank, each in enumerate(groups) if group in each]
    tensors = {rank: received[rank][group] for rank in holders}
    names = differing([tensors.get(rank, {}) for rank in range(len(received))], all_have=holders)
    name = names[0]
    mine = in_common.get(group, {}).get(name)
    parts = [digest_in_place(part) for part in _parts_of(mine)] if mine is not None else []
    lists = [json.loads(each) for each in exchange(json.dumps(parts).encode())]
    places = [lists[rank] for rank in holders]
    wrong = sum(len(set(column)) > 1 for column in zip(*places, strict=False))
    few = wrong == 1 and min(map(len, places)) == _PARTS
    compared = max(map(len, tensors.values()))
    who = disagreement({rank: each.get(name) for rank, each in tensors.items()}, name, group)
    return f"{who} ({len(names)} of {compared} tensors there differ). {_FEW if few else _MANY}"


def _parts_of(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Splits the tensor into `_PARTS` parts of adjacent elements, or fewer parts if it has fewer
    elements."""
    return tensor.reshape(-1).tensor_split(max(1, min(_PARTS, tensor.numel())))


_FEW: Final = (
    f"Less than one {_PARTS}th of its elements differ, so the likely cause is a memory or "
    "arithmetic fault on that rank's machine, or a script that writes single elements on only "
    "some ranks"
)
_MANY: Final = (
    "The likely cause is a script that changes values on only some ranks: under `if shoal.rank() "
    "== 0:`, or from random numbers or data that differ between ranks. Change values in the same "
    "way on every rank"
)
_OFTEN: Final = "consistency_check_every= sets how often ranks compare"


def differing(values: Sequence[Mapping[str, int]], all_have: Sequence[int] = ()) -> list[str]:
    """Returns the names whose values differ between ranks, in order. `values`: for each rank, its
    values by name. `all_have`: ranks that must have every name."""
    names = dict.fromkeys(name for each in values for name in each)
    return [
        name
        for name in names
        if len(
            {each.get(name) for rank, each in enumerate(values) if name in each or rank in all_have}
        )
        > 1
    ]


def disagreement(values: Mapping[int, int | None], name: str, group: str) -> str:
    """Describes which ranks' values of the tensor `name` differ from the value on most ranks; if
    there is no majority, names all ranks. `values`: digests by rank, not all equal."""
    most, number = Counter(values.values()).most_common(1)[0]
    others = [rank for rank, digest in values.items() if digest != most]
    what = f"{name} ({group})"
    if 2 * number <= len(values):
        return f"{_ranks(values)} hold different values of {what}"
    rest = [rank for rank in values if rank not in others]
    return (
        f"{_ranks(others)} {'holds' if len(others) == 1 else 'hold'} different values of {what} "
        f"than {_ranks(rest)}"
    )


def _ranks(ranks: Sequence[int] | Mapping[int, Any]) -> str:
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
