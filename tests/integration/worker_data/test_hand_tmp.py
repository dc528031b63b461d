import re
from pathlib import Path
import numpy as np
import pytest
from tests.integration.worker_data import test_data_sources as t

def blocks():
    text = t.PAGE.read_text()
    return dict(zip(("mosaic", "litdata"), re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)))

def write(folder, kind):
    data = folder / "data"
    if kind == "mosaic":
        from streaming import MDSWriter
        with MDSWriter(out=str(data), columns={"number": "int"}, size_limit=256) as out:
            for number in range(t.SAMPLES):
                out.write({"number": number})
    else:
        from litdata.streaming.cache import Cache
        data.mkdir()
        c = Cache(str(data), chunk_size=10)
        for number in range(t.SAMPLES):
            c[number] = {"number": number}
        c.done(); c.merge()
    print(sorted(p.name for p in data.iterdir()))

@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["mosaic", "litdata"])
def test_hand(kind, zygote, tmp_path, monkeypatch):
    write(tmp_path, kind)
    monkeypatch.setattr(t, "write", lambda folder: None)
    monkeypatch.setattr(t, "examples", lambda: {kind: blocks()[kind]})
    t.test_each_sample_counts_once_per_epoch_through_a_kill_and_a_resume_on_fewer_ranks(kind, zygote, tmp_path)
