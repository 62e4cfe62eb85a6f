"""Extends mkdocs.yml: adds pages from outside of docs/, a page for each public subsystem, and all decisions.

README, CONTRIBUTING and CHANGELOG stay at the root, and links between them and docs/ work in the repository. On the
site they are ordinary pages: this module rewrites the links, and adds the linked files from outside of docs/ (examples,
the board). So `mkdocs build --strict` checks all links.
"""

import ast
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).parents[1]

PAGES: Final = {"README.md": "first-steps.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
"""Pages outside of docs/, and their paths on the site."""

SUBSYSTEMS: Final = {
    "relatum": "plugin",
    "relatum.errors": "plugin",
    "relatum.keys": "plugin",
    "relatum.reading": "plugin",
    "relatum.recording": "plugin",
    "relatum.publishing": "plugin",
    "relatum.collecting": "plugin",
    "relatum.outcomes": "plugin",
    "relatum.superstreams": "plugin",
    "relatum.contexts": "plugin",
    "relatum.metrics": "plugin",
    "relatum.local": "plugin",
    "relatum_consumer": "consumer_api",
    "relatum_consumer.groups": "consumer_api",
    "relatum_migrations": "migrations",
    "relatum_spark": "spark_connectors",
}
"""The modules that users import, each with its source root."""

FETCHED: Final = re.compile(r"""<(?:script|img|iframe|link)[^>]+(?:src|href)=["']?(?:https?:)?//[^>]*>""")
"""Elements for which a browser would fetch something from another host."""

LINK: Final = re.compile(r"(\]\()([^)\s]+)(\))")
FENCE: Final = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation: a page for each subsystem, and the decisions in order, former ones last."""
    generated: dict[str, list[Any]] = {
        "Python": [{subsystem: f"reference/{subsystem}.md"} for subsystem in SUBSYSTEMS],
        "Decisions": [f"adr/{page.name}" for page in sorted((ROOT / "docs" / "adr").glob("*.md"))],
    }
    for entry in config.nav or []:
        for pages in entry.values() if isinstance(entry, dict) else ():
            for page in pages if isinstance(pages, list) else ():
                if isinstance(page, dict):
                    page.update({name: generated[name] for name in page.keys() & generated.keys()})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of docs/, the subsystems' pages, and the files to which pages link."""
    for name in PAGES:
        files.append(File.generated(config, PAGES[name], abs_src_path=str(ROOT / name)))
    for subsystem, source in SUBSYSTEMS.items():
        files.append(File.generated(config, f"reference/{subsystem}.md", content=_reference(subsystem, source)))
    for name in _linked_files():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links from or to files outside of docs/ to links on the site."""
    source = page.file.src_uri
    page_path = next((page for page, on_site in PAGES.items() if on_site == source), f"docs/{source}")
    if source.startswith("reference/"):
        return markdown

    def rewritten(match: re.Match[str]) -> str:
        target = _target(page_path, match[2])
        return match[0] if target is None else f"{match[1]}{_on_site(source, *target)}{match[3]}"

    # Code blocks contain no links.
    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(rewritten, part) for part in parts)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Raise an error if a page loads something from another host."""
    if fetched := FETCHED.findall(output):
        raise PluginError(f"{page.file.src_uri} loads from another host; add the file: {', '.join(fetched)}")
    return output


def _target(page_path: str, link: str) -> tuple[str, str] | None:
    """Return a link's target, relative to the repository's root, and its anchor; None for other sites."""
    path, hash_, anchor = link.partition("#")
    if not path or "://" in path or path.startswith("mailto:"):
        return None
    return normpath(str(PurePosixPath(page_path).parent / path)), hash_ + anchor


def _on_site(source: str, target: str, anchor: str) -> str:
    """Return the link from a page of the site to a file of the repository."""
    on_site = PAGES.get(target, target.removeprefix("docs/"))
    if on_site == "adr":
        on_site = f"adr/{sorted((ROOT / 'docs' / 'adr').glob('*.md'))[0].name}"
    return relpath(on_site, str(PurePosixPath(source).parent)) + anchor


def _linked_files() -> list[str]:
    """Return the files outside of docs/ that pages link to and that are not pages."""
    found: set[str] = set()
    for page in [*(ROOT / name for name in PAGES), *(ROOT / "docs").rglob("*.md")]:
        page_path = page.relative_to(ROOT).as_posix()
        for link in LINK.findall(FENCE.sub("", page.read_text())):
            target = _target(page_path, link[1])
            if target is not None and not target[0].startswith("docs/") and target[0] not in PAGES:
                path = ROOT / target[0]
                found |= {each.relative_to(ROOT).as_posix() for each in _files_at(path)}
    return sorted(found)


def _files_at(path: Path) -> list[Path]:
    return [each for each in sorted(path.iterdir()) if each.is_file()] if path.is_dir() else [path]


def _reference(subsystem: str, source: str) -> str:
    """Return a subsystem's page: its docstring, and the names in its `__all__`."""
    module = ROOT / source / Path(*subsystem.split("."))
    path = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    tree = ast.parse(path.read_text())
    names = _public(tree)
    lines = [f"# {subsystem}", "", ast.get_docstring(tree) or "", ""]
    # A public module has its own page.
    lines += [f"::: {subsystem}.{name}\n" for name in names if f"{subsystem}.{name}" not in SUBSYSTEMS]
    return "\n".join(lines)


def _public(tree: ast.Module) -> list[str]:
    """Return the names in `__all__`, or the public classes and functions of a module without it."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            names: Any = ast.literal_eval(node.value)
            return sorted(names, key=str.lower)
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
