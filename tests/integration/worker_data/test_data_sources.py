"""The examples of docs/guides/data-sources.md: three ranks train, one is killed within a step, the
run stops within an epoch, and two ranks resume it. Each sample has then been trained on once per
epoch.

The model counts: it has a weight per sample, and each step adds 1 to the weights of its samples. A
weight is part of a step's result, so a lost or repeated sample shows in the model itself.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from pathlib import Path

import pytest

from tests.integration.worker_elastic.cluster import cluster
from tests.zygote.children import Zygote

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "data-sources.md"
SAMPLES = 96
SHARDS = 6
EPOCHS = 2
STEPS = SAMPLES // 8
STOPS_AFTER = STEPS + 5
"""Steps of the first run, which ends within the second epoch."""
KILLED_BEFORE = 8

BEFORE = """
import os
import shoal
import torch

os.chdir({folder!r})
dataset = [{{"number": number}} for number in range({samples})]
"""

AFTER = """
counting = torch.nn.Embedding({samples}, 1)
torch.nn.init.zeros_(counting.weight)
model, optimizer = shoal.as_distributed(counting, torch.optim.SGD(counting.parameters(), 8.0))
shoal.resume("checkpoints")
for epoch in loader.epochs({epochs}, max_steps=int(os.environ["MAX_STEPS"])):
    for step in loader.steps():
        for batch in step:
            numbers = batch["number"] if "number" in batch else batch["number.cls"]
            (-model(numbers).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
shoal.save_checkpoint("checkpoints")
counts = model.full_state_dict()["weight"].flatten()
shoal.print_once(
    f"{{loader.global_step}} steps, counts {{sorted(set(counts.round(decimals=3).tolist()))}}"
)
"""


def write(folder: Path) -> None:
    """Writes the samples as .jsonl and as .tar files, of different lengths."""
    data = folder / "data"
    data.mkdir()
    cuts = [SAMPLES * cut**2 // SHARDS**2 for cut in range(SHARDS + 1)]
    for shard in range(SHARDS):
        numbers = range(cuts[shard], cuts[shard + 1])
        (data / f"{shard}.jsonl").write_text(
            "".join(json.dumps({"number": number}) + "\n" for number in numbers)
        )
        with tarfile.open(data / f"{shard}.tar", "w") as tar:
            for number in numbers:
                member = tarfile.TarInfo(f"{number:05d}.number.cls")
                content = str(number).encode()
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def examples() -> dict[str, str]:
    """Returns the page's examples by the title of their section, numbered within it."""
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        found |= {f"{title} {number}": block for number, block in enumerate(blocks, 1)}
    return found


QUICK = ("Plain DataLoaders 1", "webdataset 1")
"""An example by index and one by shards. Each worker of the others imports a large package, or runs
the same code as a plain DataLoader."""


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(example, marks=() if example in QUICK else pytest.mark.slow)
        for example in examples()
    ],
)
def test_each_sample_counts_once_per_epoch_through_a_kill_and_a_resume_on_fewer_ranks(
    example: str, zygote: Zygote, tmp_path: Path
) -> None:
    write(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(
        BEFORE.format(folder=str(tmp_path), samples=SAMPLES)
        + examples()[example]
        + AFTER.format(samples=SAMPLES, epochs=EPOCHS)
    )
    settings = {
        "script": script,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "huggingface"),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    (tmp_path / "first").mkdir()
    with cluster(
        zygote, tmp_path / "first", MAX_STEPS=str(STOPS_AFTER), max_workers=3, **settings
    ) as running:
        running.start(0)
        running.start(1, SHOAL_FAILPOINTS=f"session.before_apply@{KILLED_BEFORE}=kill")
        running.start(2)
        running.finish(0, 2, may_end_well=True)
        assert running.workers[1].wait() != 0
        assert f"{STOPS_AFTER} steps, counts [1.0, 2.0]" in running.said()
    (tmp_path / "second").mkdir()
    with cluster(
        zygote, tmp_path / "second", MAX_STEPS="1000", max_workers=2, **settings
    ) as running:
        running.start(0)
        running.start(1)
        running.finish(0, 1, may_end_well=True)
        assert f"{EPOCHS * STEPS} steps, counts [2.0]" in running.said()


def test_every_source_has_an_example() -> None:
    titles = {title.rpartition(" ")[0] for title in examples()}
    assert titles == {
        "Plain DataLoaders",
        "torchdata: StatefulDataLoader",
        "Hugging Face datasets",
        "webdataset",
    }
