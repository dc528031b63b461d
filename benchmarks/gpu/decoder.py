"""A decoder of 1.3 billion parameters, its data, and the ways in which systems train it on one
device.

With a single rank, nothing is sent, so the systems differ only in the work that they add on the
host and in the memory that they use.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.workers.blocks import MANY_EPOCHS

_DENSE_BF16_FLOPS: Final = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}
"""Peak floating-point operations per second, from the datasheets of the SXM boards."""
_SYNCED: Final = 3
"""Number of steps that are timed one by one, after those that are timed together."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of the model and of its steps."""

    words: int
    width: int
    layers: int
    heads: int
    tokens: int
    """Tokens per sample."""
    batch: int
    warm: int
    """Number of steps before the timed ones."""
    steps: int


LARGE: Final = Size(
    words=32_768, width=2048, layers=24, heads=16, tokens=2048, batch=4, warm=4, steps=12
)
"""1.34 billion parameters."""
TINY: Final = Size(words=64, width=32, layers=2, heads=2, tokens=16, batch=2, warm=1, steps=2)
"""Sizes for rehearsals."""
FEW_LAYERS: Final = 6
"""Number of layers for variants that compile for a long time, or wait long for the host."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to train the decoder."""

    name: str
    system: str
    """"torch", "ddp" and "fsdp2" are torch's own implementations; "shoal" is Shoal, under
    `strategy`."""
    strategy: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `shoal.as_distributed`."""
    autocast: bool = True
    """True if autocast casts parameters to bf16 where they are used; False if the system itself
    casts all parameters."""
    fused: bool = True
    recompute: bool = False
    """True if activations are recomputed in the backward pass, block by block."""
    compiled: bool = False
    few_layers: bool = False


class Block(nn.Module):
    """Causal attention, then an MLP."""

    def __init__(self, width: int, heads: int, *, recompute: bool) -> None:
        super().__init__()
        self.heads, self.recompute = heads, recompute
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.up, self.down = (
            nn.Linear(width, 4 * width, bias=False),
            nn.Linear(4 * width, width, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute:
            again: torch.Tensor = checkpoint(self._compute, x, use_reentrant=False)
            return again
        return self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.attention_norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        x = x + self.out(attended)
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.mlp_norm(x))))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, norm and output layer."""

    def __init__(self, size: Size, *, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.words, size.width)
        self.layers = nn.ModuleList(
            Block(size.width, size.heads, recompute=recompute) for _ in range(size.layers)
        )
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, size.words, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Measurements of training under one recipe."""

    parameters: int
    step_s: float
    """Mean duration of a step if the host does not wait for the device after each step."""
    synced_s: float
    """Median duration of a step, measured until the device is idle."""
    host_s: float
    """Mean time that the host spends on a step."""
    warm_s: float
    """Total duration of the warm-up steps, in which memory is allocated and code is compiled."""
    tokens_per_s: float
    mfu: float | None
    """Fraction of the device's peak operations per second; None: the device is unknown."""
    peak_bytes: int
    loss: float


class Training:
    """A model that is trained according to one recipe. Belongs to the thread that created it."""

    def __init__(self, recipe: Recipe, size: Size, device: torch.device) -> None:
        self.size, self.device = size, device
        self._autocast = recipe.autocast
        torch.manual_seed(0)
        with torch.device(device):
            module = Decoder(size, recompute=recipe.recompute and recipe.system != "shoal")
        self.parameters = sum(p.numel() for p in module.parameters())
        self._multiplied = self.parameters - module.embed.weight.numel()  # an embedding looks up
        words = torch.randint(
            0,
            size.words,
            (512 * size.batch, size.tokens + 1),
            generator=torch.Generator().manual_seed(1),
        )
        model, self._optimizer, self._batches = _set_up(
            recipe, module, TensorDataset(words), size, device
        )
        self._called = torch.compile(model) if recipe.compiled else model

    def step(self) -> torch.Tensor:
        """Takes one step and returns its loss, without waiting for the device."""
        tokens = next(self._batches)[0].to(self.device, non_blocking=True)
        self._optimizer.zero_grad()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast):
            logits = self._called(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def timed_step(self) -> float:
        """Takes one step and returns the seconds until the device was idle."""
        begun = time.perf_counter()
        self.step()
        self.settle()
        return time.perf_counter() - begun

    def settle(self) -> None:
        """Blocks until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def warm_up(self) -> float:
        """Takes the warm-up steps, and returns their total duration in seconds."""
        begun = time.perf_counter()
        for _ in range(self.size.warm):
            self.step()
        self.settle()
        return time.perf_counter() - begun

    def figures(self) -> Figures:
        """Takes the warm-up steps, then measures the timed steps."""
        warm_s = self.warm_up()
        on_device = self.device.type == "cuda"
        if on_device:
            torch.cuda.reset_peak_memory_stats(self.device)
        begun = time.perf_counter()
        for _ in range(self.size.steps):
            loss = self.step()
        host_s = (time.perf_counter() - begun) / self.size.steps
        self.settle()
        step_s = (time.perf_counter() - begun) / self.size.steps
        most = _most_flops(self.device)
        tokens = self.size.batch * self.size.tokens
        return Figures(
            parameters=self.parameters,
            step_s=step_s,
            synced_s=statistics.median(self.timed_step() for _ in range(_SYNCED)),
            host_s=host_s,
            warm_s=warm_s,
            tokens_per_s=tokens / step_s,
            mfu=None if most is None else self._flops_per_token() * tokens / step_s / most,
            peak_bytes=torch.cuda.max_memory_allocated(self.device) if on_device else 0,
            loss=loss.item(),
        )

    def _flops_per_token(self) -> float:
        """Returns the floating-point operations per token in the forward and backward passes: 6 for
        each weight of a matrix multiplication, plus those of attention, half of which is masked
        (PaLM, appendix B)."""
        return 6.0 * self._multiplied + 6.0 * self.size.layers * self.size.width * self.size.tokens


def in_world_of_one(recipe: Recipe, device: torch.device, call: Callable[[], Any]) -> Any:
    """Calls `call` and returns its result. First creates the world of one rank that the recipe's
    system needs: a process group for DDP and FSDP2, a session for Shoal, nothing for plain
    torch."""
    if recipe.system in ("ddp", "fsdp2"):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
        )
        try:
            return call()
        finally:
            dist.destroy_process_group()
    if recipe.system == "shoal":
        import shoal

        (answer,) = shoal.launch(call, world_size=1)
        return answer
    return call()


def _set_up(
    recipe: Recipe, module: Decoder, dataset: TensorDataset, size: Size, device: torch.device
) -> tuple[Any, torch.optim.Optimizer, Iterator[Any]]:
    """Returns the model, the optimizer and an endless iterator over batches, as the recipe's system
    provides them."""
    options: dict[str, Any] = {"pin_memory": True} if device.type == "cuda" else {}
    fused = recipe.fused and not (recipe.options.get("offload") == "cpu" and device.type == "cuda")
    if recipe.system == "shoal":
        import shoal

        optimizer = torch.optim.AdamW(module.parameters(), 1e-4, fused=fused)
        again = {"activation_checkpointing": [Block]} if recipe.recompute else {}
        model, optimizer = shoal.as_distributed(
            module, optimizer, strategy=recipe.strategy, **recipe.options, **again
        )
        loader = shoal.ElasticDataLoader(
            dataset, global_batch_size=size.batch, shuffle=False, **options
        )
        return model, optimizer, (batch for _ in loader.epochs(MANY_EPOCHS) for batch in loader)
    model: Any = module
    if recipe.system == "ddp":
        model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    elif recipe.system == "fsdp2":
        model = _fully_sharded(module)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=recipe.fused)
    return model, optimizer, _for_ever(DataLoader(dataset, size.batch, drop_last=True, **options))


def _fully_sharded(module: Decoder) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in module.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(module, mp_policy=policy)


def _for_ever(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _most_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    with contextlib.suppress(StopIteration):
        return next(flops for board, flops in _DENSE_BF16_FLOPS.items() if board in name)
    return None
