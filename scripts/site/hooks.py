"""Pages of the site that are not Markdown in docs/, and links to files of the repository.

A link to a Markdown file outside docs/ leads to a page made of that file, and a link to any other
file to a page that shows it. A link to nothing fails the build, and so does a public name that has
no entry.
"""

from __future__ import annotations

import ast
import logging
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.utils import get_relative_url
from pymdownx.slugs import slugify

log = logging.getLogger("mkdocs.hooks.ckptd")

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

PAGES = {
    "CHANGELOG.md": "repo/changelog.md",
    "CONTRIBUTING.md": "repo/contributing.md",
    "SECURITY.md": "repo/security.md",
    "bench/RESULTS.md": "repo/results.md",
    "ckptd/README.md": "repo/slices/ckptd.md",
    "plugins/README.md": "repo/plugins.md",
    "docs/recover.py": "recover.md",
    "README.md": "index.md",
    **{
        f"{p.parent.relative_to(ROOT)}/README.md": f"repo/slices/{p.parent.name}.md"
        for p in sorted((ROOT / "ckptd").glob("*/README.md"))
    },
}
"""Files of the repository, and the page that each is on the site."""

LINK = re.compile(r"(\]\(|^\[\w+\]: )([^)\s]+)", re.MULTILINE)
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"<code>(docs/[\w/-]+\.md)</code>")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".sbatch": "bash"}
API = "reference/python/"
BOOST = {
    ("tasks.md",): 6,
    ("start.md", "symptoms.md"): 4,
    ("guide/",): 2,
    ("design/", "repo/", "spec/", "reference/campaigns.md", "reference/interop.md"): 0.4,
}
"""What the search shows first: where people begin, then guides, and last how it is built."""

_shown: dict[str, File] = {}


def on_config(config: Any) -> Any:
    """Give headings the names that GitHub gives them, so that a link works in both places."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are made of files outside docs/, or of programs."""
    _shown.clear()
    for source, page in PAGES.items():
        if page == "index.md":
            continue
        text = (ROOT / source).read_text()
        if not source.endswith(".md"):
            text = program(source, text)
        files.append(File.generated(config, page, content=text))
    for path in sorted({target for page in sources(files) for target in outside(page)}):
        text = program(path, (ROOT / path).read_text())
        shown = File.generated(
            config,
            f"files/{path}.md",
            content=f"---\nsearch: {{exclude: true}}\n---\n{text}",
            inclusion=InclusionLevel.NOT_IN_NAV,
        )
        _shown[path] = shown
        files.append(shown)
    return files


def program(path: str, text: str) -> str:
    """Return a page that shows a file."""
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {Path(path).name}\n\n`{path}` of the repository.\n\n`````{language}\n{text}\n`````\n"


def sources(files: Files) -> list[Path]:
    """Return the Markdown files that pages are made of."""
    return [origin(f.src_uri) for f in files.documentation_pages()]


def origin(page: str) -> Path:
    """Return the file that a page is made of."""
    for source, made in PAGES.items():
        if made == page and page != "index.md":
            return ROOT / source
    return DOCS / page


def outside(page: Path) -> list[str]:
    """Return the files of the repository, other than pages, that a page links to."""
    if page.suffix != ".md":
        return []
    found = []
    for _, link in LINK.findall(FENCE.sub("", page.read_text())):
        path = repository(page, link)
        if path is not None and (ROOT / path).is_file() and page_of(path) is None:
            found.append(path)
    return [p for p in found if Path(p).suffix not in {".svg", ".png"}]


def repository(page: Path, link: str) -> str | None:
    """Return the path in the repository that a relative link of a page leads to."""
    target = link.partition("#")[0]
    if not target or "://" in target or target.startswith("mailto:"):
        return None
    path = (page.parent / target).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else None


def page_of(path: str) -> str | None:
    """Return the page of the site that a file or folder of the repository is."""
    if (ROOT / path).is_dir() and (ROOT / path / "README.md").exists():
        path = f"{path}/README.md"
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/") and path.endswith(".md") and not path.startswith("docs/changes/"):
        return path.removeprefix("docs/")
    return None


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Lead each link to where its file is on the site."""
    if page.file.src_uri.startswith("files/"):
        return markdown
    source = origin(page.file.src_uri)
    here = page.file.src_uri
    for starts, boost in BOOST.items():
        if here.startswith(starts):
            page.meta["search"] = {"boost": boost}

    def lead(match: re.Match[str]) -> str:
        before, link = match.groups()
        path = repository(source, link)
        if path is None:
            return match[0]
        anchor = link.partition("#")[1] + link.partition("#")[2]
        if not (ROOT / path).exists():
            log.warning("%s links to %s, which is not there", source.relative_to(ROOT), link)
        to = page_of(path) or (_shown[path].src_uri if path in _shown else None)
        if to is None and path.startswith("docs/") and (ROOT / path).is_file():
            to = path.removeprefix("docs/")
        if to is None:  # a folder
            return f"{before}#nowhere-{path}"
        return f"{before}{get_relative_url(to, here)}{anchor}"

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        # What follows a language, as in "lay rules", is for tests.
        block = re.sub(r"\A( *```\w+) .*", r"\1", fence[0])
        parts += [LINK.sub(lead, markdown[end : fence.start()]), block]
        end = fence.end()
    parts.append(LINK.sub(lead, markdown[end:]))
    text = "".join(parts)
    return re.sub(r"\[([^\]]+)\]\(#nowhere-([^)]+)\)", _folder, text)


def _folder(link: re.Match[str]) -> str:
    """Return words in place of a link to a folder."""
    text, path = link.groups()
    there = f"`{path}` of the repository"
    return there if text.strip("`") == path else f"{text} ({there})"


def on_page_content(html: str, *, page: Any, config: Any, files: Files) -> str:
    """Make links of the pages that a docstring names."""

    def link(match: re.Match[str]) -> str:
        target = files.get_file_from_path(match[1].removeprefix("docs/"))
        if target is None:
            return match[0]
        return f'<a href="{get_relative_url(target.url, page.url)}">{match[0]}</a>'

    return NAMED.sub(link, html)


def public_names() -> set[str]:
    """Return what `__all__` names of each module that the pages of the API begin with."""
    names = set()
    for page in sorted((DOCS / API).glob("*.md")):
        for module in re.findall(r"^<!-- all of ([\w.]+) -->$", page.read_text(), re.MULTILINE):
            names |= {f"{module}.{name}" for name in exported(module)}
    return names


def exported(module: str) -> list[str]:
    """Return `__all__` of a module of the repository."""
    parts = module.split(".")
    base = ROOT if parts[0] == "ckptd" else ROOT / "plugins"
    path = base.joinpath(*parts)
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if name != "__version__"]
    raise ValueError(f"{module} has no __all__")


def on_post_build(*, config: Any) -> None:
    """Fail where a public name has no entry."""
    there = set()
    for page in (Path(config.site_dir) / API).glob("*.html"):
        there |= set(re.findall(r'id="([\w.]+)"', page.read_text()))
    for name in sorted(public_names() - there):
        if f"{name}.{name.rpartition('.')[2]}" in there:  # a function of the module of its name
            continue
        log.warning("%s has no entry in %s", name, API)
