"""The session in a world of one: calls of the script around the loop do not disturb the steps in
it."""

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError, PreconditionError
from shoal_worker.elastic.contract.channel import LocalChannel
from shoal_worker.elastic.contract.phase import Phase, ScriptPhase
from shoal_worker.elastic.contract.step import ScriptPosition, Step
from shoal_worker.elastic.session.worker_process import current_session, set_session
from shoal_worker.state.tree import Snapshot
from torch import nn

pytestmark = pytest.mark.usefixtures("fresh_session")


def start(
    *, strategy: str = "ddp", deterministic: bool = False, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, shoal.ElasticDataLoader]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy=strategy, deterministic=deterministic
    )
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    dataset = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    return model, optimizer, shoal.ElasticDataLoader(dataset, **{"global_batch_size": 8, **options})


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: shoal.ElasticDataLoader
) -> list[torch.Tensor]:
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        assert optimizer.step()
        optimizer.zero_grad()
    return [t.clone() for t in model.full_state_dict().values()]


def undisturbed() -> list[torch.Tensor]:
    expected = train(*start())
    set_session(None)
    return expected


def same(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


def test_peeked_batch_is_dealt_again() -> None:
    expected = undisturbed()
    model, optimizer, loader = start()
    x, _ = next(iter(loader))
    assert len(x) == 8
    assert same(train(model, optimizer, loader), expected)
    assert loader.global_step == 3


def test_forward_and_backward_pass_on_a_peeked_batch_leave_no_trace() -> None:
    expected = undisturbed()
    model, optimizer, loader = start()
    x, y = next(iter(loader))
    nn.functional.cross_entropy(model(x), y).backward()
    assert same(train(model, optimizer, loader), expected)


def test_kept_iterator_that_was_only_peeked_at_does_not_block_the_loop() -> None:
    expected = undisturbed()
    model, optimizer, loader = start()
    kept = iter(loader)
    next(kept)
    assert same(train(model, optimizer, loader), expected)


def test_one_step_of_micro_batches_may_be_peeked_at() -> None:
    model, optimizer, loader = start(micro_batch_size=4)
    for batch in next(loader.steps()):
        model(batch[0])
    for step in loader.steps():
        for x, y in step:
            nn.functional.cross_entropy(model(x), y).backward()
        assert optimizer.step()
        optimizer.zero_grad()
    assert loader.global_step == 3


def test_a_loop_left_before_the_step_was_finished_may_still_finish_it() -> None:
    model, optimizer, loader = start()
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        break
    assert optimizer.step()
    assert loader.global_step == 1


def arriving() -> ScriptPhase:
    """Puts this process into the state of a joiner that has received the job's state but whose
    script has not reached its peers' position."""
    phase: ScriptPhase = current_session()._held.phase
    phase.now = Phase.ARRIVING
    return phase


def test_joiner_that_left_its_loop_before_finishing_its_first_step_may_still_finish_it() -> None:
    model, optimizer, loader = start()
    phase = arriving()
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        break
    assert phase.now is Phase.ARRIVING
    assert optimizer.step()
    assert phase.now is Phase.TRAINING
    assert loader.global_step == 1


def test_an_update_that_raises_in_a_joiners_first_step_is_reported_by_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer, loader = start()
    phase = arriving()

    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError("half way")

    monkeypatch.setattr(torch.optim.SGD, "step", fail)
    with pytest.raises(ArithmeticError, match="half way"):
        train(model, optimizer, loader)
    assert phase.now is Phase.TORN


def test_step_taken_by_ranks_at_different_places_is_refused_before_it_is_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer, loader = start()
    before = [p.clone() for p in model.parameters()]

    def sum_with_a_rank_that_takes_the_next_step(
        step: Step, vote: Sequence[float]
    ) -> tuple[list[float], dict[str, Any]]:
        words = [
            step.step_vote(
                boundary_wanted=False,
                stop_announced=False,
                leaving=False,
                settings=0,
                place=ScriptPosition("loader", 1, 0, number),
            )
            for number in (0, 1)
        ]
        return [a + b for a, b in zip(*words, strict=True)], {}

    monkeypatch.setattr(model.engine, "sum_commit", sum_with_a_rank_that_takes_the_next_step)
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        break
    with pytest.raises(PreconditionError, match="step 0 of epoch 0 of loader 'loader'") as refusal:
        optimizer.step()
    assert refusal.value.reason == "RANKS_DIVERGED"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_batch_of_weight_zero_may_contain_anything() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
    x = torch.ones(16, 4)
    x[:8] = torch.nan
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(x),
        global_batch_size=8,
        micro_batch_size=4,
        shuffle=False,
        weight_fn=lambda b: float(b[0].isfinite().sum()),
    )
    before = [t.clone() for t in model.full_state_dict().values()]
    for step in loader.steps():
        for (batch,) in step:
            model(batch).square().mean().backward()
        assert optimizer.step()
        optimizer.zero_grad()
        if step.number == 0:  # its whole batch has weight 0, so there is no update
            assert same(before, list(model.full_state_dict().values()))
    assert not same(before, list(model.full_state_dict().values()))
    assert all(t.isfinite().all() for t in model.full_state_dict().values())


Batches = Iterator[tuple[shoal.ElasticDataLoader, Any] | None]
"""The batches of a script with two loaders, each with its loader. None: the state is saved."""


def in_turn(
    first: shoal.ElasticDataLoader, second: shoal.ElasticDataLoader, epochs: Iterable[int]
) -> Batches:
    for _ in epochs:
        for loader in (second, first, second):
            for batch in loader:
                yield loader, batch
                yield None


def nested(
    first: shoal.ElasticDataLoader, second: shoal.ElasticDataLoader, epochs: Iterable[int]
) -> Batches:
    for _ in epochs:
        for batch in first:
            yield first, batch
            for inner in second:
                yield second, inner
            yield None


def run_two_loaders(
    script: Callable[..., Batches], *, plain: bool, resumed_from: Any = None
) -> Iterator[tuple[tuple[str, int, int] | None, Any]]:
    """Runs a script with two loaders. Yields the position of each step, and the state of the run
    where it is saved. `plain`: the script counts its epochs itself."""
    set_session(None)
    model, optimizer, second = start(name="second")
    first = shoal.ElasticDataLoader(second.dataset, global_batch_size=12, name="first")
    session = current_session()
    if resumed_from is not None:
        session.replace_state(LocalChannel(), resumed_from)
    for taken in script(first, second, range(2) if plain else first.epochs(2)):
        if taken is None:
            yield None, Snapshot.take(session.assemble(LocalChannel())).state()
            continue
        loader, (x, y) = taken
        place = (loader.name, loader.epoch, loader.step)
        nn.functional.cross_entropy(model(x), y).backward()
        assert optimizer.step()
        optimizer.zero_grad()
        yield place, None


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("script", "steps"), [(in_turn, 3 + 2 + 3), (nested, 2 * (1 + 3))])
def test_run_with_two_loaders_resumes_from_any_state_that_it_saves(
    script: Callable[..., Batches], steps: int, plain: bool
) -> None:
    whole = list(run_two_loaders(script, plain=plain))
    places = [place for place, _ in whole]
    assert len(places) - places.count(None) == 2 * steps
    for number, (place, state) in enumerate(whole, start=1):
        if place is None:
            resumed = run_two_loaders(script, plain=plain, resumed_from=state)
            assert [place for place, _ in resumed] == places[number:], f"after step {number}"


@pytest.mark.parametrize(
    ("second_step", "lost", "refused"),
    [("always", 2, True), ("if committed", 2, False), ("left", 1, True)],
)
def test_another_loaders_step_in_place_of_an_aborted_one_is_refused(
    second_step: str, lost: int, refused: bool
) -> None:
    """Otherwise, the fault would change the order of the run's steps."""
    model, optimizer, second = start(name="second")
    first = shoal.ElasticDataLoader(second.dataset, global_batch_size=12, name="first")
    others, taken, aborted = iter(second), list[str](), list[str]()

    def take(loader: shoal.ElasticDataLoader, x: torch.Tensor, y: torch.Tensor) -> bool:
        loss = nn.functional.cross_entropy(model(x), y)
        if len(taken) == lost and not aborted:
            aborted.append(loader.name)
            current_session().lifecycle.abort_step("a rank was lost")
        loss.backward()
        committed = bool(optimizer.step())
        optimizer.zero_grad()
        taken.extend([loader.name] * committed)
        return committed

    def script() -> None:
        for x, y in first:
            if not take(first, x, y) and second_step == "if committed":
                continue
            for other in second if second_step == "left" else others:
                take(second, *other)
                break

    if refused:
        with pytest.raises(PreconditionError, match="was aborted because of") as refusal:
            script()
        assert refusal.value.reason == "STEP_NOT_FINISHED"
        assert taken == ["first", "second"][:lost]
    else:
        script()
        assert taken == ["first", "second"] * 2
    assert aborted == [["first", "second"][lost % 2]]


def draws(*, lost: int | None) -> list[float]:
    """Trains with an amount of noise that the loop draws for each step. Returns these numbers.
    `lost`: number of steps after which one is aborted."""
    model, optimizer, loader = start(micro_batch_size=4)
    drawn = list[float]()
    for step in loader.steps():
        noise = random.random()
        for x, y in step:
            nn.functional.cross_entropy(model(x + noise), y).backward()
        if len(drawn) == lost:
            lost = None
            current_session().lifecycle.abort_step("a rank was lost")
        if optimizer.step():
            drawn.append(noise)
        optimizer.zero_grad()
    return drawn


def test_numbers_drawn_for_a_step_depend_neither_on_ranks_nor_on_aborted_steps() -> None:
    wanted = draws(lost=None)
    set_session(None)
    assert draws(lost=1) == wanted
    assert shoal.launch(functools.partial(draws, lost=0), world_size=3) == [wanted] * 3
    assert len(set(wanted)) == 3


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
@pytest.mark.parametrize("taken", [0, 1])
def test_a_step_whose_inner_loop_was_left_early_is_refused_before_it_is_applied(
    strategy: str, taken: int
) -> None:
    """A step is refused if its inner loop was left early, because its remaining samples would count
    as trained on."""
    model, optimizer, loader = start(micro_batch_size=4, strategy=strategy)
    before = [t.clone() for t in model.gather_full_parameters().values()]
    step = next(loader.steps())
    for x, y in step if taken else ():
        nn.functional.cross_entropy(model(x), y).backward()
        break
    with pytest.raises(
        PreconditionError, match=f"{taken} of this rank's 2 micro-batches"
    ) as refusal:
        optimizer.step()
    assert refusal.value.reason == "STEP_NOT_WHOLE"
    assert loader.global_step == 0
    assert same(before, list(model.gather_full_parameters().values()))


def test_an_inner_loop_that_took_all_its_micro_batches_need_not_ask_for_another() -> None:
    model, optimizer, loader = start(micro_batch_size=4)
    for step in loader.steps():
        for _, (x, y) in zip(range(len(step)), step, strict=False):
            nn.functional.cross_entropy(model(x), y).backward()
        assert optimizer.step()
        optimizer.zero_grad()
    assert loader.global_step == 3


def test_inner_loop_whose_step_ended_inside_it_names_the_correct_place() -> None:
    """Calling `step()` inside the inner loop raises an error that names the right place. Other
    ranks may have different numbers of micro-batches, even none."""
    model, optimizer, loader = start(micro_batch_size=8)
    batches = iter(next(loader.steps()))
    x, y = next(batches)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    with pytest.raises(PreconditionError, match="call it after that loop"):
        next(batches, None)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_deterministic_model_may_be_called_before_the_loop(strategy: str) -> None:
    """A deterministic model may be called before the loop without micro-batches, because a dry run
    is not a step."""
    trained = []
    for warms_up in (False, True):
        set_session(None)
        model, optimizer, loader = start(strategy=strategy, deterministic=True, micro_batch_size=4)
        if warms_up:
            model(torch.ones(2, 4)).sum().backward()
        for step in loader.steps():
            for x, y in step:
                nn.functional.cross_entropy(model(x), y).backward()
            assert optimizer.step()
            optimizer.zero_grad()
        trained.append([t.clone() for t in model.full_state_dict().values()])
    assert same(*trained)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_deterministic_steps_without_micro_batches_are_refused_even_in_a_users_own_loop(
    strategy: str,
) -> None:
    model, optimizer, _ = start(strategy=strategy, deterministic=True)
    before = [t.clone() for t in model.gather_full_parameters().values()]
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ConfigurationError, match="deterministic=True needs micro-batches"):
        optimizer.step()
    assert same(before, list(model.gather_full_parameters().values()))
