"""Jobs are stored and read back, without a Redis."""

from __future__ import annotations

import json

from shoal_coordinator.membership.model.spec import JobSpec
from shoal_coordinator.membership.model.state import JobState, Move, Moves
from shoal_coordinator.state.codec import decode_state, encode_changes, everything

SPEC = JobSpec(job_id="j", min_workers=1, max_workers=2, parameter_servers=2)


def test_moves_and_draining_places_are_read_back_as_written() -> None:
    move = Move(number=4, partitions=(0, 3, 7), giver=0, giver_incarnation="first", receiver=2)
    state = JobState(
        spec=SPEC,
        moves=Moves(settled=3, under_way=move, draining={0: "its machine is wanted", 12: "r"}),
    )
    assert decode_state(encode_changes(state, everything(state)).put) == state


def test_job_of_an_older_release_is_limited_to_its_present_servers() -> None:
    state = JobState(spec=SPEC)
    written = dict(encode_changes(state, everything(state)).put)
    header = json.loads(written["header"])
    del header["spec"]["max_parameter_servers"], written["moves"]
    read = decode_state(written | {"header": json.dumps(header)})
    assert read == state
    assert read.spec.max_parameter_servers == 2
