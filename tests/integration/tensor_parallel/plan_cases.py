"""Test cases of communication and plans that run on one rank of a tensor-parallel group; run by
ranks.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from shoal_common.errors import ConfigurationError
from shoal_worker.tensor_parallel import make_plan
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.integration.tensor_parallel.cases import pair, same_gradients
from tests.integration.tensor_parallel.counter import CollectiveCounter
from tests.integration.tensor_parallel.models import BLOCKS, Gpt2, NanoGpt, Odd, activations, tokens
from tests.integration.tensor_parallel.split_model import SplitModel


def block_communication(mesh: DeviceMesh, block: str) -> None:
    """A transformer block sends two all-reduces of the activations in each direction, and nothing
    else (SPEC.md 2)."""
    make, width = BLOCKS[block]
    torch.manual_seed(0)
    model, x = make().double(), activations(width)()
    plan = make_plan(model, mesh.size(), minimum_parameter_group_size=0)
    SplitModel(model, mesh, plan)
    with CollectiveCounter() as forward:
        output = model(x)
    with CollectiveCounter() as backward:
        output.sum().backward()
    activation_bytes = x.numel() * x.element_size()
    for counter, planned in (
        (forward, sum(b.forward_all_reduces for b in plan.communication)),
        (backward, sum(b.backward_all_reduces for b in plan.communication)),
    ):
        assert planned == 2
        assert [(c.kind, c.payload_bytes) for c in counter.collectives] == [
            ("all_reduce", activation_bytes)
        ] * 2
        n = mesh.size()
        assert sum(c.bytes_sent(n) for c in counter.collectives) == 2 * (
            2 * activation_bytes * (n - 1) / n
        )


def sequence_communication(mesh: DeviceMesh) -> None:
    """Measures the cost of a further block: the bytes of plain tensor parallelism and the gradients
    of its two norms."""
    measured = []
    for blocks in (1, 2):
        torch.manual_seed(0)
        model, _ = pair(mesh, NanoGpt(blocks=blocks).double(), sequence_dimension=1)
        with CollectiveCounter() as forward:
            output = model(tokens())
        with CollectiveCounter() as backward:
            output.sum().backward()
        measured.append((forward, backward))
    (forward_one, backward_one), (forward_two, backward_two) = measured
    assert forward_two.counts() - forward_one.counts() == {"all_gather": 2, "reduce_scatter": 2}
    assert backward_two.counts() - backward_one.counts() == {
        "all_gather": 2,
        "reduce_scatter": 2,
        "all_reduce": 4,
    }
    activation_bytes, n = 2 * 8 * 16 * 8, mesh.size()
    for one, two, norms in (
        (forward_one, forward_two, 0),
        (backward_one, backward_two, 4 * 16 * 8),
    ):
        more = sum(c.bytes_sent(n) for c in two.collectives) - sum(
            c.bytes_sent(n) for c in one.collectives
        )
        assert more == 2 * (2 * (activation_bytes + norms / 2) * (n - 1) / n)


def model_communication(mesh: DeviceMesh) -> None:
    """The plan of a full model predicts the measured communication."""
    torch.manual_seed(0)
    model, state = pair(mesh, NanoGpt(blocks=2).double())
    with CollectiveCounter() as forward:
        output = model(tokens())
    with CollectiveCounter() as backward:
        output.sum().backward()
    planned = state.plan.communication
    assert forward.counts() == {
        "all_reduce": sum(b.forward_all_reduces for b in planned),
        "all_gather": sum(b.forward_all_gathers for b in planned),
    }
    assert backward.counts() == {"all_reduce": sum(b.backward_all_reduces for b in planned)}


def mismatched(mesh: DeviceMesh) -> None:
    model = NanoGpt()
    with pytest.raises(
        ConfigurationError,
        match=f"the plan is for 3 ranks, but the mesh has shape \\({mesh.size()},\\)",
    ):
        SplitModel(
            model,
            mesh,
            make_plan(model, 3, plan={"*.*.*.attn": "replicate", "*.*.*.mlp": "replicate"}),
        )
    with pytest.raises(ConfigurationError, match="different plans"):
        SplitModel(
            model,
            mesh,
            make_plan(
                model, mesh.size(), minimum_parameter_group_size=10_000 * mesh.get_local_rank()
            ),
        )
    with pytest.raises(ConfigurationError, match="created for another model"):
        SplitModel(model, mesh, make_plan(Gpt2(), mesh.size()))
    SplitModel(model, mesh, make_plan(model, mesh.size(), minimum_parameter_group_size=0))
    with pytest.raises(ConfigurationError, match="already DTensors"):
        make_plan(model, mesh.size())


def traced(mesh: DeviceMesh) -> None:
    """Blocks found by tracing are sharded correctly, with two all-reduces in each direction."""
    torch.manual_seed(0)
    alone, inputs = Odd().double(), activations(16)()
    split, state = pair(mesh, alone, example_inputs=(inputs,))
    alone(inputs).square().sum().backward()
    with CollectiveCounter() as counter:
        split(inputs.detach().requires_grad_()).square().sum().backward()
    assert counter.counts() == {"all_reduce": 4}
    same_gradients(alone, split, state)


def asked(mesh: DeviceMesh) -> None:
    """The result equals that of one process under any plan of the user's, whether it is sensible or
    not."""
    torch.manual_seed(0)
    alone = NanoGpt(flash=False).double()
    for plan in (
        {
            "transformer.h.*.attn.c_attn": "packed_column",
            "transformer.h.*.attn.c_proj": "replicate",
        },
        {
            "transformer.h.*.attn.*": "column_gathered",
            "transformer.h.*.mlp.*": "row",
            "transformer.wpe": "embedding_dimension",
        },
        {"transformer.h.*.mlp.c_fc": "replicate", "transformer.wpe": "replicate"},
        {"transformer.h.*.attn.c_attn": "column", "transformer.h.*.attn.c_proj": "column"},
    ):
        split, state = pair(mesh, alone, plan=plan)
        alone.zero_grad()
        alone(tokens()).square().sum().backward()
        split(tokens()).square().sum().backward()
        same_gradients(alone, split, state)


def refused_randomness(mesh: DeviceMesh) -> None:
    model, _ = pair(mesh, nn.Sequential(nn.Linear(8, 16), nn.Identity(), nn.Linear(16, 8)))
    model[1].forward = lambda x: F.alpha_dropout(x, 0.5, training=True)
    with pytest.raises(
        ConfigurationError, match="alpha_dropout draws random numbers for an activation"
    ):
        model(torch.ones(2, 8))


def alone_in_its_group() -> None:
    model = Gpt2()
    before = dict(model.named_parameters())
    plan = make_plan(model, 1, minimum_parameter_group_size=0)
    SplitModel(model, init_device_mesh("cpu", (1,)), plan)
    assert type(model) is Gpt2
    assert all(p is before[name] for name, p in model.named_parameters())
    assert plan.communication == ()
    assert plan.bytes_per_rank == plan.total_bytes
