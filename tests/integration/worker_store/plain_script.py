"""A torch script that does not import Shoal. test_redis_init_method.py runs it as one of several
ranks, after registering the init method with torch."""

import datetime
import sys

import torch
import torch.distributed as dist

if __name__ == "__main__":
    url, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # the same job name again, as after a restart
    for attempt, backend in enumerate(("gloo", "shoal_gloo")):
        dist.init_process_group(
            backend,
            init_method=url,
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=60),
        )
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        print(
            f"attempt {attempt}: rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()}",
            flush=True,
        )
        dist.destroy_process_group()
    assert "shoal" not in sys.argv[0]
