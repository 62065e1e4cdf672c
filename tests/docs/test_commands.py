"""Every command that a page prints: its words, options and files exist; those with an output give it.

The quick ones run here, ``vitrine verify`` on the shipped models nightly, README's two in ``.ci/run``, the tutorials'
code in ``test_tutorials.py``. ``vitrine reproduce`` writes ``results/``, which ``test_results.py`` compares.
"""

import contextlib
import importlib.util
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from PIL import Image
from vitrine.cli import main as cli
from vitrine.engine.portraits import load_portraits, render, sample_scenes
from vitrine.evidence.registry import all_claims
from vitrine.evidence.verify.protocol import all_checks

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "nodes/web/docs").rglob("*.md")})
SETTING = r"(?:[A-Z]\w*=\S+ )*"
COMMAND = re.compile(rf"`({SETTING}(?:vitrine|pytest|python|torchrun|accelerate launch) [^`]+)`")


def commands(text):
    """Each command of a page, in its blocks and between backticks."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
    blocks += re.findall(r"^    (?:vitrine|pytest|python|torchrun) .*", plain, re.M)
    lines = [line.split("   #")[0].strip() for block in blocks for line in block.splitlines()]
    rest = " ".join(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S).split())
    return [line for line in lines if line and line[0] != "#"] + COMMAND.findall(rest)


def _words(command):
    """What a shell makes of it; settings of the environment left out."""
    words = shlex.split(re.sub(r"\(.*", "", command).replace(" && ", " ; "))
    return [word for word in words if not re.match(r"[A-Z_]+=", word)]


def _faults(words):
    """What does not exist of a command: a word, an option, a claim, a file."""
    if words[0] == "vitrine":
        return _of_ours(words[1:])
    if words[0] in ("torchrun", "accelerate"):
        return _of_ours(words[words.index("vitrine.cli.main") + 1 :]) if "-m" in words else []
    if words[:2] == ["python", "-m"]:
        return [] if importlib.util.find_spec(words[2]) else words[2:3]
    return [w for w in words[1:] if re.search(r"\.py$|^(?:tests|docs|evidence)/", w) and not (ROOT / w).exists()]


def _of_ours(words):
    words = [*words[: words.index(";")]] if ";" in words else words
    table, named = cli._tree(), []
    while words and words[0] in table:
        entry = table[words[0]]
        named.append(words.pop(0))
        table = entry.commands if isinstance(entry, cli.Group) else {}
    if words and not words[0].startswith("-") and table:
        return words[:1]
    known = _help(tuple(named)) + " --help --version"
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    claims = {"reproduce": all_claims, "verify": all_checks}.get(named[0] if named else "", dict)()
    asked = [w for w in words if re.fullmatch(r"[a-z0-9]+\.[\w.]+", w) and claims and "/" not in w]
    return [o for o in options if not re.search(rf"{o}\b", known)] + [
        c for c in asked if c not in claims and not c.endswith(("pt", "jpg", "txt", "safetensors"))
    ]


def _help(named, shown={}):  # noqa: B006 - asked for once a command
    if named not in shown:
        page = io.StringIO()
        with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
            cli.main([*named, "--help"])
        shown[named] = page.getvalue()
    return shown[named]


def test_commands_exist(subtests):
    seen = 0
    for page in set(PAGES) - {ROOT / "docs" / "retired.md"}:
        with subtests.test(str(page.relative_to(ROOT))):
            found = commands(page.read_text(encoding="utf-8"))
            assert not {command: wrong for command in found if (wrong := _faults(_words(command)))}
            seen += len(found)
    assert seen > 200


@pytest.mark.parametrize(
    "command",
    [
        "vitrine w2w wokr",
        "vitrine nemo find --protokoll nemo",
        "vitrine reproduce nemo.all",
        "pytest tests/none.py",
        "python -m vitrine.evidence.none",
        "python docs/make_none.py",
    ],
)
def test_what_does_not_exist_is_seen(command):
    assert _faults(_words(command))


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("vitrine --version", r"vitrine-diffusion \d+\.\d+\.\d+"),
        ("vitrine addresses portraits 'up-*-cross-q'", "up-level1-repeat1-vit-block0-cross-q"),
        ("vitrine emd train --help", "one-step|PROMPTS"),
        ("vitrine w2w look PORTRAITS", r"\d+"),
    ],
)
def test_quick_ones_run(command, output, capsys):
    folder = ROOT / "engine" / "portraits" / "weights" / "emd"
    words = [str(folder) if word == "PORTRAITS" else word for word in shlex.split(command)[1:]]
    with contextlib.suppress(SystemExit):
        assert cli.main(words) == 0
    assert re.search(output, capsys.readouterr().out)


def test_the_readmes_python_runs(tmp_path, monkeypatch):
    """On the shipped model, saved where the README says ``path/to/model``."""
    monkeypatch.chdir(tmp_path)
    load_portraits().pipeline().save_pretrained("path/to/model")
    pixels = render(sample_scenes(range(1))).images[0].permute(1, 2, 0)
    Image.fromarray((pixels * 255).byte().numpy()).save("horse.png")
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    names = {}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102 - the page's own code
    assert Image.open("seen.png").getextrema() != ((0, 0),) * 3
    assert names["tapped"].activations[names["layer"]].tensor.shape[0] == 1


def _verified():
    """(command, the page's paragraph below it) of docs/verify.md on the shipped models."""
    text = (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
    return re.findall(r"```bash\n(vitrine verify --model portraits[^\n]*)\n```\n\n(.*?)(?:\n\n|\Z)", text, re.S)


@pytest.mark.nightly
@pytest.mark.parametrize(("command", "said"), _verified(), ids=["portraits", "people"])
def test_verify_gives_the_pages_figures(command, said, tmp_path, monkeypatch):
    """Each "value [low, high]" of the paragraph is a figure of verify.json, rounded as the page does."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command)[1:]) == 0
    (written,) = tmp_path.rglob("verify.json")
    numbers = [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", json.dumps(json.loads(written.read_text())))]
    claimed = re.findall(r"(-?[\d.]+) \[(-?[\d.]+), (-?[\d.]+)\]", said)
    assert claimed
    for value in (number for figures in claimed for number in figures):
        places = len(value.partition(".")[2])
        assert any(f"{number * scale:.{places}f}" == value for number in numbers for scale in (1, 100)), value
