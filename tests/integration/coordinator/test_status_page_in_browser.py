"""The status page of a real coordinator in a headless Chromium; skipped if Chromium is not
installed."""

from __future__ import annotations

import json
import re
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shoal.launcher.processes.ports import ReservedPort
from shoal_protos.v1 import coordinator_pb2 as pb

from tests.browser import MISSING, Browser
from tests.integration.coordinator.harness import Coordinator, Job, Server, eventually

pytestmark = pytest.mark.skipif(MISSING is not None, reason=MISSING or "")

MakeJob = Callable[..., Job]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests of this module."""
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def browser(window: Browser) -> Iterator[Browser]:
    """A tab with empty storage; the test fails if the page logs an error."""
    yield window
    complaints = [each for each in window.complaints() if "401 (Unauthorized)" not in each]
    window.run("sessionStorage.clear(); localStorage.clear()")
    window.open("about:blank")
    assert complaints == []


def look_at(browser: Browser, job: Job) -> None:
    browser.open(f"http://{job.coordinator.ports['http']}/#job={job.job_id}")
    eventually(lambda: browser.texts("h1") == [job.job_id], "the page to show the job")


def cells(browser: Browser, section: str) -> list[list[str]]:
    """Returns the texts of a table's body."""
    rows = (
        "[...document.querySelectorAll(arguments[0])].map(row => [...row.children].map(cell => "
        "cell.innerText.trim()))"
    )
    return list(browser.run(f"return {rows}", f"#{section} tbody tr"))


def test_page_shows_a_job_its_ranks_and_a_fault_as_it_happens(
    make_job: MakeJob, browser: Browser
) -> None:
    job = make_job(together=3, smallest=2)
    a, b, c = job.form("a", "b", "c", host="host-7")
    for member in (a, b, c):
        member.beat(
            1,
            sequence=1,
            step=1234,
            loss=0.125,
            samples_per_s=50,
            step_time_s=0.02,
            busy_time_s=0.01,
            metrics={"accuracy": 0.75},
            steps_in_all=4936,
        )
    look_at(browser, job)
    eventually(
        lambda: [row[3] for row in cells(browser, "ranks")] == ["1,234"] * 3, "the ranks' steps"
    )
    row = cells(browser, "ranks")[0]
    assert re.fullmatch(r"now|\d+ s ago", row.pop(10))
    assert row == [
        "0",
        "host-7",
        "active",
        "1,234",
        "0",
        "50",
        "0.125",
        "0.75",
        "20 ms",
        "50 %",
        "1",
    ]
    eventually(lambda: "0.125" in browser.texts(".facts dd"), "a point of the history")
    facts = dict(zip(browser.texts(".facts dt"), browser.texts(".facts dd"), strict=True))
    shown = ("Ranks", "Generation", "Step", "Loss", "accuracy")
    assert [facts[name] for name in shown] == [
        "3 (min 2, max 3)",
        "1",
        "1,234 of 4,936 (25 %)",
        "0.125",
        "0.75",
    ]
    assert facts["Time left"] == "1:14"
    assert browser.texts("#link") == ["live"]
    assert browser.texts("#course .mark.fault") == []

    c.kill()
    a.generation(lambda g: g.number == 2)
    eventually(lambda: len(cells(browser, "ranks")) == 2, "the rank to be gone, without a reload")
    rows = cells(browser, "events")
    assert [row[1] for row in rows[:2]] == ["generation formed", "✕ member lost"]
    assert rows[1][2] == "rank 2 (pid 1 on host-7)"
    assert browser.run("return document.querySelectorAll('#course .mark.fault').length") == 1
    assert browser.run("return document.querySelectorAll('#course .era').length") == 2
    assert "1 faults" in browser.run(
        "return document.querySelector('#plot svg').getAttribute('aria-label')"
    )
    browser.click("#events button")
    assert [row[1] for row in cells(browser, "events")] == ["✕ member lost"]

    b.kill()
    # The page may also say that the remaining rank is silent: this test's members send heartbeats
    # only on request.
    eventually(
        lambda: any("at least 2 are needed" in text for text in browser.texts(".notice")),
        lambda: f"the page to say why the job stands; it says {browser.texts('.notice')}",
    )
    assert "waiting" in browser.texts("#summary .badge")


def test_the_table_of_ranks_with_two_metrics_fits_into_1280_pixels(
    make_job: MakeJob, tmp_path: Path
) -> None:
    job = make_job(together=1, smallest=1)
    (member,) = job.form("a", host="gpu-node-017")
    member.beat(
        1,
        sequence=1,
        step=123_456,
        loss=0.0123,
        samples_per_s=12_345,
        step_time_s=0.123,
        busy_time_s=0.1,
        metrics={"accuracy": 0.7512, "perplexity": 123.4},
        steps_in_all=4_936_000,
    )
    with Browser(tmp_path, width=1280) as browser:
        look_at(browser, job)
        eventually(lambda: "123,456" in browser.texts("#ranks td"), "the rank's step")
        content, room = browser.run(
            "const table = document.querySelector('#ranks .wide');"
            "return [table.scrollWidth, table.clientWidth]"
        )
        assert content <= room


def test_plot_starts_with_the_first_step_and_has_round_ticks(
    make_job: MakeJob, browser: Browser
) -> None:
    job = make_job(together=1)
    (member,) = job.form("a")
    looks = job.coordinator.ports["http"]
    with urllib.request.urlopen(f"http://{looks}/api/job?job={job.job_id}") as answer:
        first = json.load(answer)
    began, hour = 1_700_000_000_000, 3_600_000
    course = [[began + at * hour // 60, 0, None, 0, 1] for at in range(50)]
    course += [
        [began + hour - hour // 60 + at * 60_000, 9 * at + 1, 0.06174 + at / 200, 3267 + at, 1]
        for at in range(61)
    ]
    first |= {"history": course, "now_unix_ms": course[-1][0], "began_unix_ms": began}
    look_at(browser, job)
    shown = browser.run(
        """
        state.job = arguments[0]; state.events = []; turn += 1; drawCourse(state.job);
        const texts = [...document.querySelectorAll('#plot .axis')];
        const line = document.querySelector('#plot path.ranks').getAttribute('d');
        return [texts.map(each => each.textContent), line];
        """,
        first,
    )
    member.beat(1, sequence=1, step=1)
    labels, line = shown
    times = [label for label in labels if ":" in label]
    assert all(re.fullmatch(r"\d\d:[0-5][05]", time) for time in times), times
    assert 4 <= len(times) <= 13, times
    assert [label for label in labels if ":" not in label] == [
        *("0", "0.1", "0.2", "0.3", "0.4"),
        *("0", "2,000", "4,000"),
        *("0", "1"),
    ]
    assert float(re.match(r"M([0-9.]+)", line)[1]) == 62, "nothing is blank before the first step"


def test_page_shows_worker_names_instead_of_identifiers(
    make_job: MakeJob, browser: Browser
) -> None:
    job = make_job(together=2, smallest=1)
    one, other = (str(uuid.uuid4()) for _ in range(2))
    a, b = job.form(one, other, host="host-7")
    b.kill()
    a.generation(lambda g: g.number == 2)
    look_at(browser, job)
    eventually(lambda: len(cells(browser, "events")) >= 7, "events")
    said = "\n".join(" ".join(row) for row in cells(browser, "events"))
    assert re.search(r"member lost rank [01] \(pid 1 on host-7\)", said), said
    assert "member joined now rank 0 (pid 1 on host-7)" in said
    assert not re.search(r"[0-9a-f]{8}-[0-9a-f]{4}|cause|world_size|_", said), said


def test_page_shows_parameter_servers_and_missing_ones(
    make_job: MakeJob, make_server: Callable[..., Server], browser: Browser
) -> None:
    job = make_job(together=1, parameter_servers=2)
    server = make_server(job, "s0")
    server.received("welcome")
    server.beat()
    look_at(browser, job)
    eventually(
        lambda: [row[6] for row in cells(browser, "servers")] == ["8 B"], "the server's heartbeat"
    )
    assert cells(browser, "servers")[0] == [
        "0",
        "s0",
        "primary",
        "alive",
        "0",
        "0 B",
        "8 B",
        "s0:7000",
    ]
    assert any("1 parameter server(s) missing" in text for text in browser.texts(".notice")), (
        browser.texts(".notice")
    )


def test_text_from_users_is_shown_as_text(make_job: MakeJob, browser: Browser) -> None:
    job = make_job(together=1)
    (member,) = job.form("a")
    evil = "<img src=x onerror=\"document.title='taken'\"><b>bold</b>"
    job.client.stop_job(job.job_id, reason=evil)
    member.received("stop")
    look_at(browser, job)
    eventually(lambda: any(evil in text for text in browser.texts(".notice")), "the reason")
    assert browser.run("return document.querySelectorAll('main img, main td b').length") == 0
    assert browser.run("return document.title").startswith(job.job_id)


def test_jobs_are_selected_by_links_reachable_by_keyboard(
    make_job: MakeJob, browser: Browser
) -> None:
    one, other = make_job(together=1), make_job(together=1)
    look_at(browser, one)
    browser.run("document.querySelector(arguments[0]).focus()", f"nav a[data-job='{other.job_id}']")
    browser.type(f"nav a[data-job='{other.job_id}']", "\ue007")  # the enter key
    eventually(lambda: browser.texts("h1") == [other.job_id], "the other job")
    assert (
        browser.run("return document.querySelector('nav [aria-current]').dataset.job")
        == other.job_id
    )
    asked = browser.run("return performance.getEntriesByType('resource').length")
    eventually(
        lambda: browser.run("return performance.getEntriesByType('resource').length") > asked,
        "a further look",
    )
    assert browser.run("return document.activeElement.dataset.job") == other.job_id, (
        "focus stays when figures change"
    )


def test_page_is_readable_in_both_themes(make_job: MakeJob, browser: Browser) -> None:
    """WCAG AA requires a text contrast of 4.5."""
    job = make_job(together=2)
    a, b = job.form("a", "b")
    b.kill()
    a.generation(lambda g: g.number == 2)
    look_at(browser, job)
    eventually(lambda: len(cells(browser, "events")) > 4, "events")
    grounds = []
    for theme in ("light", "dark"):
        while browser.run("return document.documentElement.dataset.theme") != theme:
            browser.click("#theme")
        faint = browser.run(CONTRAST)
        assert not faint, (theme, faint)
        grounds.append(browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(set(grounds)) == 2


def test_page_has_names_roles_and_headings_for_screen_readers(
    make_job: MakeJob, browser: Browser
) -> None:
    job = make_job(together=1)
    job.form("a")
    look_at(browser, job)
    eventually(lambda: cells(browser, "ranks"), "the ranks")
    assert browser.run("return document.documentElement.lang") == "en"
    assert browser.run("return document.querySelectorAll('table:not(:has(caption))').length") == 0
    assert (
        browser.run(
            "return document.querySelectorAll('thead th:not([scope=col]), tbody "
            "th:not([scope=row])').length"
        )
        == 0
    )
    assert browser.run("return document.querySelector('#plot svg').getAttribute('role')") == "img"
    assert (
        browser.run(
            "return [...document.querySelectorAll('button, a')].filter(e => "
            "!e.innerText.trim()).length"
        )
        == 0
    )
    assert browser.run("return document.querySelectorAll('h1').length") == 1


def test_a_cluster_with_tokens_asks_for_one(
    make_coordinator: Callable[..., Coordinator], tmp_path: Path, browser: Browser
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("admin: a-token\nviewer: v-token\n")
    coordinator = make_coordinator("--tokens", str(tokens))
    with coordinator.client(token="a-token") as client:
        client.create_job(pb.JobSpec(job_id="secret-job", min_workers=1, max_workers=1))
    browser.open(f"http://{coordinator.ports['http']}/")
    eventually(lambda: browser.texts("#ask h2"), "the question")
    assert "secret-job" not in browser.run("return document.documentElement.outerHTML")
    for token, says in (("wrong", "the bearer token is unknown"), ("v-token", "")):
        browser.type("#token", token)
        browser.click("#token-form button")
        if says:
            eventually(lambda: browser.texts("#refused"), "the refusal")
            assert says in browser.texts("#refused")[0]
    eventually(lambda: browser.texts("h1") == ["secret-job"], "the job")
    assert browser.texts("#ask h2") == []
    assert "v-token" not in json.dumps(
        browser.run("return [location.href, document.documentElement.outerHTML, {...localStorage}]")
    )


def test_page_reports_an_absent_coordinator_and_continues_when_it_returns(
    make_coordinator: Callable[..., Coordinator], tmp_path: Path, browser: Browser
) -> None:
    reserved = ReservedPort()
    coordinator = make_coordinator(
        "--redis", f"embedded://{tmp_path / 'redis'}", "--http", f"127.0.0.1:{reserved.port}"
    )
    with coordinator.client() as client:
        client.create_job(pb.JobSpec(job_id="stays", min_workers=1, max_workers=1))
    browser.open(f"http://{coordinator.ports['http']}/")
    eventually(lambda: browser.texts("h1") == ["stays"], "the job")
    coordinator.terminate()
    eventually(lambda: "does not answer" in browser.texts("#link")[0], "the page to notice")
    assert browser.texts("h1") == ["stays"]
    coordinator.start()
    eventually(lambda: browser.texts("#link") == ["live"], "the page to go on")
    browser.complaints()  # that there was no answer
    reserved.close()


CONTRAST = """
const parse = colour => {
  const p = colour.match(/[\\d.]+/g).map(Number);
  return {rgb: p.slice(0, 3), alpha: p.length > 3 ? p[3] : 1};
};
const linear = v => v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4;
const luminance = rgb => {
  const [r, g, b] = rgb.map(linear);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = e => {
  while (e && parse(getComputedStyle(e).backgroundColor).alpha !== 1) e = e.parentElement;
  return e ? parse(getComputedStyle(e).backgroundColor).rgb : [255, 255, 255];
};
const faint = [];
for (const e of document.querySelectorAll('body *')) {
  const own = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  if (!own || !e.checkVisibility() || e.closest('script, style, .only-read, .skip')) continue;
  const style = getComputedStyle(e), ink = parse(e.closest('svg') ? style.fill : style.color).rgb;
  const [one, other] = [luminance(ink), luminance(ground(e))];
  const ratio = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
  if (ratio < 4.5)
    faint.push([e.tagName, e.className.baseVal ?? e.className, e.textContent.slice(0, 30), ratio]);
}
return faint;
"""
