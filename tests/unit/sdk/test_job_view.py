"""What `shoal status` and `shoal up` say of a job without members."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from shoal.cli.view import job_view
from shoal_protos.v1 import coordinator_pb2 as pb


@pytest.mark.parametrize(("generation", "expected"), [(0, "no members yet: workers join when"), (2, "no members any more")])
def test_a_job_without_members_has_none_yet_or_none_any_more(generation: int, expected: str) -> None:
    job = pb.GetJobResponse(
        spec=pb.JobSpec(job_id="j", min_workers=1, max_workers=3), phase=pb.JOB_PHASE_WAITING, generation=pb.Generation(number=generation)
    )
    written = io.StringIO()
    Console(file=written, width=140).print(job_view(job))
    headline, hint = written.getvalue().splitlines()
    assert headline == f"job j  waiting, generation {generation}, 0 of 3 workers have a rank"
    assert hint.startswith(expected)
