"""What users do with torch's DDP, each as a small training run that gives its parameters in the end. See test_ddp_parity.py.

A case runs twice: alone, in plain torch on the whole batch, and on the ranks of a job, each with its part of it. Run as a script in each
rank's process; the jobs, one a case, are on the coordinator of SHOAL_COORDINATOR. What became of each case goes to OUTPUT as JSON.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import shoal
import torch
from shoal_common.clients.coordinator import CoordinatorClient
from shoal_common.rpc.channel import ChannelSettings
from shoal_protos.v1 import coordinator_pb2 as pb
from shoal_worker.elastic.current import current_session, set_session
from shoal_worker.elastic.start import open_session
from shoal_worker.settings import WorkerSettings
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

WORLD = 2
BATCH = 8
STEPS = 4
TOLERANCE = 1e-10

State = dict[str, torch.Tensor]


class Alone:
    """Plain torch."""

    rank, size = 0, 1

    def distribute(self, net: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> tuple[Any, Any]:
        net.no_sync = contextlib.nullcontext
        net.clip_grad_norm_ = lambda norm: nn.utils.clip_grad_norm_(net.parameters(), norm)
        return net, optimizer

    def part(self, batch: torch.Tensor) -> torch.Tensor:
        return batch


class Ranks:
    """The ranks of this process's job."""

    size = WORLD

    @property
    def rank(self) -> int:
        return shoal.rank()

    def distribute(self, net: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> tuple[Any, Any]:
        return shoal.as_distributed(net, optimizer, **options)

    def part(self, batch: torch.Tensor) -> torch.Tensor:
        return batch.chunk(WORLD)[self.rank]


Place = Alone | Ranks
CASES: dict[str, Callable[[Place], State]] = {}


def case(run: Callable[[Place], State]) -> Callable[[Place], State]:
    CASES[run.__name__] = run
    return run


def cases(**variants: Any) -> Callable[[Callable[[Place, Any], State]], Callable[[Place, Any], State]]:
    def register(run: Callable[[Place, Any], State]) -> Callable[[Place, Any], State]:
        for name, variant in variants.items():
            CASES[f"{run.__name__}[{name}]"] = lambda place, variant=variant: run(place, variant)
        return run

    return register


def batches(steps: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        yield torch.randn(BATCH, 4, generator=generator), torch.randn(BATCH, 3, generator=generator)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def state(net: Any) -> State:
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def train(place: Place, net: nn.Module, loss_of: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor], **options: Any) -> State:
    """The usual loop, over `net` with SGD."""
    model, optimizer = place.distribute(net, sgd(net), **options)
    for x, y in batches():
        optimizer.zero_grad()
        loss_of(model, place.part(x), place.part(y)).backward()
        optimizer.step()
    return state(net)


def mse(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


# --- what the model returns


@case
def an_output_changed_in_place(place: Place) -> State:
    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = model(x)
        logits[:, 0] += 1
        return nn.functional.mse_loss(logits, y)

    return train(place, network(), loss)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class ModelOutput(collections.OrderedDict):  # as Hugging Face's, which torch's pytree does not know either until it is registered
    pass


class Pair(NamedTuple):
    first: torch.Tensor
    second: dict[str, list[torch.Tensor]]


class Opaque:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Returning(nn.Module):
    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.net = network()
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        return self.make(self.net(x))


@cases(
    dataclass=(lambda t: Output(logits=t), lambda o: o.logits),
    model_output=(lambda t: ModelOutput(logits=t), lambda o: o["logits"]),
    nested=(lambda t: Pair(t * 0, {"all": [t, t]}), lambda o: o.second["all"][1]),
    opaque=(Opaque, lambda o: o.hidden),
)
def an_output_in_a_structure(place: Place, variant: Any) -> State:
    make, get = variant
    return train(place, Returning(make), lambda model, x, y: nn.functional.mse_loss(get(model(x)), y))


# --- several backward passes in a step


@cases(mean={}, sum={"loss_reduction": "sum"})
def two_backward_passes_in_a_step(place: Place, options: dict[str, str]) -> State:
    net = network()
    reduction = options.get("loss_reduction", "mean")
    model, optimizer = place.distribute(net, torch.optim.SGD(net.parameters(), 0.01), **options)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(place.part(x)), place.part(y), reduction=reduction).backward()
        nn.functional.l1_loss(model(place.part(x)), place.part(y), reduction=reduction).backward()
        optimizer.step()
    return state(net)


@cases(mean={}, sum={"loss_reduction": "sum"})
def gradients_kept_over_two_steps(place: Place, options: dict[str, str]) -> State:
    net = network()
    reduction = options.get("loss_reduction", "mean")
    model, optimizer = place.distribute(net, torch.optim.SGD(net.parameters(), 0.01), **options)
    for number, (x, y) in enumerate(batches()):
        nn.functional.mse_loss(model(place.part(x)), place.part(y), reduction=reduction).backward()
        optimizer.step()
        if number % 2:
            optimizer.zero_grad(set_to_none=number == 1)
    return state(net)


@cases(mean={}, sum={"loss_reduction": "sum"})
def accumulation_without_synchronization(place: Place, options: dict[str, str]) -> State:
    net = network()
    reduction = options.get("loss_reduction", "mean")
    model, optimizer = place.distribute(net, torch.optim.SGD(net.parameters(), 0.01), **options)
    for x, y in batches():
        optimizer.zero_grad()
        whole = place.part(x), place.part(y)
        with model.no_sync():
            nn.functional.mse_loss(model(whole[0][:2]), whole[1][:2], reduction=reduction).backward()
        nn.functional.mse_loss(model(whole[0]), whole[1], reduction=reduction).backward()
        with model.no_sync():  # the last one is reduced at the step
            nn.functional.l1_loss(model(whole[0]), whole[1], reduction=reduction).backward()
        optimizer.step()
    if isinstance(place, Alone):
        return state(_accumulated_alone(reduction))
    return state(net)


def _accumulated_alone(reduction: str) -> nn.Module:
    """The first two samples of each rank's part, then all."""
    torch.manual_seed(0)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for x, y in batches():
        optimizer.zero_grad()
        some = torch.tensor([0, 1, 4, 5])
        nn.functional.mse_loss(net(x[some]), y[some], reduction=reduction).backward()
        nn.functional.mse_loss(net(x), y, reduction=reduction).backward()
        nn.functional.l1_loss(net(x), y, reduction=reduction).backward()
        optimizer.step()
    return net


@case
def two_losses_of_one_forward_pass(place: Place) -> State:
    net = network()
    model, optimizer = place.distribute(net, sgd(net))
    for x, y in batches():
        optimizer.zero_grad()
        out = model(place.part(x))
        nn.functional.mse_loss(out, place.part(y)).backward(retain_graph=True)
        nn.functional.l1_loss(out, place.part(y)).backward()
        optimizer.step()
    return state(net)


@case
def a_gradient_penalty(place: Place) -> State:
    def loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return nn.functional.mse_loss(out, y) + slope.square().mean()

    return train(place, network(), loss)


# --- parameters that take no part


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))

    def forward(self, x: torch.Tensor, heads: tuple[int, ...]) -> torch.Tensor:
        hidden = self.trunk(x).tanh()
        return torch.cat([self.heads[head](part) for head, part in zip(heads, hidden.chunk(len(heads)), strict=True)])


@cases(same_on_all_ranks=(0, 0), differs_by_rank=(0, 1))
def an_unused_branch(place: Place, heads: tuple[int, int]) -> State:
    mine = heads if isinstance(place, Alone) else (heads[place.rank],)
    return train(place, Branches(), lambda model, x, y: nn.functional.mse_loss(model(x, mine), y))


@case
def a_branch_that_is_used_in_some_steps(place: Place) -> State:
    net = Branches()
    model, optimizer = place.distribute(net, torch.optim.AdamW(net.parameters(), 0.1))
    for number, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(place.part(x), (number % 2,)), place.part(y)).backward()
        assert (net.heads[1].weight.grad is None) == (number % 2 == 0)
        assert net.heads[2].weight.grad is None
        optimizer.step()
    return state(net)


@case
def a_rank_without_a_backward_pass(place: Place) -> State:
    net = network()
    model, optimizer = place.distribute(net, torch.optim.SGD(net.parameters(), 0.1))
    for number, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss = mse(model, place.part(x), place.part(y))
        if isinstance(place, Alone):
            part = number % 2
            loss = nn.functional.mse_loss(model(x.chunk(2)[part]), y.chunk(2)[part]) / 2
        if isinstance(place, Alone) or place.rank == number % 2:
            loss.backward()
        optimizer.step()
    return state(net)


@case
def frozen_parameters_that_are_unfrozen_later(place: Place) -> State:
    net = network()
    model, optimizer = place.distribute(net, torch.optim.SGD(net.parameters(), 0.1))
    net[0].requires_grad_(False)
    for number, (x, y) in enumerate(batches(6)):
        if number == 2:
            net[0].requires_grad_(True)
        if number == 4:
            net[2].requires_grad_(False)
        optimizer.zero_grad()
        mse(model, place.part(x), place.part(y)).backward()
        optimizer.step()
    return state(net)


# --- ways of computing


@case
def tied_weights(place: Place) -> State:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    net[2].weight = net[0].weight
    return train(place, net, mse)


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(4, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


@cases(reentrant=True, non_reentrant=False)
def activation_checkpointing(place: Place, reentrant: bool) -> State:
    return train(place, Checkpointed(reentrant=reentrant), mse, bucket_cap_mb=1)


@cases(before=True, after=False)
def torch_compile(place: Place, before: bool) -> State:
    net = network()
    given = torch.compile(net, backend="eager") if before else net
    model, optimizer = place.distribute(given, sgd(net))
    if not before:
        model = torch.compile(model, backend="eager")
    for x, y in batches():
        optimizer.zero_grad()
        mse(model, place.part(x), place.part(y)).backward()
        optimizer.step()
    trained = model.full_state_dict() if isinstance(place, Ranks) else net.state_dict()
    return {name: tensor.detach().clone() for name, tensor in trained.items()}


@case
def channels_last_convolutions(place: Place) -> State:
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.LazyLinear(3))
    net(torch.zeros(1, 2, 4, 4))
    net = net.to(memory_format=torch.channels_last)
    return train(place, net, lambda model, x, y: mse(model, x.new_ones(len(x), 2, 4, 4) * x.sum(1).view(-1, 1, 1, 1), y))


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 3, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).float()).double()


@case
def parameters_of_several_dtypes(place: Place) -> State:
    return train(place, TwoDtypes(), mse)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
        self.unused = nn.Parameter(torch.randn(2, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(x.to(torch.complex128) @ self.weight).sum(-1)


@case
def complex_parameters(place: Place) -> State:
    return train(place, Complex(), mse)


@case
def training_in_evaluation_mode(place: Place) -> State:
    net = network()
    model, optimizer = place.distribute(net, sgd(net))
    for x, y in batches():
        optimizer.zero_grad()
        with torch.no_grad():
            model(place.part(x))  # a loop without a loader: its step begins with a forward pass in training mode
        if isinstance(place, Ranks):
            current_session().ensure_step()
        model.eval()
        mse(model, place.part(x), place.part(y)).backward()
        model.train()
        optimizer.step()
    return state(net)


@cases(sgd=lambda p: torch.optim.SGD(p, 0.1), sparse_adam=lambda p: torch.optim.SparseAdam(list(p), 0.1))
def sparse_gradients(place: Place, make: Any) -> State:
    table = nn.Embedding(20, 3, sparse=True)
    model, optimizer = place.distribute(table, make(table.parameters()))
    for x, y in batches():
        optimizer.zero_grad()
        rows = place.part((x[:, 0] * 4).long().clamp(-9, 9) + 9)
        nn.functional.mse_loss(model(rows), place.part(y)).backward()
        optimizer.step()
    return state(table)


# --- optimizers and schedulers


@case
def parameter_groups_with_settings_of_their_own(place: Place) -> State:
    net = network()
    groups = [{"params": net[0].parameters(), "lr": 0.01}, {"params": net[2].parameters(), "weight_decay": 0.1}]
    model, optimizer = place.distribute(net, torch.optim.AdamW(groups, 0.1))
    for x, y in batches():
        optimizer.zero_grad()
        mse(model, place.part(x), place.part(y)).backward()
        optimizer.step()
    return state(net)


@cases(
    step=lambda o: lr_scheduler.StepLR(o, 2),
    cosine=lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    one_cycle=lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=8),
    cyclic=lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    sequential=lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 1)], [2]),
    plateau=lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
)
def learning_rate_schedules(place: Place, make: Any) -> State:
    net = network()
    model, optimizer = place.distribute(net, sgd(net))
    scheduler = make(optimizer)
    if isinstance(place, Ranks):
        shoal.register_state(scheduler=scheduler)
    for number, (x, y) in enumerate(batches(6)):
        optimizer.zero_grad()
        mse(model, place.part(x), place.part(y)).backward()
        optimizer.step()
        scheduler.step(*([float(number)] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    return state(net) | {"lr": torch.tensor([g["lr"] for g in optimizer.param_groups])}


@case
def clipping(place: Place) -> State:
    net = network()
    model, optimizer = place.distribute(net, sgd(net))
    norms = []
    for x, y in batches():
        optimizer.zero_grad()
        mse(model, place.part(x), place.part(y)).backward()
        norms.append(float(model.clip_grad_norm_(0.1)))
        optimizer.step()
    return state(net) | {"norms": torch.tensor(norms)}


@case
def a_gradient_scaler(place: Place) -> State:
    net = network()
    model, optimizer = place.distribute(net, sgd(net))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    if isinstance(place, Ranks):
        shoal.register_state(scaler=scaler)
    for number, (x, y) in enumerate(batches(6)):
        optimizer.zero_grad()
        bad = number == 3 and place.rank == 0  # on one rank alone: all must skip the step
        scaler.scale(mse(model, place.part(x), place.part(y)) * (float("inf") if bad else 1.0)).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            model.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
    return state(net) | {"scale": torch.tensor(scaler.get_scale())}


@case
def a_gradient_scaler_before_the_reduction(place: Place) -> State:
    net = network()
    model, optimizer = place.distribute(net, sgd(net))
    scaler = torch.amp.GradScaler("cpu")
    if isinstance(place, Ranks):
        (x, y), *_ = batches()
        with model.no_sync():
            scaler.scale(mse(model, place.part(x), place.part(y))).backward()
        with pytest.raises(shoal.PreconditionError, match="GradScaler"):
            scaler.step(optimizer)
        model.synchronize_gradients()
        assert optimizer.step()
    return {}


# --- buffers


class Averages(nn.Module):
    """Keeps a buffer by assignment, as moving averages often are, and one that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("constant", torch.tensor([0.1, 1 / 3, -float("inf"), 7e5], dtype=torch.float32))
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.cache = torch.zeros(len(self.cache) + 1)
        return self.net(x)


@case
def buffers_that_are_assigned_anew(place: Place) -> State:
    net = Averages()
    constant = net.constant.clone()
    trained = train(place, net, mse)
    assert torch.equal(trained.pop("constant"), constant)  # bit for bit
    return trained


# --- train_step


@cases(automatic={}, by_hand={"auto_sync_gradients": False})
def train_step_in_one_call(place: Place, options: dict[str, bool]) -> State:
    net = network()
    model, optimizer = place.distribute(net, sgd(net), **options)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        if isinstance(place, Alone):
            loss = mse(model, x, y)
            loss.backward()
        else:
            loss = model.train_step(place.part(x), place.part(y), nn.functional.mse_loss)
        losses.append(float(loss.detach()))
        optimizer.step()
    return state(net) | {"losses": torch.tensor(losses)}


@case
def synchronization_by_hand(place: Place) -> State:
    net = network()
    model, optimizer = place.distribute(net, sgd(net), auto_sync_gradients=False)
    for x, y in batches():
        optimizer.zero_grad()
        mse(model, place.part(x), place.part(y)).backward()
        if isinstance(place, Ranks):
            model.synchronize_gradients()
            model.synchronize_gradients()  # a second time changes nothing
        optimizer.step()
    return state(net)


@case
def steps_of_unequal_shares(place: Place) -> State:
    xs, ys = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    dataset = torch.utils.data.TensorDataset(xs, ys)
    net = network()
    if isinstance(place, Alone):
        optimizer = sgd(net)
        for x, y in zip(xs.split(7), ys.split(7), strict=True):
            optimizer.zero_grad()
            mse(net, x, y).backward()
            optimizer.step()
        return state(net)
    model, optimizer = place.distribute(net, sgd(net))
    for x, y in shoal.ElasticDataLoader(dataset, global_batch_size=7, shuffle=False):
        optimizer.zero_grad()
        mse(model, x, y).backward()
        assert optimizer.step()
    return state(net)


# --- running them


def difference(expected: State, got: State) -> str:
    """What differs by more than the tolerance."""
    exact = all(tensor.dtype != torch.float32 for tensor in expected.values())
    tolerance = TOLERANCE if exact else 1e-6
    wrong = []
    for name in sorted(expected.keys() | got.keys()):
        if name not in got or name not in expected:
            wrong.append(f"{name} is missing")
        elif expected[name].shape != got[name].shape:
            wrong.append(f"{name} has shape {tuple(got[name].shape)} instead of {tuple(expected[name].shape)}")
        elif not torch.allclose(expected[name], got[name], rtol=0, atol=tolerance):
            wrong.append(f"{name} is off by {float((expected[name].double() - got[name].double()).abs().max()):.2g}")
    return "; ".join(wrong)


def outcome(name: str) -> str:
    """Empty if the ranks end as one process does."""
    run = CASES[name]
    try:
        torch.manual_seed(0)
        expected = run(Alone())
        open_session(WorkerSettings(job_id=f"job-{list(CASES).index(name)}"))
        try:
            torch.manual_seed(0)
            return difference(expected, run(Ranks()))
        finally:
            current_session().close()
            set_session(None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Sparse invariant checks are implicitly disabled")
    warnings.filterwarnings("ignore", "The epoch parameter in `scheduler.step\\(\\)` was not necessary")  # SequentialLR's own use
    warnings.filterwarnings("ignore", "Lazy modules are a new feature")
    torch.set_default_dtype(torch.float64)
    if os.environ["SHOAL_LOCAL_INDEX"] == "0":
        with CoordinatorClient(ChannelSettings(address=os.environ["SHOAL_COORDINATOR"])) as client:
            for number in range(len(CASES)):
                client.create_job(
                    pb.JobSpec(job_id=f"job-{number}", min_workers=1, max_workers=WORLD, join_grace_ms=30_000, lease_ms=15_000)
                )
    wanted = os.environ.get("CASES", "")
    outcomes = {name: outcome(name) for name in CASES if wanted in name}
    Path(os.environ["OUTPUT"], f"{os.environ['SHOAL_LOCAL_INDEX']}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
