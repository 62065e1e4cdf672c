"""The page's requests: one guard in front of all of them, and answers that are an object or a sentence.

A body is a small JSON object of UTF-8 with finite numbers. Whatever else comes is answered 4xx, with what is accepted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...engine.errors import VitrineError, printable, refuse
from .panel_state import NodeKey
from .render_thread import Gone, Superseded
from .run_watch import Busy

BYTES, DEPTH, DIGITS, LETTERS = 65_536, 8, 20, 200
"""The most of a body, of its objects in one another, of a whole number, and of an id."""
Answer = dict[str, Any] | bytes
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="vitrine-page")
"""Of our own: the server reads its files with the loop's."""


class Refused(Exception):
    """An answer that is no picture: its status and its sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def not_run() -> Refused:
    """Nothing is known of the node."""
    return Refused(404, "node: given one that has not run here; accepted: a node of a graph that ran. Run it once")


# --- what comes in ------------------------------------------------------------------------------------------------
async def body_of(request: Any) -> dict[str, Any]:
    """The object in a request's body.

    Raises:
        Refused: It is anything else.
        VitrineError: Its numbers or texts are not usable.
    """
    kind = str(request.content_type)
    charset = str(request.charset or "utf-8").lower()
    if kind != "application/json" or charset not in ("utf-8", "utf8"):
        shown = f"{kind}; charset={charset}"
        raise Refused(415, str(refuse("content type", shown, "application/json in UTF-8", "set the header")))
    content, most = bytearray(), (request.content_length or 0)
    try:
        while most <= BYTES and (part := await request.content.read(BYTES + 1)):
            content += part
            most = len(content)
    except Exception as error:  # a broken encoding, or a connection that is gone
        raise Refused(400, str(refuse("body", type(error).__name__, "an object of JSON", "send it again"))) from None
    if most > BYTES:
        raise Refused(413, str(refuse("body", f"{most} bytes or more", f"at most {BYTES}", "send less text")))
    return parsed(bytes(content))


def parsed(content: bytes) -> dict[str, Any]:
    """An object of JSON."""
    try:
        body = json.loads(content.decode(), parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except VitrineError:
        raise
    except (ValueError, RecursionError) as error:
        shown = type(error).__name__ if isinstance(error, RecursionError) else str(error)
        raise refuse("body", shown, "an object of JSON", "send one") from None
    if not isinstance(body, dict):
        raise refuse("body", type(body).__name__, "an object of JSON", "send one")
    _check(body, DEPTH)
    return body


def _whole(digits: str) -> int:
    if len(digits.lstrip("-")) > DIGITS:
        raise refuse("number", f"{len(digits)} digits", f"at most {DIGITS} digits", "send a smaller one")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise refuse("number", digits[:DIGITS], "finite numbers", "send one")
    return number


def _check(value: Any, depth: int) -> None:
    """Depth of objects and lists, and letters that UTF-8 has."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise refuse("text", "half a surrogate pair", "letters of Unicode", "send whole ones") from None
    elif isinstance(value, (dict, list)):
        if depth == 0:
            raise refuse("body", "deeper", f"at most {DEPTH} objects or lists in one another", "send a flat one")
        for entry in [*value, *value.values()] if isinstance(value, dict) else value:
            _check(entry, depth - 1)


def text_in(asked: Mapping[str, Any], name: str, most: int = LETTERS) -> str:
    """A text of an object, empty where it has none."""
    value = asked.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > most:
        shown = f"{len(value)} letters" if isinstance(value, str) else type(value).__name__
        raise refuse(name, shown, f"a text of at most {most} letters", "send a shorter one")
    return value


def number_in(asked: Mapping[str, Any], name: str, low: float, high: float, usual: float | None = None) -> Any:
    """A number of an object, a whole one where the bounds are."""
    value, kinds = asked.get(name, usual), int if isinstance(low, int) else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        what = "a whole number" if isinstance(low, int) else "a number"
        raise refuse(name, printable(str(value)[:LETTERS]), f"{what} from {low} to {high}", "send one")
    return value


def key_in(asked: Mapping[str, Any]) -> NodeKey:
    """Which node a request is about."""
    return NodeKey(*(text_in(asked, name) for name in NodeKey._fields))


# --- what goes out ------------------------------------------------------------------------------------------------
async def in_thread(work: Callable[..., Any], *args: Any) -> Any:
    """What ``work`` returns, in a thread of ours."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work, *args)


async def answered(work: Awaitable[Answer]) -> tuple[Answer, int]:
    """What ``work`` makes and 200, or what was wrong and a status."""
    try:
        return await work, 200
    except Refused as error:
        return {"error": str(error)}, error.status
    except Busy:
        return {"error": "a graph runs: the picture follows afterwards", "runs": True}, 409
    except (Superseded, Gone):
        return {"error": "a newer request of this panel took the place of this one"}, 409
    except VitrineError as error:
        return {"error": str(error)}, 400
    except Exception as error:
        logging.getLogger("vitrine").warning("a panel's request failed", exc_info=error)
        line = (str(error).strip() or type(error).__name__).partition("\n")[0]
        return {"error": f"this could not be made: {printable(line[:LETTERS])}"}, 422


def post(path: str, work: Callable[[dict[str, Any], Any], Awaitable[Any]]) -> None:
    """Answer ``POST path``, where there is a server; importing the nodes elsewhere needs none.

    Args:
        work: of the body and the request; makes an object, or its JSON where that is large.
    """
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is None or not hasattr(server, "routes"):
        return
    from aiohttp import web

    @server.routes.post(path)
    async def answer(request: Any) -> Any:
        async def worked() -> Answer:
            return await work(await body_of(request), request)  # type: ignore[no-any-return]

        content, status = await answered(worked())
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        return web.Response(body=text, status=status, content_type="application/json", charset="utf-8")
