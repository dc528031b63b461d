"""Joiners receive only the frozen parameters that differ from their own."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from shoal_worker.elastic.contract.reconcile import StateName
from shoal_worker.elastic.contract.step import ScriptPosition
from torch import nn

from tests.unit.worker_elastic.ranks import Member, Model, form

BORDER = ScriptPosition("train", 1, 0, 6)
WIDTH = 512


class Adapted(Model):
    """A model with a frozen base of 1 MB and a small trained layer."""

    def __init__(self, base: float, value: float, *, meta: bool = False) -> None:
        super().__init__(value, meta=meta)
        self.module.base = nn.Linear(WIDTH, WIDTH, device="meta" if meta else "cpu")
        self.module.base.requires_grad_(False)
        if not meta:
            for parameter in self.module.base.parameters():
                parameter.fill_(base)

    def frozen(self) -> Mapping[str, torch.Tensor]:
        return {
            f"model/{name}": parameter
            for name, parameter in self.module.named_parameters()
            if not parameter.requires_grad
        }

    @property
    def values(self) -> list[float]:
        """The value of all frozen weights, and that of all trained ones."""
        weights = self.module.base.get_parameter("weight"), self.module.weight
        return [float(weight.detach().unique()) for weight in weights]


def member(base: float, value: float, *, meta: bool = False, joins: bool = False) -> Member:
    made = Member(
        Adapted(base, value, meta=meta), state=None if joins else StateName(1, 6), live=not joins
    )
    made.held.note_built()
    return made


def boundary(each: Member) -> Any:
    each.formation.reform()
    return each.formation.let_joiners_in(BORDER)


def received(caplog: pytest.LogCaptureFixture) -> list[float]:
    """Returns the megabytes that joiners have received, in ascending order."""
    return sorted(
        float(str(record.args[0]))
        for record in caplog.records
        if isinstance(record.args, tuple) and "MB of state" in record.msg
    )


@pytest.fixture(autouse=True)
def logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="shoal_worker")


def test_joiner_with_the_same_base_receives_only_the_trained_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    members = [member(1.0, 5.0), member(1.0, 5.0), member(1.0, 0.0, joins=True)]
    assert form(members, boundary) == [None, None, BORDER]
    assert members[2].model.values == [1.0, 5.0]  # type: ignore[attr-defined]
    assert received(caplog)[0] < 0.01
    assert members[2].held.built == members[0].held.built != {}


@pytest.mark.parametrize(("base", "meta"), [(2.0, False), (1.0, True)])
def test_a_joiner_with_another_base_or_none_receives_everything(
    caplog: pytest.LogCaptureFixture, base: float, meta: bool
) -> None:
    other = member(base, 0.0, meta=meta, joins=True)
    members = [member(1.0, 5.0), other, member(1.0, 0.0, joins=True)]
    assert form(members, boundary) == [None, BORDER, BORDER]
    assert [each.model.values for each in members] == [[1.0, 5.0]] * 3  # type: ignore[attr-defined]
    assert received(caplog)[0] > 1.0


def test_a_frozen_parameter_that_the_run_has_changed_is_sent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    members = [member(1.0, 5.0), member(1.0, 0.0, joins=True)]
    members[0].model.module.get_parameter("base.bias").fill_(7.0)
    assert form(members, boundary) == [None, BORDER]
    assert float(members[1].model.module.get_parameter("base.bias")[0]) == 7.0
    assert received(caplog)[0] < 0.01
