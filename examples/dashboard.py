"""Shows the events and the progress of a job: `python dashboard.py JOB`. Prints a line for each
event and, every few seconds, a line with the progress of the ranks.

Both use one asynchronous client. A web server could send the same values to browsers.
"""

import argparse
import asyncio
from contextlib import suppress

import shoal

parser = argparse.ArgumentParser(description="Shows the events and the progress of a job.")
parser.add_argument("job", help="name of the job, as listed by `shoal jobs`")
parser.add_argument(
    "--coordinator", help="HOST:PORT of a shared coordinator; default: this machine's jobs"
)
parser.add_argument("--every", type=float, default=2.0, help="seconds between lines of progress")
options = parser.parse_args()


async def print_events(client: shoal.AsyncClient) -> None:
    """Prints each event of the job until the job's cluster ends."""
    async for event in client.events(options.job, follow=True):
        print(
            f"{event.at:%H:%M:%S} {event.kind}",
            *(f"{name}={value}" for name, value in event.attributes.items()),
            flush=True,
        )


async def print_progress(client: shoal.AsyncClient) -> None:
    """Prints the progress of the job every few seconds, until cancelled."""
    while True:
        with suppress(shoal.UnavailableError, shoal.UnknownResourceError):  # restarting or stopping
            job = await client.job(options.job)
            speed = sum(member.samples_per_s for member in job.members)
            losses = [member.loss for member in job.members if member.loss is not None]
            loss = f"{sum(losses) / len(losses):.4g}" if losses else "not reported"
            step = max((member.step for member in job.members), default=0)
            print(
                f"{job.phase}: {job.world_size} ranks at step {step}, {speed:,.0f} samples/s, loss "
                f"{loss}",
                flush=True,
            )
        await asyncio.sleep(options.every)


async def main() -> None:
    """Prints events and progress until there are no more events."""
    async with shoal.AsyncClient(options.coordinator) as client:
        progress = asyncio.create_task(print_progress(client))
        await print_events(client)
        progress.cancel()


asyncio.run(main())
