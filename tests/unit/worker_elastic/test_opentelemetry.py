"""OpenTelemetry receives the steps, checkpoints, calls, numbers and warnings of a rank, each once,
even if the receiver is unavailable for a while."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_common.rpc.client_interceptors import ClientCall
from shoal_worker.elastic.session.worker_process import current_session
from shoal_worker.metrics import WorkerMetrics
from shoal_worker.tracking.sinks import Event, EventKind, Points, Span, TrackedRun
from shoal_worker.tracking.spans import SpanSource
from torch import nn

from tests.otlp import Receiver, receiver
from tests.zygote.children import eventually

pytestmark = pytest.mark.usefixtures("fresh_session")

STEPS = 10


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiver() as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


def train(*, checkpoints: Path | None = None, at_half: Any = None) -> None:
    net = nn.Linear(1, 1)
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 1e-3))
    data = torch.utils.data.TensorDataset(torch.ones(40, 1))
    loader = shoal.ElasticDataLoader(data, global_batch_size=4)
    shoal.track(shoal.OpenTelemetry(), every_steps=2)
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        shoal.report(loss=loader.global_step)
        if checkpoints is not None:
            shoal.save_checkpoint(checkpoints, every_steps=4)
        if at_half is not None and loader.global_step == STEPS // 2:
            at_half()
    shoal.shutdown()


def test_steps_checkpoints_numbers_and_warnings_arrive(received: Receiver, tmp_path: Path) -> None:
    train(
        checkpoints=tmp_path,
        at_half=lambda: logging.getLogger("shoal_worker.test").warning("the disk is nearly full"),
    )
    spans = received.spans()
    steps = [attributes for name, attributes, _ in spans if name == "shoal.steps"]
    assert [(each["shoal.first_step"], each["shoal.last_step"]) for each in steps] == [
        (first, first + 1) for first in range(1, STEPS, 2)
    ]
    saved = [attributes for name, attributes, _ in spans if name == "shoal.checkpoint"]
    assert [each["shoal.checkpoint.outcome"] for each in saved] == ["written"] * len(saved)
    assert len(saved) == 2
    assert all(span.end_time_unix_nano > span.start_time_unix_nano for *_, span in spans)
    assert received.points("shoal.loss") == [float(step) for step in range(2, STEPS + 1, 2)]
    assert received.points("shoal.world_size") == [1.0] * (STEPS // 2)
    assert ("", "WARNING", "the disk is nearly full") in received.logs()
    (resource,) = received.resources()
    assert resource["service.name"] == "shoal-worker"
    assert resource["service.instance.id"].endswith("/0")
    assert resource["shoal.run"]


def test_unavailable_receiver_gets_each_span_and_number_once(
    received: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    """Spans are accepted, but metrics are refused. The spans must not be sent again."""
    received.refused.add("metrics")

    def back() -> None:
        eventually(lambda: received.refusals >= 3, "three refusals")
        received.refused.clear()

    with caplog.at_level(logging.INFO):
        train(at_half=back)
    steps = [each["shoal.last_step"] for name, each, _ in received.spans() if name == "shoal.steps"]
    assert steps == list(range(2, STEPS + 1, 2))
    assert received.points("shoal.loss") == [float(step) for step in range(2, STEPS + 1, 2)]
    (away,) = [text for text in caplog.messages if "is not accepting reports" in text]
    assert "the OTLP receiver did not accept metrics: " in away
    assert "error code" in away
    assert not [each for each in caplog.records if each.name.startswith("opentelemetry")]


def test_events_become_logs_and_the_scripts_random_numbers_are_unchanged(
    received: Receiver,
) -> None:
    expected = random.getstate()
    sink = shoal.OpenTelemetry()
    sink.open(run=TrackedRun(job="train", key="a", place="h1/0"), step=1)
    fault = Event(step=4, time_ns=10**18, kind=EventKind.FAULT, text="a fault aborted 1 step(s)")
    join = Event(step=5, time_ns=10**18, kind=EventKind.JOIN, text="1 rank(s) joined")
    span = Span(step=4, name="shoal.generation", begin_ns=10**18, end_ns=10**18 + 1, error="lost")
    sink.write([fault, Points(step=4, time_ns=10**18, values={"accuracy": 0.5}), join, span])
    sink.close(ended=True)
    assert random.getstate() == expected
    assert [(name, span.status.message) for name, _, span in received.spans()] == [
        ("shoal.generation", "lost")
    ]
    assert received.logs() == [
        ("shoal.fault", "WARNING", fault.text),
        ("shoal.join", "INFO", join.text),
    ]
    assert received.points("accuracy") == [0.5]
    assert received.resources()[0] | {"shoal.job": "train"} == received.resources()[0]


def test_few_quick_calls_and_all_failed_and_slow_ones_have_spans() -> None:
    shoal.init()
    session, found = current_session(), []
    SpanSource(session, found.append, every_steps=1)
    called = session.metrics.calls._followers[-1]
    for seconds, code in [(0.01, "OK")] * 5 + [(0.2, "OK"), (0.01, "UNAVAILABLE")]:
        called(ClientCall(method="/shoal.v1.Coordinator/GetJob", seconds=seconds, code=code))
    assert [
        (span.attributes["rpc.grpc.status_code"], span.attributes["shoal.calls_without_span"])
        for span in found
    ] == [("OK", 0), ("OK", 4), ("UNAVAILABLE", 0)]
    assert {span.name for span in found} == {"shoal.v1.Coordinator/GetJob"}
    assert [span.error for span in found] == ["", "", "UNAVAILABLE"]


def test_generations_recoveries_and_joins_are_periods() -> None:
    metrics, found = WorkerMetrics(), []
    metrics.follow_periods(lambda name, seconds, attributes: found.append((name, dict(attributes))))
    metrics.generation_formed(number=2, member_id="m", rank=0, world_size=3, seconds=0.1)
    metrics.recovered(0.2)
    metrics.joined(0.1, count=2)
    assert found == [
        ("generation", {"number": 2, "world_size": 3}),
        ("recovery", {}),
        ("join", {"count": 2}),
    ]
