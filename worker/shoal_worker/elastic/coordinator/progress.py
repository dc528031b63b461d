"""Progress of this worker, for heartbeats and metrics.

Written by the training thread, and read by the coordinator link's thread. A lock guards the fields
that change together when a step is committed. All other fields are independent of each other.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from shoal_common.errors import ConfigurationError
from shoal_common.formats.tally import MOST_METRICS, Counts, TallyWriter
from shoal_common.system.kernel_waits import KernelWait
from shoal_common.system.processes import children_cpu_s

from shoal_worker.backends.waits import Waits
from shoal_worker.elastic.contract.reported_loss import ReportedLoss
from shoal_worker.elastic.coordinator.script_lines import DATA_WORKER, calls_of, script_line
from shoal_worker.metrics import WorkerMetrics

_WINDOW_S = 1.0
_MEDIAN_OF = 31
_LONGEST_NAME = 64
LOCATE_AFTER_S = 5.0
"""Time without progress, in seconds, after which heartbeats contain the current line of the
script."""
_CPU_OF_CHILDREN_S = 5.0
"""Interval in seconds between measurements of the child processes' CPU time. It is long
because every process must be inspected."""


@dataclass(frozen=True, kw_only=True)
class BusyLink:
    """Connection to a peer that has had data waiting to be sent for most of the last few
    seconds."""

    rank: int
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a worker at one moment."""

    step: int = 0
    """Number of committed optimizer steps."""
    steps_in_all: int = 0
    """Total number of steps in the run, including future steps. 0 if unknown, or if ranks take
    steps independently."""
    epoch: int = 0
    sequence: int = 0
    """Number of step boundaries, steps and operations that the training thread has reached. If the
    number stops growing, the worker is stuck."""
    samples_per_s: float = 0.0
    """Samples per second of this rank, over about the last second."""
    loss: float = math.nan
    """Last reported loss; NaN if none was reported."""
    step_time_s: float = 0.0
    """Median duration of the last steps, in seconds."""
    samples: int = 0
    """Total number of committed samples of this rank."""
    staleness: float = 0.0
    """Staleness of the last push (async_sgd), in versions of the servers' values."""
    waiting_s: float = 0.0
    """Duration of the training thread's current wait for its peers, in seconds; 0 if it is not
    waiting."""
    waiting_in: str = ""
    """Description, for people, of what the training thread is waiting for: a collective, or the
    formation of a generation."""
    busy_time_s: float = 0.0
    """Part of `step_time_s` in which this rank did not wait for its peers."""
    cpu_s: float = 0.0
    """CPU time in seconds used by the process and its children."""
    server_wait_s: float = 0.0
    """Duration of this worker's current wait for a parameter server, in seconds; 0 if it is not
    waiting."""
    awaited_server: str = ""
    """Name of the awaited parameter server, for people."""
    busy_link: BusyLink | None = None
    share: float = 0.0
    """This rank's number of micro-batches divided by an equal share, if micro-batches are dealt by
    speed or a step has fewer micro-batches than ranks; otherwise 0."""
    upload_backlog_bytes: int = 0
    """Size of the checkpoints on this rank's disk that have not been uploaded yet, in bytes."""
    script_line: str = ""
    """Line of the script that the training thread is executing, if there has been no progress for a
    while; otherwise empty."""
    last_wait: str = ""
    """Description of the last collective, or other wait for peers, that the training thread has
    completed."""
    stacks: str = ""
    """Stacks of this process, if it has made no progress for a while and new stacks are due;
    otherwise empty."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Latest reported numbers other than the loss, by name."""


class ProgressMeter:
    """Counts steps, samples and reached boundaries, and computes rates over about the last second,
    or over the last step if that took longer."""

    def __init__(
        self, metrics: WorkerMetrics, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`clock`: function that returns the time in seconds since an arbitrary moment."""
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._sequence = 0
        self._moved_at, self._thread, self._native_id = clock(), 0, 0
        """Time of the last call to `entered`, and the identifier and native id of the training
        thread, which made that call."""
        self._kernel_wait = KernelWait()
        self.data_worker = ""
        """Line of code, for people, that is being executed by the data worker that the training
        thread is waiting for; empty if unknown. Set by the hang report."""
        self._steps = 0
        self._samples = 0
        self.loss = ReportedLoss()
        """Losses reported by the loop or by `train_step`."""
        self._reported: dict[str, ReportedLoss] = {}
        """Other numbers reported by the loop, by name. Adding a name replaces the dict."""
        metrics.loss.set_function(lambda: self.loss.value)
        metrics.share.set_function(lambda: self.share)
        self._staleness = 0.0
        self._recent: deque[tuple[float, int]] = deque()
        self._step_times: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._busy_times: deque[float] = deque(maxlen=_MEDIAN_OF)
        self._last_commit: float | None = None
        self._waited_s = 0.0
        """Total duration of all waits until the last commit, in seconds."""
        self._cpu = ProcessorTime(clock)
        self.waits = Waits(clock)
        """Records when this rank waits for its peers."""
        self.server_waits: Callable[[], tuple[float, str]] = lambda: (0.0, "")
        """Function that returns how many seconds this worker has been waiting for a parameter
        server, and the server's name. Set by the parameter servers' client."""
        self.epoch = 0
        """Epoch of the loader that the script iterates over; set by the session's owner."""
        self.steps_in_all = 0
        """Total number of steps of the run over all ranks; 0 if unknown. Set by the session's
        owner."""
        self.takes_own_steps = False
        """True if ranks take steps independently. Set by the session's owner."""
        self.share = 0.0
        """Value of `Progress.share`. Set by the session's owner."""
        self.upload_backlog_bytes = 0
        """Value of `Progress.upload_backlog_bytes`. Set by the thread that uploads."""
        self.tally_writer: TallyWriter | None = None
        """Writes this worker's commits to a file for the launcher; None if the launcher has not
        requested it. Set by the session's owner."""
        self._before: tuple[int, int] | None = None
        """Numbers of steps and samples committed by the run before this process's first commit;
        None until that commit."""
        self._losses = (0, 0, 0.0)
        """Index of the newest loss counted in the tally, and the number and sum of all finite
        losses counted so far."""
        self._commits = 0
        self._known = (0, 0)
        """Numbers of steps and samples that the tally must not count, because another worker had
        already pushed their batches, or because the steps were undone."""
        self._unpushed = (0, 0)
        """Number of inner steps that have not been pushed to the servers yet, and number of samples
        in these steps."""
        self._counts: Counts | None = None
        """Current values of the tally for the launcher."""
        self._pushing = 0
        self._begun_pushes: set[int] = set()
        """Keys of batches that this process has begun to push and has not committed."""
        self._pushes_again = False
        self.lost_steps = 0
        """Number of steps that this worker aborted because of a fault."""
        self._followers: list[tuple[Callable[[], None], Callable[[int], None]]] = []

    def follow(self, *, begun: Callable[[], None], committed: Callable[[int], None]) -> None:
        """Registers callbacks. `begun`: called when a step begins. `committed`: called after each
        commit, with the number of committed steps. The step's mean loss is not recorded until that
        call has returned."""
        self._followers.append((begun, committed))

    def begun(self) -> None:
        """Records the beginning of a step."""
        for begun, _ in self._followers:
            begun()

    def lost(self) -> None:
        """Records an aborted step."""
        self.lost_steps += 1
        self._metrics.steps_lost.inc()

    def entered(self) -> None:
        """Records that the training thread has reached a step boundary, or has entered a step or an
        operation, and is therefore not stuck."""
        self._sequence += 1
        self._moved_at = self._clock()
        if self._thread != threading.get_ident():
            self._thread, self._native_id = threading.get_ident(), threading.get_native_id()

    @property
    def staleness(self) -> float:
        """Staleness of the last push, in versions of the servers' values."""
        return self._staleness

    def pushed(self, staleness: float) -> None:
        """Records a push that the servers have applied. `staleness`: staleness of the push, in
        versions of the servers' values."""
        self._staleness = staleness
        self._metrics.staleness.observe(staleness)

    def committed(self, *, steps: int, samples: int, loss: float | None) -> None:
        """Records a committed step. `steps`: number of committed steps. `samples`: this rank's
        samples in the step. `loss`: mean loss of the step, if known."""
        now = self._clock()
        with self._lock:
            self._sequence += 1
            self._steps = steps
            self._samples += samples
            self._recent.append((now, samples))
            while len(self._recent) > 2 and self._recent[0][0] < now - _WINDOW_S:
                self._recent.popleft()
            last, self._last_commit = self._last_commit, now
            total_s = self.waits.total_s
            waited_s, self._waited_s = total_s - self._waited_s, total_s
            if last is not None:
                self._step_times.append(now - last)
                self._busy_times.append(max(0.0, now - last - waited_s))
        if last is not None:
            self._metrics.step_seconds.observe(now - last)
            self._metrics.wait_seconds.inc(waited_s)
        self._metrics.steps_committed.inc()
        self._metrics.samples.inc(samples)
        for _, committed in self._followers:
            committed(steps)
        if loss is not None:
            self.loss.report(loss)

    def pushing(self, batch: int) -> None:
        """Records that the push of a batch to the servers begins. `batch`: key of the batch; 0 if
        it has none."""
        self._pushing, self._pushes_again = batch, batch in self._begun_pushes
        if batch:
            self._begun_pushes.add(batch)
        if self.tally_writer is not None:
            self.tally_writer.pushing(batch)

    def round_pushed(self) -> None:
        """Records that the inner steps since the last push have now been pushed, by a push between
        two steps."""
        self._unpushed = (0, 0)
        if self.tally_writer is not None and self._counts is not None:
            self._counts = self._counts._replace(unpushed_steps=0, unpushed_samples=0)
            self.tally_writer.recount(self._counts)

    def round_undone(self) -> None:
        """Records that the inner steps since the last push have been undone."""
        self._known = self._known[0] + self._unpushed[0], self._known[1] + self._unpushed[1]
        self._unpushed = (0, 0)

    def tally(
        self,
        steps: int,
        samples: int,
        step_samples: int,
        *,
        generation: int,
        asynchronous: bool,
        known: bool = False,
        pushed: bool = True,
    ) -> None:
        """Writes the last committed step to `tally_writer`, which must be set.

        Args:
            steps: number of steps of the run so far.
            samples: number of samples of the run so far.
            step_samples: number of samples in this step.
            generation: the rank's current generation.
            known: True if the servers already had the step's batch, or the batches of its round.
            pushed: False for an inner step of an unfinished round.
        """
        writer = self.tally_writer
        assert writer is not None
        round_steps, round_samples = self._unpushed[0] + 1, self._unpushed[1] + step_samples
        self._unpushed = (0, 0) if pushed else (round_steps, round_samples)
        if pushed:
            self._begun_pushes.discard(self._pushing)
        if known and not self._pushes_again:  # otherwise this worker may have pushed it
            self._known = self._known[0] + round_steps, self._known[1] + round_samples
            writer.known(self._pushing, round_steps, round_samples)
            return
        steps, samples = steps - self._known[0], samples - self._known[1]
        if self._before is None:
            self._before = steps - 1, samples - step_samples
        self._commits += 1
        loss = self._count_loss()
        _, losses, loss_sum = self._losses
        self._counts = Counts(
            commits=self._commits,
            samples=samples,
            samples_before=self._before[1],
            steps_before=self._before[0],
            steps_in_all=self.steps_in_all,
            epoch=self.epoch,
            lost_steps=self.lost_steps,
            losses=losses,
            loss_sum=loss_sum,
            loss=loss,
            asynchronous=asynchronous,
            batch=self._pushing,
            unpushed_steps=self._unpushed[0],
            unpushed_samples=self._unpushed[1],
        )
        self.write_reported()
        writer.committed(self._counts, generation=generation, steps=steps)

    def _count_loss(self) -> float:
        """Returns the newest loss. Adds it to the counted losses unless it is already counted or
        not finite."""
        (count, loss), (last, losses, loss_sum) = self.loss.newest, self._losses
        if count != last and math.isfinite(loss):
            losses, loss_sum = losses + 1, loss_sum + loss
        self._losses = count, losses, loss_sum
        return loss

    def write_last(self) -> None:
        """Writes the numbers that were reported after the last step to the launcher's file. Called
        at the end of the run."""
        self.write_reported()
        if self.tally_writer is not None and self._counts is not None:
            loss = self._count_loss()
            _, losses, loss_sum = self._losses
            self.tally_writer.recount(
                self._counts._replace(losses=losses, loss_sum=loss_sum, loss=loss)
            )

    def write_reported(self) -> None:
        """Writes the reported numbers, except the loss, to the launcher's file."""
        if self.tally_writer is not None and self._reported:
            self.tally_writer.metrics((name, each.value) for name, each in self._reported.items())

    def report(self, numbers: Mapping[str, float | torch.Tensor]) -> None:
        """Records numbers that the loop reports, by name.

        Raises:
            ConfigurationError: a value is not a single number, there are too many names, or a name
                is too long.
        """
        for name, value in numbers.items():
            if name == "loss":
                self.loss.report(value)
                continue
            reported = self._reported.get(name)
            if reported is None:
                if len(name) > _LONGEST_NAME:
                    raise ConfigurationError(
                        f"shoal.report({name}=...): the name has {len(name)} characters; "
                        f"expected at most {_LONGEST_NAME}"
                    )
                if len(self._reported) >= MOST_METRICS:
                    raise ConfigurationError(
                        f"shoal.report({name}=...): only {MOST_METRICS} names besides the loss "
                        f"are allowed, and all are in use: {', '.join(self._reported)}"
                    )
                reported = ReportedLoss(name)
            reported.report(value)
            self._reported = {**self._reported, name: reported}

    @property
    def reported(self) -> Mapping[str, ReportedLoss]:
        """All numbers that the loop reports, including the loss; keyed by name."""
        return {"loss": self.loss, **self._reported}

    @property
    def still_s(self) -> float:
        """Seconds since the training thread last reached a step boundary, a step or an operation; 0
        before the first."""
        return self._clock() - self._moved_at if self._thread else 0.0

    @property
    def sequence(self) -> int:
        """Current value of `Progress.sequence`."""
        return self._sequence

    @property
    def thread(self) -> int:
        """Identifier of the training thread; 0 before the first step."""
        return self._thread

    def _script_line(self) -> str:
        line = script_line(calls_of(self._thread), self._kernel_wait.look(self._native_id))
        if line.endswith(DATA_WORKER) and self.data_worker:
            line += f", which is {self.data_worker}"
        return line

    def snapshot(self) -> Progress:
        """Returns this worker's current progress. While a step takes unusually long, the returned
        rate falls and the step time grows."""
        waiting_s, waiting_in = self.waits.now
        server_wait_s, awaited_server = self.server_waits()
        line = self._script_line() if self.still_s >= LOCATE_AFTER_S else ""
        with self._lock:
            now = self._clock()
            running_s = now - self._last_commit if self._last_commit is not None else 0.0
            waited_s = self.waits.total_s - self._waited_s + waiting_s
            busy_times = list(self._busy_times)
            times, samples = list(self._step_times), [n for _, n in self._recent]
            since_last = now - self._recent[-1][0] if samples else 0.0
            step_s = statistics.median(times) if times else 0.0
            busy_s = statistics.median(busy_times) if times else 0.0
            if times and running_s > 2 * step_s:
                # the unfinished step already takes longer than earlier ones
                step_s, busy_s = running_s, max(0.0, running_s - waited_s)
            span = max(self._recent[-1][0] - self._recent[0][0], since_last) if samples else 0.0
            return Progress(
                step=self._steps,
                steps_in_all=0 if self.takes_own_steps else self.steps_in_all,
                epoch=self.epoch,
                sequence=self._sequence,
                samples_per_s=sum(samples[1:]) / span if span > 0 else 0.0,
                loss=self.loss.value,
                step_time_s=step_s,
                samples=self._samples,
                staleness=self._staleness,
                waiting_s=waiting_s,
                waiting_in=waiting_in,
                busy_time_s=busy_s,
                cpu_s=self._cpu.seconds(),
                server_wait_s=server_wait_s,
                awaited_server=awaited_server,
                share=self.share,
                upload_backlog_bytes=self.upload_backlog_bytes,
                script_line=line,
                last_wait=self.waits.last,
                metrics={name: reported.value for name, reported in self._reported.items()},
            )


class ProcessorTime:
    """CPU time of this process and its children, such as data workers. The CPU time of a hung
    process does not increase."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._children_s = 0.0
        self._looked_at: float | None = None

    def seconds(self) -> float:
        """Returns the CPU time in seconds. Never decreases: children that have ended keep their
        last measured value."""
        if self._looked_at is None or self._clock() > self._looked_at + _CPU_OF_CHILDREN_S:
            self._looked_at = self._clock()
            self._children_s = max(self._children_s, children_cpu_s())
        return time.process_time() + self._children_s
