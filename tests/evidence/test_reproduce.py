"""The evidence core: the registry of claims, ``reproduce``, charts, and the report page."""

import json
from inspect import signature
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image
from vitrine.cli.main import main
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.charts import _ticks, curve_picture
from vitrine.engine.io.html_page import Report
from vitrine.evidence import registry as claims
from vitrine.evidence import reproduce
from vitrine.evidence.charts import line_chart
from vitrine.evidence.portraits import claims as portraits_claims
from vitrine.evidence.portraits import quality
from vitrine.evidence.result_files import commit, read_results
from vitrine.evidence.result_plots import dot_plot, ticks


def test_claims_are_found_by_name_and_glob():
    assert {"portraits.quality", "portraits.memorized"} <= set(claims.all_claims())
    assert {c.name.split(".")[0] for c in claims.pick_claims(["portraits.*"])} == {"portraits"}
    with pytest.raises(VitrineError, match="Did you mean portraits.quality"):
        claims.pick_claims(["portraits.qualty"])


def test_all_claims_together_are_quick_enough():
    """About a quarter of an hour on two cores, two claims side by side, as declared, without outside material."""
    table = claims.all_claims().values()
    ours = [c for c in table if not set(reproduce.MATERIAL) & set(signature(c.measure).parameters)]
    assert sum(c.quick_minutes for c in ours) / 2 <= 15
    assert all(0 < c.quick_minutes <= c.minutes for c in table)


@pytest.fixture
def failing(monkeypatch):
    """A claim that does not hold, in place of all others; yields the settings it was measured with."""
    calls = []

    def measure(model=None, progress=None, quick=False):
        calls.append((model, quick))
        line = claims.Curves("trend", "x", "y", {"ours": [(0.0, 1.0), (1.0, 2.0)]})
        shown = claims.arms({"chance": 0.1, "us": 0.12345}, {"us": "ours", "chance": "trivial"}, {"us": (0.1, 0.2)})
        parts = {"true": True, "bold": False}
        return claims.ClaimResult(0.5, (0.4, 0.6), False, {"why": float("nan")}, (line,), shown, 7, parts=parts)

    claim = claims.Claim("test.fails", "none", "a figure", ">= 0.9", measure, minutes=7, quick_minutes=0.25)
    monkeypatch.setattr(reproduce, "pick_claims", lambda names: [claim])
    return calls


def test_a_claim_that_fails_stays_in_the_list(failing, tmp_path, capsys):
    out = tmp_path / "deep" / "results"
    assert main(["reproduce", "--out", str(out)]) == 1
    entry = read_results(out)["test.fails"]
    assert entry["verdict"] == "partly" and entry["command"] == "vitrine reproduce test.fails" and not entry["quick"]
    assert (entry["ours"], entry["interval"], entry["n"]) == (0.1235, [0.1, 0.2], 7), "four digits, as pages print them"
    assert entry["judged"] == {"value": 0.5, "interval": [0.4, 0.6]}
    assert entry["baselines"] == [{"name": "chance", "value": 0.1, "interval": None, "role": "trivial"}]
    assert entry["commit"] == commit() and entry["versions"]["torch"] and entry["details"] == {"why": None}
    printed = capsys.readouterr().out
    assert printed.startswith("test.fails: about 7 min left\n")
    assert (
        "partly: 0.1235 (0.1 to 0.2)" in printed and "chance (trivial): 0.1" in printed and "not met: bold" in printed
    )
    assert not list(tmp_path.rglob("*.tmp*")) and failing == [(None, False)]
    assert entry["curves"][0]["series"] == {"ours": [[0, 1], [1, 2]]}
    assert Image.open(out / "test.fails-1.png").size == (1120, 640)


def test_quick_is_said_everywhere(failing, tmp_path, capsys):
    assert main(["reproduce", "test.fails", "--quick", "--model", "m", "--out", str(tmp_path)]) == 1
    entry = read_results(tmp_path)["test.fails"]
    assert entry["quick"] is True and entry["command"] == "vitrine reproduce test.fails --quick --model m"
    assert capsys.readouterr().out.startswith("test.fails: about 20 s left") and failing == [("m", True)]


def test_where_results_go():
    """Quick ones never replace those in full, and nobody's own model replaces the shipped ones' figures."""
    assert reproduce.default_folder(None, False) == Path("results")
    assert reproduce.default_folder(None, True) == Path("results/quick")
    assert reproduce.default_folder("mine", False) is None


def test_the_commit_is_gits(tmp_path):
    """From its files: a branch, loose or packed, a worktree, no branch, no repository."""
    git = tmp_path / ".git"
    assert commit(tmp_path) is None
    (git / "refs/heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\n1234567890 refs/heads/main\n")
    assert commit(tmp_path) == "1234567"
    (git / "refs/heads/main").write_text("abcdefabcdef\n")
    tree = tmp_path / "tree"
    (git / "worktrees/tree").mkdir(parents=True)
    (git / "worktrees/tree/HEAD").write_text("ref: refs/heads/main\n")
    (git / "worktrees/tree/commondir").write_text("../..\n")
    tree.mkdir()
    (tree / ".git").write_text(f"gitdir: {git / 'worktrees/tree'}\n")
    assert commit(tmp_path) == commit(tree) == "abcdefa"
    (git / "HEAD").write_text("7654321000\n")
    assert commit(tmp_path) == "7654321"


def test_a_plot_says_what_each_arm_is_without_colours():
    arms = [
        {"name": f"a <{r}>", "role": r, "value": v, "interval": None}
        for r, v in zip(claims.ROLES, (3, 2, 1, 4), strict=True)
    ]
    result = {"title": "t", "metric": "m", "better": "higher", "ours": 3, "interval": [2.5, 3.5], "baselines": arms[1:]}
    picture = ElementTree.fromstring(dot_plot(result))
    text = " ".join(picture.itertext())
    assert all(word in text for word in ("higher is better", "other method", "trivial baseline", "a <rival>"))
    marks = {p.get("d", "").split("m", 1)[-1] for p in picture.findall(".//{*}path") if p.get("class")}
    assert len(marks) >= 3 and "prefers-color-scheme: dark" in text
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0] and 3 <= len(ticks(0.4, 37.0)) <= 7


def test_a_list_of_memorized_pictures_reaches_the_claim_that_takes_one(failing, monkeypatch, tmp_path, capsys):
    assert main(["reproduce", "--plants", "mine.json"]) == 2 and not failing
    assert "--plants: given with test.fails; accepted: a claim that takes it" in capsys.readouterr().err

    def measure(model=None, progress=None, quick=False, plants=None):
        return claims.ClaimResult(1.0, None, plants == "mine.json")

    taking = claims.Claim("test.plants", "none", "a figure", "1", measure)
    monkeypatch.setattr(reproduce, "pick_claims", lambda names: [taking])
    assert main(["reproduce", "--plants", "mine.json", "--out", str(tmp_path)]) == 0
    assert read_results(tmp_path)["test.plants"]["command"] == "vitrine reproduce test.plants --plants mine.json"


@pytest.mark.nightly
def test_claims_side_by_side_are_the_same_claims(tmp_path, capsys):
    """Each in a process of one thread; what they print and write is what they measure alone."""
    names = ["emd.likelihood", "w2w.directions"]
    assert main(["reproduce", *names, "--quick", "--workers", "2", "--out", str(tmp_path)]) in (0, 1)
    both = read_results(tmp_path)
    assert capsys.readouterr().out.startswith("2 claims: about ") and set(both) == set(names)
    alone = reproduce.measure(claims.pick_claims(["w2w.directions"])[0], None, True, bar=False)
    assert json.loads(json.dumps(alone["details"])) == both["w2w.directions"]["details"]
    with pytest.raises(VitrineError, match="workers"):
        reproduce.reproduce(names, None, None, True, 0)


@pytest.mark.parametrize(
    ("cores", "names", "asked", "used"),
    [
        (2, ["w2w.*"], None, 2),
        (64, ["w2w.*"], None, 4),
        (2, ["w2w.directions"], None, 1),
        (1, ["w2w.*"], None, 1),
        (2, ["w2w.*"], 3, 3),
        (2, ["w2w.directions"], 3, 1),
    ],
)
def test_one_claim_for_each_core_unless_told_otherwise(cores, names, asked, used, monkeypatch):
    seen = []
    monkeypatch.setattr(reproduce, "cores", lambda: cores)
    monkeypatch.setattr(reproduce, "_measured", lambda picked, model, quick, workers: seen.append(workers) or [])
    reproduce.reproduce(names, None, None, True, asked)
    assert seen == [used]


@pytest.mark.parametrize("quick", [False, True])
def test_quick_portraits_claims_are_not_stricter(quick, monkeypatch):
    """Fewer samples and renders; a worst attribute a little below its target still holds when it is read from 48."""
    counts = {}

    def measure_quality(model, net, **settings):
        counts.update(settings)
        accuracy = dict.fromkeys("abcdefghij", 0.96) | {"worst": 0.87}
        return quality.Quality({"a": 0.985}, accuracy, 1.0, 2.0, 0.5, settings.get("samples", 512),
                               settings.get("renders", 4096), 0.3, 1.0, 30.0)  # fmt: skip

    monkeypatch.setattr(quality, "measure_quality", measure_quality)
    monkeypatch.setattr(quality, "measure_copies", lambda model, **settings: counts.update(settings) or [])
    result = portraits_claims.quality(quick=quick)
    portraits_claims.memorized(quick=quick)
    assert result.holds is quick and result.value == round(sum([0.96] * 10 + [0.87]) / 11, 4)
    assert counts.get("samples", 512) == (48 if quick else 512) and counts["seeds"] == (3 if quick else 10)


@pytest.mark.parametrize("points", [[], [(0.0, float("nan"))], [(float("inf"), 1.0)]])
def test_charts_refuse_what_was_not_measured(points):
    with pytest.raises(VitrineError, match="finite points"):
        line_chart({"line": points}, "t", "x", "y")
    with pytest.raises(VitrineError, match="finite points"):
        curve_picture(points, "t", "x", "y")


@pytest.mark.parametrize(("low", "high"), [(-1.53, 1.17), (0, 1), (0.5, 0.5), (3, 97), (0, 1e-7), (-4e5, 2e5)])
def test_ticks_are_round_and_hold_the_values(low, high):
    ticks = _ticks(low, high)
    assert 2 < len(ticks) <= 9 and ticks[0] <= low <= high <= ticks[-1]
    assert all(len(f"{abs(t):.6e}".split("e")[0].rstrip("0").replace(".", "")) <= 2 for t in ticks)
    assert curve_picture([(low, high), (high, low)], "t", "x", "y").size == (560, 320)


def test_the_report_is_self_contained(tmp_path):
    report = Report("A <title>", "lead")
    report.add_heading("One & two")
    report.add_paragraph("run `vitrine <x>`, then `y`")
    report.add_images([(Image.new("RGB", (4, 4)), 'caption "quoted"')])
    report.add_images([(Image.new("RGB", (400, 4)), "")])
    report.add_table([("a", "b"), (1, "<2>")])
    text = report.write(tmp_path / "report.html").read_text()
    assert "A &lt;title&gt;" in text and "&lt;2&gt;" in text and "data:image/png;base64," in text
    assert "<p>run <code>vitrine &lt;x&gt;</code>, then <code>y</code></p>" in text
    assert text.count('class="pixels"') == 1 and text.count("<figcaption>") == 1
    assert "http" not in text and not list(tmp_path.glob("*.tmp*"))
