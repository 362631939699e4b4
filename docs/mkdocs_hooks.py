"""MkDocs hooks: pages outside of docs/ are a part of the site, and their links work on GitHub and on the site.

The site has the folder docs/ as its root. A link is resolved in the repository, and written again for the site.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE"]
REFERENCE = {
    "symbiosis": [],
    "symbiosis.policies": [],
    "symbiosis.privacy": [],
    "symbiosis.testing": ["symbiosis.testing.compare.compare"],  # a module has its name
}
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")
ROLE = re.compile(r":\w+:<code>(?:~[\w.]+\.)?([\w.]+)</code>")
"""A cross-reference of Sphinx in a docstring; ``~`` leaves out the modules."""


def in_site(path: str) -> str:
    """Return where a file of the repository is in the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and files outside of docs/, and a page for each public module."""
    examples = [path for path in (ROOT / "examples").rglob("*.*") if "__pycache__" not in path.parts]
    for path in [*OUTSIDE, *(path.relative_to(ROOT).as_posix() for path in examples), "examples/deploy/Dockerfile"]:
        files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
    for name, others in REFERENCE.items():
        content = "\n".join([f"# `{name}`\n", *(f"::: {each}" for each in [name, *others])])
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite relative links."""
    here = page.file.src_uri
    inside = (ROOT / "docs" / here).exists()
    folder = posixpath.dirname(f"docs/{here}" if inside else "README.md" if here == "index.md" else here)

    def rewrite(link: re.Match[str]) -> str:
        target = in_site(posixpath.normpath(posixpath.join(folder, link[2])))
        return link[1] + posixpath.relpath(target, posixpath.dirname(here) or ".")

    return LINK.sub(rewrite, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Show cross-references of docstrings as code."""
    return ROLE.sub(r"<code>\1</code>", html)
