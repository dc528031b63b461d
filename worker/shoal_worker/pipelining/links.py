"""Communication between the ranks of one pipeline: transfers between stages, and small collectives,
over one process group.

Works with any `torch.distributed.ProcessGroup`, even one that is not registered in torch's world.
schedule.py ensures that any two ranks send and receive their messages in the same order. Transfers
therefore need no tags, which NCCL would not support. Every wait ends when the group times out or is
aborted. A failure aborts the group, so that no other rank is left waiting for this one.

All calls must come from one thread.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from shoal_common.errors import ConfigurationError, MembershipChanged
from torch.distributed import AllreduceOptions, BroadcastOptions
from torch.distributed.tensor import DTensor

from shoal_worker.backends.base import GroupEndedError

_SENDS_AHEAD: Final = 2
"""Maximum number of sends in progress to one peer. The next send waits until the first one has
finished. A send keeps its tensor alive."""


@dataclass
class Traffic:
    """Number of bytes sent by this rank, by purpose."""

    activations: int = 0
    gradients: int = 0
    headers: int = 0
    """Bytes of messages with activation shapes. A shape is sent only when it occurs for the first
    time."""
    shared: int = 0
    """Bytes of gradients of parameters shared by several stages."""
    outputs: int = 0
    """Bytes of outputs of the last stage."""


class Links:
    """One rank's connections to the other ranks of its pipeline."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        end: Callable[[str], None] | None = None,
        come_after: Callable[[dist.Work], None] | None = None,
    ) -> None:
        """Connects the ranks of `group`.

        Args:
            end: called with a reason to abort the group on all ranks; None: the group's own `abort`
                is used.
            come_after: called with a transfer to make later computations on the device wait for it.
                Used for floating-point tensors that the host does not read. None: the host waits
                for these transfers.
        """
        self._group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        self.device = device
        self.traffic = Traffic()
        self._end = end
        self._come_after = come_after
        self._sends: dict[int, collections.deque[tuple[dist.Work, torch.Tensor, str]]] = (
            collections.defaultdict(collections.deque)
        )

    def end(self, reason: str) -> None:
        """Aborts the group: immediately on this rank, and soon on all other ranks. Idempotent. May
        be called from any thread."""
        if self._end is not None:
            self._end(reason)
        else:
            end_group(self._group, reason)

    @contextmanager
    def ending_on_failure(self, what: str) -> Iterator[None]:
        """Context that aborts the group if an exception is raised within it, so that the other
        ranks notice the failure immediately. `what`: description of the work, for errors."""
        try:
            yield
        except BaseException as error:  # a KeyboardInterrupt would leave the others waiting, too
            self._sends.clear()
            cause = str(error).strip().partition("\n")[0] or type(error).__name__
            self.end(
                cause
                if isinstance(error, MembershipChanged)
                else f"{what} on rank {self.rank} of the pipeline failed: {type(error).__name__}: "
                f"{cause}"
            )
            raise

    # ------------------------------------------------------------------------------------ transfers

    def send(self, tensor: torch.Tensor, peer: int, what: str) -> None:
        """Starts sending `tensor`, which must not change until `finish_sends` has returned. `what`:
        description of the transfer, for errors."""
        pending = self._sends[peer]
        while len(pending) >= _SENDS_AHEAD:
            self._finish_send(peer)
        contiguous = tensor.detach().contiguous()
        with self._translated(what, peer):
            pending.append((self._group.send([contiguous], peer, 0), contiguous, what))

    def receive(self, into: torch.Tensor, peer: int, what: str) -> Incoming:
        """Starts receiving a tensor into `into`, which must be contiguous."""
        with self._translated(what, peer):
            return Incoming(self, self._group.recv([into], peer, 0), into, peer, what)

    def finish_sends(self) -> None:
        """Waits until the peers have received all sent tensors."""
        for peer in self._sends:
            while self._sends[peer]:
                self._finish_send(peer)

    def _finish_send(self, peer: int) -> None:
        work, tensor, what = self._sends[peer].popleft()
        with self._translated(what, peer):
            self._await(work, tensor)

    # ---------------------------------------------------------------------------------- collectives

    def all_reduce(
        self, tensor: torch.Tensor, what: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> None:
        """All-reduces `tensor` across the pipeline's ranks, in place."""
        self.start_all_reduce(tensor, what, op)()

    def start_all_reduce(
        self, tensor: torch.Tensor, what: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Callable[[], None]:
        """Starts an in-place all-reduce of `tensor`. Returns a function that waits for it."""
        return start_all_reduce(self._group, tensor, what, op) if self.size > 1 else lambda: None

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Broadcasts `tensor` from rank `source` to all ranks, in place."""
        if self.size == 1:
            return
        options = BroadcastOptions()
        options.rootRank = source
        with self._translated(what, None):
            self._group.broadcast([tensor], options).wait()

    def _await(self, work: dist.Work, tensor: torch.Tensor) -> None:
        if self._come_after is not None and tensor.is_floating_point():
            self._come_after(work)
        else:
            work.wait()

    @contextmanager
    def _translated(self, what: str, peer: int | None) -> Iterator[None]:
        with _group_errors(
            f"{what} (rank {self.rank} of the "
            f"pipeline{'' if peer is None else f', with rank {peer}'})"
        ):
            yield


class Incoming:
    """A tensor that is being received."""

    def __init__(
        self, links: Links, work: dist.Work, into: torch.Tensor, peer: int, what: str
    ) -> None:
        self._links, self._work, self._into, self._peer, self._what = links, work, into, peer, what

    def wait(self) -> None:
        """Waits until later computations can use the tensor. Raises MembershipChanged if the
        transfer failed."""
        with self._links._translated(self._what, self._peer):
            self._links._await(self._work, self._into)


def all_reduce(
    group: dist.ProcessGroup,
    tensor: torch.Tensor,
    what: str,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """All-reduces `tensor` across the ranks of the group, in place. Raises MembershipChanged if the
    group has ended."""
    start_all_reduce(group, tensor, what, op)()


def start_all_reduce(
    group: dist.ProcessGroup,
    tensor: torch.Tensor,
    what: str,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> Callable[[], None]:
    """Starts an all-reduce of `tensor`, in place. Returns a function that waits for the result."""
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp(op)
    with _group_errors(what):
        work = group.allreduce([tensor], options)

    def finish() -> None:
        with _group_errors(what):
            work.wait()

    return finish


def end_group(group: Any, reason: str) -> None:
    """Aborts a process group. Shoal's groups report the reason to all ranks; torch's own groups do
    not accept a reason."""
    try:
        group.abort(reason)
    except TypeError:
        group.abort()


@contextmanager
def _group_errors(what: str) -> Iterator[None]:
    """Context that converts the error of a failed transfer or collective to GroupEndedError. After
    a failure, the group must not be used any more, because the ranks' later operations might not
    match."""
    try:
        yield
    except MembershipChanged as error:
        raise GroupEndedError(f"{error} [{what}]") from error
    except RuntimeError as error:
        raise GroupEndedError(
            f"{what} failed: {str(error).strip().partition(chr(10))[0]}"
        ) from error


# ------------------------------------------------------------ a model's output, for the other ranks
#
# Sends the last stage's output to all other ranks of the pipeline. The output may consist of nested
# mappings, sequences, tensors and numbers. Mappings arrive as plain dicts, and tuples as tuples.


def plain(value: Any) -> Any:
    """Converts all mappings in a value to dicts, and all DTensors to full tensors. If layers are
    split across ranks, logits may be DTensors, for example."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return (
            [plain(one) for one in value]
            if isinstance(value, list)
            else tuple(plain(one) for one in value)
        )
    return value


def broadcast_output(value: Any, source: int, links: Links) -> Any:
    """Broadcasts `value` from rank `source`: first its structure, then its tensors. Must be called
    on all ranks. `value`: a result of `plain`; used on `source` only.

    Raises:
        ConfigurationError: the value contains an object that cannot be sent. Raised only on
            `source`.
        MembershipChanged: a rank failed or left.
    """
    tensors: list[torch.Tensor] = []
    text = json.dumps(_described(value, tensors)).encode() if links.rank == source else b""
    length = torch.tensor([len(text)], dtype=torch.int64, device=links.device)
    links.broadcast(length, source, "sending the structure of the outputs")
    form = torch.zeros(int(length), dtype=torch.uint8, device=links.device)
    if links.rank == source:
        form.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    links.broadcast(form, source, "sending the structure of the outputs")
    return _received(json.loads(form.cpu().numpy().tobytes()), iter(tensors), source, links)


def _received(described: Any, tensors: Iterator[torch.Tensor], source: int, links: Links) -> Any:
    kind, content = described
    if kind == "tensor":
        size, dtype = content
        own = links.rank == source
        tensor = (
            next(tensors).contiguous()
            if own
            else torch.empty(size, dtype=getattr(torch, dtype), device=links.device)
        )
        if tensor.numel():
            links.broadcast(tensor.view(-1).view(torch.uint8), source, "sending outputs")
        if own:
            links.traffic.outputs += tensor.numel() * tensor.element_size() * (links.size - 1)
        return tensor
    if kind == "dict":
        return {key: _received(one, tensors, source, links) for key, one in content}
    if kind in {"list", "tuple"}:
        values = [_received(one, tensors, source, links) for one in content]
        return values if kind == "list" else tuple(values)
    return content


def _described(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", [list(value.shape), str(value.dtype).removeprefix("torch.")]]
    if isinstance(value, dict):
        return ["dict", [[key, _described(one, tensors)] for key, one in value.items()]]
    if isinstance(value, tuple | list):
        return [
            "list" if isinstance(value, list) else "tuple",
            [_described(one, tensors) for one in value],
        ]
    if value is None or isinstance(value, bool | int | float | str):
        return ["plain", value]
    raise ConfigurationError(
        f"the model's output contains an object of type {type(value).__name__}, which cannot be "
        "sent to the other ranks; return only tensors, numbers, and lists, tuples or mappings of "
        "these"
    )
