"""The command `env`: prints what a bug report needs to say about a machine and its packages."""

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from lightning_retrieval.command_line import printable
from lightning_retrieval.progress import usable_cores
from lightning_retrieval.version import __version__

DISTRIBUTION = "lightning-retrieval"
NOT_INSTALLED = "not installed"
TOOLS = ("dev", "docs", "test")  # extras for those who work on the library itself
ALSO_SHOWN = ("numpy", "pillow", "pytorch-metric-learning")  # used through other packages, or given by users


def env() -> int:
    """Print versions of Python, the system, GPUs and all packages that the library can use, as a bug report needs them.

    Example:
        lightning-retrieval env > env.txt
    """
    for name, value in environment():
        print(f"{name + ':':28} {printable(value)}", flush=True)
    return 0


def environment() -> Iterator[tuple[str, str]]:
    """Names and values of what a bug report needs: this library, the system, the devices and the packages."""
    yield DISTRIBUTION, __version__
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "system", platform.platform()
    yield "CPU cores", str(usable_cores())
    yield "file system encoding", sys.getfilesystemencoding()
    yield from _devices()
    backend = os.environ.get("LIGHTNING_RETRIEVAL_BACKEND", "")
    if backend:
        yield "LIGHTNING_RETRIEVAL_BACKEND", backend
    for package in packages():
        yield package, installed_version(package)


def _devices() -> Iterator[tuple[str, str]]:
    """Lines about the build of torch and each GPU; one line with the error if torch cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library of CUDA is missing
        yield "torch cannot be imported", str(error)
        return
    yield "CUDA of torch", torch.version.cuda or "none: a build for CPUs"
    yield "cuDNN of torch", str(torch.backends.cudnn.version() or "none")
    count = torch.cuda.device_count()
    yield "GPUs", str(count)
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield f"GPU {index}", f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB"


def packages() -> list[str]:
    """All packages that the library can use, its own requirements first; without those of developers."""
    needed: list[str] = []
    optional = list(ALSO_SHOWN)
    try:
        requirements = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # the source is used without having been installed
        requirements = []
    for line in requirements:
        requirement = Requirement(line)
        if requirement.marker is None:
            needed.append(requirement.name)
        elif not any(requirement.marker.evaluate({"extra": extra}) for extra in TOOLS):
            optional.append(requirement.name)
    return list(dict.fromkeys([*needed, *sorted(optional)]))


def installed_version(package: str) -> str:
    """The version of an installed package, which is not imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return NOT_INSTALLED
