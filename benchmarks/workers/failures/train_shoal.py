"""T17's training loop with Shoal: `shoal run ... -m benchmarks.workers.failures.train_shoal`."""

from __future__ import annotations

import shoal

from benchmarks.workers.failures import models
from benchmarks.workers.failures.ledger import Ledger
from benchmarks.workers.failures.task import parser, task_of


def main() -> None:
    """Trains one epoch."""
    flags = parser()
    flags.add_argument("--strategy", default="ddp")
    flags.add_argument("--micro-batch", type=int, help="the result is then deterministic")
    options = flags.parse_args()
    task = task_of(options)
    task.wait_for_place()
    ledger = Ledger(task.ledgers)
    shoal.init()
    net = models.network(task)
    parts = {} if options.micro_batch is None else {"micro_batch_size": options.micro_batch}
    model, optimizer = shoal.as_distributed(
        net,
        models.optimizer_of(net),
        strategy=options.strategy,
        deterministic=bool(parts),
    )
    loader = shoal.ElasticDataLoader(
        models.dataset(task), global_batch_size=task.global_batch, **parts
    )
    loss_fn = models.loss_of(task)

    def tried(samples: list[int]) -> None:
        ledger.tried(
            group=shoal.generation(),
            world_size=shoal.world_size(),
            step=loader.global_step + 1,
            samples=samples,
        )

    for _ in loader.epochs(1):
        for step in loader.steps() if parts else ([batch] for batch in loader):
            tried([])  # a rank may have no micro-batch
            for indices, inputs, targets in step:
                tried(indices.tolist())
                loss_fn(model(inputs), targets).backward()
            if optimizer.step():
                ledger.committed()
            optimizer.zero_grad()
    ledger.finished(digest=models.digest_of(model.full_state_dict()))


if __name__ == "__main__":
    main()
