"""Evaluations of Trainers, dealt to all ranks, with what is kept of each batch: `shoal.evaluate`
gives sums alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from shoal_worker.elastic import collectives
from shoal_worker.elastic.evaluation import evaluate
from shoal_worker.elastic.session import Session
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
    """Sums over all batches, each evaluated on one rank, and what was kept of each, in their order;
    the same on all ranks.

    Args:
        session: this process's.
        model: is put into evaluation mode.
        batches: of an evaluation loader.
        measure: is given a batch's number and the batch; gives its sums, and what is to be kept of
            it: tensors, numbers, strings, and tuples, lists and dictionaries of them.
        gathers: what is kept is gathered; else it is not, and the list is empty.
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
        # If it is not all, a rank died behind the evaluation with what it had kept. All ranks see
        # that, and evaluate again. In a joiner that replays its script nobody looks at the answer.
        if len(everyones) == sums.get("batches", 0.0) or session.is_joining:
            return sums, [everyones[number] for number in sorted(everyones)]


def on_cpu(value: Any) -> Any:
    """Returns tensors, and tuples, lists and dictionaries of them, on the CPU, where `gather` takes
    them."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {name: on_cpu(each) for name, each in value.items()}
    if isinstance(value, list):
        return [on_cpu(each) for each in value]
    return tuple(on_cpu(each) for each in value) if isinstance(value, tuple) else value
