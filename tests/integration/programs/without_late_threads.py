"""Trains like any script and ends without shoal.shutdown(), on a Python that starts no threads
during interpreter shutdown.

Python 3.12.0 to 3.12.2 behave so (gh-113964). On other versions the script makes Thread.start raise
the same error, and makes `native_threads` treat this Python as affected.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from unittest import mock


def emulate_such_a_python() -> None:
    start = threading.Thread.start

    def start_unless_late(thread: threading.Thread) -> None:
        if not threading.main_thread().is_alive():
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    # mypy reports this as an error
    setattr(threading.Thread, "start", start_unless_late)  # noqa: B010
    package = importlib.util.find_spec("shoal_worker")
    assert package is not None
    assert package.origin is not None
    name = "shoal_worker.backends.native_threads"
    spec = importlib.util.spec_from_file_location(
        name, Path(package.origin).parent / "backends" / "native_threads.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with mock.patch.object(sys, "version_info", (3, 12, 1, "final", 0)):
        spec.loader.exec_module(module)


def train() -> None:
    import shoal
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    model, optimizer = shoal.as_distributed(
        net, torch.optim.SGD(net.parameters(), 0.1), strategy="ddp"
    )
    for x, y in shoal.ElasticDataLoader(data, global_batch_size=8):
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    print("the script has ended", shoal.rank(), flush=True)


if __name__ == "__main__":
    emulate_such_a_python()
    train()
