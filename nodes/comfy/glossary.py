"""The glossary as a page of ComfyUI's server, where the help pages' links lead: ``/vitrine/glossary.md``."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "web" / "docs" / "vitrine" / "glossary.md"
STYLE = "body{max-width:42em;margin:2em auto;padding:0 1em;font:16px/1.5 sans-serif} :target{background:#fd6}"


def as_html(text: str) -> str:
    """Headings, paragraphs, ``code`` and *emphasis* as HTML; each heading is an anchor under its own name."""
    parts = []
    for block in text.split("\n\n"):
        block = html.escape(block.strip())
        block = re.sub(r"`([^`]+)`", r"<code>\1</code>", block)
        block = re.sub(r"(?<![\w*])\*(\w[^*]*)\*", r"<em>\1</em>", block)
        level = len(block) - len(block.lstrip("#"))
        title = block[level:].strip()
        parts.append(f'<h{level} id="{title.lower()}">{title}</h{level}>' if level else f"<p>{block}</p>")
    head = f'<meta charset="utf-8"><title>Vitrine: words</title><style>{STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>"


def register() -> None:
    """Serve the page, where there is a server."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is None or not hasattr(server, "routes"):
        return
    from aiohttp import web

    @server.routes.get("/vitrine/glossary.md")
    async def answer(request: Any) -> Any:
        return web.Response(text=as_html(PAGE.read_text(encoding="utf-8")), content_type="text/html")
