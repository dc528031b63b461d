"""A process that fails to join leaves no session and no threads behind."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from shoal_common.errors import ConfigurationError, DeadlineError
from shoal_worker.elastic.session.brief_errors import brief
from shoal_worker.elastic.session.worker_process import find_session, open_session
from shoal_worker.settings import WorkerSettings


def test_failed_join_may_be_retried() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as nobody,
        socket.create_server(("127.0.0.1", 0)) as metrics,
    ):
        coordinator, listen = (
            f"127.0.0.1:{server.getsockname()[1]}" for server in (nobody, metrics)
        )
    settings = WorkerSettings(
        coordinator=coordinator,
        job_id="j",
        member_id="m",
        metrics_listen=listen,
        rendezvous_timeout_s=0.1,
    )
    before = set(threading.enumerate())
    for _ in range(2):
        with pytest.raises(
            DeadlineError,
            match=rf"for the coordinator at {coordinator} \(SHOAL_COORDINATOR\) to accept "
            r"this member",
        ):
            open_session(settings)
    deadline = time.monotonic() + 10
    while left := set(threading.enumerate()) - before:
        # grpc may be starting a thread, which cannot be joined yet
        assert time.monotonic() < deadline, [thread.name for thread in left]
        time.sleep(0.01)
    assert find_session() is None


def test_a_wrong_variable_is_one_sentence_without_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SERVER_TRANSPORT", "foo")
    with pytest.raises(
        ConfigurationError, match=r"^server_transport='?foo.*\(set SHOAL_SERVER_TRANSPORT\)$"
    ) as caught:
        open_session()
    # shown, though whoever shows it reads the variables too
    assert str(caught.value) in (brief(caught.value, caught.value.__traceback__) or "")
