"""Requests to the pack's routes on a real server: whatever comes is answered, with a sentence where it is refused."""

import asyncio
import gzip
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
JSON = {"Content-Type": "application/json"}
SOURCES = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "nodes" / "comfy").glob("*.py"))]
ROUTES = [route for source in SOURCES for route in re.findall(r'\bpost\("(/vitrine/\w+)"', source)]
KEY = {"client": "a", "workflow": "b", "node": "7:4"}
PERSON = KEY | {"inputs": {"label_1": "beard", "strength_1": 1.0}, "prompt": "", "seed": 7}
POINT = KEY | {"x": 0.5, "y": 0.5}

BODIES = {
    "deep objects": ('{"a":' * 20_000 + "1" + "}" * 20_000, JSON),
    "deep lists": ("[" * 60_000, JSON),
    "a little too deep": (json.dumps(KEY | {"more": [[[[[[[[[1]]]]]]]]]}), JSON),
    "infinity": ('{"node": "4", "x": Infinity, "y": 0}', JSON),
    "no number": ('{"node": "4", "x": NaN, "y": 0}', JSON),
    "a float without end": ('{"node": "4", "x": 1e999, "y": 0}', JSON),
    "4,000 digits": ('{"node": "4", "x": ' + "9" * 4000 + ', "y": 0}', JSON),
    "5,000 digits": ('{"node": "4", "x": ' + "9" * 5000 + ', "y": 0}', JSON),
    "unknown charset": (json.dumps(KEY), {"Content-Type": "application/json; charset=klingon"}),
    "another charset": (json.dumps(KEY).encode("utf-16"), {"Content-Type": "application/json; charset=utf-16"}),
    "a form": ("node=4", {"Content-Type": "application/x-www-form-urlencoded"}),
    "plain text": (json.dumps(KEY), {"Content-Type": "text/plain"}),
    "no content type": (json.dumps(KEY), {"Content-Type": ""}),
    "an odd content type": (json.dumps(KEY), {"Content-Type": ";;=;"}),
    "5 MB": (json.dumps(KEY | {"prompt": "a" * 5_000_000}), JSON),
    "5 MB in 5 kB": (gzip.compress(b" " * 5_000_000 + b"{}"), JSON | {"Content-Encoding": "gzip"}),
    "no letters": (b'{"node": "\xff"}', JSON),
    "half a pair": ('{"node": "\\ud800"}', JSON),
    "nothing": (b"", JSON),
    "a list": ("[]", JSON),
    "a number": ("1", JSON),
    "ids that are none": ('{"node": {"a": 1}}', JSON),
    "a long id": (json.dumps(KEY | {"node": "4" * 5000}), JSON),
}
PERSONS = [
    {"inputs": []}, {"inputs": None}, {"inputs": {f"label_{i}": "" for i in range(99)}},
    {"inputs": {"strength_1": "a"}}, {"inputs": {"strength_1": 1e300}}, {"inputs": {"strength_1": True}},
    {"inputs": {"label_1": ["a"]}}, {"inputs": {"more": "a" * 20_000}}, {"prompt": "a" * 20_000}, {"prompt": 4},
    {"seed": -1}, {"seed": 2**64}, {"seed": 0.5}, {"seed": "7"}, {"seed": None},
]  # fmt: skip
POINTS = [{"x": -1}, {"y": 1.001}, {"x": "0.5"}, {"x": None}, {"x": True}, {"x": [0.5]}]
CHOICES = [{"space_file": 4}, {"shipped": ["a"]}, {"space_file": "a" * 5000}]
REFUSED = [
    *[("/vitrine/person", PERSON | more) for more in PERSONS],
    *[("/vitrine/similarity", POINT | more) for more in POINTS],
    *[("/vitrine/choices", KEY | more) for more in CHOICES],
]


async def _posted(session, address, route, body, headers):
    async with session.post(f"{address}{route}", data=body, headers=headers) as answer:
        return answer.status, await answer.text()


async def _asked(address):
    """(route, name, status, text) of every request."""
    import aiohttp

    found = []
    async with aiohttp.ClientSession() as session:
        for route in ROUTES:
            for name, (body, headers) in BODIES.items():
                found.append((route, name, *await _posted(session, address, route, body, headers)))
        for route, asked in REFUSED:
            found.append((route, str(asked)[:200], *await _posted(session, address, route, json.dumps(asked), JSON)))
        good = json.dumps(PERSON | POINT)
        asks = [route for route in ROUTES if route != "/vitrine/choices"]
        unknown = {(await _posted(session, address, route, good, JSON))[0] for route in asks}
        async with session.post(f"{address}/prompt", json={"prompt": {"1": {"inputs": None}}}) as answer:
            prompt = answer.status
        names = await _posted(session, address, "/vitrine/choices", json.dumps(KEY), JSON)
    return found, unknown, prompt, names


def test_what_is_no_request_is_refused_with_a_sentence(address, page_base):
    """B: deep JSON, Infinity, 4,000 digits and unknown charsets were a 500."""
    before = len((page_base / "server.log").read_text())
    found, unknown, prompt, names = asyncio.run(_asked(address))
    log = (page_base / "server.log").read_text()[before:]
    assert len(found) == len(ROUTES) * len(BODIES) + len(REFUSED)
    wrong = [(route, name, status) for route, name, status, text in found if not 400 <= status < 500]
    assert not wrong
    for route, name, _, text in found:
        sentence = json.loads(text)["error"]
        assert "accepted: " in sentence and "Traceback" not in text, (route, name, text)
    assert len(ROUTES) >= 6 and unknown == {404} and prompt == 400 and names == (200, '{"names": []}')
    assert log and "Traceback" not in log and "Error handling request" not in log
