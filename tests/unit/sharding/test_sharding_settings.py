"""Settings of `ShardingConfiguration` about dtypes, memory and blocks. Training with each equals
training without it, at the documented cost."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from shoal_common.errors import ConfigurationError, LimitError
from shoal_worker.elastic.recovery.formation import GROUP_LOST
from shoal_worker.engine.state.hidden_parameters import inside
from shoal_worker.sharding.placements import FilePlacement, HostPlacement
from shoal_worker.sharding.unit import Stage, Unit
from torch import nn

from tests.unit.sharding.rank_threads import RankThread, run_ranks

X = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
State = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return x + torch.tanh(self.linear(x))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 32), nn.Sequential(*[Block() for _ in range(3)]), nn.Linear(32, 2)
    )


def train(strategy: str, look: Any = None, **options: Any) -> tuple[State, Any]:
    """Trains one rank. Returns the full parameters and the result of `look(model, optimizer)` after
    the last step."""
    net = make()
    options = {"minimum_parameter_group_size": 64, **options}
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.05, momentum=0.9), strategy=strategy, **options
    )
    loader = shoal.ElasticDataLoader(
        torch.utils.data.TensorDataset(X), global_batch_size=8, shuffle=False
    )
    for _ in loader.epochs(2):
        for (x,) in loader:
            model(x).float().square().mean().backward()
            assert optimizer.step()
            optimizer.zero_grad()
    seen = look(model, optimizer) if look is not None else None
    return model.full_state_dict(), seen


def launch(strategy: str, look: Any = None, **options: Any) -> tuple[State, Any]:
    return shoal.launch(lambda: train(strategy, look, **options), world_size=2)[0]


@pytest.fixture(scope="module")
def plain() -> State:
    return launch("zero1")[0]


def differences(state: State, plain: State) -> list[float]:
    assert state.keys() == plain.keys()
    assert all(value.dtype == torch.float32 for value in state.values())
    return [float((state[name] - value).abs().max()) for name, value in plain.items()]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_param_dtype_is_used_for_computing_and_not_for_updates(strategy: str, plain: State) -> None:
    def look(model: Any, optimizer: Any) -> Any:
        with inside():
            held = sum(
                {
                    s.data_ptr(): s.nbytes()
                    for s in (p.untyped_storage() for p in model.module.parameters())
                }.values()
            )
        return (
            {p.dtype for p in model.module.parameters()},
            {p.dtype for p in model.local_shard.values()},
            held,
        )

    state, (computed, updated, held) = launch(strategy, look, param_dtype=torch.bfloat16)
    assert (computed, updated) == ({torch.bfloat16}, {torch.float32})
    padded = 2 * 16 * 2 * 4
    assert held <= (
        0 if strategy == "zero3" else sum(v.numel() for v in plain.values()) * 2 + padded
    )
    assert 0 < max(differences(state, plain)) < 5e-3


def test_reduce_dtype_is_used_for_sending_gradients(plain: State) -> None:
    state, _ = launch("zero2", reduce_dtype=torch.bfloat16)
    assert 0 < max(differences(state, plain)) < 5e-3

    def sent(ranks: RankThread) -> int:
        unit = Unit(
            "",
            list(make().parameters()),
            ["p"] * 10,
            stage=Stage.GRADIENTS,
            wide=False,
            reduce_dtype=torch.bfloat16,
        )
        unit.cut(2, ranks.rank, None)
        unit.start_reducing(ranks).wait()
        assert unit.own.gradient is not None
        assert unit.own.gradient.dtype == torch.float32
        return ranks.sent_bytes

    numel = sum(p.numel() for p in make().parameters())
    assert run_ranks(2, sent)[0] == pytest.approx(2 * numel / 2, rel=0.05)


@pytest.mark.parametrize(
    ("strategy", "chosen"),
    [
        ("ddp", [Block]),
        ("zero2", True),
        ("zero3", lambda module: isinstance(module, Block)),
        ("local_sgd", [Block]),
    ],
)
def test_checkpointed_activations_are_computed_twice_and_change_nothing(
    strategy: str, chosen: Any
) -> None:
    def look(model: Any, optimizer: Any) -> int:
        return sum(block.passes for block in model.module[1])

    without, once = launch(strategy, look)
    state, twice = launch(strategy, look, activation_checkpointing=chosen)
    assert twice == 2 * once
    assert max(differences(state, without)) == 0.0


@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_offloaded_shards_and_optimizer_state_are_in_files(
    strategy: str, plain: State, tmp_path: Path
) -> None:
    def look(model: Any, optimizer: Any) -> list[str | None]:
        own = optimizer.optimizer
        pieces = [piece for group in own.param_groups for piece in group["params"] if piece.numel()]
        states = [value for piece in pieces for value in own.state[piece].values() if value.dim()]
        return [tensor.untyped_storage().filename for tensor in [*pieces, *states]]

    state, files = launch(strategy, look, offload=tmp_path / "shards")
    assert len(files) >= 4
    assert all(name is not None and name.startswith(str(tmp_path)) for name in files)
    # the files are unlinked, so they vanish with the process
    assert list((tmp_path / "shards").iterdir()) == []
    assert max(differences(state, plain)) == 0.0


def test_disk_that_fills_up_during_a_run_is_named_with_the_requested_size(
    tmp_path: Path,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    placement = FilePlacement(tmp_path)
    # otherwise the signal would end the process
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(
            LimitError,
            match=rf"offload='{tmp_path}': could not create a file of 8000 bytes there: .*free "
            r"space",
        ) as raised:
            placement.empty(2000, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert raised.value.reason == "OFFLOAD_FULL"
    # those errors would make a rank form group after group
    assert not isinstance(raised.value, GROUP_LOST)
    assert list(tmp_path.iterdir()) == []
    assert placement.empty(1000, torch.float32).sum() == 0


def test_offload_preset_changes_nothing_on_the_host(plain: State) -> None:
    state, _ = launch(
        "zero2", config=shoal.ShardingConfiguration.for_offload(minimum_parameter_group_size=64)
    )
    assert max(differences(state, plain)) == 0.0


def refused(strategy: str, match: str, **options: Any) -> None:
    net = make()
    with pytest.raises(ConfigurationError, match=match):
        shoal.launch(lambda: shoal.as_distributed(net, strategy=strategy, **options), world_size=1)


def test_settings_unknown_to_a_strategy_are_refused_with_a_remedy(tmp_path: Path) -> None:
    refused(
        "ddp",
        r"param_dtype=torch.bfloat16 with strategy='ddp'.*autocast",
        param_dtype=torch.bfloat16,
    )
    refused("ddp", r"reduce_dtype=.*gradient_compression", reduce_dtype=torch.bfloat16)
    refused("ddp", r"offload=.*use zero1", offload=tmp_path)
    refused("zero2", r"shard_modules=.*use zero3", shard_modules=[Block])


def test_invalid_settings_are_refused_by_value(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused("zero1", "expected a floating-point", param_dtype=torch.int8)
    refused(
        "zero1",
        "deterministic=True with reduce_dtype",
        reduce_dtype=torch.bfloat16,
        deterministic=True,
    )
    refused(
        "zero1",
        "both set the format in which gradients are sent",
        reduce_dtype=torch.bfloat16,
        gradient_compression="fp16",
    )
    refused("hsdp", "does not support gradient_compression=", gradient_compression="fp16")
    refused("zero1", 'expected "cpu", or a pathlib.Path', offload="disk")
    refused("zero1", "expected a writable directory", offload=tmp_path / "file")
    refused("zero3", "expected a list", shard_modules=Block)
    refused("zero2", r"prefetch_blocks=2 .*use zero3", prefetch_blocks=2)
    for value in (-1, 1.5, True, "all"):
        refused(
            "zero3",
            "prefetch_blocks=.*expected a whole number of blocks, 0 for no prefetching, or",
            prefetch_blocks=value,
        )
    refused("zero3", "no module of these classes", activation_checkpointing=[nn.Conv2d])
    refused(
        "zero3", "the function selected no module", activation_checkpointing=lambda module: False
    )


def test_updates_on_the_host_are_awaited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host starts the copies of all gradient shards and then waits only once for the device's
    stream."""
    waits: list[torch.device] = []

    class Stream:
        def synchronize(self) -> None:
            waits.append(torch.device("meta"))

    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: Stream())
    placement = HostPlacement()
    # "meta" stands in for the host and the host for a device, so that they differ
    placement.device = torch.device("meta")
    monkeypatch.setattr(
        HostPlacement, "empty", lambda _, numel, dtype: torch.empty(numel, dtype=dtype)
    )
    brought = [
        placement.bring(torch.full((3,), value, dtype=torch.float64), torch.float32)
        for value in (1.0, 2.0)
    ]
    assert not waits
    placement.arrived()
    placement.arrived()
    assert len(waits) == 1
    assert [each.tolist() for each in brought] == [[1.0] * 3, [2.0] * 3]
