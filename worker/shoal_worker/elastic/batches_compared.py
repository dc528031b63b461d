"""Compares what ranks train on in their first steps, where the script has no loader of Shoal's.

Nobody deals a plain DataLoader: with `torch.manual_seed` at the top and `shuffle=True`, every rank
trains on the same batches, and more ranks only repeat the work. Shoal cannot see how a script draws
its batches, so it compares digests of the models' inputs. Ranks of one replica (`tensor`,
`pipeline`) have the same batch by design and count as one.

Equal batches may be meant. If they never change, the script trains on all of its data, or overfits
one batch, and nothing is said. An error needs proof: each batch is another one, and on every rank a
DataLoader with a sampler of torch's own goes through more data than was compared. Anything less is
a warning: a tiny or constant dataset, a sampler of the script's, batches drawn in the loop.

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
from shoal_worker.torch_internals import iterates_undealt_dataloader, pytree

_log = logging.getLogger(__name__)

CHECKED: Final = 3
"""Steps that are compared. That many equal batches in a row are no accident."""


class BatchComparison:
    """What this rank trained on in the run's first steps."""

    def __init__(self) -> None:
        self.checked = 0
        """Steps compared since the run began or resumed. A part of the state, so that all ranks
        compare the same steps."""
        self._inputs: list[int] = []
        """Digests of the inputs of the step in progress."""
        self._batches: list[int | None] = []
        """Digest of each compared step's inputs; None: there were none, or this process did not
        take the step."""

    @property
    def due(self) -> bool:
        """The next step is compared."""
        return self.checked < CHECKED

    def begin(self, checked: int) -> None:
        """Continues behind so many compared steps, those of a loaded state or of peers."""
        self.checked = checked
        self._inputs, self._batches = [], [None] * checked

    def note(self, inputs: Any) -> None:
        """The model is called with `inputs` in the step in progress."""
        tensors = [
            each
            for each in pytree.tree_leaves(inputs)
            if isinstance(each, torch.Tensor) and not each.is_meta and each.numel()
        ]
        self._inputs += [
            digest_in_place(each)
            for each in tensors
            if each.layout is torch.strided and not each.is_nested
        ]

    def drop(self) -> None:
        """The step in progress is void."""
        self._inputs = []

    def compare(self, group: Group, placement: Placement) -> None:
        """Ends a step that is compared. All ranks call it, behind the same steps, and conclude the
        same.

        Raises:
            PreconditionError (SAME_BATCHES): all replicas have trained on the same batches of a
                DataLoader, each of them another one.
        """
        self.checked += 1
        inputs, self._inputs = self._inputs, []
        self._batches.append(xxhash.xxh3_64_intdigest(repr(inputs).encode()) if inputs else None)
        if self.due:
            return
        try:
            told = [
                json.loads(each)
                for each in group.exchange(json.dumps([placement.rank, self._batches]).encode())
            ]
            replicas = {rank: tuple(batches) for rank, batches in told}
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
        except MembershipChanged:  # the step counts all the same; its end notices the failure
            return
        what = (
            f"all {len(replicas)} ranks trained on the same batches in each of the {CHECKED} first "
            "steps: nobody deals a plain DataLoader, so each rank goes through all of the data, "
            "and more ranks only repeat the work"
        )
        remedy = (
            "Use shoal.ElasticDataLoader(dataset, global_batch_size=...) in place of torch's "
            "DataLoader, or give this one a DistributedSampler or another seed on each rank. "
            "Where the same batches are meant, as_distributed(..., consistency_check_every=0) "
            "turns this check off"
        )
        if certain:
            raise PreconditionError(f"{what}. {remedy}", reason="SAME_BATCHES")
        _log.warning("%s. %s", what, remedy)
