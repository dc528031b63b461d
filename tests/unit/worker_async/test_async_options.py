"""Each mistake in the options of async_sgd raises one error that names the value and the remedy."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from shoal_common.errors import ConfigurationError
from shoal_protos.v1 import parameter_server_pb2 as pb
from shoal_worker.config import ShardingConfiguration
from shoal_worker.parameter_servers.options import AsyncOptions, check_configuration

SGD = torch.optim.SGD([torch.zeros(1)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"consistency": "eventual"}, 'consistency=\'eventual\': expected "asp", "ssp" or "bsp"'),
        (
            {"consistency": "bsp", "staleness_bound": 0},
            'staleness_bound=0 with consistency="bsp", which makes workers proceed in step',
        ),
        ({"consistency": "bsp", "pull_every": 2}, 'pull_every=2 with consistency="bsp"'),
        ({"consistency": "ssp"}, "needs staleness_bound="),
        ({"staleness_bound": 3}, 'staleness_bound=3 with consistency="asp"'),
        (
            {"consistency": "ssp", "staleness_bound": -1},
            "staleness_bound=-1: expected a whole number",
        ),
        (
            {"consistency": "ssp", "staleness_bound": 1.5},
            "staleness_bound=1.5: expected a whole number",
        ),
        (
            {"consistency": "ssp", "staleness_bound": True},
            "staleness_bound=True: expected a whole number",
        ),
        ({"pull_every": 0}, "pull_every=0: expected a whole number of steps"),
        (
            {"consistency": "ssp", "staleness_bound": 1, "pull_every": 2},
            'pull_every=2 with consistency="ssp"',
        ),
        ({"server_timeout": 30}, "server_timeout=30: expected a positive timedelta"),
        ({"server_timeout": timedelta(0)}, "expected a positive timedelta"),
        ({"delay_compensation": -0.1}, "delay_compensation=-0.1: expected a finite, non-negative"),
        (
            {"delay_compensation": float("nan")},
            "delay_compensation=nan: expected a finite, non-negative",
        ),
        ({"delay_compensation": True}, "delay_compensation=True: expected a finite, non-negative"),
        (
            {"pull_compression": "topk"},
            "values left out of a pull are never sent; expected one of fp16, bf16, int8",
        ),
        (
            {"pull_compression": "powersgd"},
            "values left out of a pull are never sent; expected one of fp16, bf16, int8",
        ),
        (
            {"pull_compression": "zip"},
            "pull_compression='zip'; expected one of fp16, bf16, int8, or None",
        ),
        ({"inner_steps": 0}, "inner_steps=0: expected a whole number of steps"),
        ({"inner_steps": True}, "inner_steps=True: expected a whole number of steps"),
        (
            {"inner_steps": 8},
            "outer_optimizer=None with inner_steps=8: expected the optimizer for the servers "
            "to run",
        ),
        (
            {"inner_steps": 8, "outer_optimizer": SGD, "pull_every": 2},
            "pull_every=2 with inner_steps=8",
        ),
        (
            {"inner_steps": 8, "outer_optimizer": SGD, "delay_compensation": 0.04},
            "delay_compensation=0.04 with inner_steps=8",
        ),
        (
            {"inner_steps": 8, "outer_optimizer": "sgd"},
            "outer_optimizer='sgd' with inner_steps=8: expected the optimizer",
        ),
        ({"outer_optimizer": SGD}, "outer_optimizer=SGD without inner_steps="),
        ({"pull_compression": 8}, "pull_compression=8; expected one of fp16, bf16, int8, or None"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        AsyncOptions(**options)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"deterministic": True}, "deterministic=True"),
    ],
)
def test_settings_that_need_a_synchronous_step_are_refused(
    setting: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        check_configuration(ShardingConfiguration(**setting), "gloo")
    assert message in str(refusal.value)


def test_a_misspelled_backend_is_refused_though_none_is_used() -> None:
    with pytest.raises(ConfigurationError, match="backend='glue'"):
        check_configuration(ShardingConfiguration(), "glue")


def test_the_servers_receive_the_mode_and_the_bound() -> None:
    assert AsyncOptions().message() == pb.Consistency(mode=pb.Consistency.MODE_ASP)
    assert AsyncOptions(consistency="ssp", staleness_bound=3).message() == pb.Consistency(
        mode=pb.Consistency.MODE_SSP, bound=3
    )
    assert AsyncOptions(consistency="bsp").message() == pb.Consistency(mode=pb.Consistency.MODE_BSP)
