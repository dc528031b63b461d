"""Ranks compare what they hold in common after every so many steps: a machine that computes wrongly is found, and not trained on with.

Used by the training thread.
"""

from __future__ import annotations

import json

from shoal_common.errors import MembershipChanged

from shoal_worker.elastic.committed_state import HeldState
from shoal_worker.elastic.divergence import disagreement
from shoal_worker.elastic.group import Group


def compare_replicas(held: HeldState, group: Group | None) -> str | None:
    """After every so many steps: compares what ranks hold in common. Returns what is wrong, on all of them; None: nothing, as far as is
    known."""
    every, before = held.engine.consistency_check_every, held.compared
    held.compared = held.steps
    if every == 0 or held.steps // every == before // every or group is None or group.world_size == 1:
        return None
    try:
        told = [json.loads(each) for each in group.exchange(json.dumps(dict(held.engine.in_common())).encode())]
    except MembershipChanged:
        return None  # the step counts all the same; its end notices the failure
    apart = disagreement(told)
    if apart is None:
        return None
    return (
        f"after step {held.steps} {apart}: memory or arithmetic has failed there, or the script has changed values on some ranks alone. Go "
        f"back to a checkpoint of before, on other machines (compared every {every} steps: consistency_check_every=)"
    )
