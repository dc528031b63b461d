"""`shoal check` on correct and on wrong scripts."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
from shoal.checking.conversion import convert
from shoal.checking.findings import Finding
from shoal.checking.loaders import Loaders
from shoal.checking.rules import check
from shoal.checking.script import Script
from shoal.cli.app import app
from shoal_common.errors import ConfigurationError
from typer.testing import CliRunner

_ROOT = Path(__file__).parents[3]
_EXAMPLES = sorted((_ROOT / "examples").glob("**/*.py"))
_PAGES = sorted((_ROOT / "docs/migration").glob("*.md"))
_PLAIN_SCRIPTS = Path(__file__).with_name("plain_scripts")

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
            "classifier": [
                '"cuda"',
                *["every", "the", "an", "the", "training", "tqdm()", "total", "print()"],
                *["torch.save()"] * 2,
                *["print()", "torch.save()"],
            ],
            "nanogpt": [
                '"cuda"',
                "the",
                "every",
                *["the"] * 2,
                "training",
                "gradients",
                *["print()"] * 2,
                "torch.save()",
            ],
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


def test_elastic_scripts_on_all_pages_are_clean_except_for_output() -> None:
    found = []
    for page in sorted((_ROOT / "docs").rglob("*.md")):
        for block in re.findall(r"```python[^\n]*\n(.*?)```", page.read_text(), re.DOTALL):
            if "shoal.as_distributed(" in block:
                found += [(page.name, each) for each in _checked(block)]
    outputs = ("print()", "basicConfig()")
    assert [each for each in found if not each[1].what.startswith(outputs)] == []


def _checked(source: str) -> list[Finding]:
    try:
        return check(source) or []
    except SyntaxError:  # a page may show only a part of a statement
        return []


@pytest.mark.parametrize(
    ("before", "inside", "line"),
    [
        ("", "print(epoch)", "print(epoch)"),
        ("net.print_trainable_parameters()", "", "net.print_trainable_parameters()"),
        ("", "if epoch % 2 == 0:\n    print(epoch)", "print(epoch)"),
        ("", "torch.save(net.state_dict(), 'a.pt')", "torch.save(net.state_dict(), 'a.pt')"),
        ("log = open('log.txt', 'a')", "", "log = open('log.txt', 'a')"),
        ("", "values.numpy().tofile('a.bin')", "values.numpy().tofile('a.bin')"),
        ("import numpy", "numpy.savetxt('a.txt', x)", "numpy.savetxt('a.txt', x)"),
        ("", "figure.savefig('a.png')", "figure.savefig('a.png')"),
        (
            "",
            "with open('a.bin', 'wb') as file:\n    values.tofile(file)",
            "with open('a.bin', 'wb') as file:",
        ),
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
        ("n = 0", "n += 1\nif not n % 9:\n    shoal.print_once(epoch)", "n = 0"),
        ("n, m = 0, 1", "n = n + 1\nlog(n)", "n, m = 0, 1"),
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
        ("", "if shoal.is_main_process():\n    values.tofile('a.bin')"),
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
        (
            "device = 'cuda' if torch.cuda.is_available() else 'cpu'\nx = x.to(device)",
            "use(device)",
        ),
        # counts that the loop does not read, or that start again in each epoch
        ("n = 0", "n += 1"),
        ("n = 0", "n = 0\nfor each in rows:\n    n += 1\nlog(n)"),
        ("scale = 1.0", "scale *= 0.5\nlog(scale)"),
    ],
)
def test_a_line_is_not_reported(before: str, inside: str) -> None:
    assert _found(before, inside) == []


@pytest.mark.parametrize(
    ("before", "inside", "after"),
    [
        ("hist = []", "hist.append(evaluate())", "shoal.print_once(min(hist))"),
        ("hist = []", "if optimizer.step():\n    hist.append(1)\n    log(hist[-1])", ""),
        ("hist = []", "hist += [evaluate()]", "plot(hist)"),
        ("hist: dict = {'loss': [], 'n': 0}", "hist['loss'].append(1)", "plot(hist)"),
        ("hist = {}", "hist.setdefault('loss', []).append(1)", "plot(hist)"),
        ("hist = {}", "hist[epoch] = evaluate()", "plot(hist)"),
        ("hist = defaultdict(list)", "hist['loss'].append(1)", "plot(hist)"),
        ("counts = {'all': 0}", "counts['all'] += 1", "plot(counts)"),
        ("seen = set()", "seen.add(epoch)", "plot(seen)"),
        (
            "hist = []\ndef add(x):\n    hist.append(x)\ndef save():\n    write(hist)",
            "add(1)",
            "save()",
        ),
        ("total = 0.0", "total += value", "shoal.print_once(total)"),
        ("total = 0.0", "total = total + value\nif epoch % 2:\n    log(total)\n    total = 0", ""),
        ("n = 0", "n += 1", "shoal.print_once(n)"),
    ],
)
def test_a_collection_or_a_sum_that_a_joiner_lacks_is_reported(
    before: str, inside: str, after: str
) -> None:
    script = f"{_START}{before}\n{_LOOP}{textwrap.indent(inside, '    ')}\n{after}\n"
    (found,) = check(script) or []
    assert found.line == 1 + _START.count("\n")
    assert found.what.startswith("the training loop adds to")
    name = before.partition(" ")[0].rstrip(":")
    assert found.remedy.startswith(
        (f"shoal.register_state({name}={name})", f"run = shoal.register_state({name}=0")
    )
    if "def " not in before:
        body = f"{before}\n{_LOOP}{textwrap.indent(inside, '    ')}\n{after}"
        main = textwrap.indent(body, "    ")
        assert len(check(f"{_START}def main():\n{main}\nmain()\n") or []) == 1


@pytest.mark.parametrize(
    ("before", "inside", "after"),
    [
        ("hist = []\nshoal.register_state(hist=hist)", "hist.append(1)", "plot(hist)"),
        ("run = shoal.register_state(hist=[])", "run.hist.append(1)", "plot(run.hist)"),
        ("hist = []", "hist.append(1)", ""),
        ("hist = []", "hist = []\nhist.append(1)\nlog(hist)", ""),
        ("hist = []", "hist.clear()\nhist.append(1)\nlog(hist)", ""),
        ("", "hist = []\nhist.append(1)\nlog(hist)", ""),
        ("cache = {}", "if epoch not in cache:\n    cache[epoch] = f()\ng(cache[epoch])", ""),
        ("state = {}", "state['model'] = f()", "save(state)"),
        ("moved = {}", "for k in batch:\n    moved[k] = batch[k]", "f(moved)"),
        ("times = []", "times.append(time.time() - start)", "plot(times)"),
        ("spent = 0.0", "spent += time.perf_counter() - start", "log(spent)"),
        ("total = 0.0", "log(total)\ntotal = 0.0\ntotal += value", ""),
        ("names = []\nnames.append(1)", "log(names)", ""),
    ],
)
def test_a_collection_or_a_sum_of_an_epoch_or_a_process_is_not_reported(
    before: str, inside: str, after: str
) -> None:
    script = f"{_START}{before}\n{_LOOP}{textwrap.indent(inside, '    ')}\n{after}\n"
    assert check(script) == []


def test_a_sum_in_a_function_for_one_epoch_is_not_reported() -> None:
    function = f"def train_epoch():\n    hist, n = [], 0\n{textwrap.indent(_LOOP, '    ')}"
    function += "        n += 1\n        hist.append(n)\n    return hist, n\n"
    function = function.replace("for epoch in loader.epochs(3):", "if True:")
    script = f"{_START}{function}for epoch in loader.epochs(3):\n    log(train_epoch())\n"
    assert check(script) == []


@pytest.mark.parametrize(
    "module",
    ["nn.BatchNorm1d(2)", "nn.Dropout(0.1)", "nn.functional.dropout(x)", "T.RandomCrop(8)"],
)
def test_results_that_depend_on_the_number_of_workers_get_one_note(
    tmp_path: Path, module: str
) -> None:
    made = "import torchvision.transforms as T\nnet = nn.Linear(2, 1)"
    start = _START.replace("net = nn.Linear(2, 1)", f"{made}\nlayers = [{module}, {module}]")
    (found,) = check(start + _LOOP) or []
    assert found.note
    page, _, anchor = found.remedy.rpartition(" ")[2].partition("#")
    titles = re.findall(r"^## (.*)$", (_ROOT / page).read_text(), re.MULTILINE)
    assert anchor in [title.lower().replace(" ", "-") for title in titles]
    script = tmp_path / "a.py"
    script.write_text(start + _LOOP)
    result = CliRunner().invoke(app, ["check", str(script)])
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "nothing to change")
    assert "note: " in result.stdout
    for old, new in (
        ("global_batch_size=8", "global_batch_size=8, micro_batch_size=4"),
        ("0.1))", "0.1), strategy='pipeline')"),
        ("shoal.ElasticDataLoader(", "shoal.make_loader("),
    ):
        assert not any(each.note for each in check(start.replace(old, new) + _LOOP) or [])


@pytest.mark.parametrize(
    "net",
    [
        "nn.Sequential(nn.Dropout(0.0), nn.Dropout(p=0), nn.functional.dropout(x, 0.0))",
        "nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(2)))",
        "nn.LayerNorm(2)",
    ],
)
def test_other_layers_get_no_note(net: str) -> None:
    assert check(_START.replace("nn.Linear(2, 1)", net) + _LOOP) == []


_MAIN = "if shoal.is_main_process():\n    "


@pytest.mark.parametrize(
    ("before", "inside", "remedy"),
    [
        (f"{_MAIN}log = open('a.csv', 'a')", f"{_MAIN}log.write('x')", "with open(path, 'a')"),
        (
            f"import csv\nrows = None\n{_MAIN}log = open('a.csv', 'w'); rows = csv.writer(log)",
            "if rows:\n    rows.writerow([epoch])",
            "with open(path, 'a')",
        ),
        (
            f"import csv\n{_MAIN}rows = csv.writer(open('a.csv', 'w'))",
            f"{_MAIN}rows.writerow([epoch])",
            "with open(path, 'a')",
        ),
        (
            f"from pathlib import Path\n{_MAIN}log = Path('a.csv').open('a')",
            f"{_MAIN}log.write('x')",
            "with open(path, 'a')",
        ),
        (
            "from torch.utils.tensorboard import SummaryWriter\n"
            "writer = SummaryWriter('runs') if shoal.is_main_process() else None",
            "if writer:\n    writer.add_scalar('x', 1, epoch)",
            "shoal.track(",
        ),
        (f"import wandb\n{_MAIN}wandb.init()", f"{_MAIN}wandb.log({{}})", "shoal.WandB("),
        (
            "main = shoal.is_main_process()\nif main:\n    log = open('a', 'a')\n"
            "def note():\n    if main:\n        log.write('x')",
            "note()",
            "with open(path, 'a')",
        ),
    ],
)
def test_a_file_that_only_the_first_main_process_opens_is_reported(
    before: str, inside: str, remedy: str
) -> None:
    script = f"{_START}{before}\n{_LOOP}{textwrap.indent(inside, '    ')}\n"
    (found,) = check(script) or []
    assert "another rank takes its place" in found.what
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("before", "inside"),
    [
        ("", f"{_MAIN}with open('a.csv', 'a') as log:\n        log.write('x')"),
        ("", f"{_MAIN}log = open('a.csv', 'a')\n    log.write('x')"),
        (f"{_MAIN}log = open('a.csv', 'a')\n    log.write('x')", ""),
        (f"{_MAIN}config = open('a.json')", f"{_MAIN}f(config)"),
        (
            f"{_MAIN}log = open('a.csv', 'w')\n    log.write('x')",
            f"{_MAIN}with open('a.csv', 'a') as log:\n        log.write('x')",
        ),
        (f"import wandb\n{_MAIN}wandb.init()", ""),
    ],
)
def test_a_file_that_the_loop_does_not_keep_open_is_not_reported(before: str, inside: str) -> None:
    assert _found(before, inside) == []


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        ("device = 'cuda' if ready else 'cpu'\nnet.to(device)", 1),
        ("device = torch.device('cuda')\nx = torch.zeros(1, device=device)", 1),
        ("torch.load('a.pt', map_location='cuda')", 1),
        ("device = 'cuda' if ready else 'cpu'\ndef f(x):\n    return x.to(device)", 0),
        ("autocast = torch.autocast('cuda')\nnet.to('cpu' if 'cuda' in name else other)", 0),
        ("torch.cuda.set_device(1)\nnet.to('cuda')", 0),
        ("net.to(torch.device('cuda', index))", 0),
    ],
)
def test_a_device_without_a_number_is_reported_only_above_as_distributed(
    before: str, lines: int
) -> None:
    at = "model, optimizer ="
    source = _START.replace(at, f"{before}\n{at}") + _LOOP
    found = [each for each in check(source) or [] if "GPU 0" in each.what]
    assert len(found) == lines
    assert all("'cuda'" in source.splitlines()[each.line - 1] for each in found)
    below = check(f"{_START}{before}\n{_LOOP}") or []
    assert not any("GPU 0" in each.what for each in below)


_RESUMED = """
shoal.resume("checkpoints")
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
"""


@pytest.mark.parametrize(
    ("before", "inside", "reported"),
    [
        (_RESUMED, "schedule.step()", True),
        (_RESUMED.replace("StepLR", "ReduceLROnPlateau"), "schedule.step(value)", True),
        (
            _RESUMED,
            "if loader.global_step == (epoch + 1) * len(loader):\n    schedule.step()",
            False,
        ),
        (_RESUMED.replace("shoal.resume", "read"), "schedule.step()", False),
        (_RESUMED, "other.step()", False),
    ],
)
def test_a_scheduler_that_steps_after_each_epoch_of_a_resumable_run_is_reported(
    before: str, inside: str, reported: bool
) -> None:
    assert _found(before, inside) == [inside] * reported
    steps = _LOOP.replace("optimizer.step()", "if optimizer.step():\n            schedule.step()")
    assert check(_START + _RESUMED + steps) == []


@pytest.mark.parametrize(
    ("load", "reported"),
    [
        ("model.load_full(torch.load('best.pt'))", True),
        ("model.module.load_state_dict(best)", True),
        ("if found:\n    optimizer.load_state_dict(best)", True),
        (
            "if loader.global_step == n and not shoal.is_joining():\n    model.load_full(best)",
            False,
        ),
        ("other.load_state_dict(torch.load('best.pt'))", False),
        ("def load():\n    model.load_full(best)", False),
    ],
)
def test_loading_between_two_training_loops_is_reported(load: str, reported: bool) -> None:
    source = f"{_START}{_LOOP}{load}\n{_LOOP}"
    found = check(source) or []
    assert ["between two training loops" in each.what for each in found] == [True] * reported
    assert check(f"{_START}{_LOOP}{load}\n") == []
    function = textwrap.indent(_LOOP, "    ")
    called = check(f"{_START}def train():{function}train()\n{load}\ntrain()\n") or []
    assert len(called) == reported


@pytest.mark.parametrize(
    ("save", "reported"),
    [
        ("torch.save(model.state_dict(), 'a.pt')", "model.module.state_dict(), or"),
        ("state = model.state_dict()\ntorch.save(state, 'a.pt')", "model.module.state_dict(), or"),
        ("torch.save(ema.module.state_dict(), 'a.pt')", "consume_prefix_in_state_dict_if_present"),
        (
            "kept = copy.deepcopy(model).eval()\ntorch.save(kept.state_dict(), 'a.pt')",
            "kept.module.state_dict(), or",
        ),
        ("kept = copy.deepcopy(model)\ntorch.save(kept.module.state_dict(), 'a.pt')", ""),
        ("kept = copy.deepcopy(net)\ntorch.save(kept.state_dict(), 'a.pt')", ""),
        ("torch.save(model.module.state_dict(), 'a.pt')", ""),
        ("torch.save(net.state_dict(), 'a.pt')", ""),
        (
            "torch.save({k.removeprefix('module.'): v for k, v in model.state_dict().items()}, f)",
            "",
        ),
        ("torch.save({'model': model.state_dict()}, 'a.pt')", ""),
        ("state = model.state_dict()\nconsume(state, 'module.')\ntorch.save(state, 'a.pt')", ""),
    ],
)
def test_a_file_whose_names_have_the_prefix_of_the_wrapper_is_reported(
    save: str, reported: str
) -> None:
    ema = "ema = torch.optim.swa_utils.AveragedModel(model)\n"
    saved = textwrap.indent(save, "    ")
    found = check(f"{_START}{ema}{_LOOP}if shoal.is_main_process():\n{saved}\n") or []
    assert [reported in each.remedy for each in found] == [True] * bool(reported)
    sharded = _START.replace("0.1))", "0.1), strategy='fsdp')")
    found = check(f"{sharded}{ema}{_LOOP}if shoal.is_main_process():\n{saved}\n") or []
    assert len(found) == (bool(reported) and "ema" not in save)


@pytest.mark.parametrize(
    ("body", "reported"),
    [
        (
            "for k in range(9):\n        x, y = get_batch('val')\n        losses[k] = model(x, y)",
            True,
        ),
        ("for i in range(0, n, 8):\n        total += model(data[i : i + 8])", True),
        ("for k in range(9):\n        text.append(draw(model(text[-8:])))", False),
        ("for split in ('train', 'val'):\n        out[split] = measure(split)", False),
    ],
)
def test_validation_on_batches_that_the_script_makes_is_reported(body: str, reported: bool) -> None:
    helper = "def get_batch(split):\n    return read(split)\n"
    function = f"@torch.no_grad()\ndef estimate():\n    {body}\n"
    for call, expected in (("estimate()", reported), ("if main_process:\n    estimate()", False)):
        source = f"{helper}{_START}{function}{_LOOP}{textwrap.indent(call, '    ')}\n"
        found = check(source) or []
        assert ["every rank validates" in each.what for each in found] == [True] * expected


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
    call = "run = shoal.register_state(best=9.0, bad=0), and"
    of_best, of_bad = (finding.remedy for finding in found)
    assert of_best.startswith(f"{call} run.best in the loop; to keep the best checkpoint, shoal.sa")
    assert of_bad == f"{call} run.bad in the loop"
    counted = _START + "best, n = 9.0, 0\n" + _LOOP + loop + "    n += 1\n    log(n)\n"
    of_n = check(counted.replace(loop, "    best = min(best, f())\n")) or []
    assert [each.remedy.partition(", and")[0] for each in of_n] == [
        "run = shoal.register_state(best=9.0, n=0)"
    ] * 2


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


def test_accumulation_in_an_inner_loop_is_reported() -> None:
    inner = f"    for part in range(4):\n        x, y = get_batch()\n        {_PASS}\n"
    loop = f"for step in range(9):\n{inner}    clip(net)\n    scaler.step(optimizer)\n"
    found = [each for each in check(_START + loop) or [] if "accumulate" in each.what]
    source = (_START + loop).splitlines()
    assert [source[each.line - 1].strip() for each in found] == ["for part in range(4):"]
    counted = f"for i in range(9):\n    x, y = next(batches)\n    {_PASS}\n"
    counted += "    if (i + 1) % 4 == 0:\n        optimizer.step()\n"
    found = [each for each in check(_START + counted) or [] if "accumulate" in each.what]
    assert ["micro_batch_size=" in each.remedy for each in found] == [True]


@pytest.mark.parametrize(
    "loop",
    [
        # the parts of a batch of the loader
        f"for x, y in loader:\n    for part in range(4):\n        {_PASS}\n    optimizer.step()\n",
        # several steps
        f"for x, y in loader:\n    for _ in range(4):\n        {_PASS}\n        optimizer.step()\n",
        # steps of another optimizer
        f"it = iter(loader)\nwhile True:\n    for _ in range(4):\n        x, y = next(it)\n"
        f"        {_PASS}\n        opt_d.step()\n    {_PASS}\n    optimizer.step()\n",
        # epochs
        f"for epoch in range(4):\n    for x, y in loader:\n        {_PASS}\n"
        "        optimizer.step()\n",
        f"for step in loader.steps():\n    for x, y in step:\n        {_PASS}\n"
        "    optimizer.step()\n",
    ],
)
def test_inner_loops_that_do_not_accumulate_are_not_reported(loop: str) -> None:
    assert check(_START + loop) == []


@pytest.mark.parametrize(
    "loop",
    [
        f"def train(x, y):\n    for k in range(4):\n        {_PASS}\n    optimizer.step()\n"
        f"for epoch in {epochs}:\n    for x, y in {batches}:\n        train(x, y)\n"
        for epochs, batches in (
            ("loader.epochs(3)", "loader"),
            ("mine.epochs(3)", "mine"),
        )
    ],
)
def test_a_function_that_divides_a_batch_of_its_callers_loop_does_not_accumulate(
    loop: str,
) -> None:
    assert check(f"from data import mine\n{_START}{loop}") == []


@pytest.mark.parametrize("count", ["k += 1", "k = k + 1", "k = 1 + k"])
def test_accumulation_in_a_counted_while_loop_is_reported(count: str) -> None:
    inner = f"    k = 0\n    while k < 4:\n        x, y = next(it)\n        {_PASS}\n"
    loop = f"it = iter(loader)\nfor step in range(9):\n{inner}        {count}\n"
    source = f"{_START}{loop}    optimizer.step()\n"
    found = [each for each in check(source) or [] if "accumulate" in each.what]
    assert [source.splitlines()[each.line - 1].strip() for each in found] == ["while k < 4:"]


_OWN_BATCHES = "the script makes its own batches"
_UNKNOWN = "cannot tell whether the ranks train on different samples"
_STEP = f"{_PASS}\n    optimizer.step()\n"


@pytest.mark.parametrize(
    ("loop", "line"),
    [
        (
            "def get_batch():\n    at = torch.randint(len(data), (8,))\n    return x[at], y[at]\n"
            f"while True:\n    x, y = get_batch()\n    {_STEP}",
            "at = torch.randint(len(data), (8,))",
        ),
        (
            "rng = numpy.random.default_rng(0)\nfor it in range(9):\n"
            f"    at = rng.integers(0, n, 8)\n    x, y = xs[at], ys[at]\n    {_STEP}",
            "at = rng.integers(0, n, 8)",
        ),
        (
            f"for it in tqdm(range(9), disable=quiet):\n    rows = random.sample(data, 8)\n"
            f"    x, y = collate(rows)\n    {_STEP}",
            "rows = random.sample(data, 8)",
        ),
        (
            "def read(at):\n    return data[at : at + 8], labels[at]\nfor it in range(9):\n"
            f"    x, y = zip(*[read(i) for i in torch.randint(n, (8,))])\n    {_STEP}",
            "x, y = zip(*[read(i) for i in torch.randint(n, (8,))])",
        ),
        (
            "order = list(range(9))\nfor epoch in range(3):\n  random.shuffle(order)\n"
            f"  for i in order:\n    x, y = data[i], labels[i]\n    {_STEP}",
            "random.shuffle(order)",
        ),
        (
            "for epoch in range(3):\n  for i in range(0, len(data), 8):\n"
            f"    x, y = data[i : i + 8], labels[i : i + 8]\n    {_STEP}",
            "for i in range(0, len(data), 8):",
        ),
        (
            "class Tokens:\n    def next_batch(self):\n        self.at += 8\n"
            "        return read(self.at)\n"
            f"tokens = Tokens()\nfor it in range(9):\n    x, y = tokens.next_batch()\n    {_STEP}",
            "x, y = tokens.next_batch()",
        ),
        (
            "for epoch in range(3):\n  for b in range(len(data) // bs):\n    start = b * bs\n"
            f"    end = min(start + bs, len(data))\n    x, y = data[start:end], labels[start:end]\n"
            f"    {_STEP}",
            "for b in range(len(data) // bs):",
        ),
        (
            "for epoch in range(3):\n  at = 0\n  while at < len(data):\n"
            f"    x, y = data[at : at + bs], labels[at : at + bs]\n    at += bs\n    {_STEP}",
            "while at < len(data):",
        ),
        (
            "def windows():\n    while True:\n        yield data[torch.randperm(n)[:8]]\n"
            f"batches = windows()\nfor it in range(9):\n    x, y = next(batches)\n    {_STEP}",
            "yield data[torch.randperm(n)[:8]]",
        ),
        (
            "def windows():\n    while True:\n        yield read()\n"
            f"for x, y in windows():\n    {_STEP}",
            "for x, y in windows():",
        ),
    ],
)
def test_batches_that_the_script_makes_are_reported(loop: str, line: str) -> None:
    source = f"import numpy, random\n{_START}{loop}"
    found = check(source) or []
    assert [source.splitlines()[each.line - 1].strip() for each in found] == [line]
    assert found[0].what.startswith(_OWN_BATCHES)
    assert "distribute" in found[0].what
    assert found[0].certain
    page, _, anchor = found[0].remedy.rpartition(" ")[2].partition("#")
    titles = re.findall(r"^## (.*)$", (_ROOT / page).read_text(), re.MULTILINE)
    assert anchor in [title.lower().replace(" ", "-") for title in titles]


@pytest.mark.parametrize(
    "loop",
    [
        f"from mine import batches\nfor x, y in batches:\n    {_STEP}",
        f"import mine\nit = iter(mine.batches)\nwhile True:\n    x, y = next(it)\n    {_STEP}",
        # draws that need not choose samples
        f"import mine\nfor x, y in mine.batches:\n    t = torch.randint(9, (8,))\n    {_STEP}",
        f"x, y = everything()\nfor it in range(9):\n    {_STEP}",
        "x, y = everything()\nfor it in range(9):\n    t = torch.randint(0, 1000, (8,))\n"
        f"    noised = alphas[t] * x + table[t] * net(t)\n    {_STEP}",
        "import random\nx, y = everything()\nfor it in range(9):\n"
        f"    if random.choice([True, False]):\n        x = -x\n    {_STEP}",
        "import random\nsizes = [8, 16]\nx, y = everything()\nfor it in range(9):\n"
        f"    x = resize(x, random.choice(sizes))\n    {_STEP}",
        # cuts of a feature dimension, and of a list of results
        f"x, y = everything()\nfor it in range(9):\n    i = it % 4\n    x = x[:, i : i + 8]\n"
        f"    {_STEP}",
        f"x, y = everything()\nfor it in range(9):\n    show(history[it - 5 : it])\n    {_STEP}",
        f"x, y = everything()\nfor it in range(9):\n    i = random.randrange(4)\n"
        f"    x = x[:, i : i + 8]\n    {_STEP}",
        # draws for validation
        "@torch.no_grad()\ndef validate():\n    score(torch.randperm(n)[:8])\n"
        f"for it in range(9):\n    {_STEP}    validate()\n",
        f"for it in range(9):\n    {_STEP}    with torch.no_grad():\n"
        "        score(torch.randperm(n)[:8])\n",
        # only the inner one of two loops
        "import mine\ndef train_epoch(batches):\n    for x, y in batches:\n"
        f"        {_PASS}\n        optimizer.step()\n"
        "for epoch in range(3):\n    train_epoch(mine.batches)\n",
    ],
)
def test_a_loop_without_a_known_source_is_named_and_nothing_to_change_is_not_said(
    tmp_path: Path, loop: str
) -> None:
    script = tmp_path / "a.py"
    script.write_text(_START + loop)
    result = CliRunner().invoke(app, ["check", str(script)])
    assert result.exit_code == 0
    assert _UNKNOWN in result.stdout
    assert "nothing to change" not in result.stdout
    assert result.stdout.splitlines()[-1].endswith("could not check the data of the loop above")
    script.write_text(_START + loop + "print(x)\n")
    result = CliRunner().invoke(app, ["check", str(script)])
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (1, "1 line to change")


@pytest.mark.parametrize(
    "loop",
    [
        f"it = iter(loader)\nwhile True:\n    x, y = next(it)\n    {_STEP}",
        f"loaders = {{'train': loader}}\nfor x, y in loaders['train']:\n    {_STEP}",
        "class Training:\n    def __init__(self, loader):\n        self.loader = loader\n"
        "    def fit(self):\n        for x, y in self.loader:\n"
        f"            {_PASS}\n            optimizer.step()\nTraining(loader).fit()\n",
        f"def for_ever():\n    while True:\n        yield from loader\n"
        f"for x, y in for_ever():\n    {_STEP}",
        "def train(step):\n    for x, y in step:\n        pass\n"
        f"        {_PASS}\nfor step in loader.steps():\n    train(step)\n    optimizer.step()\n",
        f"for x, y in loader:\n    t = torch.randint(9, (8,))\n    {_STEP}",
        f"plain = DataLoader(few)\nfor x, y in loader:\n    show(next(iter(plain)))\n    {_STEP}",
    ],
)
def test_loops_over_a_loader_are_not_reported(loop: str) -> None:
    assert check(_START + loop) == []


@pytest.mark.parametrize(
    "batches",
    [
        "train = make()\nbatches = train",
        "train, other = (shoal.ElasticDataLoader(d, global_batch_size=8) for d in (a, b))\n"
        "batches = train",
        "train = Wrapped(loader)\nbatches = train",
        "create = functools.partial(shoal.ElasticDataLoader, global_batch_size=8)\n"
        "train = create(dataset)\nbatches = train",
        "train = load()\nbatches = [train, train][0]",
    ],
)
def test_loops_over_epochs_of_a_loader_need_no_notice(batches: str) -> None:
    loop = f"{batches}\nfor epoch in train.epochs(3):\n    for x, y in batches:\n"
    source = (
        f"import functools\nfrom mine import Wrapped, load, make\n{_START}{loop}        {_PASS}\n"
    )
    assert check(f"{source}        optimizer.step()\n") == []
    without_epochs = source.replace("train.epochs(3)", "range(3)")
    found = check(f"{without_epochs}        optimizer.step()\n") or []
    assert found
    assert all("does not see" in each.what and not each.certain for each in found)


_MEMORY = """
import random
class Memory:
    def push(self, *each):
        self.rows.append(each)
    def sample(self, n):
        return random.sample(self.rows, n)
memory = Memory()
def learn():
    x, y = torch.stack(memory.sample(8))
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
for episode in range(300):
    memory.push(act())
    learn()
"""
_ARRAYS = """
import numpy
for episode in range(300):
    states[at % n] = act()
    drawn = numpy.random.randint(0, n, 8)
    nn.functional.mse_loss(model(states[drawn]), y).backward()
    optimizer.step()
"""
_ROLLOUT = """
for episode in range(300):
    for t in range(9):
        states, done = env.step(model(states))
    order = torch.randperm(9)
    nn.functional.mse_loss(model(states[order]), y).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("loop", [_MEMORY, _ARRAYS, _ROLLOUT])
def test_samples_that_ranks_collect_get_a_notice_without_a_dataset(loop: str) -> None:
    (found,) = check(_START + loop) or []
    assert "samples that it collects itself" in found.what
    assert "averages" in found.what
    assert not found.certain
    assert "Dataset" not in found.remedy


def test_the_average_of_another_model_is_not_reported() -> None:
    average = "torch.optim.swa_utils.AveragedModel"
    start = _START.replace("model, optimizer =", "teacher = {average}({of})\nmodel, optimizer =")
    own = check(start.format(average=average, of="net") + _LOOP) or []
    assert ["average" in each.what for each in own] == [True]
    assert check(start.format(average=average, of="frozen") + _LOOP) == []


def test_nodes_of_a_type_are_collected_once() -> None:
    script = Script("f()\ng()\n")
    assert [*script.calls()] == [*script.calls()]
    script.tree.body.clear()
    assert len([*script.calls()]) == 2
    assert script.once(Loaders) is script.once(Loaders)


@pytest.mark.parametrize(
    "loop",
    [
        f"it = iter(plain)\nwhile True:\n    x, y = next(it)\n    {_STEP}",
        f"loaders = {{k: DataLoader(a) for k, a in sets}}\nfor x, y in loaders['a']:\n    {_STEP}",
        "def cycle(loader):\n    while True:\n        for each in loader:\n            yield each\n"
        f"batches = cycle(plain)\nfor it in range(9):\n    x, y = next(batches)\n    {_STEP}",
    ],
)
def test_a_plain_loader_is_followed_to_the_loop(loop: str) -> None:
    found = check(f"{_START}plain = DataLoader(dataset)\n{loop}") or []
    assert ["is not distributed" in each.what for each in found] == [True]


_RATE = "for group in optimizer.param_groups:\n        group['lr'] = "


@pytest.mark.parametrize(
    ("loop", "line"),
    [
        (f"for it in range(9):\n    {_RATE}rate(it)\n", "group['lr'] = rate(it)"),
        (f"for it in range(9):\n    lr = rate(it)\n    {_RATE}lr\n", "lr = rate(it)"),
        (f"n = 0\nfor x, y in loader:\n    {_RATE}rate(n)\n    n += 1\n", "group['lr'] = rate(n)"),
        (
            f"n = 0\nfor x, y in loader:\n    {_RATE}rate(n)\n    n = n + 1\n",
            "group['lr'] = rate(n)",
        ),
        (
            f"for i, (x, y) in enumerate(loader):\n    {_RATE}rate(i)\n",
            "group['lr'] = rate(i)",
        ),
        (
            f"class Training:\n  def fit(self):\n   for x, y in loader:\n    self.n += 1\n"
            f"    lr = rate(self.n)\n    {_RATE}lr\n",
            "lr = rate(self.n)",
        ),
        (
            "def adjust(optimizer, step):\n    optimizer.param_groups[0]['lr'] = rate(step)\n"
            "for it in range(9):\n    adjust(optimizer, it)\n",
            "adjust(optimizer, it)",
        ),
    ],
)
def test_a_learning_rate_from_the_scripts_own_count_is_reported(loop: str, line: str) -> None:
    source = f"{_START}{loop}    {_STEP}"
    found = [each for each in check(source) or [] if "learning rate" in each.what]
    assert [source.splitlines()[each.line - 1].strip() for each in found] == [line]
    assert "loader.global_step" in found[0].remedy


@pytest.mark.parametrize(
    "loop",
    [
        f"for x, y in loader:\n    {_RATE}rate(loader.global_step)\n    {_STEP}",
        f"for x, y in loader:\n    step = loader.global_step\n    {_RATE}rate(step)\n    {_STEP}",
        "for epoch in loader.epochs(3):\n  "
        + f"{_RATE}rate(epoch)\n  for x, y in loader:\n    {_STEP}".replace("\n        ", "\n    "),
        f"run = shoal.register_state(n=0)\nfor x, y in loader:\n    {_RATE}run.n\n    {_STEP}",
        f"for i, (x, y) in enumerate(loader):\n    log(i)\n    {_RATE}0.1\n    {_STEP}",
    ],
)
def test_a_learning_rate_from_the_runs_steps_or_epochs_is_not_reported(loop: str) -> None:
    assert check(_START + loop) == []


_SUMS = "for epoch in loader.epochs(3):\n  total = 0.0\n"
_ADD = "loss = nn.functional.mse_loss(model(x), y)\n    loss.backward()\n    "


@pytest.mark.parametrize(
    ("loop", "line"),
    [
        (
            f"{_SUMS}  for x, y in loader:\n    {_ADD}optimizer.step()\n    total += loss.item()\n",
            "total += loss.item()",
        ),
        (
            f"{_SUMS}  for x, y in loader:\n    {_ADD}total = total + float(loss)\n"
            "    if not optimizer.step():\n      continue\n",
            "total = total + float(loss)",
        ),
        (
            f"{_SUMS}  for step in loader.steps():\n   for x, y in step:\n    {_ADD}"
            "total += loss.item()\n   if optimizer.step():\n    scheduler.step()\n",
            "total += loss.item()",
        ),
        (
            f"losses = []\nfor x, y in loader:\n    {_ADD}optimizer.step()\n"
            "    losses.append(loss.item())\n",
            "losses.append(loss.item())",
        ),
    ],
)
def test_a_sum_of_losses_that_counts_aborted_steps_is_reported(loop: str, line: str) -> None:
    found = check(_START + loop) or []
    source = (_START + loop).splitlines()
    assert [source[each.line - 1].strip() for each in found] == [line]
    assert "an aborted step twice" in found[0].what
    assert "#average-the-loss-over-an-epoch" in found[0].remedy


@pytest.mark.parametrize(
    "loop",
    [
        f"{_SUMS}  for x, y in loader:\n    {_ADD}if optimizer.step():\n"
        "      total += loss.item()\n",
        f"{_SUMS}  for x, y in loader:\n    {_ADD}if not optimizer.step():\n      continue\n"
        "    total += loss.item()\n",
        f"{_SUMS}  for x, y in loader:\n    {_ADD}done = scaler.step(optimizer)\n    if done:\n"
        "      total += loss.item()\n",
        # within a step, and in a registered value, which is restored
        "for step in loader.steps():\n  in_step = 0.0\n  for x, y in step:\n"
        f"    {_ADD}in_step += loss.item()\n  optimizer.step()\n",
        "run = shoal.register_state(total=0.0)\nfor x, y in loader:\n"
        f"    {_ADD}optimizer.step()\n    run.total += loss.item()\n",
        # not a loss; a part of the loss
        f"{_SUMS}  for x, y in loader:\n    {_PASS}\n    optimizer.step()\n    total += len(x)\n",
        "for x, y in loader:\n    loss = first(model(x), y)\n    loss += second(model(x), y)\n"
        "    loss.backward()\n    optimizer.step()\n",
    ],
)
def test_other_sums_in_a_training_loop_are_not_reported(loop: str) -> None:
    assert check(_START + loop) == []


def test_a_sum_of_losses_is_reported_only_if_a_loader_repeats_the_batch() -> None:
    loop = (
        f"losses = []\nfor x, y in batches():\n    {_ADD}losses.append(float(loss.detach()))\n"
        "    optimizer.step()\n"
    )
    for batches, repeated in (("batches()", False), ("loader", True)):
        found = check(_START + loop.replace("batches()", batches)) or []
        assert any("an aborted step twice" in each.what for each in found) == repeated


_TRAINER_CLASS = """
import torch
from torch import nn
from torch.utils.data import DataLoader

class Trainer:
    def __init__(self, model, optimizer, loader, every):
        self.model, self.optimizer, self.every = model, optimizer, every
        self.loader = loader

    def _run_batch(self, x, y):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()

    def _run_epoch(self, epoch):
        print(f"epoch {epoch}")
        for x, y in self.loader:
            self._run_batch(x, y)

    def _save(self, epoch):
        torch.save(self.model.state_dict(), "checkpoint.pt")

    def train(self, epochs):
        for epoch in range(epochs):
            self._run_epoch(epoch)
            if epoch % self.every == 0:
                self._save(epoch)

def main():
    net = nn.Linear(4, 2)
    loader = DataLoader(dataset(), batch_size=8, shuffle=True)
    Trainer(net, torch.optim.SGD(net.parameters(), 0.1), loader, 2).train(3)

if __name__ == "__main__":
    main()
"""


def test_a_class_that_trains_is_checked() -> None:
    lines = _TRAINER_CLASS.splitlines()
    assert {lines[each.line - 1].strip() for each in check(_TRAINER_CLASS) or []} == {
        'print(f"epoch {epoch}")',
        'torch.save(self.model.state_dict(), "checkpoint.pt")',
        "for x, y in self.loader:",  # training without as_distributed
        "loader = DataLoader(dataset(), batch_size=8, shuffle=True)",
    }


_CALLBACKS = """
import torch
from shoal.integrations.transformers import Trainer, TrainingArguments
from transformers import TrainerCallback
import lightning

class Shows(TrainerCallback):
    def on_epoch_end(self, args, state, control, **kwargs):
        print(state.epoch)
        if state.is_world_process_zero:
            print(state.log_history)
        if args.should_save:
            open("log.txt", "w")

    def on_step_end(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        self._write(state)

    def _write(self, state):
        open("steps.txt", "w")

class Mine(Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        torch.save(inputs, "inputs.pt")
        return super().compute_loss(model, inputs, **kwargs)

class Net(lightning.LightningModule):
    def training_step(self, batch, index):
        self._show(index)
    def _show(self, index):
        print(index)
    @lightning.pytorch.utilities.rank_zero_only
    def on_fit_end(self):
        print("done")
    def prepare_data(self):
        open("data.bin", "wb")

Mine(model, TrainingArguments("out"), callbacks=[Shows()]).train()
"""


def test_output_of_callbacks_and_modules_that_every_rank_calls_is_reported() -> None:
    lines = _CALLBACKS.splitlines()
    assert [lines[each.line - 1].strip() for each in check(_CALLBACKS) or []] == [
        "print(state.epoch)",
        'torch.save(inputs, "inputs.pt")',
        "print(index)",
    ]


@pytest.mark.parametrize(
    "expression",
    [
        " + ".join("abc"[i % 3] for i in range(800)),
        "a" + ".b" * 700,
        "a" + ".b(1)" * 400,
        " if a else ".join("a" * 600),
        "f'{" + " + ".join("a" * 500) + ":{a + a}}'",
    ],
)
def test_deeply_nested_expressions_are_checked(expression: str) -> None:
    lines = """
value = {}
with open({}, 'w') as out: pass
model.step({}); (lambda: 1).x[{}] = 3
rate = {}
for group in optimizer.param_groups: group['lr'] = rate
""".replace("{}", expression)
    source = f"{_START}{lines}{_LOOP}{textwrap.indent(lines, '        ')}\n    print(epoch)\n"
    found = check(source)
    assert found is not None
    assert found[-1].what.startswith("print()")
    assert convert(source) is not None


def test_long_chains_of_statements_are_checked() -> None:
    branches = "".join(f"elif kind == {number}:\n    width = {number}\n" for number in range(300))
    rates = "".join(f"r{number + 1} = r{number} * 1\n" for number in range(1000))
    source = f"{_START}if kind:\n    width = 1\n{branches}r0 = 1\n{rates}"
    loop = f"{_LOOP}        optimizer.param_groups[0]['lr'] = r1000\n"
    assert check(source + loop) == []
    assert convert(source + loop) is not None


_DEVICE = 'device = "cuda" if torch.cuda.is_available() else "cpu"'
_AVERAGE = "torch.optim.swa_utils.AveragedModel(net)"
_OWN_AVERAGE = "class EMA:\n    def update(self, model): ...\n"


@pytest.mark.parametrize(
    ("before", "line", "remedy"),
    [
        (f"ema = {_AVERAGE}\n", f"ema = {_AVERAGE}", "after `model, optimizer = shoal.as_distr"),
        (f"{_OWN_AVERAGE}ema = EMA(net)\n", "ema = EMA(net)", "shoal.register_state(ema=ema)"),
    ],
)
def test_an_average_that_is_early_or_not_registered_is_reported(
    before: str, line: str, remedy: str
) -> None:
    at = "model, optimizer ="
    source = _START.replace(at, before + at) + _LOOP + "        ema.update(model)\n"
    found = check(source) or []
    assert [source.splitlines()[each.line - 1] for each in found] == [line]
    assert remedy in found[0].remedy
    assert check(_START + f"ema = {_AVERAGE}\n" + _LOOP + "        ema.update(model)\n") == []
    rate = "optimizer.param_groups[0]['lr'] = 0.1\n"
    plain = source[: source.index("class" if "class" in before else "ema")].replace("shoal, ", "")
    plain += "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
    late = f"{plain}ema = {_AVERAGE}\n{rate}{_LOOP}        ema.update(model)\n"
    assert not any("average" in each.what for each in check(late) or [])
    kind = "class EMA(torch.optim.swa_utils.AveragedModel): ...\n"
    assert check(f"{_START}{kind}ema = EMA(net)\n{_LOOP}        ema.update(model)\n") == []
    named = source.replace("\nfor epoch", "\nshoal.register_state(ema=ema)\nfor epoch")
    assert check(named) == ([] if "class EMA" in before else found)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "gpt",
            {
                "ix = torch.randint(len(data) - block_size, (batch_size,))": _OWN_BATCHES,
                "for _micro_step in range(gradient_accumulation_steps):": "gradients accumulate",
                _DEVICE: '"cuda" is GPU 0',
                "iter_num = 0": "the training loop depends on iter_num",
                "best_val_loss = 1e9": "the training loop depends on best_val_loss",
            },
        ),
        (
            "memmap",
            {
                "starts = rng.integers(0, len(tokens) - CONTEXT - 1, size=BATCH)": _OWN_BATCHES,
                'group["lr"] = LR * min(1.0, (it + 1) / WARMUP)': "the learning rate depends on `",
            },
        ),
        (
            "classifier",
            {
                f"device = torch.device({_DEVICE.removeprefix('device = ')})": '"cuda" is GPU 0',
                "ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))": "an average",
                "if (i + 1) % args.accum_steps == 0 or i + 1 == len(train_loader):": "gradients a",
                "running += loss.item() * args.accum_steps": "running counts an aborted step twi",
                "train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)": (
                    "the DataLoader of the training loop"
                ),
            },
        ),
    ],
)
def test_whole_scripts_are_reported_when_plain_and_clean_when_converted(
    name: str, lines: dict[str, str]
) -> None:
    source = (_PLAIN_SCRIPTS / f"{name}.py").read_text()
    found = {
        source.splitlines()[each.line - 1].strip(): each.what
        for each in check(source) or []
        if not each.what.startswith(("print()", "torch.save()", "training loop without"))
    }
    for line, what in lines.items():
        assert found.pop(line).startswith(what)
    assert [what for what in found.values() if not what.startswith("every rank validates")] == []
    assert check((_PLAIN_SCRIPTS / f"{name}_converted.py").read_text()) == []


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


@pytest.mark.parametrize("content", [None, "def (:\n", "a = " + "-" * 20_000 + "1\n"])
def test_files_that_are_not_scripts_are_refused(tmp_path: Path, content: str | None) -> None:
    script = tmp_path / "a.py"
    if content is not None:
        script.write_text(content)
    result = CliRunner().invoke(app, ["check", str(script)])
    assert isinstance(result.exception, ConfigurationError)
    assert "a.py" in str(result.exception)
