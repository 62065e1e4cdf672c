"""Which files below a folder are opened while something runs: the kernel's own account, so no library is missed."""

import ctypes
import os
import struct
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

_OPEN, _CREATE, _MOVED_TO, _CLOSE_WRITE, _IS_FOLDER = 0x20, 0x100, 0x80, 0x8, 0x40000000
_ALL = _OPEN | _CREATE | _MOVED_TO | _CLOSE_WRITE


@contextmanager
def watching(root):
    """While open, the files below ``root`` that are opened; those that are also written are left out at the end."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK)
    folders = {}
    for folder in [Path(root), *(p for p in Path(root).rglob("*") if p.is_dir() and not p.is_symlink())]:
        folders[libc.inotify_add_watch(descriptor, str(folder).encode(), _ALL)] = folder
    seen = SimpleNamespace(files=set())
    try:
        yield seen
        opened, written = _events(descriptor, folders)
        seen.files = opened - written
    finally:
        os.close(descriptor)


def _events(descriptor, folders):
    opened, written = set(), set()
    while True:
        try:
            data = os.read(descriptor, 1 << 20)
        except BlockingIOError:
            return opened, written
        while data:
            number, mask, _, length = struct.unpack_from("iIII", data)
            name = data[16 : 16 + length].rstrip(b"\0").decode()
            data = data[16 + length :]
            if name and not mask & _IS_FOLDER:
                (opened if mask & _OPEN else written).add(folders[number] / name)
