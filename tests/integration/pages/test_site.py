"""The build of the docs/ site fails on a broken link, or on a resource that a browser would fetch
from another host."""

from __future__ import annotations

import functools
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.browser import MISSING, Browser
from tests.zygote.children import eventually

ROOT = Path(__file__).parents[3]
MKDOCS = ROOT / ".venv-docs/bin/mkdocs"

pytestmark = [
    pytest.mark.images,
    pytest.mark.skipif(not MKDOCS.exists(), reason="make docs has not set up .venv-docs"),
]


def build(folder: Path, text: str) -> tuple[int, str]:
    """Builds a site of one page with the project's hooks and checks; returns the exit status and
    the output."""
    (folder / "docs").mkdir()
    (folder / "docs" / "README.md").write_text(f"# A page\n\n{text}\n")
    checks = re.search(r"^validation:\n(?: .*\n)+", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert checks is not None
    theme = "theme: {name: material, font: false}\n"
    (folder / "mkdocs.yml").write_text(
        f"site_name: A site\n{theme}hooks: [{ROOT / 'docsite/hooks.py'}]\n{checks[0]}not_in_nav: "
        "/source/\n"
    )
    built = subprocess.run(
        [MKDOCS, "build", "--strict"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    return built.returncode, built.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[a](nowhere.md)", "'nowhere.md', but the target is not found"),
        ("[a](#nowhere)", "no such anchor"),
        ("[a](../examples/nowhere.py)", "links to ../examples/nowhere.py, which is not there"),
        ("![a](http://127.0.0.1:1/a.png)", "fetches from elsewhere"),
        ('<script src="//127.0.0.1:1/a.js"></script>', "fetches from elsewhere"),
    ],
)
def test_faulty_page_fails_the_build(tmp_path: Path, text: str, said: str) -> None:
    status, output = build(tmp_path, text)
    assert status == 1
    assert said in output


def test_file_outside_of_docs_gets_a_page_of_its_own(tmp_path: Path) -> None:
    status, output = build(tmp_path, "[a](../examples/train.py)")
    assert status == 0, output
    assert "load_digits" in (tmp_path / "site/source/examples/train.py/index.html").read_text()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Logs nothing."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """Builds and serves the full site; yields its address."""
    subprocess.run(
        [MKDOCS, "build", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        check=True,
        timeout=240,
    )
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path / "site"))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_search_finds_a_guide_and_fetches_nothing_from_elsewhere(
    served: str, tmp_path: Path
) -> None:
    with Browser(tmp_path) as browser:
        browser.open(f"{served}/index.html?q=AveragedModel")
        found = "return [...document.querySelectorAll('a.md-search-result__link')].map(a => a.href)"
        links = eventually(lambda: browser.run(found), "the search to find something")
        assert any("guides/averages.html" in link for link in links)
        browser.open(f"{served}/architecture.html")
        assert browser.run(
            "return [...document.querySelectorAll('article img')].every(i => i.complete && "
            "i.naturalWidth > 0)"
        )
        fetched = browser.run(
            "return performance.getEntriesByType('resource').map(entry => entry.name)"
        )
        assert fetched
        assert [address for address in fetched if not address.startswith(served)] == []
