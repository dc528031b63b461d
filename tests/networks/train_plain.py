"""A plain torch script that does not use Shoal. Writes the ranks' rendezvous address and their sum
as JSON to OUTPUT."""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    result = {"met_at": os.environ["MASTER_ADDR"], "total": total.item()}
    (Path(os.environ["OUTPUT"]) / f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
