"""A small GPT that learns to write Python, byte by byte, from the source files of Python's own
standard library.

python gpt.py                                                                  alone
shoal run --standalone --nproc-per-node 2 gpt.py --strategy fsdp               on two ranks
shoal run --standalone --nproc-per-node 4 gpt.py --strategy hybrid --set tensor_parallel_size=2
"""

import argparse
import json
import math
import sysconfig
from pathlib import Path

import shoal
import torch
from torch import nn
from torch.nn import functional

BYTES = 256


class Source(torch.utils.data.Dataset):
    """Windows of the standard library's source: a text, and the same text one byte further."""

    def __init__(self, length, *, held_out):
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        chosen = [file for number, file in enumerate(files) if (number % 20 == 7) == held_out]
        text = bytearray(b"".join(file.read_bytes() for file in chosen))
        self.text = torch.frombuffer(text, dtype=torch.uint8)
        self.length = length

    def __len__(self):
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index):
        window = self.text[index * self.length : (index + 1) * self.length + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """Attention and an MLP, each after a norm and beside a shortcut."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        h = self.attention_norm(x)
        q, k, v = (
            project(h).unflatten(-1, (-1, h.shape[-1] // self.heads)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        x = x + self.out_proj(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self, length, width, layers, heads):
        super().__init__()
        self.tokens, self.places = nn.Embedding(BYTES, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, BYTES, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            h = layer(h)
        return self.head(self.norm(h))


def cross_entropy(logits, targets):
    """Mean over all bytes."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def measure(model, batch):
    """For shoal.evaluate: bits, and of how many bytes."""
    x, y = batch
    logits = model.predict(x.to(shoal.device()))
    return {
        "bits": cross_entropy(logits, y.to(shoal.device())).item() * y.numel() / math.log(2),
        "bytes": y.numel(),
    }


@torch.no_grad()
def write(model, length, prompt, count):
    """Goes on from `prompt`."""
    text = list(prompt.encode())
    for _ in range(count):
        logits = model(torch.tensor([text[-length:]], device=shoal.device()))[0, -1]
        text.append(int(torch.multinomial((logits / 0.8).softmax(0), 1)))
    return bytes(text).decode(errors="replace")


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the strategy, the value in JSON",
    )
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument(
        "--batch",
        type=int,
        default=16,
        help="windows in a step over all ranks; with async_sgd, in a push",
    )
    parser.add_argument("--length", type=int, default=128, help="bytes in a window")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--checkpoints", help="a directory to go on from, and to save to")
    parser.add_argument(
        "--write", type=int, default=0, metavar="N", help="bytes to write at the end"
    )
    return parser.parse_args(arguments)


def train(model, optimizer, scheduler, loader, options):
    """Takes steps until there are enough, over as many epochs as it takes. Returns the last loss,
    in bits per byte."""
    loss = torch.tensor(math.nan)
    for _ in loader.epochs(math.ceil(options.steps / len(loader))):
        for x, y in loader:
            loss = model.train_step(x.to(shoal.device()), y.to(shoal.device()), cross_entropy)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if shoal.is_main_process() and loader.global_step % 20 == 0:
                print(
                    f"step {loader.global_step}: {loss.item() / math.log(2):.2f} bits per byte",
                    flush=True,
                )
            if options.checkpoints:
                shoal.save_checkpoint(options.checkpoints, every_steps=50)
            if loader.global_step >= options.steps:
                return loss.item() / math.log(2)
    return loss.item() / math.log(2)


def main(arguments=None):
    options = parse(arguments)
    shoal.init()
    torch.manual_seed(0)
    net = Gpt(options.length, options.width, options.layers, options.heads)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    settings = {
        name: json.loads(value)
        for name, value in (setting.split("=", 1) for setting in options.set)
    }
    model, optimizer = shoal.as_distributed(net, optimizer, strategy=options.strategy, **settings)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=options.steps + 1, cycle_momentum=False
    )
    shoal.register_state(scheduler=scheduler)
    size = {"batch_size" if options.strategy == "async_sgd" else "global_batch_size": options.batch}
    loader = shoal.ElasticDataLoader(Source(options.length, held_out=False), **size)
    held_out = Source(options.length, held_out=True)
    held_out = torch.utils.data.Subset(held_out, range(min(8 * options.batch, len(held_out))))
    if options.checkpoints:
        shoal.resume(options.checkpoints)
    train(model, optimizer, scheduler, loader, options)
    found = shoal.evaluate(
        model,
        shoal.ElasticDataLoader(held_out, global_batch_size=options.batch, train=False),
        measure,
    )
    bits = found["bits"] / found["bytes"]
    if options.checkpoints:
        shoal.save_checkpoint(options.checkpoints)
    whole = model.clone().eval() if options.write else None
    if shoal.is_main_process():
        print(
            f"{options.strategy} on {shoal.world_size()} ranks: {bits:.3f} bits per byte of files "
            "that it has not seen",
            flush=True,
        )
        if whole is not None:
            print(write(whole, options.length, "def main(", options.write))
    return bits


if __name__ == "__main__":
    main()
