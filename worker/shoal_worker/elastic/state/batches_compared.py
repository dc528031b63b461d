"""Compares the batches of different ranks: training batches in the first steps of a script without
a Shoal loader, and evaluation batches outside of `shoal.evaluate`.

A plain DataLoader does not distribute its batches across ranks. With `torch.manual_seed` at the top
and `shuffle=True`, every rank trains on the same batches, and additional ranks only repeat the
work. Shoal cannot see how a script draws its batches, so it compares digests of the models' inputs.
Ranks of one replica (`tensor`, `pipeline`) share a batch by design and count as one.

Identical batches may be intended. If they never change, the script trains on all of its data or
overfits one batch, and nothing is reported. An error requires two conditions: the batches change,
and on every rank, a DataLoader with one of torch's own samplers iterates over more data than was
compared. In all other cases (a tiny or constant dataset, a custom sampler, or batches drawn in the
loop), there is only a warning.

If each rank evaluates the entire validation set, the results are correct but no time is saved, so a
warning is logged. Digests of the first passes are part of the next step vote, so the comparison
needs no additional messages. Evaluations after the last step are not compared.

Used by the training thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from typing import Any, Final

import torch
import xxhash
from shoal_common.errors import MembershipChanged, PreconditionError

from shoal_worker.elastic.contract.loader_interface import Placement
from shoal_worker.elastic.contract.step import Step
from shoal_worker.elastic.group.group import Group
from shoal_worker.state.digest import digest_in_place
from shoal_worker.torch_internals import iterates_undealt_dataloader, pytree

_log = logging.getLogger(__name__)

CHECKED: Final = 3
"""Number of steps whose batches are compared. So many identical batches in a row cannot be a
coincidence."""


def _digests(inputs: Any) -> list[int]:
    tensors = [
        each
        for each in pytree.tree_leaves(inputs)
        if isinstance(each, torch.Tensor) and not each.is_meta and each.numel()
    ]
    return [
        digest_in_place(each)
        for each in tensors
        if each.layout is torch.strided and not each.is_nested
    ]


class BatchComparison:
    """Compares the ranks' training batches in the first steps of the run."""

    def __init__(self) -> None:
        self.checked = 0
        """Number of steps that have been compared since the run began or resumed. It is part of the
        state, so that all ranks compare the same steps."""
        self._inputs: list[int] = []
        """Digests of the inputs in the current step."""
        self._batches: list[int | None] = []
        """Digest of the inputs of each compared step; None if the step had no inputs, or if this
        process did not take it."""

    @property
    def due(self) -> bool:
        """True if the batches of the next step will be compared."""
        return self.checked < CHECKED

    def begin(self, checked: int) -> None:
        """Restarts the comparison. `checked`: number of steps already compared, from a loaded or
        received state."""
        self.checked = checked
        self._inputs, self._batches = [], [None] * checked

    def note(self, inputs: Any) -> None:
        """Records the model's inputs in one call of the current step."""
        self._inputs += _digests(inputs)

    def drop(self) -> None:
        """Discards the inputs of an aborted step."""
        self._inputs = []

    def compare(self, group: Group, placement: Placement) -> None:
        """Records the current step's batch, and compares the ranks' batches after the last of
        `CHECKED` steps. Must be called on all ranks after the same steps; has the same result on
        all.

        Raises:
            PreconditionError (SAME_BATCHES): all replicas have trained on the same, changing
                batches of a DataLoader.
        """
        self.checked += 1
        inputs, self._inputs = self._inputs, []
        self._batches.append(xxhash.xxh3_64_intdigest(repr(inputs).encode()) if inputs else None)
        if self.due:
            return
        try:
            received = [
                json.loads(each)
                for each in group.exchange(json.dumps([placement.rank, self._batches]).encode())
            ]
            replicas = {rank: tuple(batches) for rank, batches in received}
            batches = next(iter(replicas.values()))
            alike = (
                len(replicas) > 1 and set(replicas.values()) == {batches} and None not in batches
            )
            if not alike or len(set(batches)) == 1:
                return
            undealt = json.dumps(iterates_undealt_dataloader(longer_than=CHECKED)).encode()
            certain = len(set(batches)) == len(batches) and all(
                map(json.loads, group.exchange(undealt))
            )
        except MembershipChanged:  # the step still counts; its end notices the failure
            return
        what = (
            f"all {len(replicas)} ranks trained on the same batches in each of the first "
            f"{CHECKED} steps"
        )
        intended = (
            "If equal batches are intended, turn this check off with "
            "as_distributed(..., consistency_check_every=0)"
        )
        if certain:
            raise PreconditionError(
                f"{what}: a plain DataLoader does not divide the data among ranks, so each rank "
                "processes all of it and more ranks only repeat the work. Use "
                "shoal.ElasticDataLoader(dataset, global_batch_size=...) instead of torch's "
                "DataLoader, or give this DataLoader a DistributedSampler or a different seed on "
                f"each rank. {intended}",
                reason="SAME_BATCHES",
            )
        _log.warning(
            "%s: nothing divides the data among ranks, so more ranks only repeat the work. Loop "
            "over a shoal.ElasticDataLoader(dataset, global_batch_size=...), which deals the "
            "samples to the ranks; if the loop draws its batches itself, make a Dataset that "
            "returns them. %s",
            what,
            intended,
        )


class EvaluationComparison:
    """Records the batches that the script has evaluated without `shoal.evaluate` since the last
    step. Ranks compare only one evaluation per run."""

    def __init__(self) -> None:
        self._passes: list[int] = []
        """Digests of the inputs of the first passes."""
        self._over = False
        self._dealt = False

    @property
    def due(self) -> bool:
        """True if the next pass outside of training must be recorded."""
        return not self._over and not self._dealt and len(self._passes) < CHECKED

    @contextlib.contextmanager
    def dealt(self) -> Iterator[None]:
        """Marks passes within the block as part of `shoal.evaluate`, which distributes the batches
        across ranks."""
        before, self._dealt = self._dealt, True
        try:
            yield
        finally:
            self._dealt = before

    def note(self, inputs: Any) -> None:
        """Records the model's inputs in one call outside of training."""
        self._passes.append(xxhash.xxh3_64_intdigest(repr(_digests(inputs)).encode()))

    @property
    def digest(self) -> int:
        """Digest of the first passes. 0 if all inputs are the same, or if there are too few passes
        to be an evaluation."""
        if self._over or len(self._passes) < CHECKED or len(set(self._passes)) == 1:
            return 0
        return xxhash.xxh3_64_intdigest(repr(self._passes).encode())

    def conclude(self, step: Step, *, warns: bool) -> None:
        """Ends the comparison after the committed `step`, and logs a warning if all ranks have
        evaluated the same batches. `warns`: True on the rank that logs the warning on behalf of
        all."""
        self._passes = []
        replicas = step.placement.world_size
        if step.evaluated == 0 or replicas == 1:
            return
        self._over = True
        if step.evaluated_alike and warns:
            _log.warning(
                "all %d ranks evaluated the model on the same batches: each processes the whole "
                "validation set, so more ranks only repeat the work. The results are those of "
                "one rank. Use shoal.evaluate(model, loader, fn), which divides the batches "
                "among the ranks and returns the sums on all of them. (Shown once; "
                "as_distributed(..., consistency_check_every=0) turns this check off)",
                replicas,
            )
