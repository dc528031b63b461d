"""Errors for ranks whose scripts diverged (RANKS_DIVERGED), with each rank's position or with the
difference.

A step vote only reveals that the ranks diverged (`step.py`). All ranks learn this together and then
exchange the details here. Used by the training thread.

`replicas_compared.py` detects diverging values of parameters and other state.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from shoal_common.errors import MembershipChanged, PreconditionError

from shoal_worker.elastic.contract.loader_interface import StepSource
from shoal_worker.elastic.contract.step import ScriptPosition
from shoal_worker.elastic.group.group import Group
from shoal_worker.state.digest import DRAWN, SAMPLES, STREAMED

REASON: Final = "RANKS_DIVERGED"
COUNTING: Final = (
    "A count of the script's own, such as enumerate(loader)'s or that of `if optimizer.step(): "
    "count += 1`, starts from zero in a process that joins: what happens every k steps goes by "
    "loader.global_step, or by every_steps= of save_checkpoint and evaluate"
)
"""Usual cause of diverging scripts, and its remedy."""

_REMEDIES: Final = {
    DRAWN: "a sampler draws the same on every rank if its random numbers come from a generator "
    "that it holds as an "
    "attribute, or from the global ones of torch, NumPy or Python, and if it does not look at the "
    "rank",
    STREAMED: "a stream must give all ranks the same items in the same order, whole: Shoal deals "
    "them. Do not split it by rank or worker "
    "(split_dataset_by_node, split_by_node), and seed its shuffling by set_epoch(epoch)",
    SAMPLES: "every rank makes its dataset itself, so give random_split and whatever else draws "
    "samples a "
    "generator with the same seed on every rank, and sort what a directory lists",
}


def steps_apart(
    place: ScriptPosition, source: StepSource | None, group: Group | None, of: str = ""
) -> PreconditionError:
    """Returns the error for ranks whose step votes did not agree. Called by all ranks of `group`.
    `place`, `source`: this rank's position and loader. `of`: see `Step.of`."""
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
    except MembershipChanged:  # a peer has raised its error and left
        everyones = [report]
    return PreconditionError(f"ranks diverged: {_difference(everyones)}", reason=REASON)


def waits_apart(one: dict[str, Any], other: dict[str, Any]) -> PreconditionError:
    """Returns the error for ranks that wait for each other in different collectives. Each argument
    describes one rank: its `rank`, and `what` it waits in."""
    ordered = sorted((one, other), key=lambda each: int(each["rank"]))
    who = ", ".join(f"rank {each['rank']} is in {each['what']}" for each in ordered)
    return PreconditionError(
        f"ranks diverged ({who}), and would wait for each other for ever; "
        "every rank must take the same steps, and call evaluate, save_checkpoint, "
        f"should_early_stop and the like in the same order between them. {COUNTING}",
        reason=REASON,
    )


def traces_apart(
    one: dict[str, Any], other: dict[str, Any], what: tuple[str, str], step: int
) -> PreconditionError:
    """Returns the error for ranks that wait for each other in different collectives of step
    number `step`. The first two arguments contain each rank's `rank`. `what`: the actions of
    both ranks."""
    (first, does), (second, does_) = sorted(
        ((int(each["rank"]), text) for each, text in zip((one, other), what, strict=True))
    )
    return PreconditionError(
        f"ranks diverged in step {step}, and would wait for each other for "
        f"ever: rank {first} {does}, where rank {second} {does_}; every rank must do the same "
        "passes in a step, and call optimizer.step() at the same place, of several models for the "
        f"same optimizers in one order. {COUNTING}",
        reason=REASON,
    )


def operations_apart(who: str) -> PreconditionError:
    """Returns the error for ranks that do different things between two steps. `who`: text that
    names the ranks and their operations."""
    return PreconditionError(
        f"ranks diverged ({who}); every rank must call evaluate, "
        "save_checkpoint, should_early_stop and the loader's iterations in the same order. "
        f"{COUNTING}",
        reason=REASON,
    )


def boundaries_apart(places: Sequence[Sequence[Any]]) -> PreconditionError:
    """Returns the error for ranks at different positions when joiners are admitted. `places`: each
    rank's loader, the loader's number, epoch and step."""
    return PreconditionError(
        "ranks diverged: they stand at (loader, its number, epoch, step) "
        f"{list(places)}; every rank must iterate over the same loaders in the same order",
        reason=REASON,
    )


def ends_apart(ended_after: int, step: int) -> PreconditionError:
    """Returns the error for a rank that takes a step without its peers. `ended_after`: the step
    after which a peer's script finished."""
    return PreconditionError(
        "ranks diverged: a peer's finished after step "
        f"{ended_after}, and this one takes step {step}; every rank must take the same steps: "
        "leave the loop by what is alike on all ranks, such as loader.global_step or "
        "should_early_stop",
        reason=REASON,
    )


def settings_apart(settings: object) -> PreconditionError:
    """Returns the error for ranks whose optimizers have different settings. `settings`: this rank's
    settings."""
    return PreconditionError(
        f"the ranks' optimizers have different settings; this one's are {settings}. "
        "Hyper-parameters that change in training must change alike on all ranks, also on one "
        "that joins: use a scheduler, which is sent to it, or compute them from "
        "loader.global_step. 'parameters' is a digest of which of the model's parameters are in "
        "which group, in which order, and which have requires_grad: all ranks must freeze the "
        "same",
        reason=REASON,
    )


def evaluations_apart(dealings: Sequence[str]) -> PreconditionError:
    """Returns the error for ranks that would evaluate different batches. `dealings`: JSON that
    determines each rank's batches; not all equal."""
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
            f"{different}; for a batch the optimizers of several models must step in one order "
            "on all ranks, or be left out on all"
        )
    return (
        f"they deal {_describe(places[0])} differently "
        f"{_differences([each['dealing'] for each in everyones])}"
    )


def _differences(dealings: Sequence[dict[str, Any]]) -> str:
    """Describes how `dealings` differ between ranks, with remedies."""
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
        "make the loader with the same arguments on every rank"
    ]
    return f"({what}); {'; '.join(remedies)}"


def _compare(values: Sequence[str]) -> str:
    """Describes the value of rank 0, and the first other rank with a different value."""
    other = next((rank for rank, value in enumerate(values) if value != values[0]), 0)
    return (
        f"rank 0 has {values[0]}, rank {other} has {values[other]}"
        if other
        else f"rank 0 has {values[0]}"
    )


def _describe(place: Sequence[Any]) -> str:
    loader, number, epoch, step = place
    if not loader:
        return "a step of a loop without a loader of Shoal's"
    return f"step {step} of epoch {epoch} of loader {loader!r}, the script's number {number},"
