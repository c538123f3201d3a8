"""mkdocs calls these: they write what the reference takes from the code, and make links out of docs/ work.

A link to a file of the checkout leads to a page that shows the file.
"""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
from reference import PARTS

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")
GENERATED = re.compile(r"^<!-- generated: (\w+) -->$", re.MULTILINE)
SHOWN = "source/"
"""Pages that show files of the checkout."""
LEXERS = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".jsonl": "json"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lists the guides in the navigation: the index, those it links to in its order, and the others."""
    guides = Path(config.docs_dir) / "guides"
    linked = [name for name in LINK.findall((guides / "index.md").read_text()) if (guides / name).parent == guides]
    pages = dict.fromkeys(["index.md", *linked, *sorted(each.name for each in guides.glob("*.md"))])
    next(entry for entry in config.nav or () if "Guides" in entry)["Guides"] = [f"guides/{page}" for page in pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file of the checkout to which a page links."""
    waiting = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        text = page.read_text() if page.suffix == ".md" else ""
        for target in {target for _, target in _targets(text, page.parent) if not target.is_relative_to(ROOT / "docs")}:
            if files.get_file_from_path(_shown(target)) is None:
                level = InclusionLevel.NOT_IN_NAV
                files.append(File.generated(config, _shown(target), content=_show(target), inclusion=level))
                waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fills in what is generated, and rewrites links for the site. Comments for tests are left out."""
    uri = page.file.src_uri
    place = ROOT / uri.removeprefix(SHOWN).removesuffix(".md") if uri.startswith(SHOWN) else ROOT / "docs" / uri
    text = GENERATED.sub(lambda found: PARTS[found[1]](), markdown)
    text = re.sub(r"^<!-- (?:python|bash|not run)\b.*?-->\n", "", text, flags=re.MULTILINE | re.DOTALL)
    targets = dict(_targets(text, place.parent))
    above = PurePosixPath(uri).parent

    def rewritten(link: re.Match[str]) -> str:
        if (target := targets.get(link[1])) is None:
            return link[1]
        is_page = target.is_relative_to(ROOT / "docs")
        found = target.relative_to(ROOT / "docs").as_posix() if is_page else _shown(target)
        return os.path.relpath(found, above)

    return LINK.sub(rewritten, text)


def _targets(text: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields the links to files of the checkout, and the files."""
    for link in LINK.findall(text):
        target = Path(os.path.normpath(folder / link))
        if target.exists() and target.is_relative_to(ROOT):
            yield link, target


def _shown(target: Path) -> str:
    return f"{SHOWN}{target.relative_to(ROOT).as_posix()}.md"


def _show(target: Path) -> str:
    title = f"# {target.relative_to(ROOT)}\n\n"
    if target.is_dir():
        return title + "".join(
            f"- `{each.relative_to(target)}`\n" for each in sorted(target.rglob("*")) if each.is_file()
        )
    if target.suffix == ".md":
        return target.read_text()
    return f"{title}``````{LEXERS.get(target.suffix, 'text')}\n{target.read_text().rstrip()}\n``````\n"
