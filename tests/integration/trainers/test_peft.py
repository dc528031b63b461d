"""examples/lora.py, and Shoal's Trainer with a peft model: the adapter equals that of one process
under every strategy, even after a kill."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "lora.py"
GUIDE = ROOT / "docs" / "guides" / "peft.md"

DIES = """
import functools, os, pathlib, signal, sys
sys.path.insert(0, {examples!r})
import lora, peft, shoal

if "fsdp" in sys.argv:
    peft.LoraConfig = functools.partial(peft.LoraConfig, modules_to_save=["lm_head"])

advance = shoal.ElasticDataLoader.epochs


def epochs(loader, count):
    for epoch in advance(loader, count):
        mark = pathlib.Path("killed")
        if epoch == 2 and shoal.rank() == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield epoch


shoal.ElasticDataLoader.epochs = epochs
lora.main()
"""

TRAINER = """
import sys
sys.path.insert(0, {examples!r})
import lora, peft
from shoal.integrations.transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    output_dir="out", max_steps=12, per_device_train_batch_size=12, learning_rate=1e-2,
    eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
    load_best_model_at_end=True, metric_for_best_model="eval_loss",
    report_to=[], disable_tqdm=True,
)
configuration = peft.LoraConfig(
    r=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]
)
net = peft.get_peft_model(lora.base_model(), configuration)
words = lora.Words()
samples = [{{"input_ids": words[at], "labels": words[at]}} for at in range(len(words))]
trainer = Trainer(
    net, arguments, train_dataset=samples, eval_dataset=samples[:24], strategy=sys.argv[1]
)
trainer.train()
best = min(each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each)
assert abs(trainer.evaluate()["eval_loss"] - best) < 1e-5, (best, trainer.state.log_history)
trainer.save_model("lora/adapter")
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

Adapter = dict[str, torch.Tensor]


def train(directory: Path, script: str, *arguments: str, ranks: int) -> tuple[Adapter, str]:
    """Runs the script in `directory`; returns the adapter that it writes, and its output."""
    directory.mkdir()
    (directory / "script.py").write_text(script.format(examples=str(EXAMPLE.parent)))
    shoal = ["-m", "shoal", "run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    ended = subprocess.run(
        [sys.executable, *shoal, "script.py", *arguments],
        check=False,
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=350,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    return load_file(directory / "lora" / "adapter" / "adapter_model.safetensors"), output


def check_equal(one: Adapter, other: Adapter) -> None:
    assert one.keys() == other.keys()
    adapters = ("lora_A.weight", "lora_B.weight", "lm_head.weight")
    assert all(name.endswith(adapters) for name in one)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_adapter_after_a_kill_matches_one_process(tmp_path: Path, strategy: str) -> None:
    alone, _ = train(tmp_path / "alone", DIES, "--strategy", strategy, ranks=0)
    killed, output = train(tmp_path / "killed", DIES, "--strategy", strategy, ranks=2)
    assert "ended with SIGKILL" in output
    assert ("base_model.model.lm_head.weight" in alone) == (strategy == "fsdp")
    check_equal(alone, killed)


def test_the_trainer_saves_the_adapter_of_a_sharded_model(tmp_path: Path) -> None:
    alone, _ = train(tmp_path / "alone", TRAINER, "ddp", ranks=0)
    sharded, _ = train(tmp_path / "sharded", TRAINER, "fsdp", ranks=2)
    check_equal(alone, sharded)


def test_the_guide_shows_the_lines_of_the_example() -> None:
    blocks = GUIDE.read_text().split("## With transformers")[0].split("```python\n")[1:]
    assert blocks
    for block in blocks:
        shown = textwrap.indent(block.partition("```")[0].rstrip(), "    ")
        assert shown in EXAMPLE.read_text()
