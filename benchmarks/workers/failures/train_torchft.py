"""T17's training loop with torchft. Each process is one replica, with the wrappers that torchft's
README shows.

It improves on the README in three ways. The model is not sent before the first step, because all
replicas build the same one. A restarted replica continues with the batch of the step that the
others are taking, whereas torchft's sampler would start with the first batch again. The samples of
a step are selected without the overhead of a sampler.

Runs in the peers' environment (`benchmarks.peers`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from benchmarks.workers.failures import models
from benchmarks.workers.failures.ledger import Ledger
from benchmarks.workers.failures.task import parser, task_of


def main() -> None:
    """Trains until the replicas have committed the last step."""
    flags = parser()
    flags.add_argument("--replica", type=int, required=True)
    flags.add_argument("--lighthouse", required=True)
    flags.add_argument(
        "--timeout-s", type=float, required=True, help="of collectives, quorums and connections"
    )
    flags.add_argument("--heartbeat-ms", type=int, required=True)
    options = flags.parse_args()
    task = task_of(options)
    task.wait_for_place()
    ledger = Ledger(task.ledgers)
    task.wait_for_all()
    timeout = timedelta(seconds=options.timeout_s)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    net = models.network(task)
    inner = models.optimizer_of(net)

    def state() -> dict[str, Any]:
        return {"model": net.state_dict(), "optimizer": inner.state_dict()}

    def load_state(captured: dict[str, Any]) -> None:
        net.load_state_dict(captured["model"])
        inner.load_state_dict(captured["optimizer"])

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
        init_sync=False,
    )
    model = DistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, inner)
    dataset, loss_fn = models.dataset(task), models.loss_of(task)
    share = models.order(task).view(task.steps, task.ranks, task.batch)[:, options.replica]
    while manager.current_step() < task.steps:
        indices, inputs, targets = dataset[share[manager.current_step()]]
        optimizer.zero_grad()  # asks for a quorum
        loss = loss_fn(model(inputs), targets)
        manager.wait_quorum()  # the first bucket's all-reduce would
        before = manager.current_step()  # that of the others, after a start
        ledger.tried(
            group=manager._quorum_id,  # the only place where it is said
            world_size=manager.num_participants(),
            step=before + 1,
            # a replica that takes over the others' state contributes zeros
            samples=indices.tolist() if manager.is_participating() else [],
        )
        loss.backward()
        optimizer.step()
        if manager.current_step() > before:
            ledger.committed()
    ledger.finished(digest=models.digest_of(net.state_dict()))
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
