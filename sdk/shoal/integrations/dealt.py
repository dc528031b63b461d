"""Runs the evaluations of Trainers on all ranks, and collects values of each batch in addition to
the sums returned by `shoal.evaluate`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from shoal_worker.elastic.session import collectives
from shoal_worker.elastic.session.evaluation import evaluate
from shoal_worker.elastic.session.session import Session
from torch import nn

from shoal.integrations.numbered import numbered


def evaluate_on_all(
    session: Session,
    model: nn.Module,
    batches: Any,
    measure: Callable[[int, Any], tuple[dict[str, float], Any]],
    *,
    gathers: bool,
) -> tuple[dict[str, float], list[Any]]:
    """Distributes the batches across ranks and evaluates each batch once. Returns the sums over all
    batches, and the values kept for each batch, in order. Both are the same on all ranks.

    Args:
        session: session of this process.
        model: model, which is put into evaluation mode.
        batches: batches of an evaluation loader.
        measure: function that receives the index of a batch and the batch, and returns the batch's
            sums and the values to keep (tensors, numbers, strings, and tuples, lists and
            dictionaries of them).
        gathers: True to gather the values to keep; otherwise the returned list is empty.
    """
    own: dict[int, Any] = {}

    def measured(_: nn.Module, one: tuple[int, Any]) -> dict[str, float]:
        number, batch = one
        sums, kept = measure(number, batch)
        if gathers:
            own[number] = on_cpu(kept)
        return {**sums, "batches": 1.0}

    while True:
        sums = evaluate(session, model, numbered(batches), measured)
        if not gathers:
            return sums, []
        everyones = dict(itertools.chain(*collectives.gather(session, [*own.items()])))
        # If values are missing, a rank died after the evaluation, and its values are lost. All
        # ranks notice this and evaluate again. A joiner that replays its script does not use the
        # result.
        if len(everyones) == sums.get("batches", 0.0) or session.is_joining:
            return sums, [everyones[number] for number in sorted(everyones)]


def on_cpu(value: Any) -> Any:
    """Moves tensors to the CPU, as required by `gather`, including tensors in tuples, lists and
    dictionaries."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {name: on_cpu(each) for name, each in value.items()}
    if isinstance(value, list):
        return [on_cpu(each) for each in value]
    return tuple(on_cpu(each) for each in value) if isinstance(value, tuple) else value
