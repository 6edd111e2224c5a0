"""Kills a process before each of the events by which it changes files, and lets a test look at what is left.

`killed_everywhere` starts a function in a process of its own, again and again. The n-th process is killed (SIGKILL)
before its n-th event below the watched folder: a file that is opened for writing, copied to, renamed, deleted or
flushed, a folder that is created or deleted, and an exchange of two names.

Promise 4: a kill between two changes of the file system can be placed in no other way. Python reports all of them but
the flush, the copy and the exchange, whose functions are therefore replaced.
"""

import os
import shutil
import signal
import sys

from lightning_retrieval import files
from tests.processes import load, start_processes

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "shutil.move"}


class Killer:
    """Kills this process before its `number`-th change below a folder, the first of which has the number 1."""

    def __init__(self, folder, number):
        self.folder = str(folder)
        self.number = number
        self.changes = 0

    def watch(self):
        sys.addaudithook(self.on_event)
        fsync, sendfile, exchange = os.fsync, os.sendfile, files.exchange_names

        def flush_or_die(descriptor):
            self.on_change(os.readlink(f"/proc/self/fd/{descriptor}"))
            fsync(descriptor)

        def copy_or_die(target, *settings):
            self.on_change(os.readlink(f"/proc/self/fd/{target}"))
            return sendfile(target, *settings)

        def exchange_or_die(first, second):
            self.on_change(first)
            return exchange(first, second)

        os.fsync, os.sendfile = flush_or_die, copy_or_die
        for module in list(sys.modules.values()):
            if getattr(module, "exchange_names", None) is exchange:
                module.exchange_names = exchange_or_die

    def on_event(self, event, arguments):
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                self.on_change(path)
        elif event in CHANGES:
            for path in arguments[:2]:
                if isinstance(path, (str, bytes, os.PathLike)):
                    return self.on_change(path)
        return None

    def on_change(self, path):
        if not isinstance(path, (str, bytes, os.PathLike)):
            return
        if not os.path.abspath(os.fsdecode(path)).startswith(self.folder):
            return
        self.changes += 1
        if self.changes == self.number:
            os.kill(os.getpid(), signal.SIGKILL)


def run_until(rank, world_size, file, name, args, folder, number):
    """Call a function of a test file; the process is killed before its `number`-th change below a folder.

    Returns the number of changes of a process that is not killed.
    """
    function = getattr(load(file), name)
    killer = Killer(folder, number)
    killer.watch()
    function(*args)
    return killer.changes


def killed_everywhere(function, *args, folder, before, processes, last=None, every=1):
    """Yield the number of each kill, when `folder` is as the kill has left it; at last None, after a complete run.

    Args:
        function: stands at the top of its test file; it is called with `args`, in a process of its own.
        folder: the folder that it changes; it is a copy of `before` at the start of each process.
        before: a folder with what was there before.
        processes: a new folder for the files of the processes.
        last: if given, only kills before as many of the last changes.
        every: a kill before each so many-th change only.
    """
    processes.mkdir()
    file = sys.modules[function.__module__].__file__

    def run(number):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(before, folder, symlinks=True)
        of_process = processes / str(number)
        of_process.mkdir()
        (started,) = start_processes(run_until, 1, file, function.__name__, args, folder, number, folder=of_process)
        code = started.wait(120)
        started.end()
        assert code == (-signal.SIGKILL if number else 0), started.output()
        return started

    changes = run(0).result()
    assert changes > 1, "nothing was changed below the folder"
    for number in range(max(1, changes + 1 - (last or changes)), changes + 1, every):
        run(number)
        yield number
    shutil.rmtree(processes / "0")
    run(0)
    yield None
