"""docs/results says what results/*.json say. ``VITRINE_WRITE_DOCS=1 pytest tests/docs/test_results.py`` writes it."""

import os
import re

import pytest
from vitrine.evidence.registry import ROLES, all_claims
from vitrine.evidence.result_files import SHIPPED, read_results
from vitrine.evidence.statements import METHODS, page_of, statements
from vitrine_tests.docs import results_page as page

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")
RESULTS = read_results()
VERDICTS = {"pass", "partly", "fail", "not run"}


def cells(text):
    """Of Markdown and HTML tables, links reduced to their words."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [c.strip() for row in rows for c in row] + re.findall(r"<t[dh]>(.*?)</t[dh]>", text)


def test_the_pages_are_the_results():
    if os.environ.get("VITRINE_WRITE_DOCS"):
        page.write()
    written = {file.name: file.read_text(encoding="utf-8") for file in page.FOLDER.iterdir()}
    assert written == page.pages(), "VITRINE_WRITE_DOCS=1 pytest tests/docs/test_results.py"
    assert page.readme_rows() in page.README.read_text(encoding="utf-8"), "the README's rows, by the same command"


def test_every_number_stands_in_a_result():
    known = {number for path in SHIPPED.glob("*.json") for number in NUMBER.findall(path.read_text(encoding="utf-8"))}
    known |= {f"{float(n):.4g}" for n in known} | set(NUMBER.findall(" ".join(METHODS.values()) + page.LEAD))
    for name, text in page.pages().items():
        if name.endswith(".svg"):  # ticks of an axis are no figures
            text = " ".join(re.findall(r'text-anchor="end">([^<]*)<', text))
        text = re.sub(r"\(\S+\.(?:md|svg)\S*\)|&\w+;|&#\w+;|=1|id=\"\S+\"", "", text)
        assert not set(NUMBER.findall(text)) - known, name


def test_nothing_is_long():
    for name, text in page.pages().items():
        assert not [c for c in cells(text) if len(c.split()) > 25], name
    assert not [c for c in cells(page.readme_rows()) if len(c.split()) > 25]
    for words in statements().values():
        assert len(words.about.split()) <= 150 and len(words.title.split()) <= 20


def test_every_claim_has_its_words_and_its_result():
    known = statements()
    assert set(all_claims()) <= set(known) and set(RESULTS) == set(known)
    assert {page_of(name) for name in known} == set(METHODS) and len(set(page.ON_README)) == 10
    for name, result in read_results().items():
        assert {k: result[k] for k in ("title", "metric", "better", "world", "about")} == known[name]._asdict(), name
        if name in all_claims():
            claim = all_claims()[name]
            assert (result["paper"], result["figure"], result["target"]) == (claim.paper, claim.figure, claim.target)
            measured = result["commit"] and result["date"]
            assert name in result["command"] and (measured or result["verdict"] == "not run"), name
        else:
            assert "vitrine reproduce" not in result["command"]


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_complete(name):
    result = RESULTS[name]
    assert result["verdict"] in VERDICTS and result["claim"] == name
    if result["verdict"] != "not run":
        assert isinstance(result["ours"], (int, float)) and result["command"] and result["target"]
        assert result["verdict"] != "partly" or set(result["parts"].values()) == {True, False}
    for arm in result["baselines"]:
        assert arm["role"] in ROLES and isinstance(arm["value"], (int, float))
    for arm in [{"value": result["ours"], "interval": result["interval"]}, *result["baselines"]]:
        if arm["interval"] is None:
            continue
        low, high = arm["interval"]
        # resampled pictures are farther from others: the interval of real against real lies above its distance
        assert (low <= arm["value"] or arm.get("role") == "reference") and arm["value"] <= high, arm
