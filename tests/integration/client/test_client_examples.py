"""The client examples run: a scheduler and a dashboard."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from shoal.client import Client

from tests.integration.client.waiting import until_ranked

Shell = Any  # of tests/integration/conftest.py
EXAMPLES = Path(__file__).parents[3] / "examples"
PAGE = Path(__file__).parents[3] / "docs" / "client.md"


def test_scheduler_runs_jobs_one_after_another_and_repeats_a_failed_one(here: Shell) -> None:
    here.script("print('first')", "first.py")
    here.script(
        "import os, pathlib; p = pathlib.Path('tried'); e = p.exists(); p.touch(); raise "
        "SystemExit(0 if e else 4)",
        "second.py",
    )
    scheduler = here.start_program(
        sys.executable, EXAMPLES / "scheduler.py", "--attempts", "2", "first.py", "second.py"
    )
    assert scheduler.wait() == 0, scheduler.stderr
    said = [
        line
        for line in scheduler.stdout.splitlines()
        if line.startswith(("first.py: ", "second.py: "))
    ]
    assert [line.partition(" is job")[0].partition(" with status")[0] for line in said] == [
        "first.py: attempt 1",
        "first.py: finished",
        "second.py: attempt 1",
        "second.py: failed",
        "second.py: attempt 2",
        "second.py: finished",
    ]


def test_the_scheduler_gives_up_after_its_attempts(here: Shell) -> None:
    here.script("raise SystemExit(4)", "bad.py")
    scheduler = here.start_program(
        sys.executable, EXAMPLES / "scheduler.py", "--attempts", "1", "bad.py", "never.py"
    )
    assert scheduler.wait() == 1
    assert "failed with status 4" in scheduler.stdout
    assert "never.py" not in scheduler.stdout


def test_the_dashboard_shows_events_and_progress_until_the_job_ends(
    here: Shell, client: Client, elastic_worker: Path
) -> None:
    job_id = client.submit(elastic_worker, str(here.directory / "finish"), workers=2)
    until_ranked(client, job_id, 2)
    dashboard = here.start_program(
        sys.executable, EXAMPLES / "dashboard.py", "--every", "0.1", job_id
    )
    dashboard.wait_for_output("generation_formed cause=start", "running: 2 ranks at step")
    (here.directory / "finish").touch()
    assert dashboard.wait() == 0, dashboard.stderr
    assert "job_finished" in dashboard.stdout
    assert dashboard.stderr == ""


def test_the_pages_example_runs(here: Shell) -> None:
    here.script("import os, sys\nprint(os.environ['RANK'], *sys.argv[1:])", "train.py")
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    program = here.start_program(sys.executable, here.script(example, "example.py"))
    assert program.wait() == 0, program.stderr
    assert program.stdout == "True 0\n[0]: 0 --epochs 3\n"
