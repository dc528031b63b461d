"""Server-side optimizers compute what torch's do. Settings that torch would refuse are refused
before anything changes."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shoal_common.errors import InvalidRequestError
from shoal_common.optimizers.for_servers import SERVER_OPTIMIZERS
from shoal_common.optimizers.for_torch import LAMB, DelayedNesterov, RowWiseAdagrad
from shoal_protos.v1 import coordinator_pb2
from shoal_ps_server.shard.dtypes import BY_NAME
from shoal_ps_server.shard.layout import PartitionSpec, Piece, layout_from_shard_map
from shoal_ps_server.shard.optimizer import ParameterGroup, optimizer_settings
from shoal_ps_server.shard.run_optimizer import PartitionOptimizer

CASES = [
    ("sgd", {}, lambda p: torch.optim.SGD(p, lr=0.1)),
    ("sgd", {"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    (
        "sgd",
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
        lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.3, 0.01),
    ),
    (
        "sgd",
        {"momentum": 0.9, "nesterov": 1, "maximize": 1},
        lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True, maximize=True),
    ),
    ("adamw", {}, lambda p: torch.optim.AdamW(p, lr=0.1)),
    (
        "adamw",
        {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1, "amsgrad": 1, "maximize": 1},
        lambda p: torch.optim.AdamW(p, 0.1, (0.5, 0.9), 1e-3, 0.1, amsgrad=True, maximize=True),
    ),
    (
        "adam",
        {"weight_decay": 0.1, "amsgrad": 1},
        lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1, amsgrad=True),
    ),
    (
        "adam",
        {"weight_decay": 0.1, "decoupled_weight_decay": 1},
        lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1, decoupled_weight_decay=True),
    ),
    ("adagrad", {}, lambda p: torch.optim.Adagrad(p, 0.1)),
    (
        "adagrad",
        {
            "lr_decay": 0.1,
            "weight_decay": 0.01,
            "initial_accumulator_value": 0.5,
            "eps": 1e-3,
            "maximize": 1,
        },
        lambda p: torch.optim.Adagrad(p, 0.1, 0.1, 0.01, 0.5, 1e-3, maximize=True),
    ),
    ("rmsprop", {}, lambda p: torch.optim.RMSprop(p, 0.1)),
    (
        "rmsprop",
        {
            "alpha": 0.9,
            "eps": 1e-3,
            "weight_decay": 0.01,
            "momentum": 0.9,
            "centered": 1,
            "maximize": 1,
        },
        lambda p: torch.optim.RMSprop(p, 0.1, 0.9, 1e-3, 0.01, 0.9, centered=True, maximize=True),
    ),
    ("lamb", {}, lambda p: LAMB(p, 0.1)),
    (
        "lamb",
        {"beta1": 0.5, "beta2": 0.9, "eps": 1e-3, "weight_decay": 0.1, "maximize": 1},
        lambda p: LAMB(p, 0.1, (0.5, 0.9), 1e-3, 0.1, maximize=True),
    ),
    ("rowwise_adagrad", {}, lambda p: RowWiseAdagrad(p, 0.1)),
    (
        "rowwise_adagrad",
        {"weight_decay": 0.01, "initial_accumulator_value": 0.5, "eps": 1e-3, "maximize": 1},
        lambda p: RowWiseAdagrad(p, 0.1, 0.01, 0.5, 1e-3, maximize=True),
    ),
    ("delayed_nesterov", {}, lambda p: DelayedNesterov(p, 0.1)),
    (
        "delayed_nesterov",
        {"momentum": 0.5, "every": 3, "weight_decay": 0.01, "maximize": 1},
        lambda p: DelayedNesterov(p, 0.1, 0.5, 3, 0.01, maximize=True),
    ),
]


@pytest.mark.parametrize(("name", "hyperparameters", "reference"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_partition_follows_the_same_path_as_torch_alone(
    make, name, hyperparameters, reference, dtype
) -> None:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(257, generator=generator, dtype=dtype)
    spec = make.spec(length=257, dtype=str(dtype).removeprefix("torch."))
    shard = make.shard(
        spec,
        optimizer=optimizer_settings(name=name, hyperparameters={"lr": 0.1, **hyperparameters}),
        values=start,
    )
    parameter = start.clone()
    optimizer = reference([parameter])
    for step in range(1, 8):
        parameter.grad = torch.randn(257, generator=generator, dtype=dtype)
        optimizer.step()
        shard.push(make.upload(parameter.grad, spec, sequence=step, base_version=step))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(make.values(shard), parameter, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SERVER_OPTIMIZERS)
def test_sixteen_bit_values_move_and_stay_finite(make, name, dtype) -> None:
    spec = make.spec(length=64, dtype=dtype)
    shard = make.shard(spec, optimizer=optimizer_settings(name=name, hyperparameters={"lr": 0.25}))
    gradient = torch.full((64,), 2e-4)
    gradient[0] = 0.0
    if dtype in SERVER_OPTIMIZERS[name].not_for:
        with pytest.raises(InvalidRequestError, match="NaN or infinite, the first at element 0"):
            shard.push(make.upload(gradient, spec))
        return
    shard.push(make.upload(gradient, spec))
    expected = torch.full(
        (64,), {"sgd": -0.5e-4, "delayed_nesterov": -0.95e-4, "rmsprop": -2.5}.get(name, -0.25)
    )
    expected[0] = 0.0
    torch.testing.assert_close(make.values(shard).float(), expected, rtol=0.02, atol=1e-6)


def test_groups_and_schedules_reach_the_tensors_they_name(make) -> None:
    weight, bias = make.spec(0, tensor="weight"), make.spec(1, tensor="bias")
    settings = optimizer_settings(
        name="sgd",
        hyperparameters={"lr": 1.0},
        groups=[ParameterGroup(tensors=frozenset({"bias"}), hyperparameters={"lr": 0.1})],
    )
    shard = make.shard(weight, bias, optimizer=settings)
    for spec in (weight, bias):
        shard.push(make.upload(torch.ones(6), spec))
    assert make.values(shard, 0)[0] == -1.0
    assert make.values(shard, 1)[0] == pytest.approx(-0.1)

    both = settings.changed({"lr": 2.0}, [])
    assert [both.for_tensor(tensor)["lr"] for tensor in ("weight", "bias")] == [2.0, 2.0]
    apart = settings.changed(
        {"lr": 2.0}, [ParameterGroup(tensors=frozenset({"bias"}), hyperparameters={"lr": 0.2})]
    )
    assert [apart.for_tensor(tensor)["lr"] for tensor in ("weight", "bias")] == [2.0, 0.2]
    shard.configure(apart)
    for spec in (weight, bias):
        shard.push(make.upload(torch.ones(6), spec, sequence=2, base_version=2))
    assert make.values(shard, 0)[0] == -3.0
    assert make.values(shard, 1)[0] == pytest.approx(-0.3)


def test_a_changed_learning_rate_keeps_the_momentum(make) -> None:
    settings = make.sgd(lr=1.0, momentum=0.5)
    shard = make.shard(optimizer=settings)
    shard.push(make.upload(torch.ones(6)))
    shard.configure(settings.changed({"lr": 2.0}, []))
    shard.push(make.upload(torch.ones(6), sequence=2, base_version=2))
    assert make.values(shard)[0] == -1.0 - 2.0 * 1.5


def test_equal_settings_are_equal_in_any_spelling() -> None:
    short = optimizer_settings(name="adamw", hyperparameters={})
    assert short == optimizer_settings(name="adamw", hyperparameters={"eps": 1e-8, "lr": 1e-3})
    assert short != optimizer_settings(name="adamw", hyperparameters={"lr": 2e-3})


@pytest.mark.parametrize(
    ("name", "hyperparameters", "complaint"),
    [
        ("lion", {}, "unknown optimizer 'lion'"),
        ("sgd", {"beta1": 0.9}, "no hyperparameter 'beta1'"),
        ("sgd", {"lr": -0.1}, "lr=-0.1"),
        ("sgd", {"lr": float("nan")}, "lr=nan"),
        ("sgd", {"nesterov": 0.5}, "expected 0 or 1"),
        ("sgd", {"nesterov": 1}, "nesterov with momentum="),
        ("sgd", {"nesterov": 1, "momentum": 0.9, "dampening": 0.1}, "and dampening 0"),
        ("adamw", {"beta2": 1.0}, "[0, 1)"),
    ],
)
def test_an_impossible_optimizer_is_refused_by_name(name, hyperparameters, complaint) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        optimizer_settings(name=name, hyperparameters=hyperparameters)
    assert caught.value.reason == "OPTIMIZER_INVALID"
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("groups", "complaint"),
    [
        ([({"a"}, {}), ({"a", "b"}, {})], "two parameter groups: a"),
        ([(set(), {})], "has no tensors"),
        ([({"c"}, {})], "not declared: c"),
        ([({"a"}, {"momentum": -1})], "momentum=-1"),
    ],
)
def test_impossible_groups_are_refused_by_name(groups, complaint) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        optimizer_settings(
            name="sgd",
            hyperparameters={},
            groups=[
                ParameterGroup(tensors=frozenset(tensors), hyperparameters=own)
                for tensors, own in groups
            ],
            tensors=frozenset({"a", "b"}),
        )


def test_schedule_can_neither_name_new_groups_nor_change_the_kept_state() -> None:
    settings = optimizer_settings(name="adamw", hyperparameters={})
    with pytest.raises(InvalidRequestError, match="no parameter group was configured"):
        settings.changed(
            {}, [ParameterGroup(tensors=frozenset({"a"}), hyperparameters={"lr": 1.0})]
        )
    with pytest.raises(InvalidRequestError, match="amsgrad determines the state"):
        settings.changed({"amsgrad": 1}, [])


@given(
    st.sampled_from(["sgd", "adamw"]),
    st.dictionaries(
        st.sampled_from(["lr", "momentum", "beta1", "eps", "nesterov", "x"]), st.floats()
    ),
)
def test_accepted_settings_are_accepted_by_torch(make, name, hyperparameters) -> None:
    try:
        settings = optimizer_settings(name=name, hyperparameters=hyperparameters)
    except InvalidRequestError:
        return
    spec = make.spec(length=2)
    PartitionOptimizer(torch.zeros(2), spec, settings)


@pytest.mark.parametrize(
    ("name", "hyperparameters", "dtype", "gradient", "applied"),
    [
        pytest.param("sgd", {"lr": 1e30}, "float32", 1e30, 0, id="a huge learning rate"),
        pytest.param("sgd", {"lr": 1.0}, "float32", 2e38, 1, id="gradients that add up"),
        pytest.param("adamw", {"lr": 1e-3}, "float32", 1e25, 0, id="a square that overflows"),
        pytest.param("adam", {"lr": 1e-3, "eps": 0.0}, "float32", 0.0, 0, id="zero by zero"),
        pytest.param("sgd", {"lr": 1.0}, "float16", 30000.0, 2, id="half precision"),
        pytest.param(
            "sgd", {"lr": 1.0, "weight_decay": 500.0}, "float32", 1.0, 15, id="a decay that grows"
        ),
        pytest.param(
            "rowwise_adagrad", {"eps": 0.0}, "float32", 0.0, 0, id="zero by zero, by rows"
        ),
        pytest.param(
            "rowwise_adagrad", {}, "float32", 1e25, 0, id="a mean of squares that overflows"
        ),
        pytest.param(
            "lamb", {"lr": 1e-3}, "float32", 1e25, 0, id="a square that overflows, of lamb"
        ),
    ],
)
def test_infinite_update_is_refused_and_changes_nothing(
    make, name, hyperparameters, dtype, gradient, applied
) -> None:
    spec = make.spec(dtype=dtype)
    shard = make.shard(
        spec, optimizer=optimizer_settings(name=name, hyperparameters=hyperparameters)
    )
    for sequence in range(1, applied + 1):
        shard.push(make.upload(torch.full((6,), gradient), spec, sequence=sequence))
    before = shard.image(0)
    with pytest.raises(
        InvalidRequestError,
        match=r"the update would make 6 of 6 .* the first at element 0 of tensor 'weight'",
    ) as caught:
        shard.push(make.upload(torch.full((6,), gradient), spec, sequence=applied + 1))
    assert caught.value.reason == "RESULT_NOT_FINITE"
    after = shard.image(0)
    assert (after.version, after.sequences, after.state().keys()) == (
        before.version,
        before.sequences,
        before.state().keys(),
    )
    assert torch.equal(after.values, before.values)
    assert torch.isfinite(after.values).all()


def test_ordinary_updates_are_not_tried_first(make, monkeypatch) -> None:
    """Ordinary updates are applied without a trial, which would cost a copy of the partition."""
    monkeypatch.setattr(
        "shoal_ps_server.shard.partition.Partition.check_trial",
        lambda *_: pytest.fail("the update was tried first"),
    )
    sgd = {"lr": 10.0, "momentum": 0.99, "weight_decay": 0.1}
    for name, hyperparameters in (
        *(("sgd", sgd), ("adamw", {}), ("adam", {"lr": 1.0})),
        *(
            ("lamb", {"weight_decay": 0.1}),
            ("rowwise_adagrad", {"lr": 1.0}),
            ("delayed_nesterov", {"every": 8}),
        ),
    ):
        for dtype in ("float32", "float64", "bfloat16"):
            spec = make.spec(dtype=dtype)
            shard = make.shard(
                spec, optimizer=optimizer_settings(name=name, hyperparameters=hyperparameters)
            )
            for sequence in (1, 2):
                shard.push(make.upload(torch.full((6,), 1e6), spec, sequence=sequence))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_values_that_grow_proportionally_are_refused_before_they_overflow(make, dtype) -> None:
    """LAMB's updates, which are proportional to the values, are refused before the values overflow,
    no matter how small the gradients are."""
    spec = make.spec(dtype=dtype)
    shard = make.shard(
        spec,
        optimizer=optimizer_settings(name="lamb", hyperparameters={"lr": 1.0}),
        values=torch.ones(6),
    )

    def climb() -> None:
        for sequence in range(1, 1100):
            shard.push(make.upload(torch.full((6,), -1e-3), spec, sequence=sequence))

    with pytest.raises(
        InvalidRequestError, match="the update would make 6 of 6 values NaN or infinite"
    ):
        climb()
    assert torch.isfinite(make.values(shard)).all()
    assert make.values(shard).abs().max() > 1e15


@pytest.mark.parametrize("name", SERVER_OPTIMIZERS)
def test_half_precision_updates_are_tried_first(make, name) -> None:
    spec = make.spec(dtype="float16")
    shard = make.shard(spec, optimizer=optimizer_settings(name=name, hyperparameters={}))
    assert shard.needs_trial(make.upload(torch.zeros(6), spec))


def test_updates_in_progress_count_towards_the_growth_of_values(make) -> None:
    shard = make.shard(
        optimizer=optimizer_settings(name="lamb", hyperparameters={"lr": 1.0}), values=torch.ones(6)
    )
    uploads = (make.upload(torch.full((6,), -1e-3), sequence=sequence) for sequence in range(1, 40))
    admitted = list(
        map(shard.admit_push, takewhile(lambda upload: not shard.needs_trial(upload), uploads))
    )
    # each admitted push may double the values until the bound is reached
    assert 15 < len(admitted) < 30


def test_split_row_is_refused_by_name(make) -> None:
    rows = optimizer_settings(name="rowwise_adagrad", hyperparameters={})
    piece = Piece(tensor="table", offset=0, length=10, row=4)
    whole = PartitionSpec(
        partition_id=0, pieces=(replace(piece, offset=4, length=8),), element=BY_NAME["float32"]
    )
    rows.check_pieces([whole])
    optimizer_settings(name="lamb", hyperparameters={}).check_pieces(
        [replace(whole, pieces=(piece,))]
    )
    with pytest.raises(
        InvalidRequestError,
        match="whole rows, but a row of tensor 'table' has 4 elements \\(16 bytes\\)",
    ) as caught:
        rows.check_pieces([whole, replace(whole, pieces=(piece,))])
    assert caught.value.reason == "OPTIMIZER_INVALID"


def test_rows_of_frozen_tensors_may_be_split() -> None:
    """Rows of frozen tensors may be split, because no optimizer updates them."""
    shard_map = coordinator_pb2.ShardMap(
        epoch=1,
        tensors=[
            coordinator_pb2.TensorSpec(name="table", shape=[2, 300], dtype="float32", frozen=True)
        ],
        partitions=[
            coordinator_pb2.Partition(
                partition_id=0, pieces=[coordinator_pb2.Piece(tensor_index=0, offset=0, length=256)]
            )
        ],
    )
    rows = optimizer_settings(name="rowwise_adagrad", hyperparameters={})
    rows.check_pieces(layout_from_shard_map(shard_map, server_index=0).partitions.values())
    shard_map.tensors[0].frozen = False
    with pytest.raises(InvalidRequestError, match="whole rows"):
        rows.check_pieces(layout_from_shard_map(shard_map, server_index=0).partitions.values())


def test_non_finite_value_is_found_anywhere(make) -> None:
    for wrong in (float("nan"), float("inf"), -float("inf")):
        for place in range(6):
            values = torch.arange(6.0)
            values[place] = wrong
            with pytest.raises(InvalidRequestError, match=f"the first at element {place}"):
                make.upload(values, cuts=(4, 8, 12, 16, 20)).values()
