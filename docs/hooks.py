"""What `mkdocs build` needs beside its plugins: files outside of docs/ that pages link to, and formulas as MathML.

The site has copies of these files in the folder `repository`, so that no link leaves it. Notebooks become pages.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

import nbformat
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files, InclusionLevel
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[1]
COPIES = "repository"
# Pages without a table of contents beside them: the first one, and those with the widest tables.
WHOLE = {"index.md": ["toc"], "speed.md": ["toc"], "supported_models.md": ["toc"]}
# The navigation stays beside pages in windows of 1,100 pixels and more; the theme makes it a menu below 1,220.
WIDTHS = {"76.25em": "68.75em", "76.234375em": "68.734375em"}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)")
# A list right after a paragraph, which is a list on GitHub and none in Python-Markdown.
LIST = re.compile(r"^(?![-\s|>#`]).+\n(?=- )", re.MULTILINE)
TABLE, HEADING = re.compile(r"<table>.*?</table>", re.DOTALL), re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
ROW, CELL = re.compile(r"<tr>.*?</tr>", re.DOTALL), re.compile(r"<td\b")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds what pages link to outside of docs/, and what those files link to."""
    waiting = [(ROOT / "docs" / file.src_uri, file.content_string) for file in files.documentation_pages()]
    known = {path for path, _ in waiting}
    while waiting:
        page, text = waiting.pop()
        for target in (posixpath.normpath((page.parent / link).as_posix()) for link in LINK.findall(text)):
            path = Path(target)
            outside = ROOT in path.parents and ROOT / "docs" not in path.parents
            if path in known or not outside or not path.is_file():
                continue
            known.add(path)
            copies = copies_of(path)
            for name, content in copies.items():
                name = f"{COPIES}/{path.parent.relative_to(ROOT).as_posix()}/{name}"
                files.append(File.generated(config, name, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
            waiting += [(path, content) for name, content in copies.items() if name.endswith(".md")]
    return files


def copies_of(path: Path) -> dict[str, Any]:
    """What the site has in place of a file, by name: the file itself; of a notebook, a page and its pictures."""
    if path.suffix != ".ipynb":
        return {path.name: path.read_text() if path.suffix == ".md" else path.read_bytes()}
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    notebook.metadata["language_info"] = {"name": "python"}
    page, resources = MarkdownExporter().from_notebook_node(notebook, {"output_files_dir": path.stem})
    return {f"{path.stem}.md": page, **resources["outputs"]}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between docs/ and the copies as they are on the site, and Markdown as GitHub reads it."""
    here = page.file.src_uri
    if here in WHOLE:
        page.meta["hide"] = WHOLE[here]
    copied = here.startswith(f"{COPIES}/")
    folder = posixpath.dirname(here.removeprefix(f"{COPIES}/") if copied else f"docs/{here}")

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        target = re.sub(r"\.ipynb$", ".md", target)
        place = target.removeprefix("docs/") if target.startswith("docs/") else f"{COPIES}/{target}"
        return posixpath.relpath(place, posixpath.dirname(here) or ".")

    return LIST.sub(r"\g<0>\n", LINK.sub(moved, markdown))


def on_post_build(config: Any, **_: Any) -> None:
    """The theme's files with our widths for its."""
    for path in (Path(config.site_dir) / "assets").rglob("*.min.*"):
        if path.suffix in (".css", ".js"):
            text = path.read_text()
            for width, ours in WIDTHS.items():
                text = text.replace(width, ours)
            path.write_text(text)


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw by themselves, and tables whose cells know their columns."""

    def drawn(formula: re.Match[str]) -> str:
        return convert(html.unescape(formula[2]).strip(), display="block" if formula[1] == "div" else "inline")

    return TABLE.sub(lambda table: labelled(table[0]), FORMULA.sub(drawn, content))


def labelled(table: str) -> str:
    """A table whose cells name their column, for narrow screens, where each row is a list (site.css)."""
    labels = [re.sub(r"<[^>]*>", "", heading).replace('"', "&quot;") for heading in HEADING.findall(table)]

    def row(found: re.Match[str]) -> str:
        names = iter(labels)
        return CELL.sub(lambda _: f'<td data-label="{next(names)}"', found[0])

    return ROW.sub(row, table)
