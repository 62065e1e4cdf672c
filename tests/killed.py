"""Jobs that are killed with SIGKILL, which nothing can catch, in a fork of this process."""

import multiprocessing
import os
import signal

import torch


def killing(when):
    """A progress callback that kills the process once ``when(step, total)``."""

    def progress(step, total, preview=None):
        if when(step, total):
            os.kill(os.getpid(), signal.SIGKILL)

    return progress


def _alone(job):
    torch.set_num_threads(1)  # a fork has no other threads
    job()


def killed(job):
    """Runs ``job`` in a fork, where it must kill itself."""
    process = multiprocessing.get_context("fork").Process(target=_alone, args=(job,))
    process.start()
    process.join(120)
    if process.is_alive():
        process.kill()
    assert process.exitcode == -signal.SIGKILL, process.exitcode
