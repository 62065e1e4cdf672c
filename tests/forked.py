"""The pack as a new process imports it, in a fork of this one, which has imported torch and diffusers already."""

import multiprocessing
import sys
import traceback

import torch


def _without_the_pack(said, job, arguments):
    torch.set_num_threads(1)  # a fork has none of the threads that this process computes with
    for name in [name for name in sys.modules if name.startswith("vitrine.")]:
        del sys.modules[name]
    try:
        said.send((job(*arguments), ""))
    except BaseException:
        said.send((None, traceback.format_exc()))


def imported_anew(job, *arguments):
    """What ``job`` returns in a fork in which no module of the pack is loaded; an error of its own fails the test."""
    fork = multiprocessing.get_context("fork")
    heard, said = fork.Pipe(duplex=False)
    process = fork.Process(target=_without_the_pack, args=(said, job, arguments))
    process.start()
    said.close()
    returned, error = heard.recv()
    process.join()
    assert not error, error
    return returned
