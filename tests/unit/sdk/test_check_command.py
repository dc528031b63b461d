"""`shoal check` on correct and on wrong scripts."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from shoal.checking.rules import check
from shoal.cli.app import app
from shoal_common.errors import ConfigurationError
from typer.testing import CliRunner

_ROOT = Path(__file__).parents[3]
_EXAMPLES = sorted((_ROOT / "examples").glob("**/*.py"))
_PAGES = sorted((_ROOT / "docs/migration").glob("*.md"))

_START = """
import copy, logging, math, os, time
import shoal, torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

net = nn.Linear(2, 1)
model, optimizer = shoal.as_distributed(net, torch.optim.SGD(net.parameters(), 0.1))
loader = shoal.ElasticDataLoader(dataset, global_batch_size=8)
"""
_LOOP = """
for epoch in loader.epochs(3):
    for x, y in loader:
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
"""


def _found(before: str = "", inside: str = "") -> list[str]:
    """Checks a script that has the given code before its loop and at the end of each epoch. Returns
    the lines with findings."""
    source = (
        _START + textwrap.dedent(before) + _LOOP + textwrap.indent(textwrap.dedent(inside), "    ")
    )
    found = check(source)
    assert found is not None
    return [source.splitlines()[finding.line - 1].strip() for finding in found]


@pytest.mark.parametrize("path", _EXAMPLES, ids=lambda path: str(path.relative_to(_ROOT)))
def test_examples_are_clean_except_the_plain_ones(path: Path) -> None:
    found = check(path.read_text(), path.name) or []
    if path.name == "train_plain.py":
        assert [finding.what.split()[0] for finding in found] == {
            "examples": ["the", "training", "print()"],
            "nanogpt": ["the", "the", "training", "print()", "print()", "torch.save()"],
        }[path.parent.name]
    else:
        assert found == []


@pytest.mark.parametrize("path", _PAGES, ids=lambda path: path.stem)
def test_migration_pages_are_reported_before_and_clean_after(path: Path) -> None:
    sections = re.split(r"^## (.*)$", path.read_text(), flags=re.MULTILINE)[1:]
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        for block in re.findall(r"```python[^\n]*\n(.*?)```", text, re.DOTALL):
            found = check(block) or []
            assert bool(found) == (title == "Before"), (title, found)


@pytest.mark.parametrize(
    ("before", "inside", "line"),
    [
        ("", "print(epoch)", "print(epoch)"),
        ("net.print_trainable_parameters()", "", "net.print_trainable_parameters()"),
        ("", "if epoch % 2 == 0:\n    print(epoch)", "print(epoch)"),
        ("", "torch.save(net.state_dict(), 'a.pt')", "torch.save(net.state_dict(), 'a.pt')"),
        ("log = open('log.txt', 'a')", "", "log = open('log.txt', 'a')"),
        ("logging.basicConfig()", "", "logging.basicConfig()"),
        ("bar = tqdm(range(3))", "", "bar = tqdm(range(3))"),
        ("best = 0.0", "if value > best:\n    best = value", "best = 0.0"),
        ("best, other = math.inf, 1", "best = min(best, value)", "best, other = math.inf, 1"),
        (
            "best: float = np.Inf",
            "if value < best:\n    best, last = value, epoch",
            "best: float = np.Inf",
        ),
        ("best = 9.0", "if value < best:\n    best, at = measure()", "best = 9.0"),
        ("count = 0", "count += 1\nif count > 5:\n    break", "count = 0"),
        ("ema = copy.deepcopy(net)", "update(ema, net)", "ema = copy.deepcopy(net)"),
        ("dist.init_process_group()", "", "dist.init_process_group()"),
        ("net = nn.DataParallel(net)", "", "net = nn.DataParallel(net)"),
        ("", "dist.all_reduce(value)", "dist.all_reduce(value)"),
        ("net.to('cuda:0')", "", "net.to('cuda:0')"),
        ("net.cuda()", "", "net.cuda()"),
        ("torch.manual_seed(time.time())", "", "torch.manual_seed(time.time())"),
        ("torch.manual_seed(3 + shoal.rank())", "", "torch.manual_seed(3 + shoal.rank())"),
        ("rank = int(os.environ['RANK'])", "", "rank = int(os.environ['RANK'])"),
        (
            "",
            "s = torch.optim.lr_scheduler.StepLR(optimizer, 1)",
            "s = torch.optim.lr_scheduler.StepLR(optimizer, 1)",
        ),
        ("loader = DataLoader(dataset)", "", "loader = DataLoader(dataset)"),
        (
            "held_out = DataLoader(dataset)",
            "with torch.no_grad():\n    for batch in held_out:\n        model(batch)",
            "for batch in held_out:",
        ),
        (
            "held_out = DataLoader(dataset)\nmodel.eval()",
            "for batch in held_out:\n    correct += hits(model(batch))",
            "for batch in held_out:",
        ),
    ],
)
def test_a_line_is_reported(before: str, inside: str, line: str) -> None:
    assert _found(before, inside) == [line]


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        ("", "shoal.print_once(epoch)"),
        ("", "if shoal.is_main_process():\n    print(epoch)"),
        ("first = shoal.is_main_process()", "if first and epoch:\n    print(epoch)"),
        ("", "print(f'{shoal.rank()}: {epoch}')"),
        ("", "print(epoch)  # shoal: ignore"),
        ("def log(x):\n    print(x)", "if shoal.is_main_process():\n    log(epoch)"),
        (
            "def log(x):\n    if not shoal.is_main_process():\n        return\n    print(x)",
            "log(1)",
        ),
        ("bar = tqdm(range(3), disable=not shoal.is_main_process())", ""),
        ("text = open('config.json').read()", ""),
        ("with shoal.main_first():\n    open('a', 'w')", ""),
        ("", "torch.save(state, f'part-{shoal.rank()}.pt')"),
        ("run = shoal.register_state(best=0.0)", "run.best = max(run.best, value)"),
        ("limit = 5", "if epoch > limit:\n    break"),
        ("total = 0.0", "total += value"),
        ("last = None", "last = f()\nif last is not None:\n    g(last)"),
        ("ema = copy.deepcopy(net)\nshoal.register_state(ema=ema)", "update(ema, net)"),
        ("frozen = copy.deepcopy(net)", ""),
        ("torch.manual_seed(0)", ""),
        ("", "dist.all_reduce(value, group=shoal.process_group())"),
        (
            "plain = DataLoader(dataset)\nloader = shoal.ElasticDataLoader.from_dataloader(plain)",
            "",
        ),
        ("held_out = DataLoader(dataset)", "shoal.evaluate(model, held_out, measure)"),
        ("held_out = DataLoader(dataset)", "statistics = [len(batch) for batch in held_out]"),
        ("device = 'cuda' if torch.cuda.is_available() else 'cpu'", ""),
    ],
)
def test_a_line_is_not_reported(before: str, inside: str) -> None:
    assert _found(before, inside) == []


def test_values_that_decide_together_are_registered_by_one_call() -> None:
    loop = """
    if value < best:
        best, bad = value, 0
    else:
        bad += 1
    if bad > 3:
        break
"""
    found = check(_START + "best = 9.0\nbad, limit = 0, 3\n" + _LOOP + loop)
    assert found is not None
    assert [finding.remedy for finding in found] == [
        f"run = shoal.register_state(best=9.0, bad=0), and run.{name} in the loop"
        for name in ("best", "bad")
    ]


_BATCHES = "for i, (x, y) in enumerate(loader):"
_PASS = "nn.functional.mse_loss(model(x), y).backward()"


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("body", "line"),
    [
        (f"{_PASS}\nif (i + 1) % 2 == 0 or i == last:\n    optimizer.step()", 1),
        (f"{_PASS}\nif (i + 1) % 2:\n    continue\noptimizer.step()", 1),
        (f"{_PASS}\nis_last = i % 2 == 1\nif is_last:\n    scaler.step(optimizer)", 2),
        (f"{_PASS}\nn += 1\nif n == 2:\n    optimizer.step()\n    n = 0", 2),
        (
            f"if i % 2:\n    {_PASS}\n    optimizer.step()\nelse:\n"
            f"    with model.no_sync():\n        {_PASS}",
            0,
        ),
    ],
)
def test_accumulation_over_batches_is_reported(body: str, line: int, plain: bool) -> None:
    start = _START.replace("shoal.ElasticDataLoader(", "DataLoader(") if plain else _START
    loop = f"n, last = 0, 9\n{_BATCHES}\n{textwrap.indent(body, '    ')}\n"
    source = start + loop
    found = [each for each in check(source) or [] if "accumulate" in each.what]
    assert [source.splitlines()[each.line - 1].strip() for each in found] == [
        body.splitlines()[line]
    ]
    assert "micro_batch_size=" in found[0].remedy
    assert "loader.steps()" in found[0].remedy


@pytest.mark.parametrize(
    "body",
    [
        f"{_PASS}\nif optimizer.step() and i % 2 == 0:\n    scheduler.step()",
        f"{_PASS}\noptimizer.step()\nif i % 2 == 0:\n    lr_scheduler.step()",
        f"if i % 2 == 0:\n    {_PASS}\n    optimizer.step()",
        f"if i % 2:\n    {_PASS}\n    optimizer.step()\nelse:\n    {_PASS}\n    other_opt.step()",
        f"{_PASS}\noptimizer.step()\nif i % 5 == 0:\n    {_PASS}\n    other_opt.step()",
        f"{_PASS}\nif torch.isfinite(norm):\n    optimizer.step()",
        f"{_PASS}\nif i % 2 == 0:\n    optimizer_schedulers[0].step()\nupdate(optimizer)",
        f"if i % 5:\n    other_opt.step()\nif i % 2:\n    {_PASS}\n"
        "with autocast:\n    optimizer.step()",
    ],
)
def test_a_loop_without_accumulation_is_not_reported(body: str) -> None:
    found = check(f"{_START}{_BATCHES}\n{textwrap.indent(body, '    ')}\n")
    assert found == []


@pytest.mark.parametrize(
    "trainer",
    [
        "from shoal.integrations.transformers import Trainer\nTrainer(net, arguments).train()",
        "import shoal.integrations.trl\nshoal.integrations.trl.SFTTrainer(net).train()",
        "import lightning\nfrom shoal.integrations.lightning import ShoalStrategy\n"
        "lightning.Trainer(strategy=ShoalStrategy()).fit(net, data)",
    ],
)
def test_a_script_with_a_trainer_of_shoal_is_checked(trainer: str) -> None:
    assert check(trainer) == []
    lines = ["print(1)", "torch.save(net, 'a.pt')", "log = open('log.txt', 'w')"]
    guarded = "if trainer.is_global_zero:\n    print(2)"
    source = "\n".join(["import torch", trainer, *lines, guarded])
    found = check(source) or []
    assert [source.splitlines()[each.line - 1] for each in found] == lines


@pytest.mark.parametrize(
    ("source", "remedy"),
    [
        (
            "import transformers\ntransformers.Trainer(net).train()",
            "from shoal.integrations.transformers import Trainer, TrainingArguments",
        ),
        (
            "from transformers import Seq2SeqTrainer\nSeq2SeqTrainer(net).train()",
            "from shoal.integrations.transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments",
        ),
        (
            "from trl import SFTTrainer\nSFTTrainer(net).train()",
            "from shoal.integrations.trl import SFTTrainer, SFTConfig",
        ),
        (
            "import trl\nclass Mine(trl.DPOTrainer):\n    pass",
            "from shoal.integrations.trl import DPOTrainer, DPOConfig",
        ),
    ],
)
def test_a_trainer_with_an_elastic_counterpart_is_found(source: str, remedy: str) -> None:
    assert [(each.line, each.remedy) for each in check(source) or []] == [(2, remedy)]


def test_the_command_names_file_line_and_remedy_and_fails_if_there_are_findings(
    tmp_path: Path,
) -> None:
    script = tmp_path / "a.py"
    script.write_text(_START + _LOOP)
    result = CliRunner().invoke(app, ["check", str(script)])
    assert (result.exit_code, result.stdout) == (0, "nothing to change\n")
    script.write_text(_START + _LOOP + "    print(epoch)\n")
    line = len(script.read_text().splitlines())
    result = CliRunner().invoke(app, ["check", str(script)])
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        f"{script}:{line}: print() on every rank prints the same line once per worker",
        "    remedy: shoal.print_once(...)",
        "1 line to change",
    ]


def test_a_script_without_a_training_loop_is_not_checked(tmp_path: Path) -> None:
    script = tmp_path / "a.py"
    script.write_text("print(1)\n")
    result = CliRunner().invoke(app, ["check", str(script)])
    assert result.exit_code == 0
    assert result.stdout == f"{script}: found no training loop, so nothing was checked\n"
    clean = tmp_path / "b.py"
    clean.write_text(_START + _LOOP)
    result = CliRunner().invoke(app, ["check", str(script), str(clean)])
    assert result.stdout.splitlines()[1:] == ["nothing to change in 1 of 2 scripts"]


@pytest.mark.parametrize("content", [None, "def (:\n"])
def test_files_that_are_not_scripts_are_refused(tmp_path: Path, content: str | None) -> None:
    script = tmp_path / "a.py"
    if content is not None:
        script.write_text(content)
    result = CliRunner().invoke(app, ["check", str(script)])
    assert isinstance(result.exception, ConfigurationError)
    assert "a.py" in str(result.exception)
