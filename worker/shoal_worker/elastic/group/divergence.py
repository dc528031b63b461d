"""Errors for ranks whose scripts have diverged (RANKS_DIVERGED). The errors contain each rank's
position or a description of the difference.

A step vote shows, on all ranks at the same time, that the ranks have diverged (`step.py`), but not
how. They then exchange the details here. Used by the training thread.

`replicas_compared.py` detects parameters and other state whose values have diverged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from shoal_common.errors import MembershipChanged, PreconditionError

from shoal_worker.elastic.contract.loader_interface import StepSource
from shoal_worker.elastic.contract.step import ScriptPosition
from shoal_worker.elastic.group.group import Group
from shoal_worker.state.digest import DRAWN, SAMPLES, STREAMED

REASON: Final = "RANKS_DIVERGED"
COUNTING: Final = (
    "A counter in the script, such as enumerate(loader)'s or `if optimizer.step(): count += 1`, "
    "starts from zero in a process that joins. For actions every k steps, use "
    "loader.global_step, or every_steps= of save_checkpoint and evaluate"
)
"""Usual cause of diverging scripts, and its remedy."""

_REMEDIES: Final = {
    DRAWN: "a sampler draws the same indices on every rank if its random numbers come from a "
    "generator stored as its attribute, or from the global generators of torch, NumPy or "
    "Python, and if it does not depend on the rank",
    STREAMED: "every rank must read the whole stream, in the same order, because Shoal deals the "
    "items. Do not split it by rank or worker (split_dataset_by_node, split_by_node), and "
    "seed its shuffling in set_epoch(epoch)",
    SAMPLES: "each rank creates its own dataset, so pass a generator with the same seed on every "
    "rank to random_split and to other functions that draw samples, sort directory listings, and "
    "do not split the dataset by rank (split_dataset_by_node, .shard)",
}


def steps_apart(
    place: ScriptPosition, source: StepSource | None, group: Group | None, of: str = ""
) -> PreconditionError:
    """Returns the error for ranks whose scripts are at different positions according to the step
    vote. Must be called on all ranks of `group`. `place`, `source`: this rank's position and
    loader. `of`: see `Step.of`."""
    report = {
        "place": place[:-1],
        "dealing": json.loads(source.dealing) if source is not None else {},
        "of": of,
    }
    try:
        everyones = (
            [json.loads(each) for each in group.exchange(json.dumps(report).encode())]
            if group is not None
            else [report]
        )
    except MembershipChanged:  # a peer has already raised its error and left
        everyones = [report]
    return PreconditionError(f"ranks diverged: {_difference(everyones)}", reason=REASON)


def waits_apart(one: dict[str, Any], other: dict[str, Any]) -> PreconditionError:
    """Returns the error for two ranks that are waiting for each other in different collectives.
    `one`, `other`: description of each rank, with the entries `rank` and `what` (the collective in
    which it is waiting)."""
    ordered = sorted((one, other), key=lambda each: int(each["rank"]))
    who = ", ".join(f"rank {each['rank']} is in {each['what']}" for each in ordered)
    return PreconditionError(
        f"ranks diverged ({who}) and would wait for each other forever; every rank must take the "
        "same steps, and between them call evaluate, save_checkpoint, should_early_stop and "
        f"similar functions in the same order. {COUNTING}",
        reason=REASON,
    )


def traces_apart(
    one: dict[str, Any], other: dict[str, Any], what: tuple[str, str], step: int
) -> PreconditionError:
    """Returns the error for two ranks that are waiting for each other in different collectives of
    step number `step`. `one`, `other`: description of each rank, with the entry `rank`. `what`: the
    actions of the two ranks."""
    (first, does), (second, does_) = sorted(
        ((int(each["rank"]), text) for each, text in zip((one, other), what, strict=True))
    )
    return PreconditionError(
        f"ranks diverged in step {step} and would wait for each other forever: rank {first} "
        f"{does}, but rank {second} {does_}; every rank must run the same passes in a step and "
        "call optimizer.step() at the same point, for several models in the same order. "
        f"{COUNTING}",
        reason=REASON,
    )


def operations_apart(who: str) -> PreconditionError:
    """Returns the error for ranks that do different things between two steps. `who`: text that
    names the ranks and their operations."""
    return PreconditionError(
        f"ranks diverged ({who}); every rank must call evaluate, save_checkpoint and "
        "should_early_stop, and iterate over the loader, in the same order. "
        f"{COUNTING}",
        reason=REASON,
    )


def boundaries_apart(places: Sequence[Sequence[Any]]) -> PreconditionError:
    """Returns the error for ranks whose scripts are at different positions when joiners are
    admitted. `places`: for each rank, the loader's name, the loader's index in the script, the
    epoch and the step."""
    return PreconditionError(
        "ranks diverged: their scripts are at different positions (loader, its number in the "
        f"script, epoch, step): {list(places)}; every rank must iterate over the same loaders in "
        "the same order",
        reason=REASON,
    )


def ends_apart(ended_after: int, step: int) -> PreconditionError:
    """Returns the error for a rank that takes a step after a peer's script has finished.
    `ended_after`: the step after which a peer's script finished."""
    return PreconditionError(
        f"ranks diverged: a peer's script finished after step {ended_after}, but this rank is "
        f"taking step {step}; all ranks must take the same steps: exit the loop on a condition "
        "that is the same on all ranks, such as loader.global_step or should_early_stop",
        reason=REASON,
    )


def settings_apart(settings: Sequence[Mapping[str, Any]], group: Group | None) -> PreconditionError:
    """Returns the error for ranks whose optimizers have different settings. Must be called on all
    ranks of `group`. `settings`: this rank's settings, by parameter group, followed by settings
    that belong to no group."""
    try:
        everyones: list[list[dict[str, Any]]] = (
            [json.loads(each) for each in group.exchange(json.dumps(settings).encode())]
            if group is not None
            else []
        )
        what = _different_settings(everyones)
    except MembershipChanged:  # a peer has already raised its error and left
        everyones, what = [], f"this rank has {list(settings)}"
    error = PreconditionError(
        f"the ranks' optimizers have different settings ({what}). Hyper-parameters that change "
        "during training must change identically on all ranks, including ranks that join later: "
        "use a scheduler, whose state is sent to joiners, or compute them from "
        "loader.global_step. 'parameters' is a digest of the parameter groups and of "
        "requires_grad; if it differs, use the same groups and freeze the same parameters on all "
        "ranks",
        reason=REASON,
    )
    error.on_all_ranks = bool(everyones)
    return error


def evaluations_apart(dealings: Sequence[str]) -> PreconditionError:
    """Returns the error for ranks that would evaluate different batches. `dealings`: for each rank,
    JSON that determines its batches. At least two of them differ."""
    what = _differences([json.loads(dealing) for dealing in dealings])
    return PreconditionError(
        f"ranks diverged: they evaluate different batches {what}",
        reason=REASON,
    )


def _difference(everyones: Sequence[dict[str, Any]]) -> str:
    places = [tuple(each["place"]) for each in everyones]
    if len(set(places)) > 1:
        different = _compare([_describe(place) for place in places])
        return (
            f"{different}; every rank must iterate over the same loaders in the same order. "
            f"{COUNTING}"
        )
    if len({each["of"] for each in everyones}) > 1:
        different = _compare([f"stepped the optimizer of {each['of']}" for each in everyones])
        return (
            f"{different}; all ranks must step the optimizers of several models in the same order "
            "for a batch, or all must leave one out"
        )
    return (
        f"they divide the samples of {_describe(places[0])} in different ways "
        f"{_differences([each['dealing'] for each in everyones])}"
    )


def _differences(dealings: Sequence[dict[str, Any]]) -> str:
    """Describes how the settings in `dealings` differ between ranks, and how to fix that."""
    names = [
        name
        for name in dealings[0]
        if len({json.dumps(dealing.get(name)) for dealing in dealings}) > 1
    ]
    what = (
        "; ".join(
            f"{name}: {_compare([json.dumps(dealing.get(name)) for dealing in dealings])}"
            for name in names
        )
        or "unknown"
    )
    remedies = [_REMEDIES[name] for name in names if name in _REMEDIES] or [
        "create the loader with the same arguments on every rank"
    ]
    return f"({what}); {'; '.join(remedies)}"


def _different_settings(everyones: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Describes which settings differ between ranks. `everyones`: for each rank, its settings, as
    in `settings_apart`."""
    counts = [len(each) - 1 for each in everyones]
    if len(set(counts)) > 1:
        return f"number of parameter groups: {_compare(list(map(str, counts)))}"
    differences = []
    for number, groups in enumerate(zip(*everyones, strict=True)):
        of = f" of group {number}" if number < counts[0] else ""
        for name in dict.fromkeys(name for group in groups for name in group):
            values = [group.get(name) for group in groups]
            if any(value != values[0] for value in values):
                differences.append(f"{name!r}{of}: {_compare(list(map(repr, values)))}")
    return "; ".join(differences) or "unknown"


def _compare(values: Sequence[str]) -> str:
    """Returns text with rank 0's value, and the value of the first rank that differs."""
    other = next((rank for rank, value in enumerate(values) if value != values[0]), 0)
    return (
        f"rank 0 has {values[0]}, rank {other} has {values[other]}"
        if other
        else f"rank 0 has {values[0]}"
    )


def _describe(place: Sequence[Any]) -> str:
    loader, number, epoch, step = place
    if not loader:
        return "a step of a loop without a Shoal loader"
    return f"step {step} of epoch {epoch} of loader {loader!r}, number {number} in the script,"
