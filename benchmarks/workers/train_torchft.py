"""The training loop with torchft on Gloo. Each process is one replica, with the DDP wrapper and the
optimizer wrapper that torchft's README shows.

Runs in the peers' environment (`benchmarks.peers`). The harness starts torchft's lighthouse, and
one of these processes per replica.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader
from torchft import (
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

from benchmarks.workers import training
from benchmarks.workers.steplog import StepLog
from benchmarks.workers.workload import parser, workload_of


def main() -> None:
    """Trains until the harness ends the run."""
    flags = parser()
    flags.add_argument("--replica", type=int, required=True)
    flags.add_argument("--lighthouse", required=True)
    flags.add_argument(
        "--timeout-s", type=float, required=True, help="of collectives, quorums and connections"
    )
    flags.add_argument("--heartbeat-ms", type=int, required=True)
    options = flags.parse_args()
    workload = workload_of(options)
    timeout = timedelta(seconds=options.timeout_s)

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    net = training.network(workload)
    sgd = training.optimizer_of(net)

    def state() -> dict[str, Any]:
        return {"model": net.state_dict(), "optimizer": sgd.state_dict()}

    def load_state(captured: dict[str, Any]) -> None:
        net.load_state_dict(captured["model"])
        sgd.load_state_dict(captured["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        min_replica_size=1,
        load_state_dict=load_state,
        state_dict=state,
        replica_id=f"replica_{options.replica}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=options.lighthouse,
        hostname="127.0.0.1",
        timeout=timeout,
        quorum_timeout=max(timeout, timedelta(seconds=60)),
        connect_timeout=timeout,
        heartbeat_interval=timedelta(milliseconds=options.heartbeat_ms),
    )
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, sgd)
    dataset = training.dataset(workload)
    sampler = DistributedSampler(
        dataset, options.replica, workload.ranks, group_rank=0, num_replicas=1
    )
    loader = DataLoader(dataset, batch_size=workload.batch, sampler=sampler)
    log = StepLog(workload.log, steps=workload.steps, gate=workload.gate)
    for epoch in range(training.MANY_EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            optimizer.zero_grad()
            training.loss_fn(model(inputs), labels).backward()
            before = manager.current_step()
            optimizer.step()
            if manager.current_step() > before:
                rank = manager.participating_rank()
                log.committed(
                    group=manager._quorum_id,  # the only place where it is said
                    world_size=manager.num_participants(),
                    rank=-1 if rank is None else rank,
                    step=manager.current_step(),
                )
            if log.done:
                manager.shutdown(wait=False)
                return


if __name__ == "__main__":
    main()
