"""The figures in the documentation are generated from measurements."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from benchmarks.errors import MeasurementError
from benchmarks.pages import slug, write_pages
from benchmarks.processes import REPOSITORY
from benchmarks.report import Machine, Row, Table, read, write

TABLE = Table(
    key="t0",
    title="An example",
    target="<= 1",
    method="By hand.",
    columns=("s",),
    rows=(
        Row(name="ours", command="shoal run", cells={"s": "0.5"}, samples={"s": [0.4, 0.6]}),
        Row(
            name="theirs",
            command="peer",
            cells={},
            failure=f"{sys.executable} -m peer --log={REPOSITORY}/out/log ended with 1\ndetails",
        ),
    ),
    verdict="Measured: 0.5 s (reached).",
)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    write(tmp_path / "out", TABLE, Machine.here(), "python -m benchmarks t0")
    (tmp_path / "out" / "t0.png").write_bytes(b"a plot")
    (tmp_path / "docs").mkdir()
    return tmp_path


def test_written_table_can_be_read_again(measured: Path) -> None:
    table, machine, command = read(measured / "out" / "t0.json")
    assert (table.columns, [row.name for row in table.rows], command) == (
        ("s",),
        ["ours", "theirs"],
        "python -m benchmarks t0",
    )
    assert table.rows[0].samples == {"s": [0.4, 0.6]}
    assert machine.cores == Machine.here().cores


def test_the_page_has_each_measured_table_with_its_plot(measured: Path) -> None:
    write_pages(measured / "out", measured / "docs", ["t0", "t99"])
    page = (measured / "docs" / "benchmarks" / "tables.md").read_text()
    assert "| ours | 0.5 |\n| theirs | - |" in page
    assert "![t0](t0.png)" in page
    assert (measured / "docs" / "benchmarks" / "t0.png").read_bytes() == b"a plot"


def test_page_contains_no_path_of_the_machine(measured: Path) -> None:
    write_pages(measured / "out", measured / "docs", ["t0"])
    page = (measured / "docs" / "benchmarks" / "tables.md").read_text()
    assert "theirs failed: python" in page
    assert "--log=out/log ended with 1" in page
    assert sys.prefix not in page
    assert str(REPOSITORY) not in page


def test_table_is_inserted_between_the_markers_of_other_pages(measured: Path) -> None:
    page = measured / "docs" / "guide.md"
    page.write_text("Before.\n<!-- figures: t0 -->\nold\n<!-- end of figures -->\nAfter.\n")
    assert page in write_pages(measured / "out", measured / "docs", ["t0"])
    assert (
        page.read_text()
        == "Before.\n<!-- figures: t0 -->\n|  | s |\n|---|--:|\n| ours | 0.5 |\n| theirs | - "
        "|\n<!-- end of figures -->\nAfter.\n"
    )
    assert page not in write_pages(measured / "out", measured / "docs", ["t0"])


def test_line_for_each_table_with_a_target_is_put_on_the_overview_page(measured: Path) -> None:
    write(
        measured / "out",
        dataclasses.replace(TABLE, key="t1", title="T of 1 / 2", target="none: a curve"),
        Machine.here(),
        "",
    )
    page = measured / "docs" / "benchmarks.md"
    page.write_text("<!-- figures: all -->\n<!-- end of figures -->\n")
    write_pages(measured / "out", measured / "docs", ["t0", "t1"])
    lines = page.read_text().splitlines()
    assert lines[3:] == [
        "| [T0](benchmarks/tables.md#t0-an-example) | An example | <= 1 | 0.5 s (reached) |",
        "<!-- end of figures -->",
    ]


def test_overview_page_has_the_anchors_of_the_tables() -> None:
    docs = REPOSITORY / "docs"
    headings = re.findall(
        r"^## (.*)$", (docs / "benchmarks" / "tables.md").read_text(), re.MULTILINE
    )
    linked = re.findall(r"benchmarks/tables\.md#([^)]*)", (docs / "benchmarks.md").read_text())
    assert len(linked) > 10
    assert set(linked) <= {slug(heading) for heading in headings}


def test_page_that_shows_an_unmeasured_table_is_named(measured: Path) -> None:
    (measured / "docs" / "guide.md").write_text("<!-- figures: t5 -->\n<!-- end of figures -->\n")
    with pytest.raises(MeasurementError, match=r"guide\.md shows table t5, which was not measured"):
        write_pages(measured / "out", measured / "docs", ["t0"])


def test_tables_that_were_not_remeasured_stay_in_place(measured: Path) -> None:
    for key in ("t2", "t1"):
        table = dataclasses.replace(TABLE, key=key, title=f"Table {key}")
        write(measured / "out", table, Machine.here(), "")
    docs = measured / "docs"
    (docs / "benchmarks.md").write_text("<!-- figures: all -->\n<!-- end of figures -->\n")
    (docs / "guide.md").write_text("<!-- figures: t1 -->\n<!-- end of figures -->\n")
    pages = [docs / "benchmarks" / "tables.md", docs / "benchmarks.md", docs / "guide.md"]
    keys = ["t0", "t1", "t2"]
    write_pages(measured / "out", docs, keys)
    before = [page.read_text() for page in pages]
    for key in ("t0", "t2"):
        (measured / "out" / f"{key}.json").unlink()
    write_pages(measured / "out", docs, keys)
    assert [page.read_text() for page in pages] == before
    again = dataclasses.replace(TABLE, key="t1", title="Table t1", verdict="Measured: 0.4 s.")
    write(measured / "out", again, Machine.here(), "")
    write_pages(measured / "out", docs, keys)
    after = [page.read_text() for page in pages]
    assert after[0].count("0.5 s (reached)") == 2
    assert after[1].count("0.5 s (reached)") == 2
    assert "| 0.4 s |" in after[1]
    write_pages(measured / "out", docs, ["t1"])
    assert "Table t2" not in pages[0].read_text() + pages[1].read_text()


def test_no_measurements_write_no_pages(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="run `python -m benchmarks` first"):
        write_pages(tmp_path, tmp_path, ["t0"])
