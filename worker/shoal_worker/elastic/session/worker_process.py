"""Opens the session of a process: reads the environment, joins the job, and ensures that the
process leaves the job when it exits."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from traceback import format_exception
from types import FrameType, TracebackType
from typing import Any, Final

from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.errors import (
    ConfigurationError,
    MembershipChanged,
    PreconditionError,
    ShoalError,
    StaleGenerationError,
    UnavailableError,
)
from shoal_common.exit_status import EVICTED
from shoal_common.formats.tally import TallyWriter
from shoal_common.security.secrets import take_secrets
from shoal_common.settings import Address, parse_address
from shoal_common.system.allocator import keep_freed_memory
from shoal_common.system.own_address import (
    ELSEWHERE,
    OwnAddress,
    is_loopback,
    is_unspecified,
    route_towards,
)
from shoal_common.system.stacks import serve_stacks
from shoal_common.telemetry import HttpServer, serve_metrics

from shoal_worker.backends import native_threads
from shoal_worker.backends.mpi.backend import own_seat
from shoal_worker.backends.process_end import end_now
from shoal_worker.backends.worlds import Seat, own_world
from shoal_worker.child_processes import (
    check_not_imported_again,
    keep_socket_paths_short,
    report_dead_threads,
)
from shoal_worker.elastic.contract.generation import MemberIdentity
from shoal_worker.elastic.contract.loader_interface import LoaderSession
from shoal_worker.elastic.coordinator.coordinator_messages import run_message
from shoal_worker.elastic.coordinator.fixed import FixedMembership
from shoal_worker.elastic.coordinator.membership import Membership
from shoal_worker.elastic.coordinator.script_lines import remember_source
from shoal_worker.elastic.group.transfer import StateDonor
from shoal_worker.elastic.session.brief_errors import brief, on_screen
from shoal_worker.elastic.session.desync_detector import DesyncDetector
from shoal_worker.elastic.session.files_written import WrittenFiles, notice_files
from shoal_worker.elastic.session.script_end import ScriptEnd
from shoal_worker.elastic.session.session import Session
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.settings import WorkerSettings, check_not_torchrun, error_file, mpi_world_size
from shoal_worker.torch_internals import in_backward

# --------------------------------------------------------------------------- this process's session

_process: list[Session] = []


def find_session() -> Session | None:
    """Returns the session of this process or, on the threads of a rank of `shoal.launch`, the
    session of that rank. Returns None if there is none."""
    world = own_world()
    if world is not None:
        found: Session | None = world.session
        return found
    return _process[-1] if _process else None


def set_session(session: Session | None) -> None:
    """Makes `session` the current session; None: there is no current session from now on."""
    world = own_world()
    if world is not None:
        world.session = session
        return
    _process.clear()
    if session is not None:
        _process.append(session)


# ------------------------------------------------------------------ what is left about an exception

_HAPPENED: Final = (
    "MEMBER_REPLACED",
    "MACHINE_REFUSED",
    "LEASE_EXPIRED",
    "PROCESS_EXITED",
    "MEMBER_STALLED",
    UnavailableError.default_reason,
)
"""Error reasons that are not caused by the script: the coordinator has refused a running process or
ended its membership, or a service is unavailable."""


_VERDICTS: Final = ("RANKS_DIVERGED", "REPLICAS_DIVERGED", "SAME_BATCHES")
"""Error reasons whose cause is the script or the machine, even if a failed collective preceded the
error. A replacement process would fail in the same way."""


def is_consequence(error: BaseException) -> bool:
    """Returns whether an exception, or one of its causes, shows that peers or services failed, or
    that this process was evicted."""
    chain = list(_chain(error))
    if any(isinstance(cause, ShoalError) and cause.reason in _VERDICTS for cause in chain):
        return False
    return any(
        isinstance(cause, MembershipChanged | StaleGenerationError)
        or (isinstance(cause, ShoalError) and cause.reason in _HAPPENED)
        for cause in chain
    )


def account_for(error: BaseException, traceback: TracebackType | None) -> None:
    """Handles an uncaught exception. If it was caused by events outside of this process, exits with
    status EVICTED. Otherwise, writes the exception to a file for the launcher.

    Raises:
        SystemExit: with status EVICTED."""
    if is_consequence(error):
        raise SystemExit(EVICTED)
    leave_account(error, traceback)


def leave_account(error: BaseException, traceback: TracebackType | None) -> None:
    """Writes an exception to the file that a launcher has named, if any. File and format are the
    same as for torchrun's workers (TORCHELASTIC_ERROR_FILE)."""
    path = error_file()
    if path is None:
        return
    now = time.time()
    failed_at = [
        cause.failed_at
        for cause in _chain(error)
        if isinstance(cause, ShoalError) and cause.failed_at is not None
    ]
    session = find_session()
    text = "".join(format_exception(type(error), error, traceback))
    extra = {"py_callstack": text, "timestamp": str(int(now))}
    content = {
        "message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra},
        "shoal": {
            "rank": session.rank if session is not None else -1,
            "unix_s": min([now, *failed_at]),
            "brief": brief(error, traceback),
        },
    }
    with contextlib.suppress(OSError):
        # for example a full disk: the traceback is on standard error already
        path.write_text(json.dumps(content))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


# -------------------------------------------------------------------------------- beginning and end

_log = logging.getLogger(__name__)

_SAME_SIGNAL: Final = timedelta(seconds=5)
_UNHEARD: Final = (
    "{}, so this worker does not notice that it must leave, and will be killed when its grace "
    "period ends. Set the handler before shoal.init(), whose own handler then calls it, or call "
    "the handler that signal.getsignal(signal.SIGTERM) returned from yours"
)
_LOOPBACK: Final = OwnAddress(announced="127.0.0.1", bound="127.0.0.1")


def current_session() -> Session:
    """Returns the session of this process. If there is none, creates one, as `shoal.init()`
    does."""
    return find_session() or open_session()


def current_loader_session() -> LoaderSession:
    """Returns the current session's interface for loaders."""
    return current_session().lifecycle


def open_session(settings: WorkerSettings | None = None) -> Session:
    """Creates the session of this process and makes it the current session. The settings come from
    the environment unless `settings` are given.

    With a coordinator, blocks until this member is accepted and, in a new job, until it has a rank.
    Without a coordinator, the process becomes a rank of MPI's world if `mpiexec` has started it,
    otherwise a world of one. On a rank of `shoal.launch`, creates the session of that rank,
    regardless of the environment.

    Raises:
        ConfigurationError: environment variables contradict each other, or this process is a data
            worker.
        DeadlineError: the coordinator cannot be reached, or too few members arrive, within the
            rendezvous timeout.
    """
    world = own_world()
    if world is not None and world.seat is not None:
        return open_fixed(world.seat)
    check_not_imported_again()
    settings = settings or WorkerSettings.load()
    take_secrets()  # processes started by the script do not need these variables
    if settings.coordinator is not None or mpi_world_size() > 1:
        # gradients, and temporary tensors of optimizers, are allocated and freed in every step
        keep_freed_memory()
    if settings.coordinator is None and mpi_world_size() > 1:
        session = open_fixed(
            own_seat(settings.collective_timeout),
            own=_address_outwards(settings),
            host=settings.host,
        )
        script = ScriptEnd(in_backward=in_backward)
        script.install()
        atexit.register(_end, session, script)
        return session
    metrics = WorkerMetrics()
    if settings.coordinator is None:
        check_not_torchrun(settings)
        session = Session(settings, None, None, metrics)
        set_session(session)
        atexit.register(_end_alone, weakref.ref(session), _script_end())
        return session
    return _open_member(settings, settings.coordinator, metrics)


def _open_member(settings: WorkerSettings, coordinator: str, metrics: WorkerMetrics) -> Session:
    """Creates the session of a member of a job. On failure, closes all resources that it has
    opened, because the script may retry."""
    with contextlib.suppress(ConfigurationError, OSError):
        # a script need not have data workers
        keep_socket_paths_short()
    serve_stacks()
    remember_source()
    with ExitStack() as undo:
        http = _serve(settings.metrics_listen, metrics)
        if http is not None:
            undo.callback(http.close)
        own = OwnAddress.find(
            settings.local_addr, settings.listen_addr, towards=_endpoint(coordinator)
        )
        donor = StateDonor(
            own.bound, announced=own.announced, secure=settings.calling_tls is not None
        )
        undo.callback(donor.close)
        client = CoordinatorClient(settings.channel(coordinator), interceptors=[metrics.calls])
        client.run = run_message(settings.run)
        identity = MemberIdentity(
            job_id=settings.job_id,
            member_id=settings.member_id,
            host=settings.host,
            pid=os.getpid(),
            launcher_id=settings.launcher_id,
            local_index=settings.local_index,
            donor_address=donor.address,
            donor_key=donor.key,
            metrics_address=metrics_address(settings.metrics_listen, http.port, own)
            if http is not None
            else "",
        )
        membership = Membership(client, identity, settings, host=own.announced)
        session = Session(settings, membership, donor, metrics)
        undo.callback(session.close, failed="this process failed before it had a rank")
        session.progress.tally_writer = _tally(settings)
        at_end = _Exit(session, membership, http)
        before = signal.getsignal(signal.SIGTERM)
        if at_end.hear_sigterm():  # before it has a rank, so that a waiting worker can leave
            undo.callback(signal.signal, signal.SIGTERM, before)
            session.lifecycle.before_step = at_end.check_sigterm
        try:
            session.join()
        except UnavailableError as error:
            if not settings.launcher_id:
                raise
            # The script is not at fault, so the launcher lets the other workers continue.
            leave_account(error, error.__traceback__)
            _log.error("%s", error)
            raise SystemExit(EVICTED) from error
        detector = DesyncDetector(session)
        detector.start()
        session.on_close(detector.close)
        undo.pop_all()
    set_session(session)
    at_end.install()
    if settings.tally_file is not None:
        notes = settings.tally_file.parent / "files-written"
        notice_files(WrittenFiles(notes, lambda: session.when_written))
    return session


def _serve(listen: str | None, metrics: WorkerMetrics) -> HttpServer | None:
    """Serves this worker's metrics over HTTP if `listen` is given. Returns None if no port is
    available; the worker then exports no metrics."""
    if listen is None:
        return None
    try:
        return serve_metrics(listen, metrics.registry)
    except ConfigurationError as error:
        _log.warning(
            "this worker serves no metrics: %s; set SHOAL_METRICS_LISTEN to a free port, or run "
            "with --no-metrics",
            error,
        )
        return None


def _tally(settings: WorkerSettings) -> TallyWriter | None:
    """Opens the launcher's tally file, if the launcher requested one. Returns None if there is no
    space for the file; training then continues without it."""
    if settings.tally_file is None:
        return None
    try:
        return TallyWriter(settings.tally_file)
    except OSError as error:
        _log.warning("the launcher cannot count the steps that this worker commits: %s", error)
        return None


def open_fixed(seat: Seat, *, own: OwnAddress = _LOOPBACK, host: str = "") -> Session:
    """Creates the session of one rank of a launch with fixed ranks, and makes it the current
    session. The caller must close it.

    `own`: address of this rank for its peers; `host`: name of the machine, if ranks run on several.
    """
    timeout_s = seat.timeout.total_seconds()
    settings = WorkerSettings(
        coordinator=None,
        local_index=seat.rank,
        metrics_listen=None,
        collective_timeout_s=timeout_s,
        rendezvous_timeout_s=timeout_s,
    )
    donor = StateDonor(own.bound, announced=own.announced)
    session = Session(settings, FixedMembership(seat, donor.address, host), donor, WorkerMetrics())
    session.join()
    set_session(session)
    return session


def _end(session: Session, script: ScriptEnd) -> None:
    """Closes the session at the end of the process. Does nothing if `shoal.shutdown()` has already
    closed it."""
    if find_session() is session:
        set_session(None)
    session.close(failed=script.failure())
    if session.missed is not None and script.failure() is None:
        end_now(1, f"this process failed: {session.missed}")


@functools.cache
def _script_end() -> ScriptEnd:
    """Returns the address at which other machines can reach this one, for use without a
    coordinator; loopback if there is no route to other machines."""
    script = ScriptEnd(in_backward=in_backward)
    script.install()
    return script


def _end_alone(reference: weakref.ref[Session], script: ScriptEnd) -> None:
    """Closes the session of a world of one at the end of the process. Does nothing if
    `shoal.shutdown()` has already closed it."""
    session = reference()
    if session is None or find_session() is not session:
        return
    set_session(None)
    session.close()
    if session.missed is not None and script.failure() is None:
        end_now(1, f"this process failed: {session.missed}")


class _Exit:
    """Leaves the job on SIGTERM, and at the end of the process, regardless of how the process
    ends."""

    def __init__(self, session: Session, membership: Membership, http: HttpServer | None) -> None:
        self._session = session
        self._membership = membership
        self._http = http
        self._script = ScriptEnd(account_for, in_backward, on_screen)
        self._excepthook = sys.excepthook
        self._asked_at: float | None = None
        self._handler = self._drain
        """The bound method, stored once so that the installed handler can be compared with it."""
        self._before: Callable[[int, FrameType | None], Any] | None = None
        """SIGTERM handler that the script had installed earlier."""
        self._hears = False

    def install(self) -> None:
        """Installs hooks for uncaught exceptions and for interpreter shutdown."""
        self._script.install()
        report_dead_threads(self._end_without)
        self._excepthook, sys.excepthook = sys.excepthook, self._note_uncaught
        atexit.register(self._leave)

    def _end_without(self, said: str) -> None:
        """Exits the process because one of its threads has failed. Does nothing if the process has
        left its job, because the thread is then no longer needed."""
        if find_session() is self._session:
            end_now(
                EVICTED,
                f"this worker exits with status {EVICTED} for its launcher to restart it: {said}",
            )

    def hear_sigterm(self) -> bool:
        """Installs a SIGTERM handler that asks the member to leave, and then calls the script's
        earlier handler. Returns False if the script ignores the signal, or if this is not the main
        thread."""
        if threading.current_thread() is not threading.main_thread():
            return False
        before = signal.getsignal(signal.SIGTERM)
        if before is signal.SIG_IGN or before is None:
            _log.warning(
                "%s",
                _UNHEARD.format(
                    "the script ignores SIGTERM, or its handler was not installed from Python"
                ),
            )
            return False
        self._before = before if callable(before) else None
        signal.signal(signal.SIGTERM, self._handler)
        self._hears = True
        return True

    def check_sigterm(self) -> None:
        """Logs a warning, once, if the script has replaced the SIGTERM handler with its own. Called
        before each step."""
        if self._hears and (now := signal.getsignal(signal.SIGTERM)) is not self._handler:
            self._hears = False
            _log.warning(
                "%s",
                _UNHEARD.format(
                    f"the script set a SIGTERM handler ({getattr(now, '__qualname__', now)}) "
                    "after init()"
                ),
            )

    def _leave(self) -> None:
        if find_session() is self._session:
            set_session(None)
        link = self._membership.link
        stopped = self._session.membership is not None and link.stopped is not None
        self._session.close(
            failed=str(link.evicted)
            if link.evicted
            else None
            if stopped
            else self._script.failure()
        )
        if self._http is not None:
            self._http.close()
        if not native_threads.wait(timedelta(seconds=5)):
            _log.warning("a process group is still being destroyed; exiting without waiting for it")
        self._end_if_evicted()
        missed = self._session.missed
        if missed is not None and self._script.failure() is None:
            # the launcher reports why the run has failed
            leave_account(PreconditionError(missed), None)
            end_now(1, f"this worker failed: {missed}")

    def _note_uncaught(
        self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None
    ) -> None:
        """Hook for uncaught exceptions. Omits the traceback if the coordinator has evicted this
        member, because the script is not at fault; `_leave` reports the eviction."""
        if not (isinstance(value, ShoalError) and self._membership.link.evicted is not None):
            self._excepthook(kind, value, traceback)

    def _end_if_evicted(self) -> None:
        """Exits with status EVICTED if the member has been evicted, regardless of how its script
        ended, because the state of an evicted member is not the result of the run."""
        refused = self._membership.link.evicted
        if refused is None:
            return
        job = self._membership.link.identity.job_id
        end_now(
            EVICTED,
            f"this worker was evicted from job {job!r} and exits with status {EVICTED} for its "
            f"launcher to restart it: {refused}",
        )

    def _drain(self, number: int, _frame: FrameType | None) -> None:
        """Handles SIGTERM. The first signal asks the member to leave. A later signal ends the
        process immediately, unless it arrives right after the first, because a batch system and the
        launcher may both signal a worker."""
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            self._membership.link.drain("SIGTERM")
            if self._before is not None:
                self._before(number, _frame)
        elif now - self._asked_at > _SAME_SIGNAL.total_seconds():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _address_outwards(settings: WorkerSettings) -> OwnAddress:
    """Returns the address at which other machines can reach this one, for workers without a
    coordinator. Unless the settings name an address, it is loopback if there is no route to other
    machines."""
    towards = next(
        (each for each in ELSEWHERE if route_towards(*each) is not None), ("127.0.0.1", 9)
    )
    return OwnAddress.find(settings.local_addr, settings.listen_addr, towards=towards)


def _endpoint(coordinator: str) -> tuple[str, int]:
    """Returns the coordinator's host and port. Raises ConfigurationError unless the address is
    host:port."""
    try:
        endpoint = parse_address(coordinator)
    except ConfigurationError as error:
        raise ConfigurationError(f"SHOAL_COORDINATOR={coordinator!r}: {error}") from error
    return endpoint.host, endpoint.port


def metrics_address(listen: str | None, port: int, own: OwnAddress) -> str:
    """Returns the address of this worker's metrics for Prometheus, derived from the address where
    they are served; empty if Prometheus could not reach it."""
    host = (listen or "").rpartition(":")[0].strip("[]")
    if is_unspecified(host):
        return str(Address(own.announced, port))
    if Address(host, port).is_loopback and not is_loopback(own.announced):
        _log.info(
            "this worker serves its metrics only at %s, which other machines cannot reach, so "
            "they are not announced to Prometheus; set SHOAL_METRICS_LISTEN=0.0.0.0:0",
            Address(host, port),
        )
        return ""
    return str(Address(host, port))
