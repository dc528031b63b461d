"""Test cases that run on one rank of a tensor-parallel group; run by ranks.py. A failed case raises
an assertion on the rank."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from shoal_common.errors import ConfigurationError
from shoal_worker.tensor_parallel import DropoutRandomness, Style, loss_parallel, make_plan
from shoal_worker.tensor_parallel.context import ParallelContext
from shoal_worker.tensor_parallel.region import RegionMode, region
from shoal_worker.torch_internals import function_modes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from tests.fake_device.autograd import passes_on_threads_of_autograd
from tests.integration.tensor_parallel.counter import CollectiveCounter
from tests.integration.tensor_parallel.models import (
    EncoderDecoder,
    Llama,
    NanoGpt,
    activations,
    build,
    tokens,
)
from tests.integration.tensor_parallel.more_models import MORE
from tests.integration.tensor_parallel.split_model import SplitModel

TOLERANCE = 1e-10


def close(a: torch.Tensor, b: torch.Tensor, what: str) -> None:
    difference = (a.detach() - b.detach()).abs().max().item()
    assert a.shape == b.shape
    assert difference <= TOLERANCE, f"{what} differs by {difference}"


def parity(
    mesh: DeviceMesh, model: str, sequence_dimension: int | None = None, length: int | None = None
) -> None:
    """Output, gradients of parameters and input, and one optimizer step equal those of
    one process."""
    alone, inputs = build(model)
    inputs = inputs if length is None else inputs[:, :length]
    split = copy.deepcopy(alone)
    plan = make_plan(
        split, mesh.size(), minimum_parameter_group_size=0, sequence_dimension=sequence_dimension
    )
    state = SplitModel(split, mesh, plan)
    own = inputs.detach().clone().requires_grad_(inputs.requires_grad)
    output, expected = split(own), alone(inputs)
    close(output, expected, "the output")
    factors = torch.randn(
        expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(2)
    )
    (expected * factors).sum().backward()
    (output * factors).sum().backward()
    if inputs.requires_grad:
        close(own.grad, inputs.grad, "the gradient of the input")
    for (name, parameter), (_, of_split) in zip(
        alone.named_parameters(), split.named_parameters(), strict=True
    ):
        close(state.gather(name, of_split.grad), parameter.grad, f"the gradient of {name}")
    for one in (alone, split):
        torch.optim.SGD(one.parameters(), 0.1, momentum=0.9).step()
    full = state.full_state_dict()
    for name, tensor in alone.state_dict().items():
        close(full[name], tensor, name)
    assert list(full) == list(alone.state_dict())
    held = state.bytes_here()
    assert (
        held == plan.bytes_per_rank if mesh.get_local_rank() == 0 else held <= plan.bytes_per_rank
    )


def pair(
    mesh: DeviceMesh,
    alone: nn.Module,
    dropout: DropoutRandomness = DropoutRandomness.PER_SHARD,
    **options: Any,
) -> tuple[nn.Module, Any]:
    """Returns a sharded copy of a model, and its state."""
    split = copy.deepcopy(alone)
    return split, SplitModel(
        split,
        mesh,
        make_plan(split, mesh.size(), minimum_parameter_group_size=0, **options),
        dropout,
    )


def same_gradients(alone: nn.Module, split: nn.Module, state: Any) -> None:
    for (name, parameter), (_, of_split) in zip(
        alone.named_parameters(), split.named_parameters(), strict=True
    ):
        assert (parameter.grad is None) == (of_split.grad is None), name
        if parameter.grad is not None:
            close(state.gather(name, of_split.grad), parameter.grad, f"the gradient of {name}")


def more(mesh: DeviceMesh, model: str) -> None:
    """Less usual blocks equal one process with and without sequence parallelism, buffers
    included."""
    make, styles = MORE[model]
    torch.manual_seed(0)
    alone, inputs = make().double(), activations(16)()
    pairs = [pair(mesh, alone, sequence_dimension=dimension) for dimension in (None, 1)]
    assert {
        e.module: e.style.value for e in pairs[0][1].plan.entries if e.style is not Style.REPLICATE
    } == styles
    expected = alone(inputs)
    expected.square().sum().backward()
    for split, state in pairs:
        own = inputs.detach().clone().requires_grad_()
        output = split(own)
        output.square().sum().backward()
        close(output, expected, "the output")
        close(own.grad, inputs.grad, "the gradient of the input")
        same_gradients(alone, split, state)
        full = state.full_state_dict()
        for name, tensor in alone.state_dict().items():
            close(full[name], tensor, name)


def evaluation(mesh: DeviceMesh, model: str) -> None:
    """Without gradients, torch's transformer layers take their own code paths (fast path, nested
    tensors), which do not support DTensor."""
    alone, inputs = build(model)
    split, _ = pair(mesh, alone)
    for without_gradients in (torch.no_grad, torch.inference_mode):
        with without_gradients():
            close(split.eval()(inputs.detach()), alone.eval()(inputs.detach()), "the output")
    split, _ = pair(mesh, alone, sequence_dimension=1)
    with torch.no_grad(), CollectiveCounter() as counter:
        close(split.eval()(inputs.detach()), alone(inputs.detach()), "the output")
    assert counter.counts()["all_gather"] <= 6
    if model == "torch encoder layer, norm first":
        torch.manual_seed(0)
        alone = (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)
            .double()
            .eval()
        )
        split, _ = pair(mesh, alone)
        alone.use_nested_tensor = False  # torch warns that they are a prototype
        padding = torch.tensor([[False] * 8, [False] * 6 + [True] * 2])
        with torch.no_grad():
            expected, output = (
                alone(inputs.detach(), src_key_padding_mask=padding),
                split(inputs.detach(), src_key_padding_mask=padding),
            )
        close(output[~padding], expected[~padding], "the output")


def dropout_as_one_process(mesh: DeviceMesh) -> None:
    for make, inputs in (
        (lambda: NanoGpt(dropout=0.3, flash=False), tokens()),
        (lambda: EncoderDecoder(dropout=0.3), activations(16)().detach()),
    ):
        torch.manual_seed(0)
        alone = make().double()
        for sequence_dimension in (None, 1):
            split, state = pair(
                mesh, alone, DropoutRandomness.AS_ONE_PROCESS, sequence_dimension=sequence_dimension
            )
            alone.zero_grad()
            for model in (alone, split):
                torch.manual_seed(5)
                model(inputs).square().sum().backward()
            same_gradients(alone, split, state)


def dropout_per_shard(mesh: DeviceMesh) -> None:
    context = ParallelContext(mesh, sequence_dimension=None, dropout=DropoutRandomness.PER_SHARD)
    torch.manual_seed(7)
    local = torch.ones(64)
    with region(context):
        of_shards = F.dropout(context.sharded(local, 0), 0.5).full_tensor().view(mesh.size(), -1)
        of_whole = F.dropout(context.replicated(local), 0.5).to_local()
        again = F.dropout(context.sharded(local, 0), 0.5).full_tensor().view(mesh.size(), -1)
    assert (
        len({tuple(row.tolist()) for row in (*of_shards, *again, of_whole)}) == 2 * mesh.size() + 1
    )
    everyone = (
        DTensor.from_local(of_whole, mesh, [Shard(0)], run_check=False)
        .full_tensor()
        .view(mesh.size(), -1)
    )
    assert (everyone == everyone[0]).all()
    after = DTensor.from_local(torch.rand(1), mesh, [Shard(0)], run_check=False).full_tensor()
    assert (after == after[0]).all(), "the default generators of the ranks have come apart"


def parallel_loss(mesh: DeviceMesh) -> None:
    """The loss over sharded logits equals cross_entropy with all its options, for a vocabulary of
    uneven shards. Through the model, no rank gathers the full logits."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 11, dtype=torch.float64, generator=generator)
    target = torch.tensor([0, 10, 5, -100, 3, 7])
    weight = torch.rand(11, dtype=torch.float64, generator=generator)
    options = [
        {"reduction": r, "label_smoothing": s, "weight": w}
        for r in ("mean", "sum", "none")
        for s in (0.0, 0.2)
        for w in (None, weight)
    ]
    for option in options:
        whole = logits.clone().requires_grad_()
        expected = F.cross_entropy(whole, target, **option)
        expected.sum().backward()
        split = distribute_tensor(logits.clone(), mesh, [Shard(1)]).requires_grad_()
        with loss_parallel(mesh):
            loss = F.cross_entropy(split, target, **option)
        loss.sum().backward()
        close(loss, expected, f"the loss with {option}")
        close(split.grad.full_tensor(), whole.grad, f"the gradient with {option}")
    with pytest.raises(ConfigurationError, match="expected class indices"), loss_parallel(mesh):
        F.cross_entropy(distribute_tensor(logits, mesh, [Shard(1)]), torch.rand(6, 11))
    with (
        pytest.raises(ConfigurationError, match="is not one of the 11 classes"),
        loss_parallel(mesh),
    ):
        F.cross_entropy(distribute_tensor(logits, mesh, [Shard(1)]), target + 1)

    torch.manual_seed(0)
    alone = NanoGpt(vocabulary=22).double()
    model, state = pair(mesh, alone, loss_parallel=True)
    ids = tokens()
    expected = F.cross_entropy(alone(ids).flatten(0, 1), ids.flatten())
    expected.backward()
    with CollectiveCounter() as counter:
        output = model(ids)
        with loss_parallel(mesh):
            loss = F.cross_entropy(output.flatten(0, 1), ids.flatten())
        loss.backward()
    assert output.to_local().shape[-1] < 22
    assert counter.counts()["all_gather"] == 0
    close(loss, expected, "the model's loss")
    same_gradients(alone, model, state)


def loss_within_the_model(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    alone = Llama(vocabulary=21).double()
    split, state = pair(mesh, alone, loss_parallel=True)
    ids = tokens()
    alone(ids, labels=ids)["loss"].backward()
    with CollectiveCounter() as counter:
        split(ids, labels=ids)["loss"].backward()
    assert counter.counts()["all_gather"] == 0
    same_gradients(alone, split, state)


def multihead_options(mesh: DeviceMesh) -> None:
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    padding = torch.tensor([[False] * 5, [False] * 4 + [True]])
    calls: list[tuple[dict[str, Any], tuple[torch.Tensor, ...], dict[str, Any]]] = [
        ({"batch_first": True}, (random(2, 3, 16), random(2, 5, 16), random(2, 5, 16)),
         {"key_padding_mask": padding}),
        ({"batch_first": True}, (random(2, 3, 16), random(2, 5, 16), random(2, 5, 16)),
         {"attn_mask": random(3, 5), "need_weights": False}),
        ({}, (random(3, 2, 16), random(5, 2, 16), random(5, 2, 16)),
         {"attn_mask": random(8, 3, 5) > 1.5, "average_attn_weights": False}),
        ({}, (random(3, 2, 16), random(5, 2, 16), random(5, 2, 16)),
         {"attn_mask": random(8, 3, 5) > 1.5, "key_padding_mask": padding}),
        ({"bias": False}, (random(3, 16), random(5, 16), random(5, 16)), {}),
        ({"kdim": 6, "vdim": 10, "batch_first": True},
         (random(2, 3, 16), random(2, 5, 6), random(2, 5, 10)), {"need_weights": False}),
    ]  # fmt: skip
    for made, inputs, called in calls:
        torch.manual_seed(0)
        alone = nn.MultiheadAttention(16, 4, dtype=torch.float64, **made)
        split, state = pair(mesh, alone)
        for output, expected in zip(
            split(*inputs, **called), alone(*inputs, **called), strict=True
        ):
            assert (output is None) == (expected is None)
            if expected is not None:
                close(output, expected, f"an output with {made} and {list(called)}")
        alone(*inputs, **called)[0].square().sum().backward()
        split(*inputs, **called)[0].square().sum().backward()
        same_gradients(alone, split, state)


def checkpointed_copied_compiled_frozen(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    alone = NanoGpt(dropout=0.2).double()
    alone.transformer.h[0].attn.requires_grad_(False)
    split, state = pair(mesh, alone, DropoutRandomness.PER_SHARD)
    copied = copy.deepcopy(split)
    block = split.transformer.h[0]
    run_block = block.forward
    block.forward = lambda x: checkpoint(run_block, x, use_reentrant=False)
    for model in (split, torch.compile(copied, backend="eager")):
        torch.manual_seed(9)
        model(tokens()).square().sum().backward()
    for (name, parameter), (_, other) in zip(
        split.named_parameters(), copied.named_parameters(), strict=True
    ):
        assert parameter is not other
        assert (parameter.grad is None) == ("attn" in name) == (other.grad is None)
        if parameter.grad is not None:
            close(
                state.gather(name, parameter.grad),
                state.gather(name, other.grad),
                f"the gradient of {name}",
            )


def checkpointed_within_a_loss(mesh: DeviceMesh, elsewhere: bool) -> None:
    """A model whose passes run within `loss_parallel` keeps its own settings there, even when a
    checkpointed block is recomputed. `elsewhere`: the recomputation is on a thread of autograd, as
    on CUDA."""
    torch.manual_seed(0)
    alone = NanoGpt(dropout=0.2).double()
    split, state = pair(mesh, alone, DropoutRandomness.AS_ONE_PROCESS)
    open_regions: list[int] = []
    for model in (alone, split):
        block = model.transformer.h[0]
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    split.transformer.h[0].mlp.register_forward_pre_hook(
        lambda *_: open_regions.append(
            sum(isinstance(mode, RegionMode) for mode in function_modes())
        )
    )
    torch.manual_seed(9)
    alone(tokens()).square().sum().backward()
    torch.manual_seed(9)
    with loss_parallel(mesh):
        loss = split(tokens()).square().sum()
        with passes_on_threads_of_autograd() if elsewhere else contextlib.nullcontext():
            loss.backward()
    assert open_regions == [1, 1]  # another one would apply sharding rules twice
    same_gradients(alone, split, state)


def autocast(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    alone = NanoGpt()
    split, _ = pair(mesh, alone)
    with torch.autocast("cpu", torch.bfloat16):
        expected, output = alone(tokens()), split(tokens())
    output.float().square().sum().backward()
    assert output.dtype == expected.dtype == torch.bfloat16
    assert (output - expected).abs().max() < 0.05
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in split.parameters())
