"""Parameters and gradients in host memory."""

from __future__ import annotations

import pytest
import torch
from shoal_common.errors import ConfigurationError, InvalidRequestError
from shoal_worker.parameter_servers.tensors import HostTensor, check_gradients, gradients, publish
from torch import nn


def host(value: torch.Tensor, *, gradient: torch.Tensor | None = None) -> HostTensor:
    parameter = nn.Parameter(value)
    parameter.grad = gradient
    return HostTensor("layer.weight", parameter, trained=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_values_are_received_into_the_parameter_itself(dtype: torch.dtype) -> None:
    tensor = host(torch.zeros(2, 3, dtype=dtype))
    wanted = torch.arange(6, dtype=dtype).reshape(2, 3)
    tensor.target().copy_(wanted.reshape(-1))
    publish([tensor])
    assert torch.equal(tensor.parameter, wanted)


def test_non_contiguous_parameter_uses_a_copy() -> None:
    transposed = torch.arange(6.0).reshape(2, 3).t()
    tensor = host(transposed.clone(memory_format=torch.preserve_format))
    assert not tensor.parameter.is_contiguous()
    assert torch.equal(tensor.values(), transposed.reshape(-1))
    tensor.target()[0] = 9.0
    publish([tensor])
    assert tensor.parameter[0, 0] == 9.0
    assert torch.equal(tensor.parameter.reshape(-1)[1:], transposed.reshape(-1)[1:])


def test_parameter_with_replaced_memory_is_received_into_that() -> None:
    tensor = host(torch.zeros(2))
    tensor.target()
    tensor.parameter.data = torch.zeros(2)
    tensor.target().copy_(torch.ones(2))
    assert torch.equal(tensor.parameter, torch.ones(2))


def test_gradient_is_sent_from_its_own_memory() -> None:
    gradient = torch.arange(3.0)
    (found,) = gradients([host(torch.zeros(3), gradient=gradient)]).values()
    assert found.data_ptr() == gradient.data_ptr()


def test_non_contiguous_gradient_is_copied() -> None:
    gradient = torch.arange(6.0).reshape(2, 3).t()
    (found,) = gradients([host(torch.zeros(3, 2), gradient=gradient)]).values()
    assert torch.equal(found, gradient.reshape(-1))


def test_a_parameter_without_gradient_sends_nothing() -> None:
    assert gradients([host(torch.zeros(3))]) == {}


def test_graph_of_older_values_detects_new_ones() -> None:
    tensor = host(torch.ones(2))
    squared = (tensor.parameter**2).sum()
    publish([tensor])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_scalar_and_empty_parameters_are_handled_like_others() -> None:
    scalar, empty = host(torch.tensor(2.0)), host(torch.zeros(0, 4))
    assert list(scalar.spec.shape) == []
    assert scalar.target().shape == (1,)
    assert list(empty.spec.shape) == [0, 4]
    assert empty.target().shape == (0,)


def test_dtype_that_servers_do_not_support_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"'layer\.weight' has dtype torch\.complex64"):
        host(torch.zeros(2, dtype=torch.complex64))


def test_parameter_converted_after_the_start_is_refused() -> None:
    tensor = host(torch.zeros(2))
    tensor.parameter.data = tensor.parameter.data.double()
    with pytest.raises(
        ConfigurationError,
        match=r"is now torch\.float64 of shape \(2,\), but the servers have torch\.float32",
    ):
        tensor.target()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_gradient_is_refused_by_name(poison: float) -> None:
    bad = torch.zeros(10)
    bad[3] = poison
    good = HostTensor("good", nn.Parameter(torch.zeros(1)), trained=True)
    good.parameter.grad = torch.ones(1)
    with pytest.raises(
        InvalidRequestError, match=r"1 of 10 values in the gradient of 'layer\.weight' are NaN"
    ) as refusal:
        check_gradients([good, host(torch.zeros(10), gradient=bad)])
    assert refusal.value.reason == "GRADIENT_NOT_FINITE"


def test_large_finite_gradients_are_not_mistaken_for_infinite_ones() -> None:
    check_gradients([host(torch.zeros(4), gradient=torch.full((4,), 3e38))])
    check_gradients(
        [
            host(
                torch.zeros(4, dtype=torch.float16),
                gradient=torch.full((4,), 6e4, dtype=torch.float16),
            )
        ]
    )


def test_a_sparse_gradient_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="sparse=False"):
        check_gradients([host(torch.zeros(3), gradient=torch.zeros(3).to_sparse())])
