"""A training loop that saves its state while it trains, or loads it once; with Shoal, or with
`torch.distributed.checkpoint` (DCP).

`shoal run ... -m benchmarks.workers.saving --saver shoal` or `torchrun ... -m
benchmarks.workers.saving --saver dcp-thread`. Each rank writes what it measured to one JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, Protocol

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_into
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.workers import training
from benchmarks.workers.workload import Workload

SAVERS: Final = ("shoal", "dcp-thread", "dcp-process")
STRATEGIES: Final = ("ddp", "fsdp")
_POLL_S: Final = 0.005
_LONGEST_S: Final = 120.0
"""Maximum time for a checkpoint to be complete."""


class System(Protocol):
    """A training loop that can save its state."""

    rank: int

    def step(self) -> None:
        """Takes one training step."""
        ...

    def save(self, written: Callable[[], None]) -> None:
        """Starts to save the state. `written`: called on some thread once the checkpoint is
        complete."""
        ...

    def prepare(self) -> None:
        """Creates what must exist before `load`, such as the optimizer's state."""
        ...

    def load(self) -> None:
        """Loads the newest checkpoint. Called on all ranks."""
        ...

    def close(self) -> None:
        """Waits until checkpoints in progress are written, and leaves the group."""
        ...


class OnShoal:
    """The training loop with Shoal."""

    def __init__(self, workload: Workload, strategy: str, directory: str) -> None:
        import shoal  # DCP's workers do without
        from shoal_worker.checkpoint.uploads import is_uploaded

        self._shoal, self._is_uploaded = shoal, is_uploaded
        shoal.init()
        self.rank = shoal.rank()
        self._directory = directory
        net = training.network(workload)
        self._model, self._optimizer = shoal.as_distributed(
            net, training.optimizer_of(net), strategy=strategy
        )
        loader = shoal.ElasticDataLoader(
            training.dataset(workload), global_batch_size=workload.global_batch
        )
        self._loader = loader
        self._batches = (batch for _ in loader.epochs(training.MANY_EPOCHS) for batch in loader)
        self._watchers: list[threading.Thread] = []

    def step(self) -> None:
        _take_step(self._model, self._optimizer, next(self._batches))

    def save(self, written: Callable[[], None]) -> None:
        self._shoal.save_checkpoint(self._directory, keep=1)
        if self.rank != 0:
            return
        name = f"step-{self._loader.global_step}"

        def is_complete() -> bool:
            if "://" not in self._directory:
                return (Path(self._directory) / name).exists()
            staging = Path(os.environ["SHOAL_STAGING_DIR"])
            return any(self._is_uploaded(each) for each in staging.rglob(name))

        watcher = threading.Thread(target=_await, args=(is_complete, written), daemon=True)
        watcher.start()
        self._watchers.append(watcher)

    def prepare(self) -> None:
        """Does nothing, because `resume` creates the optimizer's state."""

    def load(self) -> None:
        if not self._shoal.resume(self._directory):
            raise RuntimeError(f"there is no checkpoint in {self._directory}")

    def close(self) -> None:
        for watcher in self._watchers:
            watcher.join()
        self._shoal.shutdown()


class OnDcp:
    """The training loop with torch's DDP or FSDP2, which saves by DCP's `async_save`. Its stager
    reuses its memory from one save to the next. The ranks coordinate a checkpoint in a separate
    process group."""

    def __init__(self, workload: Workload, strategy: str, directory: str, *, process: bool) -> None:
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self._directory = Path(directory)
        self._kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=process,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )
        # A process of DCP's has a group of its own anyway.
        self._group = None if process else dist.new_group(backend="gloo")
        self._net = training.network(workload)
        self._model: nn.Module = self._net
        if strategy == "fsdp":
            for layer in self._net.children():
                if isinstance(layer, nn.Linear):
                    fully_shard(layer)
            fully_shard(self._net)
        else:
            self._model = DistributedDataParallel(self._net)
        self._optimizer = training.optimizer_of(self._net)
        dataset = training.dataset(workload)
        sampler: DistributedSampler[Any] = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=workload.batch, sampler=sampler)
        self._batches = (batch for _ in range(training.MANY_EPOCHS) for batch in loader)
        self._saves: list[tuple[Future[Any], threading.Event]] = []

    def step(self) -> None:
        _take_step(self._model, self._optimizer, next(self._batches))

    def save(self, written: Callable[[], None]) -> None:
        self._await_saves()
        future = async_save(
            self._state(),
            checkpoint_id=self._directory / f"{len(self._saves):03}",
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        assert isinstance(future, Future)  # staging is not asynchronous
        noted = threading.Event()

        def note(_: Future[Any]) -> None:
            written()
            noted.set()

        future.add_done_callback(note)
        self._saves.append((future, noted))

    def prepare(self) -> None:
        self.step()  # makes the optimizer's state
        dist.barrier()

    def load(self) -> None:
        state = self._state()
        newest = max(path.parent for path in self._directory.glob("*/.metadata"))
        load_into(state, checkpoint_id=newest)
        set_state_dict(
            self._net,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def close(self) -> None:
        self._await_saves()
        self._stager.close()
        dist.destroy_process_group()

    def _await_saves(self) -> None:
        for future, noted in self._saves:
            future.result()
            noted.wait(60)  # the future calls back after it has a result

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._net, self._optimizer)
        return {"model": model, "optimizer": optimizer}


def _take_step(model: Any, optimizer: Any, batch: Any) -> None:
    inputs, labels = batch
    training.loss_fn(model(inputs), labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def _await(is_complete: Callable[[], bool], written: Callable[[], None]) -> None:
    """Waits until `is_complete` returns True, then calls `written`. Gives up after `_LONGEST_S`
    without calling it; the harness then notices that a time is missing."""
    give_up_at = time.monotonic() + _LONGEST_S
    while not is_complete():
        if time.monotonic() > give_up_at:
            return
        time.sleep(_POLL_S)
    written()


def train(system: System, *, saves: int, between: int, after: int) -> dict[str, Any]:
    """Trains with `saves` saves: takes `between` steps before each save, and `after` steps after
    the last one. Returns the duration of each step, the indices of the steps that end with a save,
    and the time from the start of each save until its checkpoint was complete, in seconds."""
    steps_s: list[float] = []
    saved_at: list[int] = []
    written_s: list[float] = []

    def save() -> None:
        begun = time.perf_counter()
        saved_at.append(len(steps_s))
        system.save(lambda: written_s.append(time.perf_counter() - begun))

    for number in range(between * saves + after):
        begun = time.perf_counter()
        system.step()
        if number % between == between - 1 and len(saved_at) < saves:
            save()
        steps_s.append(time.perf_counter() - begun)
    closing = time.perf_counter()
    system.close()
    return {
        "steps_s": steps_s,
        "saved_at": saved_at,
        "written_s": written_s,
        "closed_s": time.perf_counter() - closing,
        "step_s": statistics.median(steps_s),
    }


def load(system: System) -> dict[str, Any]:
    """Loads the checkpoint and returns how long this took, in seconds."""
    system.prepare()
    begun = time.perf_counter()
    system.load()
    seconds = time.perf_counter() - begun
    system.close()
    return {"load_s": seconds}


def main() -> None:
    """Trains and saves, or loads."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--saver", choices=SAVERS, required=True)
    flags.add_argument("--strategy", choices=STRATEGIES, required=True)
    flags.add_argument("--checkpoints", required=True, help="directory or URL")
    flags.add_argument("--results", type=Path, required=True, help="directory")
    flags.add_argument("--load", action="store_true", help="load the newest checkpoint, and end")
    for name in ("ranks", "width", "batch", "saves", "between", "after"):
        flags.add_argument(f"--{name}", type=int, required=True)
    options = flags.parse_args()
    workload = Workload(
        log=options.results, ranks=options.ranks, width=options.width, batch=options.batch
    )
    system: System
    if options.saver == "shoal":
        system = OnShoal(workload, options.strategy, options.checkpoints)
    else:
        system = OnDcp(
            workload,
            options.strategy,
            options.checkpoints,
            process=options.saver == "dcp-process",
        )
    measured = (
        load(system)
        if options.load
        else train(system, saves=options.saves, between=options.between, after=options.after)
    )
    partial = options.results / f".{system.rank}"
    partial.write_text(json.dumps(measured))
    partial.replace(options.results / f"{system.rank}.json")


if __name__ == "__main__":
    main()
