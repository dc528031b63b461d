"""Measures the time to connect a group of all ranks, including its first all-reduce. Repeats this
several times in the same processes.

`torchrun ... -m benchmarks.workers.bare_connect --device cuda --times 10 --output FILE`: rank 0
writes the durations in seconds as a JSON list. Each is the duration of the slowest rank, because
the all-reduce ends only when all ranks have connected.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.workers.placing import joining, place, settling
from benchmarks.workers.workload import DEVICES, Workload


def main() -> None:
    """Connects and leaves `--times` times, after one repetition that is not counted."""
    flags = argparse.ArgumentParser()
    flags.add_argument("--device", choices=DEVICES, required=True)
    flags.add_argument("--times", type=int, required=True)
    flags.add_argument("--output", type=Path, required=True)
    options = flags.parse_args()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    workload = Workload(log=options.output, ranks=size, width=0, batch=0, device=options.device)
    device = place(workload, int(os.environ["LOCAL_RANK"]))
    settle = settling(device) or (lambda: None)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    seconds = []
    for number in range(options.times + 1):
        begun = time.perf_counter()
        dist.init_process_group(
            store=dist.PrefixStore(str(number), store),
            rank=rank,
            world_size=size,
            **joining(device),
        )
        dist.all_reduce(torch.ones(1, device=device))
        settle()
        seconds.append(time.perf_counter() - begun)
        dist.destroy_process_group()
    if rank == 0:
        options.output.write_text(json.dumps(seconds[1:]))


if __name__ == "__main__":
    main()
