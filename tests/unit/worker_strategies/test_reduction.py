"""Times at which gradients are sent and waited for, tested on a group whose collectives complete
when the test says so."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from shoal_common.errors import ConfigurationError, MembershipChanged, PreconditionError
from shoal_worker.config import ShardingConfiguration
from shoal_worker.elastic.contract.loader_interface import Placement, Share
from shoal_worker.elastic.contract.step import Step, StepPhase
from shoal_worker.engine.step.buffers import CommittedBuffers
from shoal_worker.replicated.buckets import AccumulatedReduction, lay_out
from shoal_worker.replicated.reduction import OverlappedReduction
from torch import nn
from torch.utils.checkpoint import checkpoint


class Work:
    """A collective that writes its result only when it is waited for, as a late one would. It then
    fails if `fails` is set."""

    def __init__(self, tensor: torch.Tensor, *, fails: bool) -> None:
        self.tensor, self.fails, self.waited = tensor, fails, False


class ScriptedGroup:
    """A group of two ranks with equal gradients. The collectives numbered in `failing` fail."""

    world_size = 2

    def __init__(self, failing: tuple[int, ...] = (), refusing: int | None = None) -> None:
        self.failing, self.refusing = failing, refusing
        self.works: list[Work] = []
        self.happened: list[str] = []

    def all_reduce_async(self, tensor: torch.Tensor) -> Any:
        if len(self.works) == self.refusing:
            raise MembershipChanged("a peer went away")
        self.happened.append("sent")
        self.works.append(Work(tensor, fails=len(self.works) in self.failing))
        return self.works[-1]

    def wait(self, work: Work) -> None:
        work.waited = True
        work.tensor.mul_(2)
        if work.fails:
            raise MembershipChanged("a peer went away")


class OneStepSession:
    """A session with one step in progress and its group, which is all that a reduction uses."""

    elastic = True

    def __init__(self, group: ScriptedGroup, micro_batches: int | None = None) -> None:
        self.group = group
        self.lifecycle = self
        share = Share(weight=1.0, total_weight=2.0, micro_batches=micro_batches)
        self.step = Step(
            placement=Placement(generation=1, rank=0, world_size=2), source=None, share=share
        )

    def note_trained(self, trained: Sequence[bool]) -> None:
        """Does nothing, because no other rank compares the result."""

    def prepare_step(self) -> None:
        self.step.prepare()

    def mark_lost(self, error: BaseException) -> None:
        self.step.lost = str(error)


def deep() -> nn.Sequential:
    """Returns five layers of 1.1 MB. With bucket_cap_mb=1, each has its own bucket."""
    return nn.Sequential(*(nn.Linear(530, 530) for _ in range(5)))


def overlapped(net: nn.Module, session: Any, **options: Any) -> OverlappedReduction:
    return OverlappedReduction(
        net, CommittedBuffers(net), session, ShardingConfiguration(bucket_cap_mb=1, **options)
    )


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


class ModelOutput(collections.OrderedDict):  # type: ignore[type-arg]  # declared as in transformers
    pass


class Pair(NamedTuple):
    first: None
    second: list[dict[str, torch.Tensor]]


@pytest.mark.parametrize(
    "form",
    [
        lambda t: t,
        lambda t: Output(logits=t),
        lambda t: ModelOutput(logits=t),
        lambda t: Pair(None, [{"logits": t}]),
        SimpleNamespace,
    ],
    ids=["tensor", "dataclass", "model_output", "nested", "opaque"],
)
def test_buckets_are_sent_during_the_backward_pass(form: Callable[..., Any]) -> None:
    group = ScriptedGroup()
    net = deep()
    reduction = overlapped(net, session := OneStepSession(group))
    for i, layer in enumerate(net):
        layer.weight.register_post_accumulate_grad_hook(
            lambda _, i=i: group.happened.append(f"gradient {i}")
        )
    reduction.prepare(session.step)
    logits = net(torch.ones(2, 530))
    reduction.follow(
        form(logits) if form is not SimpleNamespace else SimpleNamespace(logits=logits)
    )
    logits.sum().backward()
    # A layer's own hook may change its gradient, so it runs before that of the reduction.
    assert group.happened == [event for i in (4, 3, 2, 1, 0) for event in (f"gradient {i}", "sent")]
    assert all(work.waited for work in group.works)


def test_the_mean_gradient_is_in_grad_when_backward_returns() -> None:
    net, plain = deep(), deep()
    plain.load_state_dict(net.state_dict())
    reduction = overlapped(net, session := OneStepSession(ScriptedGroup()))
    reduction.prepare(session.step)
    net(torch.ones(2, 530)).sum().backward()
    plain(torch.ones(2, 530)).sum().backward()
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(net.parameters(), plain.parameters(), strict=True)
    )
    assert session.step.phase is StepPhase.PREPARED


@pytest.mark.parametrize(("failing", "refusing"), [((0,), None), ((1, 2), None), ((), 2)])
@pytest.mark.parametrize("micro_batches", [None, 1])
def test_step_is_lost_only_once_nothing_of_it_is_in_flight(
    failing: tuple[int, ...],
    refusing: int | None,
    micro_batches: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shoal_worker.replicated.buckets._CHUNK_ELEMENTS", 300_000)
    group = ScriptedGroup(failing, refusing)
    session = OneStepSession(group, micro_batches)
    net = deep()
    if micro_batches is None:
        held = overlapped(net, session)
        net(torch.ones(2, 530)).sum().backward()
        assert not held.pending
        assert all(float(p.grad.abs().sum()) == 0 for p in net.parameters() if p.grad is not None)
    else:
        reduction = AccumulatedReduction(
            net, CommittedBuffers(net), session, ShardingConfiguration()
        )
        reduction.micro_batch_begins()
        net(torch.ones(2, 530)).sum().backward()
        with torch.no_grad():
            reduction.micro_batch_ends(1.0)
            reduction.finish()
    assert session.step.lost == "a peer went away"
    assert session.step.phase is StepPhase.OPEN
    assert len(group.works) >= 2
    assert all(work.waited for work in group.works)


def test_a_backward_pass_that_raised_leaves_nothing_in_flight_once_the_step_is_discarded() -> None:
    group = ScriptedGroup()
    net = deep()
    reduction = overlapped(net, session := OneStepSession(group))
    net[2].weight.register_hook(_explode)
    logits = net(torch.ones(2, 530))
    reduction.follow(logits)
    with pytest.raises(ValueError, match="explode"):
        logits.sum().backward()
    assert [work.waited for work in group.works] == [False, False]
    for call in (reduction.prepare, reduction.synchronize):
        with pytest.raises(PreconditionError, match="failed midway"):
            call(session.step)
    reduction.discard()
    reduction.prepare(session.step)
    assert [work.waited for work in group.works] == [True, True]


def _explode(_: torch.Tensor) -> None:
    raise ValueError("explode")


def test_parameters_shared_between_reentrant_checkpoints_are_one_clear_error() -> None:
    net = nn.Linear(4, 4)
    reduction = overlapped(net, session := OneStepSession(ScriptedGroup()))
    x = torch.ones(2, 4, requires_grad=True)
    reduction.prepare(session.step)
    out = checkpoint(net, checkpoint(net, x, use_reentrant=True), use_reentrant=True)
    reduction.follow(out)
    with pytest.raises(ConfigurationError, match="use_reentrant=False"):
        out.sum().backward()


def test_hooks_of_a_dropped_model_do_nothing() -> None:
    group = ScriptedGroup()
    net = deep()
    overlapped(net, OneStepSession(group))  # the reduction is dropped at once
    net(torch.ones(2, 530)).sum().backward()
    assert group.works == []


def test_backward_pass_on_another_thread_is_reduced_too() -> None:
    group = ScriptedGroup()
    net = deep()
    reduction = overlapped(net, session := OneStepSession(group))
    logits = net(torch.ones(2, 530))
    reduction.follow(logits)
    thread = threading.Thread(target=logits.sum().backward)
    thread.start()
    thread.join()
    assert session.step.phase is StepPhase.PREPARED
    assert all(work.waited for work in group.works)


# --- the layout


def layout(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, minimum: int = 1, cap: int = 4000
) -> list[list[int]]:
    parameters = [torch.zeros(shape, dtype=dtype) for shape in shapes]
    buckets = lay_out(
        parameters,
        device=torch.device("cpu"),
        cap_bytes=cap,
        minimum_elements=minimum,
        riding=5,
        riding_dtype=torch.float32,
    )
    assert [bucket.riding.numel() for bucket in buckets] == [0] * (len(buckets) - 1) + [5]
    return [[slot.parameter.numel() for slot in bucket.slots] for bucket in buckets]


def test_buckets_are_filled_from_the_last_parameter_up_to_their_cap() -> None:
    assert layout((100,), (900,), (600,), (500,)) == [[500], [600], [900, 100]]


def test_parameter_over_the_cap_has_its_own_bucket() -> None:
    assert layout((10,), (5000,), (10,)) == [[10], [5000], [10]]


def test_too_small_buckets_are_merged_with_their_neighbours() -> None:
    assert layout((10,), (5000,), (10,), minimum=20) == [[10, 5000, 10]]


def test_layouts_up_to_two_mebibytes_have_one_bucket_and_larger_ones_several() -> None:
    assert layout((200_000,), (300_000,), cap=25 << 20) == [[300_000, 200_000]]
    assert layout((300_000,), (300_000,), cap=25 << 20) == [[300_000], [300_000]]
    assert layout((200_000,), (300_000,), cap=1 << 20) == [[300_000], [200_000]]


def test_additional_values_in_a_bucket_are_never_rounded_to_half_precision() -> None:
    assert layout((10,), (20,), dtype=torch.bfloat16) == [[20, 10], []]


def test_layout_of_several_dtypes_sends_each_separately() -> None:
    parameters = [torch.zeros(10), torch.zeros(10, dtype=torch.float64), torch.zeros(20)]
    buckets = lay_out(
        parameters,
        device=torch.device("cpu"),
        cap_bytes=4000,
        minimum_elements=1,
        riding=5,
        riding_dtype=torch.float32,
    )
    assert [bucket.flat.dtype for bucket in buckets] == [torch.float32, torch.float64]
