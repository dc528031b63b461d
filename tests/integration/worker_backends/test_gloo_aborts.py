"""Aborts: which waits they end, how they reach a group that is still forming, and that they affect
nothing else. Ranks are threads here."""

from __future__ import annotations

import gc
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor as Pool
from datetime import timedelta
from typing import Any

import grpc
import pytest
import redis
import torch
import torch.distributed as dist
from shoal_common.errors import DeadlineError, MembershipChanged
from shoal_worker.backends.gloo import forming
from shoal_worker.backends.gloo.backend import GlooBackend
from shoal_worker.backends.gloo.forming import GlooGroup, connect_gloo
from shoal_worker.store.redis_store import RedisStore

Form = Callable[..., list[GlooBackend]]
_DEADLINE_S = 60.0
"""Less than the timeouts that an abort must not wait for."""


@pytest.fixture
def threads() -> Iterator[Pool]:
    with Pool() as pool:
        yield pool


@pytest.fixture
def form(threads: Pool) -> Iterator[Form]:
    """Makes a group of the given number of ranks, all in this process."""
    made: list[GlooBackend] = []

    def make(world_size: int, **options: Any) -> list[GlooBackend]:
        group = [GlooBackend() for _ in range(world_size)]
        made.extend(group)
        store = dist.HashStore()
        all_ranks = [
            threads.submit(
                backend.initialize, rank=rank, world_size=world_size, store=store, **options
            )
            for rank, backend in enumerate(group)
        ]
        for one in all_ranks:
            one.result(timeout=_DEADLINE_S)
        return group

    yield make
    for backend in made:
        backend.shutdown()


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    """Takes all descriptors below 1024, as in a process with many open files or shared tensors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    while taken[-1] < 1024:
        taken.append(os.dup(taken[0]))
    yield
    for descriptor in taken:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        threading.Event().wait(0.005)


def _forming_threads() -> int:
    return sum(thread.name == "shoal-gloo-forming" for thread in threading.enumerate())


def _reduce_alone(threads: Pool, backend: GlooBackend, *, short: bool = False) -> Future[Any]:
    """Starts a collective that no other rank joins, and returns once it is waiting."""
    issued = threading.Event()

    def reduce() -> None:
        handle = backend.all_reduce(torch.ones(4), async_op=True)
        issued.set()
        handle.wait()

    waiting = (
        threads.submit(backend.all_reduce_short, torch.ones(4)) if short else threads.submit(reduce)
    )
    _eventually(
        lambda: waiting.done() or backend.waits.now[1] == "all_reduce" if short else issued.is_set()
    )
    return waiting


@pytest.mark.parametrize("short", [False, True])
def test_an_abort_from_another_thread_frees_the_rank_that_waits(
    form: Form, threads: Pool, short: bool
) -> None:
    first, _ = form(2)
    waiting = _reduce_alone(threads, first, short=short)
    assert not waiting.done()
    first.abort("generation 8 is being formed")
    with pytest.raises(MembershipChanged, match="generation 8 is being formed"):
        waiting.result(timeout=_DEADLINE_S)
    assert not first.is_initialized


@pytest.mark.parametrize("short", [False, True])
def test_an_abort_ends_the_group_for_peers_that_wait_or_compute(
    form: Form, threads: Pool, short: bool
) -> None:
    first, second, third = form(3)
    waiting = _reduce_alone(threads, second, short=short)
    first.abort("over")
    with pytest.raises(MembershipChanged):
        waiting.result(timeout=_DEADLINE_S)
    _eventually(lambda: not third.is_initialized)
    with pytest.raises(MembershipChanged, match="a peer closed the connection"):
        third.barrier()


@pytest.mark.usefixtures("many_descriptors")
def test_a_rank_with_many_open_files_notices_that_a_peer_has_gone(form: Form) -> None:
    first, second = form(2)
    first.abort("over")
    _eventually(lambda: not second.is_initialized)


@pytest.mark.parametrize("short", [False, True])
def test_a_collective_that_a_peer_does_not_join_ends_at_the_groups_timeout(
    form: Form, threads: Pool, short: bool
) -> None:
    first, _ = form(2, timeout=timedelta(milliseconds=300))
    waiting = _reduce_alone(threads, first, short=short)
    with pytest.raises(MembershipChanged, match="Timed out waiting 300ms"):
        waiting.result(timeout=_DEADLINE_S)


def test_message_that_never_arrives_ends_at_the_groups_timeout(form: Form) -> None:
    first, _ = form(2, timeout=timedelta(milliseconds=300))
    with pytest.raises(MembershipChanged, match="Timed out waiting 300ms"):
        first.recv(torch.ones(4), 1)


def test_an_abort_in_the_middle_of_a_message_frees_both_ends(form: Form, threads: Pool) -> None:
    """Gloo does not fail an operation whose message is cut off; the operation sleeps for the
    group's timeout."""
    cut = 0
    for _ in range(30):
        first, second = form(2)
        message = torch.ones(1 << 24)
        sending = threads.submit(first.send, message, 1)
        receiving = threads.submit(second.recv, torch.empty_like(message), 0)
        _eventually(
            lambda second=second, receiving=receiving: (
                receiving.done() or second.waits.now[1] == "recv"
            )
        )
        second.abort("generation 9")
        error = receiving.exception(timeout=_DEADLINE_S)
        if error is None:  # it had arrived completely
            continue
        assert isinstance(error, MembershipChanged)
        assert "generation 9" in str(error)
        with pytest.raises(MembershipChanged):
            sending.result(timeout=_DEADLINE_S)
        cut += 1
        if cut == 5:
            break
    assert cut


def test_an_abort_touches_no_other_connection_of_the_process(form: Form, redis_url: str) -> None:
    """A gRPC stream, a Redis connection and another group keep their connections."""
    doomed, other = form(2), form(2)
    with (
        _echo_stream() as (say, peers),
        redis.Redis.from_url(redis_url, single_connection_client=True) as client,
    ):
        connection = client.client_id()
        assert say(b"before") == b"before"
        for backend in doomed:
            backend.abort("over")
        assert say(b"after") == b"after"
        assert len(peers) == 1
        assert client.client_id() == connection
        handles = [backend.all_reduce(torch.ones(1), async_op=True) for backend in other]
        for handle in handles:
            handle.wait()


def test_listeners_opened_concurrently_are_distinguished_from_gloos(
    form: Form, threads: Pool
) -> None:
    enough = threading.Event()

    def open_listeners() -> None:
        while not enough.is_set():
            with socket.create_server(("127.0.0.1", 0)):
                pass

    noise = threads.submit(open_listeners)
    try:
        for _ in range(10):
            for backend in form(2):
                assert backend._group is not None
                assert len(backend._group._sockets) == 1
    finally:
        enough.set()
        noise.result(timeout=_DEADLINE_S)


@pytest.mark.parametrize("by", ["backend", "store"])
def test_a_group_that_waits_for_its_peers_can_be_given_up_at_once(
    by: str, redis_url: str, prefix: str, threads: Pool
) -> None:
    store = RedisStore(redis_url, prefix, timeout=timedelta(minutes=5))
    backend = GlooBackend()
    initializing = threads.submit(
        backend.initialize, rank=0, world_size=2, store=store, connect_timeout=timedelta(minutes=5)
    )
    _eventually(lambda: _forming_threads() == 1)
    (backend if by == "backend" else store).abort("generation 9")
    with pytest.raises(MembershipChanged, match="generation 9"):
        initializing.result(timeout=_DEADLINE_S)
    store.close()
    _eventually(lambda: _forming_threads() == 0)


def test_group_created_after_it_was_given_up_leaves_nothing_open(
    threads: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up, made = threading.Event(), list[GlooGroup]()

    def connect_late(*arguments: Any, **options: Any) -> GlooGroup:
        group = connect_gloo(*arguments, **options)
        made.append(group)
        assert given_up.wait(_DEADLINE_S)
        return group

    monkeypatch.setattr(forming, "connect_gloo", connect_late)
    store, both = dist.HashStore(), [GlooBackend(), GlooBackend()]
    initializing = [
        threads.submit(one.initialize, rank=rank, world_size=2, store=store)
        for rank, one in enumerate(both)
    ]
    _eventually(lambda: len(made) == 2)
    for backend, one in zip(both, initializing, strict=True):
        backend.abort("generation 9")
        with pytest.raises(MembershipChanged, match="generation 9"):
            one.result(timeout=_DEADLINE_S)
    given_up.set()
    _eventually(lambda: _forming_threads() == 0)
    assert [copy.fileno() for group in made for copy in group.sockets._copies] == [-1, -1]


def test_absent_peer_is_named_at_the_connect_timeout(redis_url: str, prefix: str) -> None:
    store = RedisStore(redis_url, prefix)
    with pytest.raises(
        DeadlineError,
        match=r"connecting 3 ranks took longer than connect_timeout=0\.2 s: ranks \[1, 2\] did not "
        r"arrive",
    ):
        GlooBackend().initialize(
            rank=0, world_size=3, store=store, connect_timeout=timedelta(milliseconds=200)
        )
    store.close()
    _eventually(lambda: _forming_threads() == 0)


def test_earlier_timeout_of_a_torch_store_is_reported_as_the_same_deadline() -> None:
    limit = timedelta(seconds=0.2)
    group = forming.FormingGroup(
        dist.HashStore(),
        0,
        2,
        hostname="127.0.0.1",
        connect_timeout=limit,
        timeout=timedelta(seconds=30),
    )
    group._connect_timeout = timedelta(seconds=_DEADLINE_S)
    with pytest.raises(DeadlineError, match=r"ranks \[1\] did not arrive"):
        group.wait()
    _eventually(lambda: _forming_threads() == 0)


def test_forgotten_backend_closes_its_connections(form: Form, threads: Pool) -> None:
    store = dist.HashStore()
    kept, forgotten = GlooBackend(), GlooBackend()
    both = [
        threads.submit(backend.initialize, rank=rank, world_size=2, store=store)
        for rank, backend in enumerate([kept, forgotten])
    ]
    for one in both:
        one.result(timeout=_DEADLINE_S)
    del forgotten, both, one
    gc.collect()
    _eventually(lambda: not kept.is_initialized)
    kept.shutdown()


class _echo_stream:
    """Serves one gRPC stream that stays open. `peers`: addresses of clients that opened a stream; a
    reconnect would add a second one."""

    def __init__(self) -> None:
        self.peers: list[str] = []
        self._server = grpc.server(futures.ThreadPoolExecutor())
        method = grpc.stream_stream_rpc_method_handler(self._echo)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("test.Echo", {"Echo": method})]
        )
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self._said = threading.Semaphore(0)
        self._next: list[bytes | None] = []
        self._answers = self._channel.stream_stream("/test.Echo/Echo")(self._requests())

    def __enter__(self) -> tuple[Callable[[bytes], bytes], list[str]]:
        return self._say, self.peers

    def __exit__(self, *_: object) -> None:
        self._put(None)
        self._channel.close()
        self._server.stop(0).wait()

    def _echo(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        self.peers.append(context.peer())
        yield from requests

    def _requests(self) -> Iterator[bytes]:
        while True:
            self._said.acquire()
            said = self._next.pop(0)
            if said is None:
                return
            yield said

    def _put(self, said: bytes | None) -> None:
        self._next.append(said)
        self._said.release()

    def _say(self, said: bytes) -> bytes:
        self._put(said)
        return next(self._answers)


def test_wait_for_a_message_after_the_end_of_its_group_fails_at_once(form: Form) -> None:
    first, _ = form(2)
    message = torch.ones(1 << 20)
    receiving = first.recv(message, 1, async_op=True)
    first.abort("generation 9")
    with pytest.raises(MembershipChanged, match="generation 9"):
        receiving.wait()
