"""Evaluation over all ranks, with the predictions of all: what transformers' `evaluation_loop` gives in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from shoal_worker.elastic import collectives
from shoal_worker.elastic.evaluation import evaluate
from shoal_worker.elastic.session import Session
from torch import nn
from transformers.trainer_pt_utils import EvalLoopContainer

from shoal.integrations.numbered import numbered


def evaluate_on_all(
    session: Session, model: nn.Module, batches: Any, measure: Callable[[Any], tuple[dict[str, float], Any]], *, gathers: bool
) -> tuple[dict[str, float], list[Any]]:
    """Sums over all batches, each evaluated on one rank, and what was kept of each, in their order; the same on all ranks.

    Args:
        session: this process's.
        model: is put into evaluation mode.
        batches: of an evaluation loader.
        measure: gives a batch's sums, and what is to be kept of it: tensors, and tuples, lists and dictionaries of them.
        gathers: what is kept is gathered; else it is not, and the list is empty.
    """
    own: dict[int, Any] = {}

    def measured(_: nn.Module, one: tuple[int, Any]) -> dict[str, float]:
        number, batch = one
        sums, kept = measure(batch)
        if gathers:
            own[number] = _on_cpu(kept)
        return {**sums, "batches": 1.0}

    while True:
        sums = evaluate(session, model, numbered(batches), measured)
        if not gathers:
            return sums, []
        everyones = dict(itertools.chain(*collectives.gather(session, [*own.items()])))
        # If it is not all, a rank died behind the evaluation with what it had kept. All ranks see that, and evaluate again. In a joiner
        # that replays its script nobody looks at the answer.
        if len(everyones) == sums.get("batches", 0.0) or session.is_joining:
            return sums, [everyones[number] for number in sorted(everyones)]


def concatenated(parts: Iterable[Any], *, concatenates: bool) -> Any:
    """What transformers makes of logits or labels of several batches: arrays, padded to one width. `concatenates`: else lists of them."""
    container = EvalLoopContainer(concatenates, padding_index=-100)
    for part in parts:
        if part is not None:
            container.add(part)
    return container.get_arrays()


def _on_cpu(value: Any) -> Any:
    """Returns tensors, and tuples, lists and dictionaries of them, on the CPU, where `gather` takes them."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {name: _on_cpu(each) for name, each in value.items()}
    return tuple(_on_cpu(each) for each in value) if isinstance(value, (tuple, list)) else value
