"""The pages and the site made of them: every relative link leads somewhere, nothing is loaded from another host."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def test_relative_links_lead_somewhere(subtests):
    for path in PAGES:
        with subtests.test(str(path.relative_to(ROOT))):
            text = FENCE.sub("", path.read_text(encoding="utf-8"))
            links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
            near = [unquote(link) for link in links if "://" not in link]
            targets = {link: path.parent / (link.split("#")[0] or path) for link in near}
            assert not [link for link, target in targets.items() if link[0] == "/" or not target.exists()]


class Seen(HTMLParser):
    """What a page of the site links to, what it loads, and the anchors it has."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loaded, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.anchors |= {attrs.get("id"), attrs.get("name")}
        self.loaded += [attrs[k] for k in ("src", "srcset", "poster") if attrs.get(k)]
        if attrs.get("href"):
            (self.loaded if tag == "link" and attrs.get("rel") != "canonical" else self.links).append(attrs["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Folder of the built site, and its pages parsed."""
    pytest.importorskip("material", reason="the docs extra is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, {p: Seen(p.read_text(encoding="utf-8")) for p in folder.rglob("*.html") if p.name != "404.html"}


def test_nothing_is_loaded_from_another_host(site):
    folder, pages = site
    assert not {link for page in pages.values() for link in page.loaded if re.match(r"(?:\w+:)?//", link)}
    styles = "".join(p.read_text(encoding="utf-8") for p in folder.rglob("*.css"))
    assert styles and not re.findall(r"(?:url\(|@import\s*)[\"']?(?:https?:)?//[^)]+", styles)


def test_links_of_the_site_lead_somewhere(site):
    folder, pages = site
    dead, seen = set(), 0
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            if re.match(r"\w+:", link):
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file).resolve() if file not in ("", ".") else path
            seen += 1
            exists = target.is_file() or target == folder
            if not exists or (anchor and target in pages and anchor not in pages[target].anchors):
                dead.add(f"{path.relative_to(folder)}: {link}")
    assert seen > 1000 and not dead


def test_every_page_and_every_node_is_on_the_site(site):
    folder, pages = site
    docs = {p.relative_to(ROOT / "docs").with_suffix(".html") for p in (ROOT / "docs").rglob("*.md")}
    docs = {p.with_name("index.html") if p.stem == "README" else p for p in docs}
    helps = {Path("nodes") / f"{p.stem}.html" for p in (ROOT / "nodes/web/docs").glob("*.md")}
    assert docs | helps | {Path("index.html"), Path("examples/index.html")} <= {p.relative_to(folder) for p in pages}
