"""Makes a Python process on Linux behave as on Windows, in what the library could get wrong there.

Python imports this module by itself if its folder is on PYTHONPATH, as in `.ci/windows`; so does every process that is
started by one with it. On Windows, it does nothing.

- Modules that only POSIX has do not exist, and processes can only be spawned. For the library and its tests, functions
  and signals that only POSIX has do not exist; third-party packages have other code for Windows, and go on as on Linux.
- A file that this process has open, or mapped into memory, cannot be renamed, replaced or deleted by the library, nor
  can a folder with such a file be renamed. A folder is neither replaced by a file nor opened, nor is a file flushed
  that was opened for reading.
- The library cannot create a file whose name Windows does not allow.

What breaks a rule raises the error of Windows, and is written to the file `AS_ON_WINDOWS_LOG`, since the error may be
suppressed.
"""

import os
import re
import signal
import sys
import sysconfig
import traceback

MODULES = {"fcntl", "grp", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
NAMES = {
    os: (
        *("O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "WNOHANG", "chown", "fchmod", "fchown", "fork"),
        *("forkpty", "getegid", "geteuid", "getgid", "getloadavg", "getpgid", "getuid", "killpg", "lchown", "mkfifo"),
        *("mknod", "nice", "posix_fadvise", "pread", "pwrite", "register_at_fork", "sched_getaffinity", "sendfile"),
        *("setegid", "seteuid", "setgid", "setsid", "setuid", "statvfs", "sync", "sysconf", "uname", "wait", "wait3"),
    ),
    signal: (
        *("SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGTSTP", "SIGUSR1"),
        *("SIGUSR2", "SIGXCPU", "SIGXFSZ", "alarm", "pause", "pthread_kill", "pthread_sigmask", "setitimer"),
    ),
}
REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LIBRARY = tuple(os.path.join(REPOSITORY, name) + os.sep for name in ("lightning_retrieval", "callbacks", "datamodules"))
TESTS = os.path.join(REPOSITORY, "tests") + os.sep
STANDARD_LIBRARY = (sysconfig.get_path("stdlib") + os.sep, "<frozen")
OF_PACKAGES = f"{os.sep}site-packages{os.sep}"
NOT_IN_NAMES = re.compile(r'[<>:"|?*\\\x00-\x1f]|[. ]$|^(con|prn|aux|nul|com[0-9]|lpt[0-9])(\.|$)', re.IGNORECASE)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def hide():
    """Hide what only POSIX has, and let processes only be spawned."""
    import multiprocessing.context

    for module, names in NAMES.items():
        hide_names(module, names)
    for name in MODULES:
        sys.modules[name] = None
    for method in ("fork", "forkserver"):
        del multiprocessing.context._concrete_contexts[method]
    multiprocessing.get_all_start_methods = lambda: ["spawn"]
    multiprocessing.set_start_method("spawn")
    fsync = os.fsync

    def flush(descriptor):
        with open(f"/proc/self/fdinfo/{descriptor}") as file:
            flags = int(re.search(r"flags:\s+(\d+)", file.read())[1], 8)
        if not flags & WRITES:
            refuse(f"the descriptor {descriptor} is flushed, but was opened for reading")
        fsync(descriptor)

    os.fsync = flush


def hide_names(module, names):
    """Move names of a module out of it, to where a function finds them for other code than the library's."""
    hidden = {name: vars(module).pop(name) for name in names}

    def find(name):
        caller = sys._getframe(1).f_code.co_filename
        if name not in hidden or caller.startswith((*LIBRARY, TESTS)):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}", name=name, obj=module)
        return hidden[name]

    module.__getattr__ = find


def is_of_library():
    """Whether a function of the library has called the function of the standard library, or of C, that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        of_standard_library = file.startswith(STANDARD_LIBRARY) and OF_PACKAGES not in file
        if not of_standard_library and file != __file__:
            return file.startswith(LIBRARY)
        frame = frame.f_back
    return False


def refuse(rule, *, does_no_harm=False):
    """Write down which rule is broken, where, and in which test, unless this does no harm; then raise an error."""
    log = os.environ.get("AS_ON_WINDOWS_LOG")
    if log and not does_no_harm:
        lines = [f"{os.environ.get('PYTEST_CURRENT_TEST', '')}: {rule}\n", *traceback.format_stack(limit=12), "\n"]
        with open(log, "a") as file:
            file.writelines(lines)
    raise PermissionError(13, f"As on Windows, {rule}")


def used_files():
    """The paths of all files that this process has open or mapped into memory."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except OSError:  # the descriptor of the list itself
            continue
    with open("/proc/self/maps") as file:
        for line in file:
            found.add("/" + line.rstrip("\n").partition("/")[2])
    return {path for path in found if os.path.isfile(path)}


def full_path(path, folder=-1):
    """The path without links in its folders; `folder` is the descriptor of the folder of a relative path, or -1."""
    path = os.fsdecode(path)
    if folder is not None and folder >= 0:
        path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), path)
    parent, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(parent), name)


def check_free(path, *, may_stay=False):
    """Raise if this process uses a file, or a file in a folder."""
    used = [file for file in used_files() if file == path or file.startswith(path + os.sep)]
    if used:
        refuse(f"{path} is renamed, replaced or deleted while {used} is open or mapped", does_no_harm=may_stay)


def on_rename(source, target, folder=-1, target_folder=-1):
    source, target = full_path(source, folder), full_path(target, target_folder)
    check_free(source)
    check_free(target)
    if os.path.lexists(target) and (os.path.isdir(source) or os.path.isdir(target)):
        refuse(f"{target} is replaced, but it or its replacement is a folder")
    check_name(target)


def on_remove(path, folder=-1):
    path = full_path(path, folder)
    of_index = os.path.basename(os.path.dirname(path)).startswith("files-")
    check_free(path, may_stay=of_index)  # an old version stays while an index of it is mapped


def on_open(path, mode, flags):
    if not isinstance(path, (str, bytes, os.PathLike)):
        return
    if flags & WRITES:
        check_name(os.fsdecode(path))
    elif mode is None and os.path.isdir(path) and sys._getframe(2).f_code.co_filename.startswith(LIBRARY):
        refuse(f"the folder {path} is opened")


def check_name(path, *_):
    name = os.path.basename(os.fsdecode(path).rstrip("/"))
    if NOT_IN_NAMES.search(name):
        refuse(f"the name of {path} is not allowed")


def on_library(name):
    caller = sys._getframe(3).f_code.co_filename  # of `ctypes.CDLL`
    if name is None and caller.startswith(LIBRARY):
        refuse("the process itself is opened as a library")


EVENTS = {
    "os.rename": on_rename,
    "os.remove": on_remove,
    "os.mkdir": check_name,
    "open": on_open,
    "ctypes.dlopen": on_library,
}


def watch():
    """Apply the rules to what the library does."""

    def on_event(event, arguments):
        check = EVENTS.get(event)
        if check is not None and is_of_library():
            check(*arguments)

    sys.addaudithook(on_event)


if sys.platform == "linux":
    hide()
    watch()
