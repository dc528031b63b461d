"""`shoal init`: the starter, and copies of plain scripts."""

from __future__ import annotations

import ast
import os
import pty
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from shoal.checking.conversion import MARK, convert
from shoal.checking.rules import check
from shoal.checking.script import Script
from shoal.cli.app import app
from shoal_common.errors import ConfigurationError
from typer.testing import CliRunner

_EXAMPLES = Path(__file__).parents[3] / "examples"
_PLAIN = (_EXAMPLES / "train_plain.py").read_text()


def test_starter_is_written_with_the_next_command_and_runs_unedited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["init"])
    assert (result.exit_code, result.stdout.splitlines()) == (
        0,
        ["wrote train.py", "next: shoal run --standalone --nproc-per-node 2 train.py"],
    )
    source = (tmp_path / "train.py").read_text()
    assert check(source) == []
    for call in (
        "ElasticDataLoader",
        "register_state",
        "is_main_process",
        "save_checkpoint",
        "best=",
        "resume",
        "evaluate",
        ".epochs(",
    ):
        assert call in source


def test_a_file_is_overwritten_only_with_force(tmp_path: Path) -> None:
    script, plain = tmp_path / "my train.py", tmp_path / "plain.py"
    script.write_text("mine\n")
    plain.write_text(_PLAIN)
    for words in (["init", str(script)], ["init", str(script), "--from", str(plain)]):
        result = CliRunner().invoke(app, words)
        assert isinstance(result.exception, ConfigurationError)
        assert "--force" in str(result.exception)
        assert script.read_text() == "mine\n"
    result = CliRunner().invoke(app, ["init", str(script), "--force"])
    assert f"--nproc-per-node 2 '{script}'" in result.stdout
    assert "as_distributed" in script.read_text()


def test_terminal_prompts_for_the_file(tmp_path: Path) -> None:
    keys, terminal = pty.openpty()
    try:
        with subprocess.Popen(
            [sys.executable, "-m", "shoal", "init"],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            cwd=tmp_path,
        ) as command:
            os.write(keys, b"mine.py\n")
            assert command.wait(120) == 0
        shown = os.read(keys, 10_000).decode()
    finally:
        os.close(keys)
        os.close(terminal)
    assert "Script to write [train.py]:" in shown
    assert (tmp_path / "mine.py").exists()


def test_the_plain_example_is_converted_and_shown_as_a_diff(tmp_path: Path) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text(_PLAIN)
    result = CliRunner().invoke(app, ["init", "--from", str(plain)])
    assert result.exit_code == 0
    changed = [line for line in result.stdout.splitlines() if line.startswith(("+", "-"))]
    assert changed[2:] == [
        "+import shoal",
        "-loader = DataLoader(dataset, batch_size=96, shuffle=True)",
        "+model, optimizer = shoal.as_distributed(model, optimizer)",
        "+loader = shoal.ElasticDataLoader.from_dataloader(DataLoader(dataset, batch_size=96, "
        "shuffle=True))",
        "-for epoch in range(300):",
        "+for epoch in loader.epochs(300):",
        "+        shoal.report(loss=loss)",
        '-    print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)',
        '+    shoal.print_once(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)',
    ]
    assert result.stdout.endswith(
        f"next: shoal run --standalone --nproc-per-node 2 {tmp_path}/plain_elastic.py\n"
    )
    assert plain.read_text() == _PLAIN
    assert check((tmp_path / "plain_elastic.py").read_text()) == []


def test_a_loop_in_a_function_with_a_scheduler_is_converted_and_the_rest_is_marked() -> None:
    source = """\
import torch
from torch import nn
from torch.utils.data import DataLoader


def main():
\tmodel = nn.Linear(2, 1)
\toptimizer = torch.optim.SGD(
\t\tmodel.parameters(), 0.1)
\tscheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
\tloader = DataLoader(
\t\tdataset(),
\t\tbatch_size=8)
\tbest = 9.0
\tfor epoch in range(3):
\t\ttotal = 0.0
\t\tfor i, (x, y) in enumerate(loader):
\t\t\tloss = nn.functional.mse_loss(model(x), y)
\t\t\tloss.backward()  # ö
\t\t\toptimizer.step()
\t\t\tscheduler.step()
\t\t\toptimizer.zero_grad()
\t\t\ttotal += loss.item()
\t\tif total < best:
\t\t\tbest = total
\t\tprint("ö", total / len(loader))


main()
"""
    conversion = convert(source)
    assert conversion is not None
    assert (conversion.obstacles, conversion.marks) == ((), 2)
    lines = conversion.source.splitlines()
    at = lines.index("\tmodel, optimizer = shoal.as_distributed(model, optimizer)")
    assert lines[at - 1] == "\t\tmodel.parameters(), 0.1)"
    at = lines.index("\t\t\tif optimizer.step():")
    assert lines[at - 1 : at + 2] == [
        "\t\t\tshoal.report(loss=loss)",
        "\t\t\tif optimizer.step():",
        "\t\t\t\tscheduler.step()",
    ]
    at = lines.index("\tbest = 9.0")
    assert lines[at - 3].startswith(f"\t{MARK}the training loop depends on best")
    assert f"\t\t\t{MARK}total counts an aborted step twice" in conversion.source
    assert '\t\tshoal.print_once("ö", total / len(loader))' in lines


@pytest.mark.parametrize(
    ("before", "parameters"),
    [
        ("", "(p for p in model.parameters() if p.requires_grad)"),
        ("some = [p for p in model.parameters() if p.requires_grad]", "some"),
        ("", "params=[p for n, p in model.named_parameters() if 'bias' in n]"),
        ("model[0].requires_grad_(False)", "model[1].parameters()"),
        (
            "decay = [model[0].weight, *model[1].parameters()]\n"
            "rest = list(model[0].parameters())\n"
            "groups = [{'params': decay}, {'params': rest, 'weight_decay': 0.0}]",
            "groups",
        ),
    ],
)
def test_optimizer_may_have_groups_or_some_of_the_models_parameters(
    before: str, parameters: str
) -> None:
    made = f"optimizer = torch.optim.AdamW({parameters}, lr=1e-3)"
    conversion = convert(_PLAIN.replace(_MADE, f"{before}\n{made}"))
    assert conversion is not None
    assert (conversion.obstacles, conversion.marks) == ((), 0)
    distributed = "model, optimizer = shoal.as_distributed(model, optimizer)"
    assert f"{made}\n{distributed}\n" in conversion.source


@pytest.mark.parametrize(
    ("old", "new", "converted"),
    [
        ("in loader:", "in tqdm(loader):", "    for images, labels in loader:"),
        ("in loader:", 'in tqdm(loader, desc=f"{epoch}"):', "    for images, labels in loader:"),
        (
            "in loader:",
            "in tqdm(\n    loader,\n    leave=False\n):",
            "    for images, labels in loader:",
        ),
        (
            "images, labels in loader:",
            "i, (images, labels) in tqdm(enumerate(loader), total=len(loader)):",
            "    for i, (images, labels) in enumerate(loader):",
        ),
        (
            "images, labels in loader:",
            "i, (images, labels) in enumerate(tqdm(loader), 1):",
            "    for i, (images, labels) in enumerate(loader, 1):",
        ),
        (
            "    for images, labels in loader:",
            "    bar = tqdm(loader, ncols=80)\n    for images, labels in bar:",
            "    bar = loader",
        ),
        ("range(300)", "range(0, 300)", "for epoch in loader.epochs(300):"),
        ("range(300)", "tqdm(range(300))", "for epoch in loader.epochs(300):"),
        ("range(300)", "trange(300, desc='epochs')", "for epoch in loader.epochs(300):"),
    ],
)
def test_progress_bars_around_a_loop_are_dropped(old: str, new: str, converted: str) -> None:
    assert old in _PLAIN
    conversion = convert(_IMPORTS + _PLAIN.replace(old, new))
    assert conversion is not None
    assert (conversion.obstacles, conversion.marks) == ((), 0)
    assert converted in conversion.source.splitlines()
    assert "tqdm(" not in conversion.source


@pytest.mark.parametrize(
    ("begin", "end", "number"), [("1", "301", "300"), ("1", "n + 1", "n"), ("1", "n", "n - 1")]
)
def test_epochs_counted_from_one_keep_their_numbers(begin: str, end: str, number: str) -> None:
    conversion = convert(f"n = 3\n{_PLAIN.replace('range(300)', f'range({begin}, {end})')}")
    assert conversion is not None
    assert (conversion.obstacles, conversion.marks) == ((), 0)
    assert f"for epoch in loader.epochs({number}):\n    epoch += 1  #" in conversion.source


def test_loop_that_resumes_by_itself_is_converted_and_refuses_another_first_epoch() -> None:
    resuming = (
        "first, best = 0, 0.0\n"
        "if resume:\n"
        "    first = load(resume) + 1\n"
        "for epoch in range(first, 300):"
    )
    conversion = convert(_PLAIN.replace(_RANGE, resuming))
    assert conversion is not None
    assert (conversion.obstacles, conversion.marks) == ((), 1)
    lines = conversion.source.splitlines()
    at = lines.index("if first != 0:")
    assert lines[at + 1].startswith("    raise SystemExit(")
    assert lines[at + 2] == "for epoch in loader.epochs(300):"
    assert "shoal.resume(directory)" in " ".join(lines[at - 3 : at])

    unchanged = convert(_PLAIN.replace(_RANGE, "first = 0\nfor epoch in range(first, 300):"))
    assert unchanged is not None
    assert (unchanged.marks, "SystemExit" in unchanged.source) == (0, False)


def test_an_average_above_as_distributed_moves_below_it_with_its_comment() -> None:
    average = (
        "# of the weights\n"
        "average = AveragedModel(\n    model, multi_avg_fn=ema(0.9)\n).to(device)\n"
    )
    updated = f"{_STEP}\n        average.update_parameters(model)"
    source = _PLAIN.replace(_MADE, f"{average}x = 1\n{_MADE}").replace(_STEP, updated)
    conversion = convert(_IMPORTS + source)
    assert conversion is not None
    assert (conversion.obstacles, conversion.marks) == ((), 0)
    distributed = "model, optimizer = shoal.as_distributed(model, optimizer)\n"
    assert f"x = 1\n{_MADE}\n{distributed}{average}" in conversion.source
    assert conversion.source.count("AveragedModel(") == 1
    assert (
        "        if optimizer.step():\n            average.update_parameters(model)\n"
        in conversion.source
    )


def test_a_registered_scheduler_may_step_anywhere_in_the_loop() -> None:
    schedule = "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 9)"
    source = _PLAIN.replace(_MADE, f"{_MADE}\n{schedule}").replace(
        "        optimizer.zero_grad()", "        optimizer.zero_grad()\n        schedule.step()"
    )
    conversion = convert(source)
    assert conversion is not None
    assert (conversion.obstacles, conversion.marks) == ((), 0)
    assert "        optimizer.zero_grad()\n        schedule.step()\n" in conversion.source


_AFTER_IMPORTS = "\n\ntorch.manual_seed"


def _within(head: str) -> str:
    """Returns the plain example with everything after its imports inside of a statement."""
    imports, split, rest = _PLAIN.partition(_AFTER_IMPORTS)
    assert split
    return f"{imports}\n\n{head}\n{textwrap.indent(_AFTER_IMPORTS.lstrip() + rest, '    ')}"


def test_a_script_under_a_main_guard_is_converted() -> None:
    guard = 'if __name__ == "__main__":\n'
    conversion = convert(_within(guard.rstrip()))
    assert conversion is not None
    assert (conversion.obstacles, conversion.marks) == ((), 0)
    plain = convert(_PLAIN)
    assert plain is not None
    body = textwrap.dedent(conversion.source.partition(guard)[2])
    assert body == _AFTER_IMPORTS.lstrip() + plain.source.partition(_AFTER_IMPORTS)[2]


@pytest.mark.parametrize(
    ("source", "obstacles"),
    [
        (lambda: _within("if train:"), ["the loop over epochs is inside another statement"]),
        (
            lambda: _PLAIN.replace(
                _PLAIN[_PLAIN.index(_RANGE) :],
                'if __name__ == "__main__":\n'
                + textwrap.indent(_PLAIN[_PLAIN.index(_RANGE) :], "    "),
            ),
            ["it is created outside of the block of the loop"] * 2,
        ),
    ],
)
def test_loop_in_another_block_lists_only_true_obstacles(
    source: Callable[[], str], obstacles: list[str]
) -> None:
    conversion = convert(source())
    assert conversion is not None
    assert [each.partition(": ")[2] for each in conversion.obstacles] == obstacles
    _check_that_loops_are_refused(conversion.source)


def _check_that_loops_are_refused(source: str) -> None:
    """Checks that an error ends the script directly above its first training loop."""
    script = Script(source)
    loop = script.training_loops()[0]
    (block,) = (
        value
        for _, value in ast.iter_fields(next(script.above(loop)))
        if isinstance(value, list) and loop in value
    )
    above = block[block.index(loop) - 1]
    assert isinstance(above, ast.Raise)
    assert ast.unparse(above).startswith("raise SystemExit('the training loop below is not conv")


_IMPORTS = "from torch.optim.swa_utils import AveragedModel\nfrom tqdm import tqdm, trange\n"
_RANGE = "for epoch in range(300):"
_COUNTED = "for i, (images, labels) in enumerate(loader):"
_STEP = "        optimizer.step()"
_MADE = "optimizer = torch.optim.AdamW(model.parameters(), 1e-3)"


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("import torch\n", "import torch\nimport torch.distributed\n", "docs/migration/ddp.md"),
        (_RANGE, f"torch.distributed.barrier()\n{_RANGE}", "docs/migration/ddp.md"),
        (_MADE, f"{_MADE}\nother = nn.DataParallel(model)", "docs/migration/ddp.md"),
        ("import torch\n", "import torch\nimport accelerate\n", "docs/migration/accelerate.md"),
        (_RANGE, "for epoch in range(2, 301):", "not `for ... in range(n)`"),
        (_RANGE, f"first = 1\n{_RANGE.replace('300', 'first, 300')}", "shoal.resume restores"),
        (
            _RANGE,
            f"if resume:\n    first = 0\n{_RANGE.replace('300', 'first, 300')}",
            "shoal.resume restores",
        ),
        (_RANGE, "for epoch in tqdm(tqdm(range(300))):", "not `for ... in range(n)`"),
        (_RANGE, "while True:", "not `for ... in range(n)`"),
        ("import torch\n", "import torch\nimport trl\n", "docs/guides/trl.md"),
        (_RANGE, "for epoch in range(first, 300):", "shoal.resume restores the epoch"),
        (_STEP, "        if loss < 9:\n            optimizer.step()", "optimizer.step()"),
        (_STEP, "        optimizer.step(None)", "optimizer.step()"),
        (_STEP, f"{_STEP}\n{_STEP}", "optimizer.step()"),
        (_STEP, f"{_STEP}; x = 1", "the line has more than one statement"),
        (_STEP, f"        if loss > 9:\n            break\n{_STEP}", "break, continue or return"),
        (_STEP, f"{_STEP}\n        x = 1\n        schedule.step()", "directly after"),
        (
            _MADE,
            f"average = AveragedModel(model)\naverage.load_state_dict(saved)\n{_MADE}",
            "an average created above as_distributed",
        ),
        (
            _MADE,
            f"d = 0.9\naverage = AveragedModel(model, avg_fn=ema(d))\nd = 0.01\n{_MADE}",
            "an average created above as_distributed",
        ),
        (
            _MADE,
            f"def f():\n    return average(x)\n\n\naverage = AveragedModel(model)\nf()\n{_MADE}",
            "an average created above as_distributed",
        ),
        (
            "    for images, labels in loader:",
            "    bar = tqdm(loader)\n    bar.set_description('x')\n    for images, labels in bar:",
            "the script uses the progress bar bar",
        ),
        ("        loss.backward()", "        if loss:\n            loss.backward()", "backward()"),
        (_MADE, _MADE.replace("model.parameters()", "[{'params': []}]"), "model.parameters()"),
        (_MADE, _MADE.replace("model.parameters()", "chosen()"), "model.parameters()"),
        (
            _MADE,
            _MADE.replace("model.parameters()", "[*other.parameters(), *model.parameters()]"),
            "the parameters of one model",
        ),
        (_MADE, f"{_MADE}\nmodel = model.to('cpu')", "assigned again"),
        (_MADE, f"other = model\n{_MADE}", "may keep a reference to"),
        (
            _MADE,
            f"average = torch.optim.swa_utils.AveragedModel(model)\nprint(average)\n{_MADE}",
            "an average created above as_distributed",
        ),
        (_MADE, f"{_MADE}\nsecond = torch.optim.SGD(model.parameters(), 1)", "one optimizer"),
        ("shuffle=True)", "sampler=sampler)", "sampler"),
        (_RANGE, f"first = next(iter(loader))\n{_RANGE}", "used outside of"),
        ("in loader:", "in DataLoader(dataset):", "not `for ... in loader`"),
    ],
)
def test_loop_of_an_unsupported_shape_is_kept_below_an_error_with_the_reason_and_marks(
    old: str, new: str, reason: str
) -> None:
    assert old in _PLAIN
    source = _IMPORTS + _PLAIN.replace(old, new)
    conversion = convert(source)
    assert conversion is not None
    assert reason in " ".join(conversion.obstacles)
    assert conversion.marks > 0
    if reason.startswith("docs/"):  # of another library
        assert ast.dump(ast.parse(conversion.source)) == ast.dump(ast.parse(source))
    else:
        _check_that_loops_are_refused(conversion.source)
        lines = conversion.source.splitlines()
        loop = source[source.index("\nfor epoch" if "\nfor epoch" in source else "\nwhile ") :]
        kept = [line.replace("print(", "shoal.print_once(") for line in loop.splitlines()[1:]]
        left = [each for each in lines if not each.lstrip().startswith("#")]
        assert left[-len(kept) :] == kept


@pytest.mark.parametrize(
    ("old", "new", "line", "remedy"),
    [
        (_RANGE, "while True:", "while True:", "loader.epochs(max_steps=n)"),
        (_RANGE, "for epoch in range(2, 301):", "for epoch in range(2, 301):", "loader.epochs(n)"),
        (
            "    for images, labels in loader:",
            "    bar = tqdm(loader)\n    for images, labels in bar:\n        bar.update()",
            "    bar = tqdm(loader)",
            "tqdm(loader, disable=not shoal.is_main_process())",
        ),
        (
            _RANGE,
            "for epoch in range(first, 300):",
            "for epoch in range(first, 300):",
            "shoal.resume(directory) before the loop, without `first`",
        ),
        (_STEP, f"{_STEP}\n        if loss < 1: break", "        if", "epochs(max_steps=n)"),
        ("flush=True)", "flush=True)\n    if loss < 1: break", "    if", "should_early_stop"),
    ],
)
def test_unconverted_loop_names_what_to_write_instead(
    tmp_path: Path, old: str, new: str, line: str, remedy: str
) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text(_IMPORTS + _PLAIN.replace(old, new))
    shown = CliRunner().invoke(app, ["init", "--from", str(plain)]).stdout
    lines = (tmp_path / "plain_elastic.py").read_text().splitlines()
    at = next(n for n, each in enumerate(lines) if f"{MARK}not converted" in each)
    above = next(n for n in range(at, len(lines)) if not lines[n].lstrip().startswith("#"))
    comment = " ".join(each.strip(" #") for each in lines[at:above])
    assert remedy in comment
    assert lines[above].startswith(line)
    assert f"places marked '{MARK.strip()}'" in shown


@pytest.mark.parametrize(
    ("old", "new", "page"),
    [
        (_STEP, f"{_STEP}\n        if loss < 1: break", "docs/migration/classifier.md"),
        (_STEP, f"        if i % 2 == 1:\n    {_STEP}", "docs/guides/accumulation.md"),
        (_RANGE, "while True:", "docs/migration/nanogpt.md"),
    ],
)
def test_error_above_an_unconverted_loop_names_the_page_for_its_kind(
    old: str, new: str, page: str
) -> None:
    counted = _PLAIN.replace("for images, labels in loader:", _COUNTED)
    conversion = convert(counted.replace(old, new))
    assert conversion is not None
    assert conversion.page == page
    assert f"is not converted yet: {page}" in conversion.source


def test_all_obstacles_are_listed_by_line(tmp_path: Path) -> None:
    plain = tmp_path / "plain.py"
    counted = f"        if i % 2 == 1:\n    {_STEP}\n    {_STEP.replace('step', 'zero_grad')}"
    source = (
        _PLAIN.replace(_RANGE, "first = 1\nfor epoch in range(first, 300):")
        .replace("for images, labels in loader:", "for i, (images, labels) in enumerate(loader):")
        .replace("        optimizer.zero_grad()\n", "")
        .replace(_STEP, counted)
        .replace("flush=True)", "flush=True)\n    if loss < 1:\n        break")
        .replace("shuffle=True)", "sampler=sampler)")
    )
    plain.write_text(source)
    shown = CliRunner().invoke(app, ["init", "--from", str(plain)]).stdout.splitlines()
    at = shown.index(
        "the training loop was not converted, so the copy ends with an error above it; "
        "docs/guides/accumulation.md shows how to convert it:"
    )
    listed = [each.strip() for each in shown[at + 1 : at + 5]]
    lines = ["", *map(str.strip, source.splitlines())]
    found = re.findall(r"line (\d+): (.*)", "\n".join(listed))
    assert [(what, lines[int(line)]) for line, what in found] == [
        (
            "loader has a sampler or worker_init_fn, or may have one",
            "loader = DataLoader(dataset, batch_size=96, sampler=sampler)",
        ),
        (
            "range(first, 300): shoal.resume restores the epoch, so loop over loader.epochs(300)",
            "for epoch in range(first, 300):",
        ),
        (
            "gradients accumulate over several batches: docs/guides/accumulation.md",
            "if i % 2 == 1:",
        ),
        ("the training loop has a break, continue or return", "break"),
    ]
    assert "micro_batch_size=" in (tmp_path / "plain_elastic.py").read_text()


@pytest.mark.parametrize(
    ("name", "line", "remedy"),
    [
        ("gpt", "    ix = torch.randint(", "#a-script-that-draws-its-own-batches"),
        ("gpt", "    for _micro_step in range(", "loader.steps()"),
        ("gpt", "iter_num = 0", "loader.global_step"),
        ("memmap", "    starts = rng.integers(", "#a-script-that-draws-its-own-batches"),
        ("memmap", '        group["lr"] = ', "loader.global_step"),
        ("memmap", "for it in range(MAX_ITERS):", "loader.epochs(max_steps=n)"),
        ("gpt", "        for k in range(eval_iters):", "shoal.evaluate(model, loader, fn)"),
        ("gpt", "raise SystemExit(", "convert the loop as in docs/migration/nanogpt.md"),
        ("classifier", "    raise SystemExit(", "as in docs/guides/accumulation.md"),
        ("classifier", "        torch.save(ema.module.s", "consume_prefix_in_state_dict_if_presen"),
        ("classifier", "            if (i + 1) % args.accum_steps == 0", "loader.steps()"),
    ],
)
def test_copies_of_whole_scripts_have_comments_at_the_lines_to_change(
    name: str, line: str, remedy: str
) -> None:
    plain = (Path(__file__).with_name("plain_scripts") / f"{name}.py").read_text()
    conversion = convert(plain)
    assert conversion is not None
    lines = conversion.source.splitlines()
    at = next(n for n, each in enumerate(lines) if each.startswith(line))
    above = next(n for n in range(at, 0, -1) if not lines[n - 1].lstrip().startswith("#"))
    assert remedy in " ".join(each.strip(" #") for each in lines[above:at])


def test_everything_but_an_endless_loop_is_converted(tmp_path: Path) -> None:
    plain = tmp_path / "plain.py"
    plain.write_text((_EXAMPLES / "nanogpt/train_plain.py").read_text() + _AFTER_LOOP)
    shown = CliRunner().invoke(app, ["init", "--from", str(plain)]).stdout.splitlines()
    changed = [
        line
        for line in shown
        if line.startswith(("+", "-")) and not line.lstrip("+ ").startswith("#")
    ]
    assert changed[2:] == [
        "+import shoal",
        "+model, optimizer = shoal.as_distributed(model, optimizer)",
        '+raise SystemExit("the training loop below is not converted yet: '
        'docs/migration/nanogpt.md")',
        '-        print(f"iter {iter_num}: loss {loss.item():.4f}")',
        '+        shoal.print_once(f"iter {iter_num}: loss {loss.item():.4f}")',
        '-        print(f"iter {iter_num}: val loss {val_loss:.4f}")',
        '+        shoal.print_once(f"iter {iter_num}: val loss {val_loss:.4f}")',
        '-            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}',
        '+            state = {"model": model.module.state_dict(), '
        '"optimizer": optimizer.state_dict()}',
        '-torch.save(model.state_dict(), "final.pt")',
        "+if shoal.is_main_process():",
        '+    torch.save(model.module.state_dict(), "final.pt")',
        '-torch.save(model.state_dict(), "read.pt")',
        '+torch.save(model.module.state_dict(), "read.pt")',
    ]
    assert (
        "the training loop was not converted, so the copy ends with an error above it; "
        "docs/migration/nanogpt.md shows how to convert it:"
    ) in shown


_AFTER_LOOP = """
torch.save(model.state_dict(), "final.pt")
torch.save(optimizer.state_dict(), "optimizer.pt")
torch.save(model.state_dict(), "read.pt")
other.load_state_dict(torch.load("read.pt"))
"""


@pytest.mark.parametrize(
    ("line", "converted"),
    [
        ('device = "cuda" if torch.cuda.is_available() else "cpu"', "device = shoal.device()"),
        (
            'device = torch.device("cuda" if torch.cuda.is_available() else "cpu")',
            "device = shoal.device()",
        ),
        (
            "import logging\nlogging.basicConfig(format='x', level=logging.INFO)",
            "level=logging.INFO if",
        ),
    ],
)
def test_device_and_logging_are_converted(line: str, converted: str) -> None:
    moved = "model = model.to(device)\n" if "device" in line else ""
    conversion = convert(_PLAIN.replace(_MADE, f"{line}\n{moved}{_MADE}"))
    assert conversion is not None
    assert (conversion.obstacles, conversion.marks) == ((), 0)
    assert converted in conversion.source


def test_names_without_the_prefix_of_a_wrapper_stay_without_it_in_the_copy() -> None:
    plain = "{k.removeprefix('module.'): v for k, v in %s.items()}"
    loaded = f"model.load_state_dict({plain % 'torch.load(path)'})"
    saved = f"torch.save({plain % 'model.state_dict()'}, 'a.pt')"
    conversion = convert(_PLAIN.replace(_MADE, f"{loaded}\n{_MADE}") + f"{saved}\n")
    assert conversion is not None
    assert (conversion.obstacles, conversion.marks) == ((), 0)
    assert f"{loaded}\n{_MADE}\n" in conversion.source
    kept = saved.replace("model.state_dict", "model.module.state_dict")
    assert conversion.source.endswith(f"if shoal.is_main_process():\n    {kept}\n")


@pytest.mark.parametrize(
    "use",
    ["autocast(device)", "if device == 'cpu':\n    pass", "device = other", "logging(device.type)"],
)
def test_device_that_the_script_uses_as_a_string_is_marked(use: str) -> None:
    line = 'device = "cuda" if torch.cuda.is_available() else "cpu"'
    conversion = convert(_PLAIN.replace(_MADE, f"{line}\n{use}\nmodel.to(device)\n{_MADE}"))
    assert conversion is not None
    assert line in conversion.source
    assert f'{MARK}"cuda" is GPU 0 on every rank' in conversion.source


def test_copy_of_a_script_with_unknown_data_says_so() -> None:
    source = _PLAIN.replace("in loader:", "in batches_of(dataset):")
    conversion = convert(f"from mine import batches_of\n{source}")
    assert conversion is not None
    text = re.sub(r"\n *#     ", " ", conversion.source)
    assert f"{MARK}cannot tell whether the ranks train on different samples" in text


def test_marks_are_placed_above_decorators_and_multi_line_statements() -> None:
    source = (
        _PLAIN + '    torch.save(1, "a.pt")\n    torch.save(\n        """a\nb""",\n        path)\n'
    )
    conversion = convert(source.replace(_RANGE, "for epoch in range(2, 9):"))
    assert conversion is not None
    assert conversion.source.count(f"    {MARK}torch.save()") == 2


@pytest.mark.parametrize("content", [None, "def (:\n", "print(1)\n"])
def test_scripts_that_cannot_be_converted_are_refused_and_nothing_is_written(
    tmp_path: Path, content: str | None
) -> None:
    plain = tmp_path / "plain.py"
    if content is not None:
        plain.write_text(content)
    result = CliRunner().invoke(app, ["init", "--from", str(plain)])
    assert isinstance(result.exception, ConfigurationError)
    assert "plain.py" in str(result.exception)
    assert not (tmp_path / "plain_elastic.py").exists()


def test_an_elastic_script_needs_no_copy(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["init", "--from", str(_EXAMPLES / "train.py")])
    assert (result.exit_code, "needs no changes" in result.stdout) == (0, True)
    assert not (_EXAMPLES / "train_elastic.py").exists()
