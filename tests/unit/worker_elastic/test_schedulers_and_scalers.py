"""Registered state: schedulers and scalers do not advance in lost steps, and a loaded state waits
for its object to be registered."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.elastic.state.schedulers_and_scalers import RegisteredState


def scheduler() -> torch.optim.lr_scheduler.StepLR:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    lr = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    return lr


def test_a_scheduler_does_not_advance_after_an_aborted_step() -> None:
    registered, lr = RegisteredState(), scheduler()
    registered.register("lr", lr)
    registered.step_aborted()
    lr.step()
    assert lr.get_last_lr() == [1.0]
    registered.step_begins()
    lr.step()
    assert lr.get_last_lr() == [0.5]


class Seen:
    """A metric that the script updates in its loop."""

    def __init__(self) -> None:
        self.samples = torch.zeros(1)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.samples = state["samples"]


def test_changes_of_a_lost_step_to_a_registered_object_are_undone() -> None:
    registered, seen = RegisteredState(), Seen()
    registered.register("seen", seen, copied=True)
    for lost in (False, True, True, False):
        registered.put_back_again()
        registered.step_begins()
        registered.step_taken(may_be_lost=True)
        seen.samples += 1  # in place, so a copy must have been made
        if lost:
            registered.step_aborted()
            assert seen.samples.item() == 11  # one step has been committed
        else:
            registered.step_committed()
        seen.samples += 10  # after optimizer.step(), as in every iteration of the loop
    assert seen.samples.item() == 22


class Meters(dict[str, int]):
    """Metrics by name."""

    def state_dict(self) -> dict[str, int]:
        return dict(self)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.update(state)


def test_changes_of_a_lost_step_to_modules_and_containers_are_undone() -> None:
    """They can be iterated over, as loaders can."""
    registered, teacher = RegisteredState(), torch.nn.Sequential(torch.nn.BatchNorm1d(1))
    meters = Meters(seen=0)
    registered.register("teacher", teacher, copied=True)
    registered.register("meters", meters, copied=True)
    registered.step_begins()
    registered.step_taken(may_be_lost=True)
    teacher(torch.ones(2, 1))
    meters["seen"] += 2
    registered.step_aborted()
    assert teacher.state_dict()["0.num_batches_tracked"].item() == 0
    assert meters["seen"] == 0


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [(torch.utils.data.DataLoader, (range(2),)), (torch.utils.data.IterableDataset, ())],
)
def test_loaders_are_not_restored_within_an_iteration(kind: Any, arguments: Any) -> None:
    class Loader(kind):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            return iter(())

        def state_dict(self) -> dict[str, int]:
            return {}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise AssertionError(state)

    registered, loader = RegisteredState(), Loader(*arguments)
    registered.register("loader", loader, copied=True)
    registered.step_begins()
    registered.step_taken(may_be_lost=True)
    registered.step_aborted()


def test_peers_and_checkpoints_receive_a_registered_object_as_before_the_lost_step() -> None:
    registered, seen = RegisteredState(), Seen()
    registered.register("seen", seen, copied=True)
    registered.step_begins()
    registered.step_taken(may_be_lost=True)
    seen.samples += 1
    registered.withdraw()
    assert registered.capture()["states"]["seen"]["samples"].item() == 0
    registered.reinstate()
    assert seen.samples.item() == 1
    registered.step_aborted()
    seen.samples += 1
    assert registered.capture()["states"]["seen"]["samples"].item() == 0


def test_a_large_registered_object_is_not_copied_in_each_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registered, seen = RegisteredState(), Seen()
    seen.samples = torch.zeros(17 << 20)
    registered.register("seen", seen, copied=True)
    for _ in range(2):
        registered.step_begins()
        registered.step_taken(may_be_lost=True)
        seen.samples[0] += 1
        registered.step_aborted()
    assert seen.samples[0].item() == 2
    assert [record.message for record in caplog.records if "64 MiB" in record.message] == [
        "the registered object 'seen' holds more than 64 MiB of tensors, or 256 KiB of other "
        "values, so it is not copied in each step, and changes made in a lost step are not "
        "undone. Change it only after optimizer.step(), and only if that returned a true value"
    ]


class Position:
    """Position of a script in its own data."""

    def __init__(self) -> None:
        self.next = 0
        self.history: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next, self.history = state["next"], state["history"]


def test_a_loop_without_a_loader_trains_on_no_sample_twice_after_a_lost_step() -> None:
    registered, position = RegisteredState(), Position()
    registered.register("position", position, copied=True)
    trained = []
    for lost in (False, True, False, False):
        sample = position.next
        position.next += 1
        registered.put_back_again()  # the forward pass begins the step
        registered.step_begins()
        registered.step_taken(may_be_lost=True, comes_again=False)
        position.history.append(0.5)
        if lost:
            registered.step_aborted()
        else:
            registered.step_committed()
            trained.append(sample)
    assert trained == [0, 2, 3]
    assert position.next == 4
    assert len(position.history) == 3


def test_an_object_with_many_values_is_not_copied_in_each_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registered, position = RegisteredState(), Position()
    position.history = [0.123456789] * 30_000
    registered.register("position", position, copied=True)
    for _ in range(2):
        registered.step_begins()
        registered.step_taken(may_be_lost=True)
        registered.step_aborted()
    assert (
        len([record for record in caplog.records if "256 KiB of other values" in record.message])
        == 1
    )


def test_a_scaler_that_is_not_enabled_may_be_updated_after_an_aborted_step() -> None:
    registered, scaler = RegisteredState(), torch.amp.GradScaler("cpu", enabled=False)
    registered.register("scaler", scaler)
    registered.step_aborted()
    scaler.update()


def test_advances_in_a_step_are_withdrawn_while_its_outcome_is_unknown() -> None:
    registered, lr = RegisteredState(), scheduler()
    registered.advance_with(lr.optimizer)
    registered.register("lr", lr)
    registered.step_begins()
    registered.scaled_by(8.0)
    lr.step()
    registered.withdraw()
    captured = registered.capture()
    assert (
        lr.last_epoch,
        lr.optimizer.param_groups[0]["lr"],
        captured["scale"],
        captured["advances"],
    ) == (0, 1.0, None, {"lr": 0})
    registered.reinstate()
    captured = registered.capture()
    assert (
        lr.last_epoch,
        lr.optimizer.param_groups[0]["lr"],
        captured["scale"],
        captured["advances"],
    ) == (1, 0.5, 8.0, {"lr": 1})
    registered.step_aborted()
    assert (lr.last_epoch, lr.optimizer.param_groups[0]["lr"], registered.capture()["scale"]) == (
        0,
        1.0,
        None,
    )


def test_the_gate_stays_out_of_the_schedulers_state() -> None:
    registered, lr = RegisteredState(), scheduler()
    before = set(lr.state_dict())
    registered.register("lr", lr)
    assert set(lr.state_dict()) == before
    assert isinstance(lr, torch.optim.lr_scheduler.StepLR)


def test_a_copy_of_a_registered_scheduler_steps_itself_and_is_not_gated() -> None:
    registered, lr = RegisteredState(), scheduler()
    registered.register("lr", lr)
    copied = copy.copy(lr)
    registered.step_aborted()
    copied.step()
    assert (lr.last_epoch, copied.last_epoch) == (0, 1)


def test_state_waits_for_an_object_registered_later() -> None:
    donor, donors_lr = RegisteredState(), scheduler()
    donor.register("lr", donors_lr)
    donors_lr.step()
    taker = RegisteredState()
    taker.restore(donor.capture())
    late = scheduler()
    taker.register("lr", late)
    assert late.last_epoch == donors_lr.last_epoch


def test_an_object_without_state_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigurationError, match=r"register_state\(ema=...\): int has no state_dict"
    ):
        RegisteredState().register("ema", 3)


def test_a_name_belongs_to_one_object() -> None:
    registered = RegisteredState()
    registered.register("lr", scheduler())
    with pytest.raises(ConfigurationError, match="already used by another object"):
        registered.register("lr", scheduler())


def run_of(registered: RegisteredState) -> torch.optim.lr_scheduler.StepLR:
    """Returns a scheduler of the run's optimizer."""
    lr = scheduler()
    registered.advance_with(lr.optimizer)
    registered.register("lr", lr)
    return lr


def test_an_advance_before_the_step_was_found_lost_is_undone() -> None:
    registered = RegisteredState()
    lr = run_of(registered)
    registered.step_begins()
    lr.step()
    registered.step_aborted()
    lr.step()
    assert (lr.last_epoch, lr.get_last_lr(), lr.optimizer.param_groups[0]["lr"]) == (0, [1.0], 1.0)
    registered.step_begins()
    lr.step()
    registered.step_committed()
    registered.step_begins()
    registered.step_aborted()
    assert (lr.last_epoch, lr.optimizer.param_groups[0]["lr"]) == (1, 0.5)


@pytest.mark.parametrize("saved_after_it_advanced", [True, False])
def test_advances_repeated_for_skipped_epochs_do_not_count_again(
    saved_after_it_advanced: bool,
) -> None:
    before = RegisteredState()
    lr = run_of(before)
    lr.step()
    if saved_after_it_advanced:
        lr.step()
    after = RegisteredState()
    resumed = run_of(after)
    after.restore(before.capture())
    for _ in range(2):  # epochs for which the loader yields no batches
        after.passed_over()
        resumed.step()
    assert resumed.last_epoch == 2
    after.step_begins()
    after.step_taken()
    after.step_committed()
    resumed.step()
    assert resumed.last_epoch == 3


def test_scheduler_created_after_its_state_was_loaded_keeps_the_loaded_learning_rate() -> None:
    def warmup(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LinearLR:
        return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)

    before = RegisteredState()
    donor = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    before.advance_with(donor)
    done = warmup(donor)
    before.register("lr", done)
    for _ in range(3):
        donor.step()
        done.step()
    after = RegisteredState()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    after.advance_with(optimizer)
    after.restore(before.capture())
    optimizer.load_state_dict(donor.state_dict())
    after.restored()
    late = warmup(optimizer)
    after.register("lr", late)
    assert (late.last_epoch, optimizer.param_groups[0]["lr"]) == (3, 1.0)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_digest_of_the_settings_follows_every_change(lr: float | torch.Tensor) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.99))
    registered = RegisteredState()
    registered.advance_with(optimizer)
    digests = [registered.settings_digest()]

    def changed() -> bool:
        digests.append(registered.settings_digest())
        assert digests[-1] == registered.settings_digest(), "equal settings, different digests"
        return digests[-1] != digests[-2]

    group = optimizer.param_groups[0]
    assert not changed()
    group["lr"] *= 2  # in place if it is a tensor
    assert changed()
    group["betas"] = (0.8, 0.99)
    assert changed()
    group["weight_decay"] = 0.01
    assert changed()
    registered.scaled_by(2.0)
    assert changed()
    registered.note_trained([True, False])
    assert changed()
    group["own"] = [1, 2]
    assert changed()
    group["own"].append(3)
    assert changed()


@pytest.mark.parametrize(("first", "then"), [(1.0, 1), (0.0, -0.0), (True, 1)])
def test_equal_numbers_have_one_digest_even_on_a_later_rank(first: float, then: float) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    member, joiner = RegisteredState(), RegisteredState()
    for registered in (member, joiner):
        registered.advance_with(optimizer)
    optimizer.param_groups[0]["weight_decay"] = first
    before = member.settings_digest()
    optimizer.param_groups[0]["weight_decay"] = then
    assert joiner.settings_digest() == member.settings_digest() == before


def test_group_membership_and_trainability_of_parameters_are_among_the_settings() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    first, *others = net.parameters()
    settings_seen = []
    for groups, frozen in (
        ([[first], others], False),
        ([[others[0]], [first, *others[1:]]], False),
        ([[first], others[::-1]], False),
        ([[first], others], True),
    ):
        registered = RegisteredState()
        first.requires_grad_(not frozen)
        registered.made_from(
            net.parameters(),
            torch.optim.SGD([{"params": group, "lr": 0.1} for group in groups]),
            device=torch.device("cpu"),
        )
        settings_seen.append(str(registered.settings))
    assert len(set(settings_seen)) == len(settings_seen)
    registered.note_trained([True] * 4)
    assert str(registered.settings) == settings_seen[0]
