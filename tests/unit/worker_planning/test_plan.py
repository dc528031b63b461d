"""The parts of a plan that can be checked without a run."""

from __future__ import annotations

import functools
import itertools
import json
import resource
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError
from shoal_worker.config import ShardingConfiguration
from shoal_worker.pipelining.schedule import training_schedule
from shoal_worker.planning.pipeline_time import StageCosts, most_in_flight, play
from shoal_worker.planning.plan import WIDTH
from shoal_worker.planning.planner import RESERVE, plan
from shoal_worker.planning.traced_passes import measure
from shoal_worker.planning.units import parse_bytes, parse_flops, readable_bytes, readable_seconds
from torch import nn

from benchmarks.workers import blocks


def _decoder(width: int = 64) -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    with torch.device("meta"):
        net = blocks.Decoder(width)
        words = torch.zeros(2, blocks.TOKENS, dtype=torch.long)
    return net, torch.optim.AdamW(net.parameters()), words


@functools.cache
def _usual() -> Any:
    return _plan()


def _plan(**options: Any) -> Any:
    net, optimizer, words = _decoder()
    return plan(
        net,
        optimizer,
        **{"world_size": 8, "example": words, "targets": words, "loss_fn": blocks.loss_fn}
        | options,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size=0: expected a number of ranks, at least 1"),
        (
            {"device_memory": "80 bananas"},
            "device_memory='80 bananas': expected a positive number of bytes",
        ),
        ({"device_memory": "-1GB"}, "device_memory='-1GB'"),
        ({"device_flops": "fast"}, "device_flops='fast': expected a positive number of operations"),
        ({"bandwidth": 0}, "bandwidth=0"),
        ({"efficiency": 1.5}, "efficiency=1.5: expected a fraction above 0 and at most 1"),
        ({"ranks_per_host": 0}, "ranks_per_host=0"),
        ({"global_batch_size": 0}, "global_batch_size=0: expected a number of samples"),
        (
            {"example": None, "global_batch_size": 8},
            "without an example: the cost of a sample is unknown",
        ),
        (
            {"example": "words"},
            "expected the model's inputs, including a tensor with one row per sample",
        ),
        (
            {"config": ShardingConfiguration(gradient_compression="bf16")},
            "is not supported in plans",
        ),
    ],
)
def test_invalid_values_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match="(?s)" + message.replace("(", r"\(")):
        _plan(**options)


def test_a_model_without_parameters_and_an_optimizer_of_another_model_are_refused() -> None:
    _, optimizer, _ = _decoder()
    with pytest.raises(ConfigurationError, match="ReLU has no parameter with requires_grad=True"):
        plan(nn.ReLU(), optimizer, world_size=2)
    with pytest.raises(ConfigurationError, match="do not belong to the model"):
        plan(nn.Linear(2, 2), optimizer, world_size=2)
    with pytest.raises(ConfigurationError, match=r"model=int: expected a torch\.nn\.Module"):
        # a mistake that the error must name
        plan(3, optimizer, world_size=2)  # type: ignore[arg-type]


def test_example_that_the_model_rejects_is_refused_with_the_models_own_error() -> None:
    with pytest.raises(ConfigurationError, match="Decoder could not be run with fake tensors"):
        _plan(example={"sentences": torch.zeros(2, 16, dtype=torch.long)})


def test_model_and_optimizer_are_unchanged() -> None:
    net = blocks.Decoder(64)
    optimizer = torch.optim.AdamW(net.parameters())
    before = {name: value.clone() for name, value in net.state_dict().items()}
    words = torch.zeros(2, blocks.TOKENS, dtype=torch.long)
    plan(net, optimizer, world_size=4, example=words, targets=words, loss_fn=blocks.loss_fn)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert not optimizer.state
    assert all(p.grad is None and not p.is_meta for p in optimizer.param_groups[0]["params"])


def test_strategy_beyond_the_devices_memory_is_marked_with_its_largest_consumer() -> None:
    free = _usual()
    ddp = next(each for each in free.strategies if each.strategy == "ddp")
    found = _plan(device_memory=int(ddp.memory.total / (1 - RESERVE)) - 1000)
    again = next(each for each in found.strategies if each.strategy == "ddp")
    assert not again.fits
    assert again.reason.startswith("needs ")
    assert again.reason.endswith("of it optimizer")
    assert found.recommended is not None
    assert found.recommended.fits
    assert next(
        each
        for each in _plan(device_memory=int(ddp.memory.total / (1 - RESERVE)) + 1000).strategies
        if each.strategy == "ddp"
    ).fits


def test_recommended_strategy_is_the_fastest_with_the_result_of_one_process() -> None:
    found = _usual()
    exact = [each.estimate.seconds for each in found.strategies if each.fits and each.exact]
    assert found.recommended is found.strategies[0]
    assert found.recommended.estimate.seconds <= min(exact) * 1.05
    assert not next(each for each in found.strategies if each.strategy == "local_sgd").exact


def test_small_model_on_few_ranks_is_not_sharded() -> None:
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    found = plan(
        net,
        torch.optim.SGD(net.parameters(), 0.1),
        world_size=4,
        example=torch.zeros(4, 8),
        device_memory="1GB",
    )
    assert found.recommended is not None
    assert found.recommended.strategy == "ddp"


def test_every_strategy_but_async_sgd_is_in_a_plan_or_has_a_reason() -> None:
    there = {each.strategy for each in _usual().strategies}
    assert there == {
        "ddp",
        "zero1",
        "zero2",
        "zero3",
        "fsdp",
        "hsdp",
        "tensor",
        "pipeline",
        "hybrid",
        "local_sgd",
    }


def test_unsplittable_model_names_the_reason() -> None:
    net = nn.Sequential(nn.Linear(8, 8))
    found = plan(
        net, torch.optim.SGD(net.parameters(), 0.1), world_size=4, example=torch.zeros(1, 8)
    )
    pipeline = next(each for each in found.strategies if each.label == "pipeline pp4 dp1")
    assert pipeline.memory is None
    assert not pipeline.fits
    assert "expected at least 1 stage and at most one per block" in pipeline.reason
    assert "Not possible:" in str(found)


def test_non_elementwise_optimizers_are_planned_where_parameters_stay_unsharded() -> None:
    net, _, words = _decoder()
    found = plan(
        net,
        torch.optim.Adafactor(net.parameters()),
        world_size=2,
        example=words,
        targets=words,
        loss_fn=blocks.loss_fn,
    )
    by_name = {each.label: each for each in found.strategies}
    assert by_name["ddp"].fits
    assert by_name["pipeline pp2 dp1"].fits
    assert (
        "Adafactor is not known to update each element independently"
        in by_name["tensor tp2 dp1"].reason
    )
    assert by_name["zero1"].fits
    # Adafactor keeps one row and one column of a matrix.
    assert by_name["ddp"].memory.optimizer < by_name["ddp"].memory.parameters / 10


def test_a_plan_without_an_example_has_memory_and_no_times() -> None:
    found = _plan(example=None, targets=None, loss_fn=None)
    assert found.recommended.strategy == "ddp"
    assert all(each.estimate is None for each in found.strategies)
    assert all(
        each.memory.activations is None for each in found.strategies if each.memory is not None
    )
    assert "no example of the model's inputs" in str(found)


def test_planned_activations_match_what_autograd_keeps() -> None:
    net = blocks.Decoder(64)
    words = torch.zeros(2, blocks.TOKENS, dtype=torch.long)
    kept: dict[int, torch.Tensor] = {}
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = blocks.loss_fn(net(words), words)
    really = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    loss.backward()
    assert measure(net, words, words, blocks.loss_fn).kept_at_most() == pytest.approx(
        really, rel=0.01
    )


def test_checkpointed_blocks_keep_only_their_inputs_and_compute_twice() -> None:
    whole, again = _usual(), _plan(config=ShardingConfiguration(activation_checkpointing=True))
    ddp = {
        name: next(each for each in found.strategies if each.strategy == "ddp")
        for name, found in (("whole", whole), ("again", again))
    }
    passes = measure(
        blocks.Decoder(64), *[torch.zeros(2, blocks.TOKENS, dtype=torch.long)] * 2, blocks.loss_fn
    )
    kept = passes.kept()
    in_blocks = sum(size for path, size in kept.items() if path.startswith("layers."))
    saved = ddp["whole"].memory.activations - ddp["again"].memory.activations
    # Three of the four blocks keep only their inputs.
    inputs = 4 * 2 * blocks.TOKENS * 64 * 4
    assert in_blocks * 3 / 4 - inputs <= saved <= in_blocks * 3 / 4
    assert ddp["again"].estimate.computing > 1.15 * ddp["whole"].estimate.computing


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (8, 8)])
def test_wait_of_even_stages_under_1f1b_matches_the_paper(ranks: int, micro_batches: int) -> None:
    schedule = training_schedule(
        "1f1b", ranks=ranks, stages_per_rank=1, micro_batches=micro_batches
    )
    costs = StageCosts(
        forward_flops=(1.0,) * ranks,
        backward_share=2.0,
        kept=(1.0,) * ranks,
        recomputed=0.0,
        border_bytes=(0.0,) * (ranks - 1),
    )
    seconds, bubble = play(schedule, costs, flops_per_second=1.0, bytes_per_second=1.0)
    assert seconds == pytest.approx(3 * (micro_batches + ranks - 1))
    assert bubble == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    assert most_in_flight(schedule, costs) == [
        min(ranks - rank, micro_batches) for rank in range(ranks)
    ]


def test_seventy_billion_parameters_on_512_ranks_take_no_memory_to_plan() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.device("meta"):
        net = blocks.Decoder(8192)
        for layer in net.layers:
            layer.mlp.up_proj = nn.Linear(8192, 1 << 20, bias=False)
            layer.mlp.down_proj = nn.Linear(1 << 20, 8192, bias=False)
    found = plan(net, torch.optim.AdamW(net.parameters()), world_size=512, device_memory="80GB")
    assert found.parameters > 69e9
    assert len(found.strategies) > 50
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_tables_fit_a_hundred_columns_with_columns_one_below_the_other() -> None:
    text = str(_plan(device_memory="1MB", world_size=512))
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    heads = [
        i for i, line in enumerate(lines) if line.lstrip().startswith(("KiB a rank", "MiB a rank"))
    ]
    assert len(heads) == 2  # one for those that fit, and one for those that are too large
    head = heads[0]
    rows = [
        row
        for start in heads
        for row in itertools.takewhile(lambda row: row[:2] in ("  ", "* "), lines[start + 1 :])
    ]
    assert rows
    for word in (
        "params",
        "grads",
        "state",
        "mirrors",
        "staging",
        "activ.",
        "total",
        "sent",
        "bubble",
    ):
        end = lines[head].index(word) + len(word)
        assert all(row[end - 1] != " " and row[end] == " " for row in rows), word


def test_plan_in_which_nothing_fits_recommends_nothing() -> None:
    found = _plan(device_memory="1KB", world_size=2)
    assert found.recommended is None
    assert "recommended: none, because no strategy fits" in str(found)


def test_json_plan_contains_the_content_of_the_table() -> None:
    found = _plan(device_memory="80GB")
    document = json.loads(json.dumps(found.to_json()))
    first = document["strategies"][0]
    assert first["recommended"]
    assert first["memory"]["total"] == pytest.approx(found.recommended.memory.total)
    assert first["sent"] == pytest.approx(found.recommended.sent)
    assert document["device_memory"] == 80 * 10**9


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("80GB", 80 * 10**9),
        ("80 GiB", 80 * 2**30),
        (1024, 1024),
        ("200Gbit/s", 25 * 10**9),
        ("1.5e3", 1500),
    ],
)
def test_amounts_are_parsed_as_people_write_them(text: str | int, amount: int) -> None:
    assert parse_bytes("amount", text) == amount


def test_rates_and_amounts_are_shown_with_a_unit() -> None:
    assert parse_flops("rate", "312T") == parse_flops("rate", "312TFLOP/s") == 312e12
    assert (readable_bytes(1536), readable_bytes(12)) == ("1.5 KiB", "12 B")
    assert [readable_seconds(s) for s in (1e-5, 0.0123, 1.5, 250.0)] == [
        "10 us",
        "12.3 ms",
        "1.5 s",
        "250 s",
    ]


_CUT = ("zero1", "zero2", "zero3", "fsdp")


@pytest.mark.parametrize(
    ("make", "labels"),
    [
        (torch.optim.AdamW, ("ddp", *_CUT, "local_sgd", "tensor tp2 dp1", "pipeline pp2 dp1")),
        (torch.optim.Adafactor, ("ddp", *_CUT)),  # tensors are dealt whole
    ],
    ids=["AdamW", "Adafactor"],
)
def test_roles_of_a_plan_match_what_ranks_hold(make: Any, labels: tuple[str, ...]) -> None:
    """The memory that a plan predicts is the memory that ranks use, in one process over
    `shoal.launch`. tests/integration/worker_planning has real processes."""
    from benchmarks.workers.account import _at_rest, _note_gradients, before_update

    words = torch.zeros(2, blocks.TOKENS, dtype=torch.long)

    def rank(strategy: str, options: dict[str, Any]) -> dict[str, Any]:
        net = blocks.Decoder(64)
        inner = make(net.parameters())
        account: dict[str, Any] = {}
        model, optimizer = shoal.as_distributed(net, inner, strategy=strategy, **options)
        before_update(inner, functools.partial(_note_gradients, account, model, inner))
        data = torch.utils.data.TensorDataset(torch.zeros(8, blocks.TOKENS, dtype=torch.long))
        for (x,) in shoal.ElasticDataLoader(data, global_batch_size=4):
            model.train_step(x, x, blocks.loss_fn)
            _note_gradients(account, model, inner)
            optimizer.step()
            optimizer.zero_grad()
        return account | _at_rest(model, inner)

    net = blocks.Decoder(64)
    planned = plan(
        net,
        make(net.parameters()),
        world_size=2,
        example=words,
        targets=words,
        loss_fn=blocks.loss_fn,
        global_batch_size=4,
    )
    for label in labels:
        each = next(one for one in planned.strategies if one.label == label)
        accounts = shoal.launch(rank, each.strategy, dict(each.options), world_size=2)
        most = {role: max(account[role] for account in accounts) for role in accounts[0]}
        most["mirrors"] = sum(size for role, size in most.items() if role.startswith("mirrored"))
        for role in ("parameters", "gradients", "optimizer", "mirrors"):
            assert getattr(each.memory, role) == pytest.approx(most[role], rel=0.1, abs=1), (
                label,
                role,
            )


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
def test_frozen_parameters_have_no_gradients_state_mirrors_or_traffic(strategy: str) -> None:
    def planned(*, frozen: bool) -> Any:
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
        net[0].requires_grad_(not frozen)
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
        every = plan(net, optimizer, world_size=4).strategies
        return next(each for each in every if each.strategy == strategy)

    adapter = 4 * (512 * 8 + 8)
    few, whole = planned(frozen=True), planned(frozen=False)
    assert few.memory.parameters == whole.memory.parameters
    assert few.sent < whole.sent / 10
    for role, factor in (("gradients", 1), ("optimizer", 2), ("mirrors", 3)):
        assert getattr(few.memory, role) <= 1.1 * factor * adapter
