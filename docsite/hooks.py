"""Hooks for MkDocs: rewrites links to files outside of docs/, inserts diagrams, and checks that the
site does not need a network.

Pages must be readable in the repository as well as on the site. On the site, a link to a file
outside of docs/ therefore leads to a page that shows the file, and a Mermaid diagram is replaced by
the SVG drawn from it (`docsite/diagrams.py`). A link to a file that does not exist fails the build.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any, Final

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # MkDocs runs this file alone
from docsite.diagrams import DIAGRAM, digest  # noqa: E402

_SHOWN: Final = "source"
"""Folder of the site with the pages that show files outside of docs/."""
_LINK: Final = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCE: Final = re.compile(r"^(`{3,}).*?^\1`*$", re.DOTALL | re.MULTILINE)
_LANGUAGES: Final = {
    ".py": "python",
    ".yml": "yaml",
    ".yaml": "yaml",
    ".js": "javascript",
    ".proto": "protobuf",
    ".sh": "bash",
}
_FETCHED: Final = re.compile(
    r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)"""
)
_FETCHED_BY_STYLES: Final = re.compile(r"""(?:url\(|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each file outside of docs/ that a page links to, and in turn for each file
    that such a page links to. Called by MkDocs."""
    pending = [
        (f"docs/{file.src_uri}", Path(file.abs_src_path).read_text())
        for file in files.documentation_pages()
        if file.abs_src_path
    ]
    there: set[str] = set()
    while pending:
        page, text = pending.pop()
        for target in _targets(page, text):
            uri = _uri(target)
            if not uri.startswith(f"{_SHOWN}/") or uri in there:
                continue
            there.add(uri)
            content = _shown(target)
            files.append(File.generated(config, uri, content=content))
            if target.endswith(".md"):
                pending.append((target, content))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Redirects links to files outside of docs/ to the pages that show these files, and replaces
    Mermaid diagrams by their drawings. Called by MkDocs."""
    uri = page.file.src_uri
    here = uri.removeprefix(f"{_SHOWN}/") if uri.startswith(f"{_SHOWN}/") else f"docs/{uri}"
    up = posixpath.relpath("diagrams", posixpath.dirname(uri) or ".")

    def drawing(found: re.Match[str]) -> str:
        return f"![A diagram]({up}/{digest(found[1])}.svg)"

    def link(found: re.Match[str]) -> str:
        target = _resolved(here, found[2])
        if target is None:
            return found[0]
        return (
            f"{found[1]}{posixpath.relpath(_uri(target), posixpath.dirname(uri) or '.')}{found[3]}"
        )

    return _outside_fences(DIAGRAM.sub(drawing, markdown), link)


def on_post_build(config: Any) -> None:
    """Raises PluginError if the site would load anything from another host. Called by MkDocs."""
    found = []
    for file in sorted(Path(config["site_dir"]).rglob("*")):
        if file.suffix == ".html":
            found += [f"{file.name}: {address}" for address in _FETCHED.findall(file.read_text())]
        elif file.suffix == ".css":
            found += [
                f"{file.name}: {address}"
                for address in _FETCHED_BY_STYLES.findall(file.read_text())
            ]
    if found:
        raise PluginError("the site fetches from elsewhere: " + "; ".join(found[:10]))


def _outside_fences(text: str, replace: Any) -> str:
    parts, at = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_LINK.sub(replace, text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, _LINK.sub(replace, text[at:])])


def _targets(page: str, text: str) -> list[str]:
    found = [_resolved(page, target) for _, target, _ in _LINK.findall(_FENCE.sub("", text))]
    return [target for target in found if target is not None]


def _resolved(page: str, target: str) -> str | None:
    """Returns the path in the repository to which a link on `page` leads. Returns None if the link
    needs no change, because it is a URL or leads from one page of docs/ to another. Raises
    PluginError if the target does not exist."""
    if re.match(r"[a-z]+:", target):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    there = ROOT / path
    if path.startswith("docs/"):
        if there.is_dir():
            return f"{path}/README.md"
        return path if not page.startswith("docs/") else None
    if path.startswith("..") or not there.exists():
        raise PluginError(f"{page} links to {target}, which is not there")
    return path


def _uri(path: str) -> str:
    """Returns the location, on the site, of the page for a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{_SHOWN}/{path}" if path.endswith(".md") else f"{_SHOWN}/{path}.md"


def _shown(path: str) -> str:
    file = ROOT / path
    if path.endswith(".md"):
        return file.read_text()
    if file.is_dir():
        names = "\n".join(
            f"- `{each.name}`"
            for each in sorted(file.iterdir())
            if not each.name.startswith(("_", "."))
        )
        return f"# {path}\n\nA folder of the repository, with\n\n{names}\n"
    return f"# {path}\n\n````{_LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}````\n"
