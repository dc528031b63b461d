"""Each line of the sample record survives SIGKILL, and the audit counts samples by the rules of
recovery."""

import json
import os
import signal
import subprocess
import sys

import pytest
from shoal_common.errors import ConfigurationError, CorruptDataError
from shoal_worker.data.loader import ElasticDataLoader
from shoal_worker.data.record import SampleRecord, audit


def dealt(generation, step, samples, *, epoch=0, rank=0, index=None, begin=None, **fields):
    line = {
        "kind": "dealt",
        "loader": "loader",
        "generation": generation,
        "epoch": epoch,
        "step": step,
        "rank": rank,
    }
    begin = 2 * step if begin is None else begin
    line |= {
        "index": rank if index is None else index,
        "begin": begin,
        "first": samples[0] if samples else begin,
    }
    return line | {"samples": samples, "expected": 4, "dataset": 4, "drawn": False} | fields


def committed(generation, step, *, epoch=0, begin=None):
    begin = 2 * step if begin is None else begin
    return {
        "kind": "committed",
        "loader": "loader",
        "generation": generation,
        "epoch": epoch,
        "step": step,
        "begin": begin,
    }


@pytest.fixture
def judge(tmp_path):
    def write_and_audit(**members):
        for member, lines in members.items():
            (tmp_path / f"{member}.jsonl").write_text(
                "".join(json.dumps(line) + "\n" for line in lines)
            )
        verdict = audit(tmp_path)
        (epoch,) = verdict.epochs
        assert verdict.exactly_once == epoch.exactly_once
        return epoch

    return write_and_audit


def test_step_is_the_union_of_the_samples_dealt_to_all_members(judge):
    epoch = judge(
        a=[dealt(1, 0, [0]), committed(1, 0), dealt(1, 1, [2]), committed(1, 1)],
        b=[dealt(1, 0, [1], rank=1), committed(1, 0), dealt(1, 1, [3], rank=1), committed(1, 1)],
    )
    assert epoch.exactly_once
    assert (epoch.once, epoch.expected) == (4, 4)


def test_a_dead_members_part_of_a_step_that_a_survivor_committed_counts(judge):
    assert judge(
        a=[dealt(1, 0, [0]), committed(1, 0), dealt(2, 1, [2, 3]), committed(2, 1)],
        b=[dealt(1, 0, [1], rank=1)],
    ).exactly_once


def test_the_highest_generation_of_a_step_counts(judge):
    """A step that a dead member had applied and the survivors repeated in a later generation counts
    once."""
    epoch = judge(
        a=[
            dealt(1, 0, [0]),
            dealt(2, 0, [0, 1]),
            committed(2, 0),
            dealt(2, 1, [2, 3]),
            committed(2, 1),
        ],
        b=[dealt(1, 0, [1], rank=1), committed(1, 0)],
    )
    assert epoch.exactly_once


def test_steps_rolled_back_by_a_later_generation_do_not_count_even_if_it_divides_them_differently(
    judge,
):
    """Steps that a resume from an earlier checkpoint rolled back do not count, even if the later
    generation divides the samples into steps differently."""
    epoch = judge(
        a=[dealt(1, 0, [0, 1]), committed(1, 0), dealt(1, 1, [2, 3]), committed(1, 1)],
        b=[dealt(2, 0, [0, 1, 2, 3]), committed(2, 0)],
    )
    assert epoch.exactly_once


def test_a_step_dealt_twice_in_one_generation_counts_once(judge):
    assert judge(
        a=[
            dealt(1, 0, [0, 1]),
            dealt(1, 0, [0, 1]),
            committed(1, 0),
            dealt(1, 1, [2, 3]),
            committed(1, 1),
        ]
    ).exactly_once


def test_samples_of_steps_that_never_committed_are_lost_and_named(judge):
    epoch = judge(a=[dealt(1, 0, [0, 1]), committed(1, 0), dealt(1, 1, [2, 3])])
    assert (epoch.once, epoch.lost, epoch.lost_samples, epoch.repeated) == (2, 2, (2, 3), 0)


def test_samples_dealt_to_two_ranks_are_repeated_and_named(judge):
    epoch = judge(a=[dealt(1, 0, [0, 1]), committed(1, 0)], b=[dealt(1, 0, [1, 2, 3], rank=1)])
    assert (epoch.once, epoch.lost, epoch.repeated, epoch.repeated_samples) == (3, 0, 1, (1,))


def test_a_dropped_tail_is_not_lost(judge):
    epoch = judge(a=[dealt(1, 0, [0, 1], expected=2, dataset=3), committed(1, 0)])
    assert epoch.exactly_once
    assert epoch.lost_samples == ()


def test_samples_that_a_sampler_draws_twice_count_by_position(judge):
    fields = {"drawn": True, "dataset": 9}
    epoch = judge(
        a=[
            dealt(1, 0, [7, 7], first=0, **fields),
            committed(1, 0),
            dealt(1, 1, [7, 8], first=2, **fields),
            committed(1, 1),
        ]
    )
    assert epoch.exactly_once


def test_torn_last_line_is_skipped(tmp_path):
    line = json.dumps(dealt(1, 0, [0, 1])) + "\n" + json.dumps(committed(1, 0)) + "\n"
    (tmp_path / "a.jsonl").write_text(line + '{"kind": "dealt", "loa')
    assert audit(tmp_path).once == 2


@pytest.mark.parametrize("line", ["{", "[]", '{"kind": "other"}', '{"kind": "committed"}'])
def test_any_other_damaged_line_is_corrupt_data_named_by_file_and_number(tmp_path, line):
    (tmp_path / "a.jsonl").write_text(json.dumps(committed(1, 0)) + "\n" + line + "\n")
    with pytest.raises(CorruptDataError, match=r"a\.jsonl:2"):
        audit(tmp_path)


def test_missing_directory_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="SHOAL_RECORD_DIR"):
        audit(tmp_path / "nowhere")


def test_an_empty_directory_has_no_epochs(tmp_path):
    assert audit(tmp_path).epochs == ()


def test_loader_writes_its_record_to_the_directory_in_the_environment(
    session, tmp_path, monkeypatch
):
    monkeypatch.setenv("SHOAL_RECORD_DIR", str(tmp_path / "records"))
    monkeypatch.setenv("SHOAL_MEMBER_ID", "m1")
    loader = ElasticDataLoader(list(range(4)), global_batch_size=4, shuffle=False)
    for _ in loader:
        loader.committed(session.placement)
    lines = [
        json.loads(line) for line in (tmp_path / "records" / "m1.jsonl").read_text().splitlines()
    ]
    assert lines == [
        dealt(0, 0, [0, 1, 2, 3]),
        committed(0, 0),
    ]
    assert audit(tmp_path / "records").exactly_once


WRITER = """
import sys, pathlib
from shoal_worker.data.record import SampleRecord
record = SampleRecord(pathlib.Path(sys.argv[1]), "m")
for step in range(10**9):
    record.write("committed", loader="loader", generation=1, epoch=0, step=step, begin=2 * step)
    print(step, flush=True)
"""


def test_every_line_written_before_a_sigkill_is_present(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    reported = [int(process.stdout.readline()) for _ in range(200)]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    lines = (tmp_path / "m.jsonl").read_bytes().split(b"\n")
    assert [json.loads(line)["step"] for line in lines[: len(reported)]] == reported


def test_two_writers_of_one_member_do_not_overwrite_each_other(tmp_path):
    one, two = SampleRecord(tmp_path, "m"), SampleRecord(tmp_path, "m")
    one.write("committed", **{k: v for k, v in committed(1, 0).items() if k != "kind"})
    two.write("committed", **{k: v for k, v in committed(1, 1).items() if k != "kind"})
    one.close(), two.close()
    assert len((tmp_path / "m.jsonl").read_text().splitlines()) == 2
