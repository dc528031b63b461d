"""Ranks whose script has no loader of Shoal's compare what they train on in their first steps.

A plain DataLoader is dealt by nobody: with `torch.manual_seed` at the top and `shuffle=True`, every rank trains on the same batches, and
more ranks only repeat the work. Shoal cannot see how a script draws its batches, so it compares digests of the models' inputs. Ranks of one
replica (`tensor`, `pipeline`) have the same batch by design and count as one. Batches that do not change from step to step may be meant:
the script trains on all of its data in each step.

Used by the training thread.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final

import torch
import xxhash
from shoal_common.errors import MembershipChanged, PreconditionError

from shoal_worker.elastic.group import Group
from shoal_worker.elastic.loader_interface import Placement
from shoal_worker.state.digest import digest_in_place
from shoal_worker.torch_internals import is_iterating_dataloader, pytree

_log = logging.getLogger(__name__)

CHECKED: Final = 3
"""Steps that are compared. That many equal batches in a row are no accident."""


class BatchComparison:
    """What this rank trained on in the run's first steps."""

    def __init__(self) -> None:
        self.checked = 0
        """Steps compared since the run began or resumed. A part of the state, so that all ranks compare the same steps."""
        self._inputs: list[int] = []
        """Digests of the inputs of the step in progress."""
        self._batches: list[int] = []
        """Digest of each step's inputs, of those that were compared."""
        self._alike = True

    @property
    def due(self) -> bool:
        """The next step is compared."""
        return self.checked < CHECKED

    def begin(self, checked: int) -> None:
        """Continues behind so many compared steps, those of a loaded state or of peers."""
        self.checked = checked
        self._inputs, self._batches, self._alike = [], [], checked == 0

    def note(self, inputs: Any) -> None:
        """The model is called with `inputs` in the step in progress."""
        tensors = [each for each in pytree.tree_leaves(inputs) if isinstance(each, torch.Tensor) and not each.is_meta and each.numel()]
        self._inputs += [digest_in_place(each) for each in tensors if each.layout is torch.strided]

    def drop(self) -> None:
        """The step in progress is void."""
        self._inputs = []

    def compare(self, group: Group, placement: Placement) -> None:
        """Ends a step that is compared. All ranks call it, behind the same steps.

        Raises:
            PreconditionError (SAME_BATCHES): all replicas have trained on the same changing batches of a DataLoader.
        """
        self.checked += 1
        inputs, self._inputs = self._inputs, []
        batch = xxhash.xxh3_64_intdigest(repr(inputs).encode()) if inputs else None
        try:
            told = [json.loads(each) for each in group.exchange(json.dumps([placement.rank, batch]).encode())]
        except MembershipChanged:  # the step counts all the same; its end notices the failure
            self._alike = False
            return
        replicas = dict(map(tuple, told))
        self._alike = self._alike and len(replicas) > 1 and len(set(replicas.values())) == 1 and batch is not None
        self._batches.append(batch or 0)
        if self.due or not self._alike or len(self._batches) < CHECKED or len(set(self._batches)) == 1:
            return
        what = (
            f"all {len(replicas)} ranks trained on the same batches in each of the {CHECKED} first steps: nobody deals a plain "
            "DataLoader, so each rank goes through all of the data, and more ranks only repeat the work"
        )
        remedy = (
            "Use shoal.ElasticDataLoader(dataset, global_batch_size=...) in place of torch's DataLoader, or give this one a "
            "DistributedSampler or another seed on each rank. Where the same batches are meant, as_distributed(..., "
            "consistency_check_every=0) turns this check off"
        )
        if is_iterating_dataloader():
            raise PreconditionError(f"{what}. {remedy}", reason="SAME_BATCHES")
        _log.warning("%s. %s", what, remedy)
