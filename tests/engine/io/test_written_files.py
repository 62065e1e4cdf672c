"""Files that Vitrine writes: their mode, a full disk, names at a filesystem's limit, and folders of others."""

import os
import resource
import signal
import stat
import subprocess
import sys

import pytest
import torch
from vitrine.engine.errors import VitrineError
from vitrine.engine.io.files import read_safetensors, save_safetensors, write_folder, write_text
from vitrine.engine.io.table_on_disk import RowFile
from vitrine.engine.settings.setting_checks import refuse_unwritable
from vitrine_tests.hangs import HANGS

LONGEST = 255


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


def test_files_follow_the_umask(tmp_path, umask):
    """The safetensors library writes with mode 0600, which other users of a machine cannot read."""

    def fill(folder):
        from safetensors.torch import save_file

        (folder / "inner").mkdir(parents=True)
        save_file({"x": torch.zeros(2)}, folder / "inner" / "part.safetensors")

    files = [
        save_safetensors(tmp_path / "a.safetensors", {"x": torch.zeros(2)}),
        write_text(tmp_path / "a.txt", "a"),
        write_folder(tmp_path / "folder", fill) / "inner" / "part.safetensors",
    ]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o666 & ~umask] * 3


def full(folder, code):
    """Run code in a process whose files may not grow beyond 4 kB; the words of its error."""

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    return subprocess.run(
        [sys.executable, "-B", "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        preexec_fn=limited,
        timeout=HANGS,
    )


def test_a_full_disk_is_an_os_error_with_the_files_name(tmp_path):
    code = (
        "import torch\nfrom vitrine.engine.io.files import save_safetensors, write_text\n"
        "for write, what in ((save_safetensors, {'x': torch.zeros(4096)}), (write_text, 'x' * 9999)):\n"
        "    try: write('out.file', what)\n"
        "    except OSError as error: print(error.errno, error.filename)\n"
    )
    done = full(tmp_path, code)
    assert done.stdout.splitlines() == ["27 out.file"] * 2, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("letter", ["a", "ä", "😀"])
def test_names_up_to_the_limit_are_written_and_longer_ones_refused(letter, tmp_path):
    longest = letter * (LONGEST // len(letter.encode()))
    assert write_text(tmp_path / longest, "a").read_text() == "a"
    for name in (longest + letter, f"{longest}{letter}/inner.txt"):
        with pytest.raises(VitrineError, match="255 bytes") as error:
            write_text(tmp_path / name, "a")
        assert len(str(error.value)) < 300
    assert [path.name for path in tmp_path.iterdir()] == [longest]


def test_a_folder_of_others_keeps_their_files(tmp_path, monkeypatch):
    """``--out .`` replaced the folder, whatever else was in it."""
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "old").write_text("old")

    def fill(folder):
        (folder / "part").mkdir(parents=True)
        (folder / "part" / "new").write_text("new")

    monkeypatch.chdir(tmp_path)
    write_folder(".", fill)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.txt", "part"]
    assert [p.name for p in (tmp_path / "part").iterdir()] == ["new"]


def test_outputs_that_cannot_be_written_are_refused(tmp_path):
    (tmp_path / "file").write_text("a")
    for kind, path, said in (
        ("file", tmp_path, "accepted: a file"),
        ("file", tmp_path / "file" / "inner.txt", "is a file"),
        ("file", tmp_path / ("a" * 256), "255 bytes"),
        ("file", "/proc/none/out.txt", "/proc"),
        ("folder", tmp_path / "file", "accepted: a folder"),
        ("folder", tmp_path / "file" / "inner", "is a file"),
        ("folder", tmp_path / "a" / ("b" * 300), "255 bytes"),
    ):
        with pytest.raises(VitrineError, match="out: given") as error:
            refuse_unwritable(path, kind, "out")
        assert said in str(error.value)
    for kind, path in (("file", tmp_path / "new" / "a.txt"), ("file", tmp_path / "file"), ("folder", tmp_path)):
        refuse_unwritable(path, kind, "out")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_equal_contents_are_equal_bytes(tmp_path):
    """A resumed training wrote its LoRA again, and the next part refused it as another one."""
    about = {"a": "ü \u2028 \x7f", "b": '{"x": "y\\n\t\x01"}', "kind": "space", "name": "", "version": "1"}
    files = [tmp_path / f"{i}.safetensors" for i in range(9)]
    for file in files:
        save_safetensors(file, {"x": torch.arange(6.0), "y": torch.zeros(2, dtype=torch.half)}, about)
    assert len({file.read_bytes() for file in files}) == 1
    tensors, metadata = read_safetensors(files[0])
    assert metadata == about | {"format": "pt"} and tensors["x"].tolist() == [0, 1, 2, 3, 4, 5]


def test_a_table_that_nothing_refers_to_has_no_open_files(tmp_path):
    table = RowFile(tmp_path, (3, 4))
    table.write(0, torch.ones(2, 4))
    files = [table._numbers, table._flags]
    assert not any(file.closed for file in files)
    del table
    assert all(file.closed for file in files)
    with RowFile(tmp_path, (3, 4)) as again:
        assert again.done.tolist() == [True, True, False]
