"""Tables and streams of Hugging Face's `datasets` from local files, without a network. After a
resume, they yield the same items, whether the loader seeks or skips."""

import json
from pathlib import Path

import pytest
import shoal
from shoal_worker.elastic.contract.loader_interface import Placement

ROWS = 100


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    import pandas  # imported here because only these tests need it, and it takes half a second

    folder = tmp_path_factory.mktemp("rows")
    for part in range(4):
        rows = range(part * ROWS // 4, (part + 1) * ROWS // 4)
        (folder / f"{part}.jsonl").write_text(
            "".join(json.dumps({"number": row, "text": f"row {row}"}) + "\n" for row in rows)
        )
    pandas.DataFrame(
        {"number": range(ROWS), "text": [f"row {row}" for row in range(ROWS)]}
    ).to_parquet(folder / "all.parquet")
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))


def streamed(files: Path, kind):
    import datasets

    datasets.disable_progress_bars()
    if kind == "parquet":
        return datasets.load_dataset(
            "parquet", data_files=str(files / "all.parquet"), split="train", streaming=True
        )
    rows = datasets.load_dataset(
        "json", data_files=sorted(map(str, files.glob("*.jsonl"))), split="train", streaming=True
    )
    if kind == "mapped":
        return rows.map(lambda row: {"number": row["number"] + 1000}).filter(
            lambda row: row["number"] % 3
        )
    return rows.shuffle(seed=3, buffer_size=20) if kind == "shuffled" else rows


def test_table_rows_are_yielded_once_and_a_batch_is_fetched_in_one_call(
    files, make_rank, tmp_path, monkeypatch
):
    import datasets

    rows = datasets.load_dataset(
        "parquet",
        data_files=str(files / "all.parquet"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    fetched, fetch = [], datasets.Dataset.__getitems__
    monkeypatch.setattr(
        datasets.Dataset,
        "__getitems__",
        lambda table, indices: fetched.append(len(indices)) or fetch(table, indices),
    )

    whole = rank_of(make_rank, rows, None).rest_of_first_epoch()
    assert sorted(row for step in whole for row in step) == sorted(rows["text"])
    assert fetched == [8] * 12 + [4]
    first = rank_of(make_rank, rows, None)
    begun = first.rest_of_first_epoch(3)
    state = json.loads(json.dumps(first.loader.state_dict()))
    assert begun + rank_of(make_rank, rows, state).rest_of_first_epoch() == whole


def rank_of(make_rank, stream, state, **options):
    return make_rank(
        lambda: shoal.ElasticDataLoader(stream, global_batch_size=8, collate_fn=Texts, **options),
        Placement(generation=1, rank=0, world_size=1),
        state,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_of_a_stream_are_seekable(files, make_rank, caplog, workers):
    def rank(state=None):
        rows = streamed(files, "jsonl")
        assert rows.num_shards == 4
        shards = shoal.ShardedStream(
            range(4), lambda number: rows.shard(num_shards=4, index=number)
        )
        return rank_of(make_rank, shards, state, micro_batch_size=4, num_workers=workers)

    whole = rank().rest_of_first_epoch()
    assert sorted(row for step in whole for row in step) == sorted(
        row["text"] for row in streamed(files, "jsonl")
    )
    first = rank()
    begun = first.rest_of_first_epoch(3)
    state = json.loads(json.dumps(first.loader.state_dict()))
    assert all(place[4] for place in state["stream"]["lanes"]), "the shards' readers have states"
    first.iterator.close()
    first.loader._supply._close_readers()  # its threads would continue to run
    assert begun + rank(state).rest_of_first_epoch() == whole
    assert "skip" not in caplog.text


@pytest.mark.parametrize(
    "kind", ["jsonl", "parquet", "mapped", "shuffled", "read by a data worker"]
)
def test_stream_resumes_where_it_was_and_yields_each_row_once(files, make_rank, kind, caplog):
    def rank(state=None):
        stream = streamed(files, kind)
        return rank_of(make_rank, stream, state, num_workers=int("worker" in kind))

    whole = rank().rest_of_first_epoch()
    assert sorted(row for step in whole for row in step) == sorted(
        row["text"] for row in streamed(files, kind)
    )
    first = rank()
    begun = first.rest_of_first_epoch(3)
    state = json.loads(json.dumps(first.loader.state_dict()))
    first.iterator.close()
    first.loader._supply._close()  # its threads would continue to run
    rest = rank(state).rest_of_first_epoch()
    assert begun + rest == whole
    assert ("led to a different item" in caplog.text) == (kind == "shuffled"), (
        "a state_dict does not contain the shuffle buffer"
    )


def test_stream_is_reshuffled_each_epoch(files, make_rank):
    stream = streamed(files, "shuffled")
    rank = make_rank(
        lambda: shoal.ElasticDataLoader(stream, global_batch_size=ROWS, collate_fn=Texts),
        Placement(generation=1, rank=0, world_size=1),
    )
    epochs = []
    for _ in range(2):
        epochs.append(rank.take())
        rank.commit()
        assert rank.take() is None or rank.loader.epoch == 1
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    rank.loader._supply._close()


class Texts(list):
    """The texts of a batch."""

    def __init__(self, rows):
        super().__init__(row["text"] for row in rows)

    def tolist(self):
        return list(self)
