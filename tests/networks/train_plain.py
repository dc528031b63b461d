"""A plain torch script that does not use Shoal. Each rank writes the rendezvous address and the
result of an all-reduce (a one from every rank) as JSON to a file in OUTPUT."""

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
