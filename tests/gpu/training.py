"""One training for all tests of this folder: the part of one rank on `shoal.device()` over BACKEND,
and the same training by one process in plain torch on the host.

As a script, it is a worker of a job that trains with STRATEGY and OPTIONS (JSON) over BACKEND,
compiles one block with COMPILED, and uses DATA_WORKERS data workers. It writes its result as one
JSON line to OUTPUT. DETERMINISTIC=1 uses micro-batches in float32, whose sums do not depend on the
number of ranks; otherwise, the training uses float64, where the order of sums only affects the last
digits. WIDTH is the width of the layers, and TOKENS the number of rows of each sample. GPU_SHARED=1
lets it share a GPU with other ranks over NCCL. GRAPHED is the number of rows that a rank has in a
step; one block is then a CUDA graph, on devices. FAULT is a fault of the device that occurs once
among all workers (`device_faults`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import shoal
import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.workers.shared_gpu import SWITCH, pass_for_a_machine
from tests.gpu import device_faults
from tests.integration.worker_elastic.pacing import pace

SAMPLES: Final = 96
BATCH: Final = 16
MICRO: Final = 4
EPOCHS: Final = 4
STEPS: Final = EPOCHS * SAMPLES // BATCH
WIDTH: Final = 32
_INPUTS: Final = 8
_BLOCKS: Final = 6
_PIPELINED: Final = ("pipeline", "hybrid")
_GENERATOR: Final = threading.Lock()
"""Guards torch's random number generator, which ranks share if they are threads."""


class Block(nn.Module):
    """A block that is gathered as one unit and split by width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


def network(width: int = WIDTH, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Returns the network with the same weights in all processes. It is created on the host."""
    with _GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(_INPUTS, width), *(Block(width) for _ in range(_BLOCKS)), nn.Linear(width, 1)
        ).to(dtype)


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), 1e-2)


def dataset(dtype: torch.dtype = torch.float64, tokens: int | None = None) -> TensorDataset:
    """Returns the samples. Each has `tokens` rows, or is a single row for None."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(
        SAMPLES, *([tokens] if tokens else []), _INPUTS, dtype=torch.float64, generator=draw
    )
    return TensorDataset(x.to(dtype), x.square().sum(-1, keepdim=True).to(dtype))


loss_of = nn.functional.mse_loss


def train(
    strategy: str,
    options: dict[str, Any],
    *,
    backend: str,
    hold: Path | None = None,
    width: int = WIDTH,
    tokens: int | None = None,
    compiled: str | None = None,
    workers: int = 0,
    graphed: int = 0,
    fault: tuple[str, Path] | None = None,
) -> dict[str, torch.Tensor]:
    """Trains one rank and returns its final parameters on the host.

    hold: see `pace`.
    compiled: torch.compile's backend for one block.
    workers: number of data workers.
    graphed: rows of a rank in a step, for a CUDA graph of one block; 0 for none.
    fault: name and marker of a fault of the device.
    """
    device = shoal.device()
    in_parts = bool(options.get("deterministic"))
    dtype = torch.float32 if in_parts else torch.float64
    net = network(width, dtype).to(device)
    if compiled is not None:
        net[2].compile(backend=compiled)
    if graphed and device.type == "cuda":
        sample = torch.zeros(graphed, width, dtype=dtype, device=device, requires_grad=True)
        net[2] = torch.cuda.make_graphed_callables(net[2], (sample,))
    if fault is not None:
        device_faults.arm(fault[0], net[3], fault[1])
    model, optimizer = shoal.as_distributed(
        net,
        optimizer_of(net),
        strategy=strategy,
        backend=backend,
        minimum_parameter_group_size=64,
        **options,
    )
    loader = shoal.ElasticDataLoader(
        dataset(dtype, tokens),
        **({"batch_size": BATCH} if strategy == "async_sgd" else {"global_batch_size": BATCH}),
        micro_batch_size=MICRO if in_parts else None,
        shuffle=False,
        pin_memory=device.type == "cuda",
        num_workers=workers,
    )
    for _ in loader.epochs(EPOCHS):
        for step in loader.steps() if in_parts else ([batch] for batch in loader):
            for inputs, targets in step:
                x, y = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
                if strategy in _PIPELINED:
                    model.train_step(x, y, loss_of)
                else:
                    loss_of(model(x), y).backward()
            if hold is not None:
                pace(hold, loader.global_step, STEPS)
            optimizer.step()
            optimizer.zero_grad()
    state: dict[str, torch.Tensor] = model.full_state_dict()
    return {name: value.cpu().clone() for name, value in state.items()}


def alone(*, sync_every: int = 1, ranks: int = 1) -> dict[str, torch.Tensor]:
    """Returns the parameters after the same training in plain torch on the host. With `sync_every`
    above 1, `ranks` models train separately, each on its share of each batch, and are averaged
    every `sync_every` steps."""
    nets = [network() for _ in range(ranks if sync_every > 1 else 1)]
    optimizers = [optimizer_of(net) for net in nets]
    x, y = dataset().tensors
    step = 0
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, BATCH):
            part = BATCH // len(nets)
            for number, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
                own = slice(start + number * part, start + (number + 1) * part)
                loss_of(net(x[own]), y[own]).backward()
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            if step % sync_every == 0:
                _average(nets)
    return {name: p.detach().clone() for name, p in nets[0].named_parameters()}


@torch.no_grad()
def _average(nets: Sequence[nn.Module]) -> None:
    for same in zip(*(net.parameters() for net in nets), strict=True):
        mean = torch.stack([p.detach() for p in same]).mean(0)
        for p in same:
            p.copy_(mean)


def digest(state: dict[str, torch.Tensor]) -> str:
    """Returns a digest that is the same if and only if all bits are."""
    return hashlib.sha256(
        b"".join(value.contiguous().numpy().tobytes() for value in state.values())
    ).hexdigest()


def expandable_segments() -> bool:
    """Returns whether torch's allocator has expandable segments on this process's device."""
    return torch.cuda.is_available() and any(
        segment["is_expandable"] for segment in torch.cuda.memory_snapshot()
    )


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    torch.set_num_threads(1)
    output, options = Path(os.environ["OUTPUT"]), json.loads(os.environ.get("OPTIONS", "{}"))
    if os.environ.get(SWITCH) == "1":
        pass_for_a_machine()
    shoal.init()
    if os.environ.get("DETERMINISTIC") == "1":
        options["deterministic"] = True
    width = int(os.environ.get("WIDTH", str(WIDTH)))
    state = train(
        os.environ["STRATEGY"],
        options,
        backend=os.environ["BACKEND"],
        hold=output / "hold",
        width=width,
        tokens=int(os.environ["TOKENS"]) if "TOKENS" in os.environ else None,
        compiled=os.environ.get("COMPILED"),
        workers=int(os.environ.get("DATA_WORKERS", "0")),
        graphed=int(os.environ.get("GRAPHED", "0")),
        fault=(os.environ["FAULT"], output / "fault") if "FAULT" in os.environ else None,
    )
    result = {
        "device": str(shoal.device()),
        "world": shoal.world_size(),
        "generation": shoal.generation(),
        "digest": digest(state),
        "finite": all(bool(value.isfinite().all()) for value in state.values()),
        "checked": [float(value.double().abs().sum()) for value in state.values()],
        "expandable": expandable_segments(),
        "parameters": torch.cat([value.flatten() for value in state.values()]).tolist()
        if width == WIDTH
        else [],
    }
    (output / f"{os.environ['SHOAL_MEMBER_ID']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
