"""A partition of many tensors is updated as torch updates each tensor alone, even if some have no
gradient in some steps."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from shoal_common.errors import InvalidRequestError
from shoal_common.optimizers.for_servers import SERVER_OPTIMIZERS
from shoal_ps_server.shard.layout import PartitionSpec
from shoal_ps_server.shard.optimizer import ParameterGroup, optimizer_settings
from shoal_ps_server.shard.partition import Partition
from shoal_ps_server.shard.run_optimizer import PartitionOptimizer
from torch import nn

NAMES = ("a", "b", "c", "d", "e", "f")
SHAPES = ((3,), (1,), (10, 4), (1, 2), (7,), (5, 1))
LENGTHS = (3, 1, 40, 2, 7, 5)
ROWS = (1, 1, 4, 2, 1, 1)
OPTIMIZERS = [
    ("sgd", {"lr": 0.1}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}),
    ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": 1.0}),
    ("adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("adamw", {"lr": 0.01, "amsgrad": 1.0}),
    ("adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    ("rmsprop", {"lr": 0.01, "momentum": 0.9}),
    ("lamb", {"lr": 0.01, "weight_decay": 0.1}),
    ("rowwise_adagrad", {"lr": 0.1, "initial_accumulator_value": 0.1}),
    ("delayed_nesterov", {"lr": 0.1, "every": 3}),
]


def by_rows(spec: PartitionSpec) -> PartitionSpec:
    """Returns `spec` with the lengths of its pieces' rows."""
    return replace(
        spec,
        pieces=tuple(replace(piece, row=row) for piece, row in zip(spec.pieces, ROWS, strict=True)),
    )


def torch_optimizer(
    name: str,
    parameters: Mapping[str, nn.Parameter],
    hyperparameters: Mapping[str, float],
    own: Mapping[str, Any],
) -> Any:
    declared = SERVER_OPTIMIZERS[name]
    groups = [
        {
            "params": [parameter],
            **declared.arguments({**declared.defaults, **hyperparameters, **own.get(tensor, {})}),
        }
        for tensor, parameter in parameters.items()
    ]
    return declared.optimizer_class()(
        groups, **declared.arguments({**declared.defaults, **hyperparameters})
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("name", "hyperparameters"), OPTIMIZERS, ids=str)
def test_each_tensor_is_updated_as_if_it_were_alone(make, name, hyperparameters, dtype) -> None:
    """A partition of six tensors is updated as torch's optimizer updates the six tensors, with
    parameter groups, absent gradients, a schedule and a restart."""
    generator, noise = random.Random(7), torch.Generator().manual_seed(7)
    own = {
        "b": {"lr": 0.5, "weight_decay": 0.0},
        "c": {"lr": 0.5, "weight_decay": 0.0},
        "f": {"lr": 0.02},
    }
    groups = [
        ParameterGroup(tensors=frozenset({"b", "c"}), hyperparameters=own["b"]),
        ParameterGroup(tensors=frozenset({"f"}), hyperparameters=own["f"]),
    ]
    spec = by_rows(make.packed(0, *zip(NAMES, LENGTHS, strict=True), dtype=dtype))
    start = torch.randn(spec.length, generator=noise, dtype=getattr(torch, dtype))
    settings = optimizer_settings(name=name, hyperparameters=hyperparameters, groups=groups)
    shard = make.shard(spec, optimizer=settings, values=start)
    parts = zip(NAMES, SHAPES, start.split(LENGTHS), strict=True)
    alone = {tensor: nn.Parameter(part.clone().view(shape)) for tensor, shape, part in parts}
    reference = torch_optimizer(name, alone, hyperparameters, own)
    for sequence in range(1, 25):
        absent = sorted(generator.sample(range(len(NAMES)), generator.choice((0, 0, 1, 3, 5))))
        gradients = [torch.randn(length, generator=noise, dtype=start.dtype) for length in LENGTHS]
        present = [
            gradient for position, gradient in enumerate(gradients) if position not in absent
        ]
        shard.push(make.upload(torch.cat(present), spec, sequence=sequence, absent=absent))
        for position, (parameter, gradient) in enumerate(
            zip(alone.values(), gradients, strict=True)
        ):
            parameter.grad = None if position in absent else gradient.view(parameter.shape)
        reference.step()
        if sequence == 8:
            settings = settings.changed({"weight_decay": 0.05}, [])
            shard.configure(settings)
            for group in reference.param_groups:
                group["weight_decay"] = 0.05
        if sequence == 16:
            restored = Partition.restored(shard.image(0), settings)
            assert restored.optimizer is not None
            shard._partitions[0] = restored
    found = make.values(shard).split(LENGTHS)
    for values, parameter in zip(found, alone.values(), strict=True):
        torch.testing.assert_close(values, parameter.detach().flatten(), rtol=1e-6, atol=1e-7)


def test_tensors_with_equal_histories_share_one_torch_state(make) -> None:
    spec = make.packed(0, *zip(NAMES, LENGTHS, strict=True))
    optimizer = PartitionOptimizer(
        torch.zeros(spec.length), spec, optimizer_settings(name="adamw", hyperparameters={})
    )
    optimizer.step(torch.ones(spec.length))
    assert len(optimizer.images()) == 1
    optimizer.step(torch.ones(spec.length_without((0, 1))), (0, 1))
    assert [(run.first, run.end, int(run.state["step"])) for run in optimizer.images()] == [
        (0, 2, 1),
        (2, 6, 2),
    ]
    optimizer.step(torch.ones(spec.length_without((0, 1))), (0, 1))
    optimizer.step(torch.ones(spec.length))
    assert [int(run.state["step"]) for run in optimizer.images()] == [2, 4]


def test_stateless_optimizer_keeps_tensors_together(make) -> None:
    spec = make.packed(0, *zip(NAMES, LENGTHS, strict=True))
    groups = [ParameterGroup(tensors=frozenset({"f"}), hyperparameters={"lr": 0.5})]
    optimizer = PartitionOptimizer(
        torch.zeros(spec.length),
        spec,
        optimizer_settings(name="sgd", hyperparameters={}, groups=groups),
    )
    for absent in ((0, 2, 4), (), (5,), (1, 3)):
        optimizer.step(torch.ones(spec.length_without(absent)), absent)
        assert [(run.first, run.end) for run in optimizer.images()] == [(0, 5), (5, 6)]


def test_infinite_update_names_its_tensor(make) -> None:
    spec = make.packed(0, ("a", 2), ("b", 3), ("c", 2))
    settings = optimizer_settings(name="sgd", hyperparameters={"lr": 10.0, "momentum": 0.5})
    shard = make.shard(spec, optimizer=settings)
    shard.push(make.upload([1.0, 1.0, 1.0, 1.0], spec, absent=[1]))
    with pytest.raises(
        InvalidRequestError,
        match="1 of 7 values NaN or infinite, the first at element 2 of tensor 'b'",
    ):
        shard.push(make.upload([1.0, 1.0, 1.0, 1.0, 3e38, 1.0, 1.0], spec, sequence=2))


def test_only_memory_needed_by_an_update_is_requested(make, monkeypatch) -> None:
    spec = make.packed(0, ("a", 2), ("b", 3))
    asked: list[int] = []
    real = torch.empty

    def counted(size: int, **options: Any) -> torch.Tensor:
        if options.get("dtype") is torch.uint8:
            asked.append(size)
        return real(size, **options)

    monkeypatch.setattr(torch, "empty", counted)
    for hyperparameters, strength, expected in (
        ({}, 0.0, []),
        ({"momentum": 0.9}, 0.0, [20]),
        ({"momentum": 0.9}, 0.5, [40, 20]),
    ):
        optimizer = optimizer_settings(
            name="sgd", hyperparameters=hyperparameters, delay_compensation=strength
        )
        shard = make.shard(spec, optimizer=optimizer)
        asked.clear()
        for sequence in (1, 2):
            shard.push(make.upload(torch.ones(5), spec, sequence=sequence))
        assert asked == expected


def test_many_skipped_pieces_cost_no_more_than_their_number(make) -> None:
    """The number of comparisons for absent pieces is linear in their number. An earlier search in a
    list made it quadratic."""
    compared = 0

    class Position(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int.__eq__(self, other)  # type: ignore[arg-type]  # only numbers are compared

        __hash__ = int.__hash__

    count = 512
    spec = make.packed(0, *((f"t{number}", 2) for number in range(count)))
    optimizer = PartitionOptimizer(
        torch.zeros(spec.length),
        spec,
        optimizer_settings(name="sgd", hyperparameters={"momentum": 0.9}),
    )
    absent = tuple(Position(number) for number in range(0, count, 2))
    optimizer.step(torch.ones(spec.length_without(absent)), absent)
    assert compared <= 4 * count


def test_memory_for_state_is_requested_only_for_pieces_without_state(make) -> None:
    spec = make.packed(0, *zip(NAMES, LENGTHS, strict=True))
    optimizer = PartitionOptimizer(
        torch.zeros(spec.length), spec, optimizer_settings(name="adamw", hyperparameters={})
    )
    assert optimizer.fresh_pieces(()) == list(spec.pieces)
    optimizer.step(torch.ones(3), (1, 2, 3, 4, 5))
    assert optimizer.fresh_pieces(()) == list(spec.pieces[1:])
    assert optimizer.fresh_pieces((2, 3, 4, 5)) == [spec.pieces[1]]


def test_row_state_is_one_number_per_row(make) -> None:
    spec = by_rows(make.packed(0, *zip(NAMES, LENGTHS, strict=True), dtype="bfloat16"))
    settings = optimizer_settings(name="rowwise_adagrad", hyperparameters={})
    shard = make.shard(spec, optimizer=settings)
    assert settings.most_state_bytes(spec.pieces, spec.element) == 4 * (3 + 1 + 10 + 1 + 7 + 5)
    shard.push(make.upload(torch.ones(spec.length - 40), spec, absent=[2]))
    assert shard.summary().stored_bytes == 2 * spec.length + 4 * (3 + 1 + 1 + 7 + 5)
    shard.push(make.upload(torch.ones(40), spec, sequence=2, absent=[0, 1, 3, 4, 5]))
    assert [tuple(run.state["sum"].shape) for run in shard.image(0).runs] == [
        (3,),
        (1,),
        (10,),
        (1,),
        (7,),
        (5,),
    ]
    assert all(run.state["sum"].dtype is torch.float32 for run in shard.image(0).runs)


def test_infinite_row_sum_names_its_row(make) -> None:
    spec = by_rows(make.packed(0, *zip(NAMES, LENGTHS, strict=True)))
    shard = make.shard(
        spec, optimizer=optimizer_settings(name="rowwise_adagrad", hyperparameters={})
    )
    gradient = torch.ones(spec.length)
    gradient[3 + 1 + 9] = 3e38
    with pytest.raises(
        InvalidRequestError,
        match="1 of 10 sum NaN or infinite, the first at element 8 of tensor 'c'",
    ):
        shard.push(make.upload(gradient, spec))


def test_each_tensor_has_its_own_trust_ratio(make) -> None:
    """Each tensor has its own trust ratio, even if tensors are adjacent and have not been updated
    yet."""
    spec = make.packed(0, ("a", 2), ("b", 3), ("c", 1))
    optimizer = PartitionOptimizer(
        torch.ones(6), spec, optimizer_settings(name="lamb", hyperparameters={})
    )
    for absent in ((0, 1), (), (1,)):
        optimizer.step(torch.ones(spec.length_without(absent)), absent)
        assert [(run.first, run.end) for run in optimizer.images()] == [(0, 1), (1, 2), (2, 3)]
    assert [int(run.state["step"]) for run in optimizer.images()] == [2, 1, 3]


def test_failed_step_creates_no_state(make, monkeypatch) -> None:
    spec = make.packed(0, ("a", 2), ("b", 2))
    optimizer = PartitionOptimizer(
        torch.zeros(4), spec, optimizer_settings(name="adamw", hyperparameters={})
    )
    optimizer.step(torch.ones(2), (1,))
    with monkeypatch.context() as patched:
        patched.setattr(
            torch, "_fused_adamw_", lambda *_, **__: (_ for _ in ()).throw(MemoryError())
        )
        with pytest.raises(MemoryError):
            optimizer.step(torch.ones(4))
    first, second = optimizer.images()
    assert first.state
    assert not second.state


def test_non_finite_values_are_named_by_their_tensor_even_when_pieces_are_skipped(
    make,
) -> None:
    spec = make.packed(0, ("a", 2), ("b", 3), ("c", 2))
    with pytest.raises(InvalidRequestError, match="the first at element 1 of tensor 'c'"):
        make.shard(spec).push(make.upload([0.0, 0.0, 0.0, float("nan")], spec, absent=[1]))
