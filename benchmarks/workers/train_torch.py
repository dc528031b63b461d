"""Trains the decoder with torch's own parallelism: `torchrun ... -m benchmarks.workers.train_torch
--with fsdp2`. Each variant is written as in torch's tutorial."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from benchmarks.workers import blocks
from benchmarks.workers.placing import joining, loading, place, settling
from benchmarks.workers.steplog import StepLog
from benchmarks.workers.workload import Workload, parser, workload_of

MICRO_BATCHES: Final = 4


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A model that torch has parallelized in one of several ways."""

    backward: Callable[[torch.Tensor, torch.Tensor], None]
    """Runs the forward and backward passes for a batch."""
    optimizer: torch.optim.Optimizer
    replicas: int
    """Number of replicas that share the global batch."""
    replica: int
    """Index of this rank's replica."""


def main() -> None:
    """Trains until the harness ends the run."""
    flags = parser()
    flags.add_argument("--with", dest="peer", choices=sorted(_PEERS), required=True)
    options = flags.parse_args()
    workload = workload_of(options)
    device = place(workload, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(**joining(device))
    peer = _PEERS[options.peer](workload, device)
    dataset = blocks.dataset(workload)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, peer.replicas, peer.replica)
    loader = DataLoader(dataset, batch_size=workload.batch, sampler=sampler, **loading(device))
    log = StepLog(workload.log, steps=workload.steps, gate=workload.gate, settle=settling(device))
    step = 0
    for epoch in range(blocks.MANY_EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            inputs, labels = (each.to(device, non_blocking=True) for each in batch)
            peer.backward(inputs, labels)
            peer.optimizer.step()
            step += 1
            log.committed(
                group=0, world_size=dist.get_world_size(), rank=dist.get_rank(), step=step
            )
            peer.optimizer.zero_grad()
            if log.done:
                dist.destroy_process_group()
                return


def _plain(model: nn.Module, optimizer: torch.optim.Optimizer, *, shared: bool = False) -> Peer:
    """Returns a peer that calls the model as usual. `shared`: True if all ranks train on the same
    batch; False if each rank is a replica with its own batch."""

    def backward(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        blocks.loss_fn(model(inputs), labels).backward()

    alone = (1, 0)
    replicas, replica = alone if shared else (dist.get_world_size(), dist.get_rank())
    return Peer(backward=backward, optimizer=optimizer, replicas=replicas, replica=replica)


def _ddp(workload: Workload, device: torch.device) -> Peer:
    net = blocks.network(workload).to(device)
    return _plain(DistributedDataParallel(net), blocks.optimizer_of(net))


def _zero_redundancy(workload: Workload, device: torch.device) -> Peer:
    net = blocks.network(workload).to(device)
    model = DistributedDataParallel(net)
    return _plain(model, ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-4))


def _fsdp2(workload: Workload, device: torch.device) -> Peer:
    net = blocks.network(workload).to(device)
    for block in net.layers:
        fully_shard(block)
    fully_shard(net)
    return _plain(net, blocks.optimizer_of(net))


def _tensor(workload: Workload, device: torch.device) -> Peer:
    net = _split_blocks(
        blocks.network(workload).to(device), init_device_mesh(device.type, (workload.ranks,))
    )
    return _plain(net, blocks.optimizer_of(net), shared=True)


def _split_blocks(net: blocks.Decoder, mesh: DeviceMesh) -> blocks.Decoder:
    ends = {
        "q_proj": ColwiseParallel(),
        "k_proj": ColwiseParallel(),
        "v_proj": ColwiseParallel(),
        "o_proj": RowwiseParallel(),
    }
    between = {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    plan = {f"self_attn.{name}": style for name, style in ends.items()} | {
        f"mlp.{name}": style for name, style in between.items()
    }
    for block in net.layers:
        parallelize_module(block, mesh, plan)
    return net


class _Stage(nn.Module):
    """Pipeline stage with some of the decoder's layers. The first stage also has the embedding, the
    last one the output layer."""

    def __init__(self, net: blocks.Decoder, *, stage: int, stages: int) -> None:
        super().__init__()
        share = -(-blocks.BLOCKS // stages)
        self.embed_tokens = net.embed_tokens if stage == 0 else nn.Identity()
        self.layers = nn.Sequential(*list(net.layers)[stage * share : (stage + 1) * share])
        self.end = nn.Sequential(net.norm, net.lm_head) if stage == stages - 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.end(self.layers(self.embed_tokens(x)))
        return out


def _pipelining(
    workload: Workload,
    device: torch.device,
    schedule: type[Schedule1F1B] | type[ScheduleGPipe] = Schedule1F1B,
) -> Peer:
    rank, stages = dist.get_rank(), dist.get_world_size()
    part = _Stage(blocks.network(workload), stage=rank, stages=stages).to(device)
    runs = schedule(
        PipelineStage(part, rank, stages, device),
        n_microbatches=MICRO_BATCHES,
        loss_fn=blocks.loss_fn,
    )

    def backward(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        if rank == 0:
            runs.step(inputs)
        elif rank == stages - 1:
            runs.step(target=labels, losses=[])
        else:
            runs.step()

    return Peer(backward=backward, optimizer=blocks.optimizer_of(part), replicas=1, replica=0)


def _tensor_and_fsdp2(workload: Workload, device: torch.device) -> Peer:
    """Combines tensor parallelism within pairs of ranks with data parallelism between pairs, by
    FSDP2, as in torch's recipe for two dimensions. (torch's DDP would ignore parameters that are
    split.) Parameters stay gathered between the passes, so that as much is sent as by an
    all-reduce."""
    mesh = init_device_mesh(
        device.type, (workload.ranks // 2, 2), mesh_dim_names=("data", "tensor")
    )
    net = _split_blocks(blocks.network(workload).to(device), mesh["tensor"])
    for block in net.layers:
        fully_shard(block, mesh=mesh["data"], reshard_after_forward=False)
    fully_shard(net, mesh=mesh["data"], reshard_after_forward=False)
    optimizer = blocks.optimizer_of(net)

    def backward(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        blocks.loss_fn(net(inputs), labels).backward()

    return Peer(
        backward=backward,
        optimizer=optimizer,
        replicas=mesh["data"].size(),
        replica=mesh["data"].get_local_rank(),
    )


_PEERS: Final[dict[str, Callable[[Workload, torch.device], Peer]]] = {
    "ddp": _ddp,
    "zero-redundancy": _zero_redundancy,
    "fsdp2": _fsdp2,
    "tensor": _tensor,
    "pipelining": _pipelining,
    "tensor-and-fsdp2": _tensor_and_fsdp2,
}

if __name__ == "__main__":
    main()
