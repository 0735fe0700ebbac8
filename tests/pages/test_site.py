"""The site of docs/: it builds without warnings, its links lead somewhere, and its pages need no other machine."""

import importlib
import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import ghostclip

ROOT = Path(__file__).resolve().parents[2]
# Whose names are in the API reference.
PUBLIC = ("", ".accounting", ".audit", ".bench", ".clipping", ".compat.opacus", ".datasets", ".engine", ".errors",
    ".integrations.huggingface", ".integrations.lightning", ".integrations.trl", ".integrations.tracking", ".ledger",
    ".models", ".optim", ".report", ".traces")  # fmt: skip
# Elements whose address is fetched when a page is shown; links and forms are not.
FETCHED = {"script", "img", "iframe", "link", "source", "video", "audio", "object", "embed"}

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """What a page of HTML links to, what it loads, and which places it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.links, self.loads, self.ids = path, set(), set(), set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values and (name == "id" or tag == "a")}
        for name in ("href", "src", "srcset", "data"):
            if name in values and (tag in FETCHED or name == "href"):
                (self.loads if tag in FETCHED else self.links).add(values[name])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[Path, Page]:
    """What mkdocs builds, warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return {path: Page(path) for path in folder.rglob("*.html")}


def local(address: str) -> bool:
    return not urlsplit(address).scheme and not urlsplit(address).netloc


def test_every_page_is_there(site):
    folder = min(site, key=lambda path: len(path.parts)).parent
    for page in (ROOT / "docs").rglob("*.md"):
        assert folder / page.relative_to(ROOT / "docs").with_suffix(".html") in site
    assert folder / "repository" / "SECURITY.html" in site
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        page = folder / "repository" / "notebooks" / f"{notebook.stem}.html"
        assert any((page.parent / address).is_file() for address in site[page].loads if address.endswith(".png"))


def test_links_lead_somewhere(site):
    followed = 0
    for page in site.values():
        if page.path.name == "404.html":  # its addresses begin at the server's root
            continue
        for link in filter(local, page.links | page.loads):
            path, anchor = unquote(urlsplit(link).path), unquote(urlsplit(link).fragment)
            target = Path(os.path.normpath(page.path.parent / path)) if path else page.path
            assert target.exists(), (page.path.name, link)
            if anchor and target in site:
                assert anchor in site[target].ids, (page.path.name, link)
                followed += 1
    assert followed > 100


def test_cells_know_their_columns_for_narrow_screens(site):
    (page,) = (page for page in site if page.name == "learning.html" and page.parent.name != "results")
    rows = [re.findall('<td data-label="(.*?)">', row) for row in re.findall("<tr>.*?</tr>", page.read_text(), re.S)]
    assert ["setting", "clipped", "runs", "accuracy"] in [row[:1] + row[-3:] for row in rows]
    assert ["figure", "what it was in the trainings above", "when it is bad, and what to do"] in rows


def test_no_page_loads_anything_from_elsewhere(site):
    for page in site.values():
        assert [address for address in page.loads if not local(address) and not address.startswith("data:")] == []
        folder = page.path.parent
        for sheet in {folder / urlsplit(each).path for each in page.loads if urlsplit(each).path.endswith(".css")}:
            if sheet.exists():
                assert re.findall(r"(?:url\(|@import\s)[\"']?(?:https?:)?//[^)\"']*", sheet.read_text()) == []


@pytest.mark.parametrize("name", PUBLIC)
def test_the_api_reference_has_every_public_name(name, site):
    module = importlib.import_module(f"ghostclip{name}")
    ids = set().union(*(page.ids for path, page in site.items() if path.parent.name == "api"))
    for public in module.__all__:
        named = getattr(module, public)
        if inspect.isclass(named) or inspect.isfunction(named):
            places = {module.__name__, named.__module__}
            if getattr(ghostclip, public, None) is named:
                places.add("ghostclip")
            assert {f"{place}.{public}" for place in places} & ids, public
