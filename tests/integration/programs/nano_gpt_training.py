"""The unmodified GPT of another package (nano_gpt, after Karpathy's lessons), with that package's
optimizer, schedule and batches, in a loop like its own: gradient accumulation, clipping, learning
rates set by hand. It prints the model's final state.

Arguments: a directory, a strategy ("plain": torch, in one process), and optionally "kill": the
second worker kills itself in its 6th step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shoal
import torch
from nano_gpt.config import DatasetConfig, GPTConfig, TrainConfig
from nano_gpt.datasets.data_loader import ChunkingIterable
from nano_gpt.model import GPT
from nano_gpt.trainer import create_optimizer, get_lr

SIZE = GPTConfig(block_size=16, vocab_size=32, n_layer=3, n_head=4, n_embd=32)
COURSE = TrainConfig(
    total_batch_size=8 * 16,
    micro_batch_size=2,
    sequence_length=16,
    max_lr=1e-2,
    warmup_steps=3,
    max_steps=12,
)
DATA = DatasetConfig(micro_batch_size=1, sequence_length=16)


def kill_once(directory: Path) -> None:
    killed = directory / "killed"
    if os.environ.get("LOCAL_RANK") == "1" and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def set_rate(optimizer: torch.optim.Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(COURSE, step)


def plain_steps(samples: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parts = COURSE.grad_accum_steps(1)
    for step in range(COURSE.max_steps):
        optimizer.zero_grad()
        begin = step * 8 % len(samples)
        for x, y in zip(
            *(tensor[begin : begin + 8].split(2) for tensor in samples.tensors), strict=True
        ):
            _, loss = model(x, y)
            (loss / parts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        set_rate(optimizer, step)
        optimizer.step()


def elastic_steps(
    samples: Any, model: Any, optimizer: Any, directory: Path, *, kills: bool
) -> None:
    loader = shoal.ElasticDataLoader(
        samples, global_batch_size=8, micro_batch_size=2, shuffle=False
    )

    def batches() -> Iterator[Any]:
        for _ in loader.epochs(COURSE.max_steps):
            for step in loader.steps():
                yield step
                if loader.global_step == COURSE.max_steps:
                    return

    for step in batches():
        optimizer.zero_grad()
        for x, y in step:
            _, loss = model(x, y)
            loss.backward()
        if kills and loader.global_step == 5:
            kill_once(directory)
        model.clip_grad_norm_(1.0)
        set_rate(optimizer, loader.global_step)
        optimizer.step()


def main() -> None:
    directory, strategy, kills = Path(sys.argv[1]), sys.argv[2], "kill" in sys.argv[3:]
    directory.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(COURSE.seed)
    tokens = torch.randint(0, SIZE.vocab_size, (40 * 16 + 1,))
    xs, ys = zip(*ChunkingIterable(DATA, tokens), strict=True)
    samples = torch.utils.data.TensorDataset(torch.cat(xs), torch.cat(ys))
    net = GPT(SIZE, None).double()  # the tokenizer is stored but never called
    optimizer = create_optimizer(net, COURSE, None, is_cuda=False)
    if strategy == "plain":
        plain_steps(samples, net, optimizer)
        state = net.state_dict()
    else:
        model, optimizer = shoal.as_distributed(
            net, optimizer, strategy=strategy, minimum_parameter_group_size=1
        )
        elastic_steps(samples, model, optimizer, directory, kills=kills)
        state = model.full_state_dict()
    if strategy == "plain" or shoal.rank() == 0:
        torch.save(state, directory / "model.pt")
    print(
        f"told {json.dumps({'parameters': sum(value.numel() for value in state.values())})}",
        flush=True,
    )


if __name__ == "__main__":
    main()
