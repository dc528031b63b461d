"""Spans of one rank, for sinks that trace: steps, generations, checkpoints and calls.

The number of spans is kept so low that none has to be dropped. A span of steps covers `every_steps`
steps. A call to a service has a span if it fails or is slow; of the other calls of each method, one
every ten seconds has a span.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from shoal_common.rpc.client_interceptors import ClientCall

from shoal_worker.elastic.session.session import Session
from shoal_worker.tracking.sinks import Report, Span

_SLOW_CALL_S: Final = 0.1
_CALL_INTERVAL_S: Final = 10.0


class SpanSource:
    """Follows one session and passes its spans to `put`."""

    def __init__(
        self, session: Session, put: Callable[[Report], None], *, every_steps: int
    ) -> None:
        """`put`: receives the spans. Called from several threads. `every_steps`: number of steps
        per span."""
        self._session = session
        self._put = put
        self._every = every_steps
        self._began_ns: int | None = None
        """Time when the first step that is not covered by a span began; None if there is no such
        step."""
        self._covered = session.steps
        """Newest step that is covered by a span, or the step before the first span."""
        self._lost = session.progress.lost_steps
        self._lock = threading.Lock()
        self._calls: dict[str, tuple[float, int]] = {}
        """Method -> time of its newest span, and number of calls without a span since then."""
        session.progress.follow(begun=self._begun, committed=self._committed)
        session.metrics.follow_periods(self._period)
        session.metrics.calls.follow(self._called)
        session.on_close(lambda: self._end_steps(self._session.steps))

    def _begun(self) -> None:
        if self._began_ns is None:
            self._began_ns = time.time_ns()

    def _committed(self, step: int) -> None:
        if step <= self._covered:  # after a return to a checkpoint
            self._covered = step - 1
        if step - self._covered >= self._every:
            self._end_steps(step)

    def _end_steps(self, step: int) -> None:
        begin_ns, self._began_ns = self._began_ns, None
        first, self._covered = self._covered + 1, step
        if begin_ns is None or step < first:
            return
        session = self._session
        lost, self._lost = session.progress.lost_steps - self._lost, session.progress.lost_steps
        self._span(
            "shoal.steps",
            begin_ns,
            {"shoal.first_step": first, "shoal.last_step": step, "shoal.lost_steps": lost},
        )

    def _period(self, name: str, seconds: float, attributes: Mapping[str, str | int]) -> None:
        begin_ns = time.time_ns() - round(seconds * 1e9)
        failed = name == "checkpoint" and attributes["outcome"] != "written"
        self._span(
            f"shoal.{name}",
            begin_ns,
            {f"shoal.{name}.{key}": value for key, value in attributes.items()},
            error=str(attributes["outcome"]) if failed else "",
        )

    def _called(self, call: ClientCall) -> None:
        now = time.monotonic()
        with self._lock:
            last, unseen = self._calls.get(call.method, (None, 0))
            if (
                call.code == "OK"
                and call.seconds < _SLOW_CALL_S
                and last is not None
                and now - last < _CALL_INTERVAL_S
            ):
                self._calls[call.method] = (last, unseen + 1)
                return
            self._calls[call.method] = (now, 0)
        self._span(
            call.method.removeprefix("/"),
            time.time_ns() - round(call.seconds * 1e9),
            {
                "rpc.system": "grpc",
                "rpc.grpc.status_code": call.code,
                "shoal.calls_without_span": unseen,
            },
            error="" if call.code in ("OK", "CANCELLED") else call.code,
        )

    def _span(
        self, name: str, begin_ns: int, attributes: Mapping[str, str | int], *, error: str = ""
    ) -> None:
        session = self._session
        self._put(
            Span(
                step=session.steps,
                name=name,
                begin_ns=begin_ns,
                end_ns=time.time_ns(),
                attributes={
                    "shoal.rank": session.rank,
                    "shoal.generation": session.generation,
                    **attributes,
                },
                error=error,
            )
        )
