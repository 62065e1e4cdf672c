"""What the site takes from outside docs/: the README, the nodes' help pages, the example scripts, pictures, workflows.

MkDocs calls :func:`on_files` and :func:`on_page_markdown`. The pages stay as they are for a reader of the repository;
here each relative link is turned into a link between pages of the site.
"""

import json
import re
from pathlib import Path
from posixpath import dirname, relpath
from urllib.parse import quote, unquote

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
HELP = "nodes/web/docs/"
SERVED = "/vitrine/"
"""Where help pages link to: ComfyUI's server answers there, whichever folder the page opens them from."""
AT = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSES.md": "licenses.md",
    "SECURITY.md": "security.md",
    "nodes/web/docs/vitrine/glossary.md": "glossary.md",
    "docs/examples": "examples/index.md",
    "docs": "index.md",
}
"""Path in the repository -> page of the site, where that is no rule."""
LINK = re.compile(r"(?<=\]\()([^)\s#]+)|(?<=src=\")([^\"]+)|(?<=href=\")([^\"#]+)")
FENCE = re.compile(r"(^```.*?^```)", re.M | re.S)


def page_of(path: str) -> str:
    """Where a file of the repository stands on the site."""
    if path in AT:
        return AT[path]
    if path.startswith(HELP):
        return f"nodes/{path.removeprefix(HELP)}"
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}"


def sources() -> dict[str, str]:
    """Markdown outside docs/ that is a page: path in the repository -> page."""
    paths = [p for p in AT if (ROOT / p).is_file() and not p.startswith(HELP)] + [
        f"{HELP}{p.name}" for p in sorted((ROOT / HELP).glob("*.md"))
    ]
    return {path: page_of(path) for path in paths}


def targets(path: str, text: str) -> dict[str, str]:
    """Relative links of a page that lead to something in the repository: as written -> path in the repository."""
    written = ["".join(m) for part in FENCE.split(text)[::2] for m in LINK.findall(part)]
    near = [link for link in written if "://" not in link and (not link.startswith("/") or link.startswith(SERVED))]
    where = {k: ROOT / HELP / k[1:] if k.startswith("/") else (ROOT / path).parent / unquote(k) for k in near}
    return {k: v.resolve().relative_to(ROOT).as_posix() for k, v in where.items() if v.exists()}


def nodes_page() -> str:
    """The list of all nodes, each with its one sentence, by folder of the menu."""
    names = json.loads((ROOT / "locales/en/nodeDefs.json").read_text(encoding="utf-8"))
    head = "# All nodes\n\nThe same pages open in ComfyUI: right-click a node, *Node Info*.\n\n"
    rows = [f"- [{n['display_name']}]({key}.md): {n['description']}" for key, n in names.items()]
    return head + "\n".join(rows) + "\n"


def examples_page() -> str:
    """Every script of docs/examples, whole."""
    scripts = sorted((ROOT / "docs/examples").glob("*.py"))
    parts = [f"## [{p.name}]({p.name})\n\n```python\n{p.read_text(encoding='utf-8')}```\n" for p in scripts]
    return "# Examples\n\nEach runs as it stands, on the model that ships with Vitrine.\n\n" + "\n".join(parts)


def on_files(files, config):
    """Add the pages from outside docs/, and every file that some page links to."""
    own = {f"docs/{f.src_uri}": f.content_string for f in files if f.src_uri.endswith(".md")}
    waiting = own | {path: (ROOT / path).read_text(encoding="utf-8") for path in sources()}
    for path, page in sources().items():
        files.append(File.generated(config, page, content=waiting[path]))
    files.append(File.generated(config, "nodes/index.md", content=nodes_page()))
    files.append(File.generated(config, "examples/index.md", content=examples_page()))
    while waiting:
        path, text = waiting.popitem()
        for target in targets(path, text).values():
            page = page_of(target)
            if page.startswith(("files/", "nodes/pictures/")) and files.get_file_from_path(page) is None:
                files.append(File.generated(config, page, abs_src_path=str(ROOT / target)))
                if target.endswith(".md"):
                    waiting[target] = (ROOT / target).read_text(encoding="utf-8")
    return files


def on_page_markdown(markdown, page, config, files):
    """Turn the repository's links into the site's."""
    here = page.file.src_uri
    paths = {site: path for path, site in sources().items()}
    path = paths.get(here) or (here.removeprefix("files/") if here.startswith("files/") else f"docs/{here}")
    known = {link: quote(relpath(page_of(target), dirname(here))) for link, target in targets(path, markdown).items()}
    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(lambda m: known.get(m[0], m[0]), part) for part in parts[::2]]
    return "".join(parts)
