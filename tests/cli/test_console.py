"""What commands print: narrow terminals, ASCII, closed pipes, Ctrl-C, and libraries without their noise."""

import dataclasses
import inspect
import io
import logging
import os
import re
import signal
import subprocess
import sys
import time
import typing
from pathlib import Path

import pytest
from vitrine.cli.main import Group, _parse, _tree, main
from vitrine.engine.runtime.quiet import NOISE, quiet_libraries
from vitrine.engine.settings.setting_checks import NamesFile, Writes, _marks
from vitrine_tests.hangs import HANGS

TREE = _tree()
PATHS = [[], *([name] for name in TREE)]
PATHS += [[name, inner] for name, entry in TREE.items() if isinstance(entry, Group) for inner in entry.commands]
COMMANDS = {name: entry for name, entry in TREE.items() if isinstance(entry, type)} | {
    f"{word} {name}": entry
    for word, group in TREE.items()
    if isinstance(group, Group)
    for name, entry in group.commands.items()
}
VITRINE = [sys.executable, "-c", "import sys\nfrom vitrine.cli.main import main\nsys.exit(main())"]


def help_page(path, monkeypatch, encoding="utf-8"):
    """The help page of a command on a terminal of an encoding."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as stop:
        main([*path, "--help"])
    assert not stop.value.code and out.errors == "strict"
    out.flush()
    return out.buffer.getvalue().decode(encoding)


def test_help_pages_end_in_narrow_ascii_terminals(monkeypatch):
    """Three columns wide, tyro's layout never ended; bullets were no ASCII."""
    cases = [("3", path) for path in PATHS] + [(columns, ["w2w"]) for columns in ("1", "20", "none")]
    for columns, path in cases:
        monkeypatch.setenv("COLUMNS", columns)
        text = help_page(path, monkeypatch, "ascii")
        assert text.startswith("usage: " + " ".join(["vitrine", *path])) and "\\u" not in text
        assert os.environ["COLUMNS"] == columns


def test_positional_arguments_are_called_by_their_names(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    for path in PATHS:
        usage = re.sub(r"\[--[^]]*]|--\S+ \S+", "", help_page(path, monkeypatch).splitlines()[0])
        assert not re.search(r"\b(STR|PATH|INT|FLOAT)\b", usage), usage


def test_mistakes_are_told_in_ascii_as_well(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "3")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert main(["taps", "rank"]) == 2
    assert capsys.readouterr().err == (
        "vitrine: Missing from vitrine taps rank: PICTURES Folder of pictures; four or more. (required)\n"
    )


@pytest.mark.parametrize("words", [["--help"], ["addresses"]])
def test_a_closed_pipe_is_no_error(words):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*VITRINE, *words], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_behind_stdout_is_told():
    with open("/dev/full", "w") as full:
        done = subprocess.run([*VITRINE, "addresses"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "vitrine: [Errno 28] No space left on device\n")


def test_without_stdout_a_command_runs():
    done = subprocess.run(["sh", "-c", 'exec "$0" "$@" >&-', *VITRINE, "--help"], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_is_one_line(tmp_path):
    waiting = (
        # A job in the background is born ignoring it.
        "import signal, sys, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from vitrine.cli import commands\nfrom vitrine.cli.main import main\n"
        "def run(self):\n    open('runs', 'w').close()\n    time.sleep(1200)\n"
        "commands.Demo.run = run\nsys.exit(main(['demo']))"
    )
    running = subprocess.Popen([sys.executable, "-c", waiting], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "runs").exists() and running.poll() is None:
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    assert running.communicate(timeout=HANGS)[1] == "demo: loading\nvitrine: interrupted\n"
    assert running.returncode == 130


def test_home_is_found_where_a_shell_leaves_it(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    command = _parse(["emd", "train", "~/c.json", "--start=~/a.safetensors", "--out", "~/s"])
    assert (command.config, command.start) == (tmp_path / "c.json", tmp_path / "a.safetensors")
    assert command.out == tmp_path / "s"
    assert _parse(["nemo", "detect", "~/p.txt", "--model", "~/m"]).model == str(tmp_path / "m")


def test_every_output_is_marked():
    """Whatever a command calls so is written; an output that cannot be is refused before the work."""
    for name, command in COMMANDS.items():
        hints = typing.get_type_hints(command, include_extras=True)
        for field in dataclasses.fields(command):
            if field.name in ("out", "json", "work", "state", "cache"):
                assert any(isinstance(mark, Writes) for mark in _marks(hints[field.name])), (name, field.name)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("demo --out .", "out: given .; accepted: a file"),
        ("nemo calibrate prompts.txt --out folder", "out: given folder; accepted: a file"),
        ("w2w sample --out file/inner", "out: given file/inner, where file is a file"),
        ("w2w label folder --sampling emphasis=1", "out: given folder; accepted: a file"),
        (f"taps rank folder --out {'a' * 300}", "out: given a name of 300 bytes"),
        ("taps rank folder --size 0", "size: given 0; accepted: whole pixels from 1 to 65536"),
        ("nemo check --prompts a --height -8", "height: given -8; accepted: whole pixels"),
        ("w2w label", "Missing from vitrine w2w label: SPACE"),
    ],
)
def test_outputs_and_sizes_are_refused_before_the_work(words, said, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder").mkdir()
    Path("prompts.txt").write_text("a face\n")
    for command in COMMANDS.values():
        monkeypatch.setattr(command, "run", lambda self: pytest.fail("it ran"))
    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"vitrine: {said}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "prompts.txt"]


def _marked(command, field):
    return _marks(typing.get_type_hints(command, include_extras=True)[field.name])


NAMES = [
    (name, field.name)
    for name, command in COMMANDS.items()
    for field in dataclasses.fields(command)
    if any(isinstance(mark, NamesFile) for mark in _marked(command, field))
]
PART_OF_A_PATH = re.compile(r"(?:with_name|with_stem|joinpath|Path)\([^)\n]*self\.(\w+)|/ f?\"[^\"\n]*\{self\.(\w+)")


def test_an_option_that_becomes_a_name_is_marked():
    """In the source of every command: a text option inside a path must be one that is checked before the work."""
    used = set()
    for name, command in COMMANDS.items():
        texts = {f.name for f in dataclasses.fields(command) if str in _kinds(typing.get_type_hints(command)[f.name])}
        for match in PART_OF_A_PATH.finditer(inspect.getsource(command)):
            used |= {(name, field) for field in match.groups() if field in texts}
    assert used and used <= set(NAMES), "annotate them as FileName"


@pytest.mark.parametrize("value", ["../x", "a/b", "a\\b", "", "nul", ".hidden", "x" * 300, "bell\x07", "a:b"])
def test_a_name_that_is_a_path_is_refused_before_the_work(value, monkeypatch, tmp_path, capsys):
    """`w2w pairs --label ../x` ended in a traceback after the model was loaded."""
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS.values():
        monkeypatch.setattr(command, "run", lambda self: pytest.fail("it ran"))
    assert ("w2w pairs", "label") in NAMES
    for name, field in NAMES:
        needed = [
            f for f in dataclasses.fields(COMMANDS[name]) if f.default is f.default_factory is dataclasses.MISSING
        ]
        words = [w for f in needed for w in (("x",) if "Positional" in str(f.type) else (f"--{f.name}", "x"))]
        assert main([*name.split(), *words, f"--{field.replace('_', '-')}", value]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"vitrine: {field}: given ") and "letters without folders" in said, said
    assert not list(tmp_path.iterdir())


def _kinds(hint):
    return {kind for arg in typing.get_args(hint) for kind in _kinds(arg)} or {hint}


def _fields(command):
    """(name, type, default) of each flag that holds a number, those of settings included."""
    hints = typing.get_type_hints(command, include_extras=True)
    for field in dataclasses.fields(command):
        yield field.name, hints[field.name], field.default
        for mark in getattr(hints[field.name], "__metadata__", ()):
            makes = getattr(mark, "constructor_factory", None)
            for flag, parameter in (inspect.signature(makes()).parameters if makes else {}).items():
                yield flag, makes().__annotations__[flag], parameter.default


NUMBERS = [
    (name, field, value)
    for name, command in COMMANDS.items()
    for field, hint, default in _fields(command)
    for value in ("nan", "inf")
    if float in _kinds(hint)
    if value != str(default)
]


def test_what_is_no_number_is_refused_before_the_work(monkeypatch, tmp_path, capsys):
    """``--lr nan`` trained to the first loss, ``--timestep nan`` to the first picture."""
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS.values():
        monkeypatch.setattr(command, "run", lambda self: pytest.fail("it ran"))
    assert len(NUMBERS) > 40
    for name, field, value in NUMBERS:
        command = COMMANDS[name]
        needed = [f for f in dataclasses.fields(command) if f.default is f.default_factory is dataclasses.MISSING]
        words = [w for f in needed for w in (("x",) if "Positional" in str(f.type) else (f"--{f.name}", "x"))]
        assert main([*name.split(), *words, f"--{field.replace('_', '-')}", value]) == 2, (name, field)
        said = capsys.readouterr().err
        setting = field.removeprefix("sampling_")  # the samples' guidance, next to that of the score
        assert f"{setting}: given {value}; accepted: " in said or f"{setting}: given ({value},)" in said, said


def test_the_last_line_on_a_terminal_is_a_link_to_what_was_written(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["w2w", "sample", "--out", "people", "--seeds", "0"]
    assert main(words) == 0 and "file://" not in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(words) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (tmp_path / "people").as_uri()


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("dmeo", "demo"),
        ("veirfy --model portraits", "verify"),
        ("nemo detcet", "detect"),
        ("w2w buidl loras", "build"),
        ("lora reprot a.safetensors", "report"),
        ("demo --otu a.html", "--out"),
        ("nemo find prompts.txt --protokol nemo", "--protocol"),
        ("w2w edit a.safetensors --proctect", "--protect"),
        ("emd train --divice cpu", "--device"),
        ("nemo detect prompts.txt --method smaples", "samples"),
        ("addresses portraits --dtype float61", "float16"),
        ("addresses portraits --device cudaa", "cuda"),
        ("addresses portrait", "'portraits'"),
        ("verify --model portraitss --dry", "portraits"),
        ("reproduce nemo.blockin", "nemo.blocking"),
        ("verify --model portraits --claim nemo.detectoin --dry", "nemo.detection"),
        ("addresses portraits up-level1-repeat1-vit-block0-cros-q", "up-level1-repeat1-vit-block0-cross-q"),
        ("addresses portraits upp-*", "up-*"),
    ],
)
def test_a_wrong_word_suggests_the_right_one(words, meant, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert f"Did you mean {meant}" in said, said


def test_noise_of_libraries_is_left_out_and_warnings_are_not(caplog):
    for logger, part in NOISE:
        with quiet_libraries():
            logging.getLogger(logger).warning("about %s.", part)
            logging.getLogger(logger).warning("a real one")
        logging.getLogger(logger).warning("about %s.", part)
        assert [record.getMessage() for record in caplog.records] == ["a real one", f"about {part}."]
        caplog.clear()


@pytest.mark.nightly
def test_a_command_that_loads_a_model_prints_its_own_words_alone():
    """Bars of loaded weights, torchvision, modules kept in float32, LoRA keys of text encoders."""
    code = (
        "import sys\nfrom vitrine.cli import commands\nfrom vitrine.cli.main import main\n"
        "def run(self):\n"
        "    from vitrine.engine.pipelines.loading import load_pipeline\n"
        "    from vitrine.engine.portraits.shipped import student_file\n"
        "    pipe, file = load_pipeline('portraits'), student_file()\n"
        "    pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name='student')\n"
        "    return 0\n"
        "commands.Demo.run = run\nsys.exit(main(['demo']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "demo: loading\n")
