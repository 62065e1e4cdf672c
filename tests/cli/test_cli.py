"""The ``vitrine`` command: one tree, help without heavy imports, and one line for every mistake."""

import subprocess
import sys

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
    assert capsys.readouterr().err.startswith(line)
