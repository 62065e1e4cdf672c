"""The ``vitrine`` command: one tree, help without heavy imports, and one line for every mistake."""

import inspect
import json
import subprocess
import sys
import time

import pytest
from vitrine.cli import commands
from vitrine.cli.main import Group, _tree, main

TREE = _tree()
PATHS = [[], *([name] for name in TREE)]
PATHS += [[name, inner] for name, entry in TREE.items() if isinstance(entry, Group) for inner in entry.commands]


def refused(arguments, capsys):
    """The one line that a refused command line prints."""
    capsys.readouterr()
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("vitrine: ")]
    assert not out and len(lines) == 1 and "Traceback" not in err
    return lines[0]


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_every_command_has_help(path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*path, "--help"])
    assert not stop.value.code
    text = capsys.readouterr().out
    assert text.startswith("usage: " + " ".join(["vitrine", *path]))
    entry = TREE[path[0]] if path else None
    if len(path) < 2 and not isinstance(entry, type):
        assert all(name in text for name in (entry.commands if entry else TREE))


def test_the_tree_lists_the_methods():
    assert set(TREE) == {"taps", "nemo", "lora", "w2w", "emd", "demo", "reproduce", "verify", "addresses"}


def test_help_reads_no_sources(monkeypatch):
    """tyro parsed the source of ``typing`` for a help of the commands: a third of the CPU time."""
    asked = []
    monkeypatch.setattr(inspect, "getsource", lambda thing: asked.append(thing) or "")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert not asked


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom vitrine.cli.main import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'diffusers', 'transformers', 'matplotlib', 'PIL'} & set(sys.modules)))"
    )
    for arguments in (["--help"], ["emd", "train", "--help"]):
        out = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert out.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["verfy"], "Did you mean verify"),
        (["w2w", "bild"], "Did you mean build"),
        ([], "Expected one of {taps"),
        (["w2w"], "Expected one of {train-loras"),
        (["demo", "--no-such-flag", "1"], "--no-such-flag"),
        (["taps", "rank"], "Folder of pictures"),
        (["emd", "train", "--stop-after", "soon"], "soon"),
        (["reproduce", "nothing.such"], "accepted"),
        (["w2w", "sample", "--edits", "beard"], "label=number"),
    ],
)
def test_mistakes_are_one_line(arguments, says, capsys):
    assert says in refused(arguments, capsys)


@pytest.mark.parametrize(
    "command",
    [
        "taps rank", "nemo calibrate", "nemo find", "nemo bake", "w2w train-loras", "w2w build", "w2w sample",
        "w2w import-official", "emd train", "emd train --start", "addresses", "reproduce portraits.memorized --model",
    ],
)  # fmt: skip
def test_a_missing_path_is_one_line(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if command.startswith("reproduce"):  # it says first how long it will take
        assert main([*command.split(), str(tmp_path / "none")]) == 2
        assert capsys.readouterr().err.strip().splitlines()[-1].startswith("vitrine: portraits folder")
    else:
        assert "accepted: " in refused([*command.split(), str(tmp_path / "none")], capsys)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (KeyboardInterrupt(), 130, "vitrine: interrupted\n"),
        (FileNotFoundError(2, "No such file", "x"), 2, "vitrine: [Errno 2] No such file: 'x'\n"),
        (ImportError("No module named 'torch'"), 2, "vitrine: No module named 'torch'. This command needs more"),
    ],
)
def test_what_a_command_raises_is_one_line(error, status, line, monkeypatch, capsys):
    def fail(self):
        raise error

    monkeypatch.setattr(commands.Demo, "run", fail)
    assert main(["demo"]) == status
    assert capsys.readouterr().err.removeprefix("demo: loading\n").startswith(line)


# --- the first line -----------------------------------------------------------------------------------------------
COMMANDS = [path for path in PATHS if len(path) == 2 or (path and isinstance(TREE[path[0]], type))]
FIRST_LINES = """
import json, sys
from vitrine.cli import main as cli
lines, write = [], sys.stderr.write
class Stop(BaseException):
    pass
def stopped(self):
    raise Stop
def first(text):
    lines.append((text, "torch" in sys.modules))
    return write(text)
sys.stderr.write = first
cli.check_settings = lambda command: None
for path in json.loads(sys.argv[1]):
    command, lines[:] = cli._tree(path[0]), []
    for word in path:
        command = command.commands[word] if isinstance(command, cli.Group) else command[word]
    command.run, command.slow = stopped, True
    cli._parse = lambda arguments: object.__new__(command)
    try:
        cli.main(path)
    except Stop:
        print(json.dumps(lines[0]))
"""


def test_the_first_line_comes_before_anything_heavy():
    """`emd train` was silent until its prompts were encoded, which came after all imports."""
    done = subprocess.run([sys.executable, "-c", FIRST_LINES, json.dumps(COMMANDS)], capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines == [[f"{' '.join(path)}: loading", False] for path in COMMANDS], done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_the_first_line_takes_two_seconds_at_most(path):
    """Of a new process, with all that comes before the command's own work."""
    begun = time.perf_counter()
    arguments = [sys.executable, "-c", FIRST_LINES, json.dumps([path])]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr.readline() == f"{' '.join(path)}: loading\n"
        assert time.perf_counter() - begun < 2


def test_a_table_from_a_file_has_no_line_before_it(capsys):
    assert main(["addresses", "portraits", "*cross-q"]) == 0
    out, err = capsys.readouterr()
    assert out and not err
