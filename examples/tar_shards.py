"""Trains on images in .tar files, in the format of webdataset. Each shard is read by one worker,
which may be killed before it has finished the shard.

    shoal run --standalone --nproc-per-node 3 examples/tar_shards.py --shards /tmp/digits

`write_shards` creates such files from scikit-learn's handwritten digits. A sample consists of the
files with the same stem: `00017.pixels` and `00017.label`.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import random
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import shoal
import torch
from sklearn.datasets import load_digits
from torch import nn


def write_shards(folder: Path, *, shards: int) -> None:
    """Writes the digits to .tar files of increasing size. Does nothing if `folder` exists."""
    if folder.exists():
        return
    digits = load_digits()
    cuts = [len(digits.target) * cut**2 // shards**2 for cut in range(shards + 1)]
    folder.mkdir(parents=True)
    for shard in range(shards):
        with tarfile.open(folder / f"digits-{shard:03d}.part", "w") as tar:
            for number in range(cuts[shard], cuts[shard + 1]):
                image, label = (
                    digits.images[number].astype("uint8").tobytes(),
                    str(digits.target[number]).encode(),
                )
                for kind, content in (("pixels", image), ("label", label)):
                    member = tarfile.TarInfo(f"{number:05d}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        (folder / f"digits-{shard:03d}.part").rename(folder / f"digits-{shard:03d}.tar")


def read_shard(path: Path) -> Iterator[tuple[torch.Tensor, int]]:
    """Yields the samples of one .tar file, shuffled with a buffer of 64 samples."""
    buffer: list[tuple[torch.Tensor, int]] = []
    with tarfile.open(path) as tar:
        sample: dict[str, bytes] = {}
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            sample[Path(member.name).suffix] = content.read()
            if len(sample) == 2:  # both files of the sample
                image = torch.frombuffer(bytearray(sample[".pixels"]), dtype=torch.uint8).view(8, 8)
                buffer.append((image, int(sample[".label"])))
                sample = {}
            if len(buffer) == 64:
                # Shoal seeds Python's generator for each item, so a different rank that continues
                # with the shard draws the same numbers.
                yield buffer.pop(random.randrange(64))
    random.shuffle(buffer)
    yield from buffer


def correct(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> dict[str, float]:
    """Returns the numbers of correct answers and of samples in a batch, for `shoal.evaluate`."""
    images, labels = batch
    return {
        "correct": float((model(images / 16).argmax(1) == labels).sum()),
        "samples": float(len(labels)),
    }


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--shards", type=Path, required=True)
    options.add_argument("--epochs", type=int, default=5)
    options.add_argument(
        "--num-workers",
        type=int,
        default=0,
        help="data-loading processes per worker",
    )
    options.add_argument(
        "--pause",
        type=float,
        default=0.0,
        help="seconds between steps, which leaves time to kill a worker",
    )
    given = options.parse_args()

    shoal.init()
    with shoal.main_first():
        write_shards(given.shards, shards=12)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    model, optimizer = shoal.as_distributed(
        net, torch.optim.AdamW(net.parameters(), 2e-3), deterministic=True
    )
    stream = shoal.ShardedStream(sorted(given.shards.glob("*.tar")), read_shard)
    loader = shoal.ElasticDataLoader(
        stream, global_batch_size=96, micro_batch_size=16, num_workers=given.num_workers
    )
    evaluation = shoal.ElasticDataLoader(
        stream, global_batch_size=96, num_workers=given.num_workers, train=False
    )

    for epoch in loader.epochs(given.epochs):
        for step in loader.steps():
            for images, labels in step:
                loss = nn.functional.cross_entropy(model(images / 16), labels)
                loss.backward()
                shoal.report(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(given.pause)
        sums = shoal.evaluate(model, evaluation, correct)  # each shard is evaluated by one worker
        shoal.print_once(
            f"epoch {epoch} is done after {loader.global_step} steps: {sums['correct']:.0f} of "
            f"{sums['samples']:.0f} correct"
        )

    parameters = b"".join(p.numpy().tobytes() for p in model.full_state_dict().values())
    shoal.print_once(f"parameters {hashlib.sha256(parameters).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
