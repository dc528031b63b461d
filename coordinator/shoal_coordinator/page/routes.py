"""Paths of the status page on the coordinator's HTTP port.

    /              the page: one file without data about the cluster, so no token is needed
    /api/jobs      all jobs for which the caller's token is valid
    /api/job       ?job=ID: one job, with the history of its newest run
    /api/events    ?job=ID[&after=EVENT]: the job's newest events, or the events after EVENT

All routes run on threads of the HTTP server. Events are stored in Redis, which only the event loop
may access, so the route of events waits for the loop.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

from shoal_common.errors import InvalidRequestError, UnavailableError
from shoal_common.telemetry.http import HttpRequest, HttpResponse, Route

from shoal_coordinator.membership.model.observation import ObservedJob
from shoal_coordinator.membership.model.reasons import Refusal
from shoal_coordinator.page.history import Histories
from shoal_coordinator.page.values import events_values, job_summary, job_values, points_values
from shoal_coordinator.service.jobs import Jobs
from shoal_coordinator.service.messages.checks import job_id
from shoal_coordinator.service.messages.requests import parse_event_id
from shoal_coordinator.state.store import JobStore, StoredEvent

PAGE: Final = "/"
OF_ONE_JOB: Final = frozenset({"/api/jobs", "/api/job", "/api/events"})
"""Paths that accept a token for a single job, and then show only that job."""
_MOST_EVENTS: Final = 500
_OLDEST: Final = "0"
"""Result of parse_event_id for an empty id."""


class StatusPage:
    """Status page of one coordinator. Must be created on the event loop; its routes run on other
    threads."""

    def __init__(self, jobs: Jobs, store: JobStore, *, timeout_s: float) -> None:
        """`timeout_s`: maximum wait in seconds for Redis to return events."""
        self.histories = Histories(jobs.observed)
        self._jobs = jobs
        self._store = store
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._page = _page()

    @property
    def routes(self) -> Mapping[str, Route]:
        """Path -> handler. All paths except PAGE reveal information about the cluster, and
        therefore require a token."""
        return {
            PAGE: lambda request: self._page,
            "/api/jobs": self._all_jobs,
            "/api/job": self._job,
            "/api/events": self._events,
        }

    def _all_jobs(self, request: HttpRequest) -> HttpResponse:
        jobs = [
            job for job in self._jobs.observed() if request.holder.may_touch(job.state.spec.job_id)
        ]
        return HttpResponse.json({"jobs": [job_summary(job) for job in jobs]})

    def _job(self, request: HttpRequest) -> HttpResponse:
        job = self._asked_for(request)
        points = self.histories.of(job.state.spec.job_id, job.state.run)
        return HttpResponse.json({**job_values(job), "history": points_values(points)})

    def _events(self, request: HttpRequest) -> HttpResponse:
        asked = self._asked_for(request).state.spec.job_id
        answer = asyncio.run_coroutine_threadsafe(
            self._found(asked, parse_event_id(request.query.get("after", ""))), self._loop
        )
        try:
            return HttpResponse.json({"events": events_values(answer.result(self._timeout_s))})
        except TimeoutError:
            answer.cancel()
            raise UnavailableError(
                f"Redis did not return the events of job {asked} within {self._timeout_s:g} s; "
                "try again",
                reason=Refusal.STORAGE_UNAVAILABLE,
            ) from None

    async def _found(self, asked: str, after: str) -> list[StoredEvent]:
        if after == _OLDEST:
            return await self._store.newest_events(asked, count=_MOST_EVENTS)
        return await self._store.events(asked, after=after, count=_MOST_EVENTS)

    def _asked_for(self, request: HttpRequest) -> ObservedJob:
        asked = request.query.get("job")
        if asked is None:
            raise InvalidRequestError(
                f"{request.path} needs the id of a job, as in {request.path}?job=train"
            )
        request.holder.check_job(job_id(asked))
        return self._jobs.get(asked).observed()


def _page() -> HttpResponse:
    text = (
        resources.files("shoal_coordinator.page")
        .joinpath("status.html")
        .read_text(encoding="utf-8")
    )
    return HttpResponse(
        text.encode(),
        "text/html; charset=utf-8",
        headers={"Content-Security-Policy": _policy(text)},
    )


def _policy(text: str) -> str:
    """Returns a content security policy that allows only the page's own script and styles, and
    connections only to the page's server."""

    def digest(element: str) -> Any:
        found = re.search(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        assert found is not None, f"the page has one <{element}>"
        return base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()

    own = f"script-src 'sha256-{digest('script')}'; style-src 'sha256-{digest('style')}'"
    return (
        f"default-src 'none'; {own}; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
