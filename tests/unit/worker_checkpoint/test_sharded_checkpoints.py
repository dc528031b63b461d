"""Checkpoints to which each rank writes its own shard. Any strategy, any number of ranks and plain
torch can read them."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import shoal
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shoal_worker.checkpoint import saving
from shoal_worker.checkpoint.files import begin, read_checkpoint, write_sharded
from shoal_worker.checkpoint.manifest import CheckpointInfo, write_manifest
from shoal_worker.checkpoint.shards import Shards
from shoal_worker.checkpoint.writer import CheckpointWriter
from shoal_worker.sharding.resharding import ShardedOptimizerState
from shoal_worker.state.digest import state_digest
from shoal_worker.state.tree import Run, StatePart
from torch import nn
from torch.distributed import checkpoint as dcp

STEPS = 4
IN_PARTS = ["zero1", "zero2", "zero3", "fsdp"]
STRATEGIES = ["ddp", *IN_PARTS, "hsdp", "local_sgd", "tensor", "pipeline", "hybrid"]


class Layer(nn.Module):
    """A layer with two dtypes, a frozen parameter and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.outer = (
            nn.Linear(5, 13),
            nn.BatchNorm1d(13),
            nn.Linear(13, 5).to(torch.float64),
        )
        self.inner.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x)).double()).float()


class Net(nn.Module):
    """A network with tied weights and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def make(strategy: str) -> tuple[Any, Any, Any]:
    torch.manual_seed(1)
    net = Net()
    own = {
        dtype: [p for p in net.parameters() if p.dtype is dtype]
        for dtype in (torch.float32, torch.float64)
    }
    groups = [{"params": own[torch.float32], "lr": 0.05}, {"params": own[torch.float64]}]
    model, optimizer = shoal.as_distributed(
        net, torch.optim.AdamW(groups, 1e-2), strategy=strategy, minimum_parameter_group_size=8
    )
    data = torch.utils.data.TensorDataset(torch.arange(48) % 7, (torch.arange(48) * 3) % 7)
    return model, optimizer, shoal.ElasticDataLoader(data, global_batch_size=12)


def train(strategy: str, directory: Path, steps: int = STEPS, **options: Any) -> dict[str, Any]:
    """Trains from the newest checkpoint, if any, and saves. Returns the state that one process
    would have."""
    model, optimizer, loader = make(strategy)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    shoal.register_state(scheduler=scheduler)
    shoal.resume(directory)
    for _ in loader.epochs(steps // len(loader)):
        for x, y in loader:
            model.train_step(x, y, nn.functional.cross_entropy)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    shoal.save_checkpoint(directory, **options)
    return {"model": model.full_state_dict(), "optimizer": optimizer.state_dict()}


def loaded(strategy: str, directory: Path) -> dict[str, Any]:
    """Resumes and returns the state that one process would have."""
    model, optimizer, _ = make(strategy)
    assert shoal.resume(directory)
    return {"model": model.full_state_dict(), "optimizer": optimizer.state_dict()}


def listing(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Checks that two model and optimizer states are bitwise equal."""
    assert {n: t.tolist() for n, t in found["model"].items()} == {
        n: t.tolist() for n, t in expected["model"].items()
    }
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert state_digest(found["optimizer"]["state"]) == state_digest(expected["optimizer"]["state"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint written by zero3 on three ranks, and the state that was saved."""
    directory = tmp_path_factory.mktemp("saved")
    states = shoal.launch(train, "zero3", directory, world_size=3)
    return directory / f"step-{STEPS}", states[0]


def test_each_rank_writes_its_own_shard(saved: tuple[Path, dict[str, Any]]) -> None:
    path, _ = saved
    written = listing(path)
    once = [name for name in written if name.startswith("frozen-")]
    assert all(name.endswith(f"-0000{n}-of-00003.safetensors") for n, name in enumerate(once, 1))
    assert [name for name in written if name not in once] == [
        "checkpoint.json",
        *(f"shard-0000{n}-of-00003.safetensors" for n in (1, 2, 3)),
    ]
    sizes = [(path / f"shard-0000{n}-of-00003.safetensors").stat().st_size for n in (2, 3)]
    whole = sum(t.nbytes for t in saved[1]["model"].values()) * 3
    assert max(sizes) < whole
    assert listing(path.parent) == [path.name]


def test_plain_module_loads_a_sharded_checkpoint(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    net = Net()
    net.load_state_dict(shoal.load_full_state(path.parent))
    assert all(value.equal(state["model"][name]) for name, value in net.state_dict().items())
    assert shoal.load_full_state(path).keys() == net.state_dict().keys()


# the warning of a single process
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torchs_own_checkpoint_reader_reads_the_shards(saved: tuple[Path, dict[str, Any]]) -> None:
    path, state = saved
    flat = {
        f"model/{name}": torch.empty(value.numel(), dtype=value.dtype)
        for name, value in state["model"].items()
        if name != "head.weight"
    }
    dcp.load(flat, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    assert all(
        flat[f"model/{name}"].view(value.shape).equal(value)
        for name, value in state["model"].items()
        if f"model/{name}" in flat
    )


def test_sharded_state_equals_the_gathered_one(tmp_path: Path) -> None:
    for name, options in (("gathered", {"sharded": False}), ("parts", {})):
        shoal.launch(
            lambda name=name, options=options: train("zero2", tmp_path / name, **options),
            world_size=2,
        )
    gathered, parts = (
        read_checkpoint(tmp_path / name / f"step-{STEPS}") for name in ("gathered", "parts")
    )
    assert "model.safetensors" in listing(tmp_path / "gathered" / f"step-{STEPS}")
    runs = [one.state.pop("run") for one in (parts, gathered)]
    assert runs == [parts.info.run, gathered.info.run]
    assert runs[0] != runs[1]  # the two runs have different ids
    assert state_digest(parts.state) == state_digest(gathered.state)
    assert dataclasses.replace(parts.info, run=gathered.info.run) == gathered.info


def _loads() -> list[Any]:
    """Returns pairs of saving and loading configurations. Under `make test`, every strategy saves
    once and loads once; `make parity` runs all pairs."""
    cells = [
        (saver, savers, reader, readers)
        for s, saver in enumerate(STRATEGIES)
        for r, reader in enumerate(STRATEGIES)
        for savers, readers in [(1 + (s + r) % 3, 1 + (s + 2 * r + 1) % 3)]
    ]
    diagonal = {(s, STRATEGIES[(n + 2) % len(STRATEGIES)]) for n, s in enumerate(STRATEGIES)}
    return [
        pytest.param(*cell, marks=() if (cell[0], cell[2]) in diagonal else pytest.mark.matrix)
        for cell in cells
    ]


@pytest.mark.parametrize(("saver", "savers", "reader", "readers"), _loads())
def test_any_strategy_and_world_size_loads_the_checkpoint_of_any_other(
    tmp_path: Path, saver: str, savers: int, reader: str, readers: int
) -> None:
    (expected, *_) = shoal.launch(train, saver, tmp_path, world_size=savers)
    # each rank has its own optimizer state, and the checkpoint has their mean
    if saver == "local_sgd":
        expected["optimizer"] = read_checkpoint(tmp_path / f"step-{STEPS}").state["optimizer"]
    for found in shoal.launch(loaded, reader, tmp_path, world_size=readers):
        assert_alike(found, expected)


def test_training_resumes_as_if_uninterrupted(tmp_path: Path) -> None:
    expected, *_ = shoal.launch(train, "zero1", tmp_path / "through", 2 * STEPS, world_size=2)
    shoal.launch(train, "zero3", tmp_path / "halves", world_size=2)
    found, *_ = shoal.launch(train, "zero1", tmp_path / "halves", 2 * STEPS, world_size=2)
    assert_alike(found, expected)


def test_directory_not_shared_by_all_ranks_is_refused_or_written_by_the_first_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On separate machines, one path is a different directory for each rank. Here, each rank gets a
    # path of its own.
    monkeypatch.setattr(saving, "_check_alike", lambda *arguments: None)

    def own_directory(sharded: bool | None) -> None:
        train("zero1", tmp_path / str(sharded) / str(shoal.rank()), sharded=sharded)

    with pytest.raises(shoal.ConfigurationError, match=r"ranks \[1\] do not see .*sharded=False"):
        shoal.launch(own_directory, True, world_size=2)
    assert listing(tmp_path / "True" / "0") == []
    shoal.launch(own_directory, None, world_size=2)
    assert "model.safetensors" in listing(tmp_path / "None" / "0" / f"step-{STEPS}")


# ------------------------------------------------------------------------------------------- damage


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_one_flipped_bit_or_truncation_anywhere_is_detected(
    saved: tuple[Path, dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    pristine, _ = saved
    damaged = tmp_path_factory.mktemp("damaged") / pristine.name
    shutil.copytree(pristine, damaged)
    file = damaged / data.draw(
        st.sampled_from([name for name in listing(pristine) if name != "checkpoint.json"])
    )
    raw = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        os.truncate(file, place)
    else:
        raw[place] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(raw)
    with pytest.raises(shoal.CorruptDataError, match=file.name) as raised:
        read_checkpoint(damaged)
    assert raised.value.reason == "FILE_CORRUPT"
    shutil.rmtree(damaged.parent)


@pytest.mark.parametrize(
    "damage",
    ["a shard is missing", "a shard is another's", "the mark is missing", "the mark is cut"],
)
def test_incomplete_checkpoint_is_reported(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, damage: str
) -> None:
    damaged = tmp_path / saved[0].name
    shutil.copytree(saved[0], damaged)
    second, third, mark = (
        damaged / n
        for n in (
            "shard-00002-of-00003.safetensors",
            "shard-00003-of-00003.safetensors",
            "checkpoint.json",
        )
    )
    match damage:
        case "a shard is missing":
            second.unlink()
        case "a shard is another's":
            shutil.copy(third, second)
        case "the mark is missing":
            mark.unlink()
        case "the mark is cut":
            os.truncate(mark, mark.stat().st_size // 2)
    with pytest.raises(shoal.CorruptDataError) as raised:
        shoal.load_full_state(tmp_path)
    assert str(damaged) in str(raised.value)


def _without_a_shard(document: dict[str, Any]) -> None:
    del document["files"]["shard-00002-of-00003"]


def _of_a_petabyte(document: dict[str, Any]) -> None:
    name, about = next(iter(document["tensors"].items()))
    for file in document["files"].values():
        file["spans"].pop(name, None)
    about["shape"] = [1 << 50]
    document["files"]["shard-00001-of-00003"]["spans"][name] = [0, 1 << 50]


def _of_a_negative_size(document: dict[str, Any]) -> None:
    next(iter(document["tensors"].values()))["shape"] = [-1]


def _with_a_span_of_nothing(document: dict[str, Any]) -> None:
    spans = document["files"]["shard-00002-of-00003"]["spans"]
    spans[next(iter(spans))] = [[]]


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (_without_a_shard, "do not add up to tensor"),
        (_of_a_petabyte, "is smaller than the"),
        (_of_a_negative_size, "is incomplete or invalid"),
        (_with_a_span_of_nothing, "is incomplete or invalid"),
    ],
)
def test_inconsistent_manifest_is_reported(
    saved: tuple[Path, dict[str, Any]], tmp_path: Path, lie: Callable[[Any], None], message: str
) -> None:
    damaged = tmp_path / saved[0].name
    shutil.copytree(saved[0], damaged)
    document = json.loads((damaged / "checkpoint.json").read_text())
    lie(document)
    rest = {key: document[key] for key in ("files", "structure", "tensors")}
    write_manifest(damaged, CheckpointInfo(**document["info"]), "sharded", **rest)
    with pytest.raises(shoal.CorruptDataError, match=message):
        read_checkpoint(damaged)


def test_missing_checkpoint_is_reported(tmp_path: Path) -> None:
    with pytest.raises(shoal.ConfigurationError, match="there is no checkpoint"):
        shoal.load_full_state(tmp_path)


# ------------------------------------------------------------------------------------------- faults


def test_save_at_the_end_of_a_launch_is_complete_when_launch_returns(tmp_path: Path) -> None:
    def only_save() -> None:
        model, optimizer, loader = make("zero3")
        for x, y in loader:
            model.train_step(x, y, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        shoal.save_checkpoint(tmp_path)

    shoal.launch(only_save, world_size=3)
    assert listing(tmp_path) == [f"step-{STEPS}"]


def shards_of(*numbers: int, state: dict[str, Any] | None = None) -> Shards:
    """Returns the part of one rank that writes the given shards. Each of the two shards has four
    elements of a vector that contains two tensors."""
    vector, values = torch.empty(7, device="meta"), torch.arange(8.0)
    model = {"a": vector[:3], "b": vector[3:].view(2, 2), "count": torch.tensor(5)}
    runs = {n: [Run(vector=vector, begin=4 * n, values=values[4 * n : 4 * n + 4])] for n in numbers}
    return Shards.take(StatePart(state={"model": model} | (state or {}), count=2, shards=runs))


INFO = CheckpointInfo(step=7, strategy="zero3", world_size=2, generation=1)


def complete(directory: Path, mine: Shards, others: Shards | None, **options: Any) -> Path | None:
    temporary = begin(directory, INFO.step)
    if others is not None:
        others.write_aside(temporary)
    settings = {"gone": lambda _: others is None, "fence": lambda: None, "keep": 1} | options
    return write_sharded(temporary, mine, INFO, **settings)


def test_shards_form_a_complete_checkpoint_and_replace_older_ones(tmp_path: Path) -> None:
    (tmp_path / "step-6").mkdir()
    # the result is a path
    shutil.copy(
        complete(tmp_path, shards_of(0), shards_of(1)) / "checkpoint.json", tmp_path / "step-6"
    )  # type: ignore[operator]
    path = complete(tmp_path, shards_of(1), shards_of(0))
    assert path is not None
    state = read_checkpoint(path).state["model"]
    assert (state["a"].tolist(), state["b"].tolist(), state["count"].item()) == (
        [0, 1, 2],
        [[3, 4], [5, 6]],
        5,
    )
    assert listing(tmp_path) == ["step-7"]


def test_rank_that_leaves_before_its_shard_is_written_invalidates_the_checkpoint(
    tmp_path: Path,
) -> None:
    assert complete(tmp_path, shards_of(0), None) is None
    assert listing(tmp_path) == []


def test_a_rank_that_cannot_write_its_shard_is_named(tmp_path: Path) -> None:
    temporary = begin(tmp_path, INFO.step)
    (temporary / "shard-00002-of-00002.safetensors").mkdir()
    with pytest.raises(shoal.UnavailableError, match="writing this rank's part failed: "):
        shards_of(1).write_aside(temporary)
    with pytest.raises(shoal.UnavailableError, match="shard 2 failed: ") as raised:
        write_sharded(
            temporary, shards_of(0), INFO, gone=lambda _: False, fence=lambda: None, keep=1
        )
    assert raised.value.reason == "CHECKPOINT_NOT_WRITTEN"
    assert listing(tmp_path) == []


def test_rank_whose_full_disk_cannot_even_store_the_error_is_named(tmp_path: Path) -> None:
    temporary = begin(tmp_path, INFO.step)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as of a full disk
    try:
        with pytest.raises(shoal.UnavailableError, match="writing this rank's part failed: "):
            shards_of(1).write_aside(temporary)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    with pytest.raises(shoal.UnavailableError, match="shard 2 failed: its disk is full"):
        write_sharded(
            temporary, shards_of(0), INFO, gone=lambda _: False, fence=lambda: None, keep=1
        )
    assert listing(tmp_path) == []


def test_rank_that_cannot_write_its_shard_fails_before_others_can_read_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorded time of a rank's failure is before its peers could read of it. The launcher uses
    these times to find the first failure."""
    temporary = begin(tmp_path, INFO.step)
    (temporary / "shard-00002-of-00002.safetensors").mkdir()
    noted_at: list[float] = []
    monkeypatch.setattr(Shards, "_note", lambda *_: noted_at.append(time.time()))
    with pytest.raises(shoal.UnavailableError) as raised:
        shards_of(1).write_aside(temporary)
    assert raised.value.failed_at is not None
    assert raised.value.failed_at <= noted_at[0]


def test_failure_of_the_first_rank_to_write_its_shard_has_the_time_of_the_failure(
    tmp_path: Path,
) -> None:
    temporary = begin(tmp_path, INFO.step)
    (temporary / "shard-00001-of-00002.safetensors").mkdir()
    with pytest.raises(shoal.UnavailableError) as raised:
        write_sharded(
            temporary, shards_of(0), INFO, gone=lambda _: False, fence=lambda: None, keep=1
        )
    assert raised.value.failed_at is not None
    assert raised.value.failed_at <= time.time()


@pytest.mark.parametrize("strategy", IN_PARTS)
def test_save_does_not_first_assemble_the_optimizer_state(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assembled: list[str] = []
    shard = ShardedOptimizerState.shard

    def counted(self: Any, unit: Any, holding: Any, key: str, dtype: torch.dtype) -> torch.Tensor:
        assembled.append(key)
        return shard(self, unit, holding, key, dtype)

    def rank() -> None:
        model, optimizer, loader = make(strategy)
        for x, y in loader:
            model.train_step(x, y, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        assembled.clear()
        shoal.save_checkpoint(tmp_path)

    monkeypatch.setattr(ShardedOptimizerState, "shard", counted)
    shoal.launch(rank, world_size=2)
    assert assembled == []
    assert read_checkpoint(tmp_path / "step-4").info.world_size == 2


def test_any_obstacle_to_writing_a_shard_is_reported_at_once(tmp_path: Path) -> None:
    temporary = begin(tmp_path, INFO.step)
    unwritable = dataclasses.replace(shards_of(1), mine={1: {"a": (0, torch.ones(3).to_sparse())}})
    writer = CheckpointWriter()
    writer.submit(
        lambda: unwritable.write_aside(temporary),
        what="writing step-7",
        timeout=timedelta(seconds=30),
    )
    with pytest.raises(shoal.UnavailableError, match=r"shard 2 failed: RuntimeError: .*sparse"):
        write_sharded(
            temporary, shards_of(0), INFO, gone=lambda _: False, fence=lambda: None, keep=1
        )
    with pytest.raises(RuntimeError, match="sparse"):
        # raised by the rank's next save, or when it leaves
        writer.wait(timedelta(seconds=30))


def test_ranks_with_different_states_are_reported_when_they_save(tmp_path: Path) -> None:
    with pytest.raises(
        shoal.UnavailableError,
        match="do not add up to tensor 'mine'; did the ranks register different state",
    ):
        complete(tmp_path, shards_of(1, state={"mine": torch.ones(2)}), shards_of(0))
    assert listing(tmp_path) == []


def test_fenced_off_first_rank_publishes_nothing(tmp_path: Path) -> None:
    def fence() -> None:
        raise shoal.StaleGenerationError("generation 1 is over")

    with pytest.raises(shoal.StaleGenerationError):
        complete(tmp_path, shards_of(0), shards_of(1), fence=fence)
    assert listing(tmp_path) == []


def test_shard_of_an_abandoned_checkpoint_is_dropped(tmp_path: Path) -> None:
    temporary = begin(tmp_path, INFO.step)
    temporary.rmdir()
    shards_of(1).write_aside(temporary)
    assert listing(tmp_path) == []


def test_abandoned_checkpoint_disappears_at_once_for_writing_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abandoned checkpoint is renamed before it is removed. A rank that found it half removed
    would report a failure of its own disk."""
    temporary = begin(tmp_path, INFO.step)
    remove_tree = shutil.rmtree

    def another_rank_writes(path: Path) -> None:
        shards_of(1).write_aside(temporary)
        assert not temporary.exists()
        remove_tree(path)

    monkeypatch.setattr(shutil, "rmtree", another_rank_writes)
    assert (
        write_sharded(
            temporary, shards_of(0), INFO, gone=lambda _: True, fence=lambda: None, keep=1
        )
        is None
    )
    assert listing(tmp_path) == []
