"""Runs jobs one after another, and retries jobs that fail: `python scheduler.py --workers 2
"train.py" "gpt.py --steps 100"`.

The jobs run in the background: they continue if this program is stopped, and `shoal jobs`,
`shoal logs` and `shoal top` show them.
"""

import argparse
import shlex
import sys
from datetime import timedelta

import shoal

parser = argparse.ArgumentParser(
    description="Runs jobs one after another, and one that fails again."
)
parser.add_argument("jobs", nargs="+", help="scripts with their arguments, each in quotes")
parser.add_argument("--workers", type=int, default=1, help="workers per job")
parser.add_argument("--attempts", type=int, default=3, help="maximum number of attempts per job")
parser.add_argument("--hours", type=float, default=24.0, help="time limit of one attempt")
options = parser.parse_args()


def run(client: shoal.Client, job: str) -> bool:
    """Runs a job, with several attempts if necessary. Returns whether an attempt succeeded."""
    for attempt in range(1, options.attempts + 1):
        job_id = client.submit(*shlex.split(job), workers=options.workers)
        print(f"{job}: attempt {attempt} is job {job_id}", flush=True)
        try:
            result = client.wait(job_id, timeout=timedelta(hours=options.hours))
        except shoal.DeadlineError:
            client.kill(job_id)
            result = client.result(job_id)
        failure = f"failed with status {result.exit_status}: {result.summary.strip()}"
        print(f"{job}: {'finished' if result.ok else failure}", flush=True)
        if result.ok:
            return True
    return False


with shoal.Client() as client:
    sys.exit(0 if all(run(client, job) for job in options.jobs) else 1)
