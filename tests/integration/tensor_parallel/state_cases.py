"""What one rank of a tensor-parallel group does in the tests of communication, plans, gradients and state; run by ranks.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from shoal_common.errors import ConfigurationError
from shoal_worker.tensor_parallel import (
    CollectiveCounter,
    clip_grad_norm_,
    grad_norm,
    make_plan,
    parallelize,
    reduce_gradients,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.integration.tensor_parallel.cases import close, pair, same_gradients
from tests.integration.tensor_parallel.models import BLOCKS, Gpt2, NanoGpt, Odd, activations, tokens

replicas = dist.GroupMember.NON_GROUP_MEMBER
"""With groups of two ranks: those that hold the same shard in the two groups. Set by ranks.py."""


def block_communication(mesh: DeviceMesh, block: str) -> None:
    """A transformer block: two all-reduces of the activations in each direction, and nothing else (SPEC.md 2)."""
    make, width = BLOCKS[block]
    torch.manual_seed(0)
    model, x = make().double(), activations(width)()
    plan = make_plan(model, mesh.size(), minimum_parameter_group_size=0)
    parallelize(model, mesh, plan)
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
        assert [(c.kind, c.payload_bytes) for c in counter.collectives] == [("all_reduce", activation_bytes)] * 2
        n = mesh.size()
        assert sum(c.bytes_sent(n) for c in counter.collectives) == 2 * (2 * activation_bytes * (n - 1) / n)


def sequence_communication(mesh: DeviceMesh) -> None:
    """What a further block costs: as many bytes as plain tensor parallelism, and the gradients of its two norms."""
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
    assert backward_two.counts() - backward_one.counts() == {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 4}
    activation_bytes, n = 2 * 8 * 16 * 8, mesh.size()
    for one, two, norms in ((forward_one, forward_two, 0), (backward_one, backward_two, 4 * 16 * 8)):
        more = sum(c.bytes_sent(n) for c in two.collectives) - sum(c.bytes_sent(n) for c in one.collectives)
        assert more == 2 * (2 * (activation_bytes + norms / 2) * (n - 1) / n)


def model_communication(mesh: DeviceMesh) -> None:
    """The plan of a whole model says what is measured."""
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


def gradients_over_replicas(mesh: DeviceMesh) -> None:
    """Two replicas with half the batch each: gradients, their norm and the clipped ones are those of the whole batch."""
    torch.manual_seed(0)
    alone = NanoGpt().double()
    alone.used_by_one = nn.Parameter(torch.ones(3, dtype=torch.float64))
    alone.used_by_none = nn.Parameter(torch.ones(3, dtype=torch.float64))
    split, state = pair(mesh, alone, plan={"used_by_*": "replicate"})
    ids = tokens()
    own = ids[replicas.rank() : replicas.rank() + 1]
    (alone(ids).square().mean() + alone.used_by_one.sum() / 2).backward()
    (split(own).square().mean() + (split.used_by_one.sum() if replicas.rank() == 0 else 0)).backward()
    with CollectiveCounter() as counter:
        reduce_gradients(split.parameters(), replicas, bucket_bytes=4096)
    assert 1 < counter.counts()["all_reduce"] < 10
    assert sum(c.payload_bytes for c in counter.collectives) <= state.plan.bytes_per_rank + 8 * len(list(alone.parameters()))
    same_gradients(alone, split, state)
    for norm_type in (1.0, 2.0, float("inf")):
        expected = torch.nn.utils.get_total_norm([p.grad for p in alone.parameters() if p.grad is not None], norm_type)
        close(grad_norm(split.parameters(), norm_type), expected, f"the norm {norm_type}")
    norm = clip_grad_norm_(split.parameters(), 0.01)
    assert norm > 0.01
    close(norm, torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01), "the norm")
    same_gradients(alone, split, state)
    split.lm_head.weight.grad.to_local().fill_(float("nan")) if mesh.get_local_rank() == 0 else None
    with pytest.raises(RuntimeError, match="is nan"):
        clip_grad_norm_(split.parameters(), 0.01, error_if_nonfinite=True)
    with pytest.raises(ConfigurationError, match="max_norm=0"):
        clip_grad_norm_(split.parameters(), 0)


def gathered(mesh: DeviceMesh, path: str) -> None:
    """Saves what is gathered from two ranks."""
    torch.manual_seed(0)
    _, state = pair(mesh, Gpt2().double())
    full = state.full_state_dict(rank0_only=True)
    assert bool(full) == (mesh.get_local_rank() == 0)
    if dist.get_rank() == 0:
        torch.save(full, path)


def loaded(mesh: DeviceMesh, path: str) -> None:
    """Loads it into four: from every rank's copy, and from the one rank that has it; a wrong one changes nothing."""
    saved = torch.load(path, weights_only=True)
    torch.manual_seed(1)
    fresh = Gpt2().double()
    fresh.load_state_dict(saved)
    expected = fresh(tokens())
    for source_rank in (None, 1):
        torch.manual_seed(2)
        model, state = pair(mesh, Gpt2().double())
        before = state.full_state_dict()
        for wrong, message in (
            ({**saved, "wte.weight": torch.zeros(3, 16)}, r"wte.weight has the shape \(3, 16\), the model's \(21, 16\)"),
            ({k: v for k, v in saved.items() if "wte" not in k}, r"lacks \['wte.weight'\]"),
        ):
            with pytest.raises(ConfigurationError, match=message):
                state.load_full_state_dict(wrong if source_rank in (None, mesh.get_local_rank()) else {}, source_rank=source_rank)
        for name, tensor in state.full_state_dict().items():
            assert torch.equal(tensor, before[name])
        state.load_full_state_dict(saved if source_rank in (None, mesh.get_local_rank()) else {}, source_rank=source_rank)
        close(model(tokens()), expected, "the loaded model's output")
        for name, tensor in state.full_state_dict().items():
            assert torch.equal(tensor, saved[name]), name
        for name, parameter in model.named_parameters():
            mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            again = state.split(name, saved[name])
            assert torch.equal(again.to_local() if isinstance(again, DTensor) else again, mine)


def from_meta(mesh: DeviceMesh) -> None:
    """The first rank's values win; the others have none. An optimizer made before gets the new parameters."""
    torch.manual_seed(100 + mesh.get_local_rank())
    with torch.device("cpu" if mesh.get_local_rank() == 0 else "meta"):
        model = NanoGpt().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = parallelize(model, mesh, make_plan(model, mesh.size(), minimum_parameter_group_size=0))
    state.repoint(optimizer)
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == [id(p) for p in model.parameters()]
    torch.manual_seed(100)
    alone = NanoGpt().double()
    close(model(tokens()), alone(tokens()), "the output")
    assert model.lm_head.weight is model.transformer.wte.weight
    with torch.device("meta"):
        nowhere = NanoGpt()
    with pytest.raises(ConfigurationError, match="meta device"):
        parallelize(nowhere, mesh, make_plan(nowhere, mesh.size(), minimum_parameter_group_size=0), source_rank=None)


def mismatched(mesh: DeviceMesh) -> None:
    model = NanoGpt()
    with pytest.raises(ConfigurationError, match=f"the plan is for 3 ranks, the mesh has the shape \\({mesh.size()},\\)"):
        parallelize(model, mesh, make_plan(model, 3, plan={"*.*.*.attn": "replicate", "*.*.*.mlp": "replicate"}))
    with pytest.raises(ConfigurationError, match="different plans"):
        parallelize(model, mesh, make_plan(model, mesh.size(), minimum_parameter_group_size=10_000 * mesh.get_local_rank()))
    with pytest.raises(ConfigurationError, match="made for another model"):
        parallelize(model, mesh, make_plan(Gpt2(), mesh.size()))
    state = parallelize(model, mesh, make_plan(model, mesh.size(), minimum_parameter_group_size=0))
    with pytest.raises(ConfigurationError, match="distributed already"):
        make_plan(state.module, mesh.size())


def traced(mesh: DeviceMesh) -> None:
    """Blocks found by tracing are split right, with two all-reduces in each direction."""
    torch.manual_seed(0)
    alone, inputs = Odd().double(), activations(16)()
    split, state = pair(mesh, alone, example_inputs=(inputs,))
    alone(inputs).square().sum().backward()
    with CollectiveCounter() as counter:
        split(inputs.detach().requires_grad_()).square().sum().backward()
    assert counter.counts() == {"all_reduce": 4}
    same_gradients(alone, split, state)


def asked(mesh: DeviceMesh) -> None:
    """Whatever a user's plan says, sensible or not, the result is that of one process."""
    torch.manual_seed(0)
    alone = NanoGpt(flash=False).double()
    for plan in (
        {"transformer.h.*.attn.c_attn": "packed_column", "transformer.h.*.attn.c_proj": "replicate"},
        {"transformer.h.*.attn.*": "column_gathered", "transformer.h.*.mlp.*": "row", "transformer.wpe": "embedding_dimension"},
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
    with pytest.raises(ConfigurationError, match="alpha_dropout draws random numbers for an activation"):
        model(torch.ones(2, 8))


def alone_in_its_group() -> None:
    model = Gpt2()
    before = dict(model.named_parameters())
    plan = make_plan(model, 1, minimum_parameter_group_size=0)
    state = parallelize(model, init_device_mesh("cpu", (1,)), plan)
    assert type(model) is Gpt2
    assert all(p is before[name] for name, p in model.named_parameters())
    assert plan.communication == ()
    assert plan.bytes_per_rank == plan.total_bytes
    full = state.full_state_dict()
    state.load_full_state_dict({name: tensor * 2 for name, tensor in full.items()})
    model(tokens()).sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    norm = clip_grad_norm_(model.parameters(), 1e-3)
    assert torch.allclose(norm, expected)
