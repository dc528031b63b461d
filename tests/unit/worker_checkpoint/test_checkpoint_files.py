"""A checkpoint is either complete or does not exist. It is read only if every byte is unchanged."""

import contextlib
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import subprocess
import time
from collections import OrderedDict
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shoal_common.errors import (
    ConfigurationError,
    CorruptDataError,
    DeadlineError,
    StaleGenerationError,
    UnavailableError,
)
from shoal_worker.checkpoint import manifest
from shoal_worker.checkpoint.files import (
    begin,
    check_place,
    latest,
    read_checkpoint,
    write_checkpoint,
)
from shoal_worker.checkpoint.manifest import CheckpointInfo
from shoal_worker.state.digest import state_digest
from shoal_worker.state.tree import Snapshot


def info(step=1, **fields):
    return CheckpointInfo(
        **{"step": step, "strategy": "ddp", "world_size": 3, "generation": 2, **fields}
    )


def write(directory, state, step=1, *, keep=3, fence=lambda: None, **fields):
    return write_checkpoint(
        Path(directory), Snapshot.take(state), info(step, **fields), fence=fence, keep=keep
    )


def sample_state(seed=0):
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "sources": {"loader": {"epoch": 3, "samples": 40}},
        "steps": 7,
    }


def listing(directory):
    return sorted(path.name for path in Path(directory).iterdir())


def test_checkpoint_is_read_back_exactly(tmp_path):
    state = sample_state()
    path = write(tmp_path / "new" / "ckpt", state, 12)
    assert path == tmp_path / "new" / "ckpt" / "step-12"
    back = read_checkpoint(path)
    assert state_digest(back.state) == state_digest(state)
    assert back.info == info(12)
    assert back.info.shoal_version


def test_unusual_values_are_read_back_exactly(tmp_path):
    tied = torch.ones(2)
    state = {
        "whole": torch.arange(3),
        "strange names": None,
    }
    del state["strange names"]
    state |= {
        "model": OrderedDict(
            [
                ("__metadata__", torch.ones(1)),
                ("", torch.zeros(2)),
                ("a/b", tied),
                ("again", tied),
                ("~whole", torch.ones(3)),
            ]
        ),
        "dtypes": [
            torch.ones(2, 2, dtype=dtype)
            for dtype in (
                torch.complex128,
                torch.bfloat16,
                torch.float8_e4m3fn,
                torch.bool,
                torch.uint64,
                torch.float8_e5m2fnuz,
            )
        ],
        "empty": [
            torch.zeros(0, 4),
            torch.zeros((), dtype=torch.complex128),
            torch.zeros(0, 3, dtype=torch.complex128),
        ],
        "0": torch.ones(1),
    }
    back = read_checkpoint(write(tmp_path, state)).state
    assert state_digest(back) == state_digest(state)
    assert back["model"]["a/b"] is back["model"]["again"]
    assert [t.shape for t in back["empty"]] == [(0, 4), (), (0, 3)]


def test_a_models_file_has_the_names_of_its_state_dict_for_any_reader(tmp_path):
    state = sample_state()
    path = write(tmp_path, state)
    by_others = safetensors.torch.load_file(path / "model.safetensors")
    assert by_others.keys() == state["model"].keys()
    assert listing(path) == ["checkpoint.json", "model.safetensors", "optimizer.safetensors"]


def test_manifest_is_readable_json(tmp_path):
    document = json.loads((write(tmp_path, sample_state()) / "checkpoint.json").read_text())
    assert document["format"] == "shoal-checkpoint"
    assert document["info"]["strategy"] == "ddp"
    assert document["structure"]["sources"]["loader"] == {"epoch": 3, "samples": 40}


def test_loaded_state_survives_the_removal_of_its_files(tmp_path):
    state = sample_state()
    path = write(tmp_path, state)
    back = read_checkpoint(path).state
    for file in path.iterdir():
        os.truncate(file, 0)
    shutil.rmtree(path)
    assert state_digest(back) == state_digest(state)


def test_snapshot_is_independent_of_the_live_tensors(tmp_path):
    live = {"model": {"w": torch.ones(3), "t": torch.arange(6.0).reshape(2, 3).t()}}
    snapshot = Snapshot.take(live)
    before = state_digest(live)
    live["model"]["w"].zero_()
    live["model"]["t"].zero_()
    assert state_digest(snapshot.state()) == before
    assert snapshot.nbytes == 3 * 4 + 6 * 4
    assert all(tensor.is_contiguous() for tensor in snapshot.tensors.values())


# ------------------------------------------------------------------- the newest, and number to keep


def test_latest_checkpoint_has_the_highest_step(tmp_path):
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    for step in (9, 10, 2):
        write(tmp_path, {"a": step}, step)
    (tmp_path / "step-x").mkdir()
    (tmp_path / "step-99").touch()
    assert latest(tmp_path) == tmp_path / "step-10"


def test_only_the_newest_are_kept_and_nothing_else_is_touched(tmp_path):
    (tmp_path / "notes.txt").touch()
    (tmp_path / "step-0").mkdir()
    for step in range(1, 6):
        write(tmp_path, {"a": step}, step, keep=2)
    assert listing(tmp_path) == ["notes.txt", "step-0", "step-4", "step-5"]


def test_written_checkpoint_is_kept_though_older_than_the_rest(tmp_path):
    for step in (8, 9):
        write(tmp_path, {"a": step}, step)
    write(tmp_path, {"a": 3}, 3, keep=1)
    assert listing(tmp_path) == ["step-3", "step-9"]


@pytest.mark.parametrize("exchange", [True, False])
def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path, monkeypatch, exchange):
    if not exchange:
        # a file system without this operation returns EINVAL
        monkeypatch.setattr(manifest, "_RENAME_EXCHANGE", 1 << 20)
    write(tmp_path, {"a": 1})
    write(tmp_path, {"a": 2})
    assert read_checkpoint(tmp_path / "step-1").state == {"a": 2}
    assert listing(tmp_path) == ["step-1"]


# ----------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize(
    "error",
    [StaleGenerationError("generation 2 is over"), DeadlineError("the coordinator did not answer")],
)
def test_fenced_off_writer_publishes_nothing(tmp_path, error):
    write(tmp_path, {"a": 1}, 1, keep=1)

    def fence():
        assert listing(tmp_path)[-1] == "step-1"
        raise error

    with pytest.raises(type(error)) as raised:
        write(tmp_path, {"a": 2}, 2, keep=1, fence=fence)
    assert raised.value is error
    assert listing(tmp_path) == ["step-1"]


def test_failing_disk_is_reported_and_existing_files_stay(tmp_path, monkeypatch):
    write(tmp_path, {"model": torch.ones(3)}, 1, keep=1)

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest.os, "fsync", full)
    with pytest.raises(UnavailableError, match="No space left") as raised:
        write(tmp_path, {"model": torch.ones(3)}, 2, keep=1)
    assert raised.value.reason == "CHECKPOINT_NOT_WRITTEN"
    assert listing(tmp_path) == ["step-1"]
    assert read_checkpoint(tmp_path / "step-1").state["model"].equal(torch.ones(3))


def test_a_tensor_file_that_cannot_grow_is_reported(tmp_path):
    """A tensor file that cannot grow raises UnavailableError and leaves no checkpoint, although
    safetensors raises an exception of its own."""
    write(tmp_path, {"model": torch.ones(3)}, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(UnavailableError, match=r"could not be written.*too large"):
            write(tmp_path, {"model": torch.ones(1 << 20)}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert listing(tmp_path) == ["step-1"]


def test_impossible_directory_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="file"):
        write(tmp_path / "file" / "ckpt", {"a": 1})


@pytest.mark.parametrize("state", [[1], {"../x": 1}, {1: 2}, OrderedDict(a=1)])
def test_a_state_whose_entries_cannot_name_files_is_refused(tmp_path, state):
    with pytest.raises(ConfigurationError, match="must be usable as file names"):
        write(tmp_path, state)


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="keep=0"):
        write(tmp_path, {"a": 1}, keep=0)


# ------------------------------------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return write(tmp_path_factory.mktemp("pristine"), sample_state())


@settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_one_flipped_bit_anywhere_is_detected_or_changes_nothing(pristine, tmp_path_factory, data):
    damaged = tmp_path_factory.mktemp("damaged") / "step-1"
    shutil.copytree(pristine, damaged)
    file = damaged / data.draw(st.sampled_from(listing(pristine)))
    raw = bytearray(file.read_bytes())
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(raw)
    if file.suffix != ".json":
        with pytest.raises(CorruptDataError, match=f"{file.name} does not match its digest"):
            read_checkpoint(damaged)
    else:
        with contextlib.suppress(CorruptDataError):
            back = read_checkpoint(damaged)
            assert back.info == info()
            assert state_digest(back.state) == state_digest(sample_state())
    shutil.rmtree(damaged.parent)


@pytest.mark.parametrize("name", ["checkpoint.json", "model.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "emptied", "removed", "longer"])
def test_removed_truncated_or_lengthened_file_is_detected(pristine, tmp_path, name, damage):
    damaged = tmp_path / "step-1"
    shutil.copytree(pristine, damaged)
    file = damaged / name
    size = file.stat().st_size
    match damage:
        case "removed":
            file.unlink()
        case "longer":
            file.write_bytes(file.read_bytes() + b"x")
        case _:
            os.truncate(file, size // 2 if damage == "truncated" else 0)
    with pytest.raises(CorruptDataError) as raised:
        read_checkpoint(damaged)
    assert str(damaged) in str(raised.value)


def test_tensor_files_of_two_checkpoints_cannot_be_mixed(tmp_path):
    one, two = write(tmp_path, sample_state(0), 1), write(tmp_path, sample_state(1), 2)
    shutil.copy(two / "model.safetensors", one / "model.safetensors")
    with pytest.raises(CorruptDataError, match=r"model\.safetensors does not match"):
        read_checkpoint(one)


def edited(pristine, tmp_path, **changes):
    copy = tmp_path / "step-1"
    shutil.copytree(pristine, copy)
    document = json.loads((copy / "checkpoint.json").read_text()) | changes
    (copy / "checkpoint.json").write_text(json.dumps(document))
    return copy


@pytest.mark.parametrize("changes", [{"version": 3}, {"layout": "dcp"}])
def test_newer_format_is_refused_with_the_release_that_wrote_it(pristine, tmp_path, changes):
    with pytest.raises(CorruptDataError, match=r"the release that wrote it, 0\.1\.0") as raised:
        read_checkpoint(edited(pristine, tmp_path, **changes))
    assert raised.value.reason == "FILE_NEWER"


@pytest.mark.parametrize(
    "changes", [{"info": {}}, {"structure": {}}, {"files": {}}, {"xxh3_64": None}]
)
def test_edited_manifest_is_detected(pristine, tmp_path, changes):
    with pytest.raises(CorruptDataError) as raised:
        read_checkpoint(edited(pristine, tmp_path, **changes))
    assert raised.value.reason == "FILE_CORRUPT"


@pytest.mark.parametrize("text", ["{}", "[]", '{"format": "other"}', "null"])
def test_files_not_written_by_shoal_are_foreign(tmp_path, text):
    (tmp_path / "checkpoint.json").write_text(text)
    with pytest.raises(CorruptDataError, match="not a Shoal checkpoint") as raised:
        read_checkpoint(tmp_path)
    assert raised.value.reason == "FILE_FOREIGN"


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"\xff\xfe", b"{", b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_manifest_that_is_not_json_is_corrupt(tmp_path, content):
    (tmp_path / "checkpoint.json").write_bytes(content)
    with pytest.raises(CorruptDataError, match="cannot be read"):
        read_checkpoint(tmp_path)


def test_a_directory_without_a_manifest_is_foreign(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CorruptDataError, match="not a Shoal checkpoint"):
            read_checkpoint(path)


def test_pickle_in_place_of_a_checkpoint_is_never_loaded(pristine, tmp_path):
    trap = tmp_path / "sprung"

    class Trap:
        def __reduce__(self):
            return (Path.touch, (trap,))

    copy = tmp_path / "step-1"
    shutil.copytree(pristine, copy)
    for file in copy.iterdir():
        file.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CorruptDataError):
        read_checkpoint(copy)
    assert not trap.exists()


# -------------------------------------------------------------------------------------------- kills


def save_for_ever(directory, step, channel):
    while True:
        step += 1
        state = {
            "model": {f"w{i}": torch.full((60_000,), float(step)) for i in range(4)},
            "step": step,
        }
        write(directory, state, step, keep=1)
        channel.send(step)


@pytest.mark.slow
def test_kill_9_during_saves_always_leaves_a_complete_checkpoint(tmp_path):
    """A writer that is killed at any time leaves a complete checkpoint, even with keep=1, where a
    wrong order of renaming and removing would leave none."""
    # The plain fork method is unsuitable: other tests have left threads in this process, and a fork
    # would copy the locks that they held.
    forked = multiprocessing.get_context("forkserver")
    forked.set_forkserver_preload(["shoal_worker.checkpoint.files"])
    step = 0
    for round_ in range(8):
        hear, tell = forked.Pipe(duplex=False)
        process = forked.Process(target=save_for_ever, args=(tmp_path, step, tell))
        process.start()
        try:
            assert hear.poll(60)
            reported = hear.recv()
            # not a wait for a condition: the sleep varies the moment of the kill
            time.sleep(0.0033 * round_)
        finally:
            process.kill()
            process.join()
        path = latest(tmp_path)
        assert path is not None
        back = read_checkpoint(path).state
        step = back["step"]
        assert step >= reported
        assert all(tensor.eq(step).all() for tensor in back["model"].values())
    write(tmp_path, {"a": 1}, step + 1, keep=1)
    assert listing(tmp_path) == [f"step-{step + 1}"], "leftovers of killed writers are removed"


def test_leftovers_of_a_killed_writer_are_removed_by_the_next(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f".step-5.{manifest._host()}.{dead.pid}.{'0' * 32}.tmp").mkdir()
    begun = begin(tmp_path, 6)
    assert listing(tmp_path) == [begun.name]


def test_leftovers_of_other_hosts_and_of_living_processes_are_left_alone(tmp_path):
    token = "0" * 32
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = manifest._host()
    names = [
        f".step-5.{host}.{os.getppid()}.{token}.tmp",
        f".step-5.elsewhere.{dead.pid}.{token}.tmp",
        ".step-5.mine.tmp",
    ]
    for name in [*names, f".step-5.{host}.{dead.pid}.{token}.tmp"]:
        (tmp_path / name).mkdir()
    write(tmp_path, {"a": 1})
    assert listing(tmp_path) == sorted([*names, "step-1"])


def test_checkpoints_of_another_run_are_neither_pruned_nor_mistaken_for_own_ones(tmp_path):
    for step in (1, 2):
        write(tmp_path, sample_state(), step, run="older")
    for step in (3, 4, 5):
        write(tmp_path, sample_state(), step, keep=2, run="own")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-1",
        "step-2",
        "step-4",
        "step-5",
    ]
    assert latest(tmp_path).name == latest(tmp_path, run="own").name == "step-5"
    assert latest(tmp_path, run="older").name == "step-2"
    assert latest(tmp_path, run="none") is None


def test_a_directory_in_which_another_run_is_ahead_is_refused(tmp_path):
    write(tmp_path, sample_state(), 60, run="older")
    check_place(tmp_path, 60, "own")
    check_place(tmp_path, 5, "older")
    with pytest.raises(
        ConfigurationError,
        match=r"contains step-60 of another run.*step 5 of this run: give each run its own",
    ):
        check_place(tmp_path, 5, "own")
