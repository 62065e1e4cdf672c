"""Jobs that are killed with SIGKILL, which nothing can catch, in a fork of this process."""

import contextlib
import multiprocessing
import os
import signal

import torch
from vitrine_tests.hangs import HANGS


def killing(when):
    """A progress callback that kills the process once ``when(step, total)``."""

    def progress(step, total, preview=None):
        if when(step, total):
            os.kill(os.getpid(), signal.SIGKILL)

    return progress


@contextlib.contextmanager
def one_thread():
    """As a fork computes, which has no other threads: sums in another number of parts round otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _alone(job):
    with one_thread():
        job()


def killed(job):
    """Runs ``job`` in a fork, where it must kill itself."""
    process = multiprocessing.get_context("fork").Process(target=_alone, args=(job,))
    process.start()
    process.join(HANGS)
    if process.is_alive():
        process.kill()
    assert process.exitcode == -signal.SIGKILL, process.exitcode
