"""A connection to Milvus: to a file of Milvus Lite, which runs in this process, or to a server or a cluster.

pymilvus is the client of all of them. Each of its errors becomes one sentence.
"""

import fcntl
import logging
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_retrieval.checks import check_path, check_string, first_line
from lightning_retrieval.optional_packages import optional_import

OWNER = "MilvusStore"  # prefix of error messages
MISSING = (
    f"{OWNER}: a store in Milvus needs pymilvus and milvus-lite; install them with pip install "
    "'lightning-retrieval[milvus]'."
)
SUFFIX = ".db"  # by which pymilvus knows a file of Milvus Lite
ADDRESS = re.compile("(https?|tcp|unix):")
CONNECTING = 10.0  # seconds that a server has to answer
CALLING = 60.0  # seconds that a call may take
LONG_CALLING = 3600.0  # seconds that a call may take that writes, loads or indexes a whole collection
LONG = ("flush", "load_collection", "create_index")
LOADS, BETWEEN_LOADS = 5, 0.5  # times that a collection is loaded until it succeeds, and seconds between them

_connections: Counter[Path] = Counter()  # of this process to each file
_changing = threading.Lock()


class MilvusConnection:
    """A client of Milvus.

    Args:
        uri: a path that ends in `.db`, or an address.
        may_create: create the file of Milvus Lite if it does not exist.

    Raises:
        ModuleNotFoundError: if pymilvus or milvus-lite is not installed.
        FileNotFoundError: if the file, or the folder that it is to be created in, does not exist.
        ValueError: if `uri` is neither.
        ConnectionError: if nothing answers, or another process has opened the file.
    """

    def __init__(self, uri: str, *, may_create: bool) -> None:
        self.file: Path | None = None
        if is_file(uri):
            self.file = _lite_file(uri, may_create)
        self.shown = shown_uri(uri)
        self._client = self._connect(uri)

    def call(self, method: str, *args: Any, **settings: Any) -> Any:
        """The result of a method of the client.

        Raises:
            ValueError: if the connection is closed.
            OSError: if Milvus reports an error.
        """
        if self._client is None:
            raise ValueError(
                f"{OWNER}: the connection to {self.shown} must be open for {method}; open the index again."
            )
        seconds = CALLING
        if method in LONG:
            seconds = LONG_CALLING
        return self.checked(method, partial(getattr(self._client, method), *args, timeout=seconds, **settings))

    def checked(self, method: str, call: Callable[[], Any]) -> Any:
        """The result of a call that belongs to a method of the client.

        Raises:
            OSError: if Milvus reports an error.
        """
        from pymilvus.exceptions import ErrorCode, MilvusException

        try:
            return call()
        except MilvusException as error:
            cure = ""
            if error.code == ErrorCode.COLLECTION_NOT_FOUND:
                cure = "; another process has replaced or deleted the index, so open it again"
            raise OSError(f"{OWNER}: {self.shown} reports an error in {method} ({_reason(error)}){cure}.") from None

    def load(self, collection: str) -> None:
        """Load a collection, so that it can be searched.

        A thread of Milvus Lite may just be writing the file of an index that is read; then it is read again.

        Raises:
            ValueError: if the connection is closed.
            OSError: if Milvus reports an error.
        """
        for attempt in range(1, LOADS + 1):
            try:
                self.call("load_collection", collection)
                return
            except OSError as error:
                if attempt == LOADS or "read error" not in str(error):
                    raise
            time.sleep(BETWEEN_LOADS)

    def close(self) -> None:
        """End the connection; the last one to a file also ends Milvus Lite, which writes what it holds in memory."""
        if self._client is None:
            return
        self._client.close()
        self._client = None
        if self.file is not None:
            _release(self.file)

    def _connect(self, uri: str) -> Any:
        pymilvus = _import_pymilvus(with_lite=self.file is not None)
        if self.file is not None:
            uri = os.fspath(self.file)
        try:
            with _changing:
                client = pymilvus.MilvusClient(uri, token=os.environ.get("MILVUS_TOKEN", ""), timeout=CONNECTING)
                if self.file is not None:
                    _connections[self.file] += 1
        except pymilvus.MilvusException as error:
            raise ConnectionError(f"{OWNER}: {self._unreachable(error)}") from None
        return client

    def _unreachable(self, error: Exception) -> str:
        if self.file is None:
            return (
                f"`uri` must be the address of Milvus, got {self.shown}, where nothing answered within "
                f"{CONNECTING:g} s ({_reason(error)}); nothing was written, so start Milvus there or give another "
                "address."
            )
        if _is_locked(self.file):
            return (
                f"`uri` must not be in use, got {self.shown}, which another process has opened; wait until it has "
                "finished, or let a server share the file: milvus-lite server --data-dir FILE."
            )
        return f"`uri` must be a file of Milvus Lite, got {self.shown}, which it cannot open ({_reason(error)})."


def is_file(uri: str) -> bool:
    """Whether this is a file of Milvus Lite, not an address; raise unless it is a string."""
    check_string(OWNER, "uri", uri)
    return not ADDRESS.match(uri)


def shown_uri(uri: str) -> str:
    """The URI without its password."""
    if is_file(uri) or "@" not in uri:
        return uri
    host = uri.rpartition("@")[2]
    return f"{urlsplit(uri).scheme}://...@{host}"


def _lite_file(uri: str, may_create: bool) -> Path:
    """The absolute path of a file of Milvus Lite, which is a folder; raise if there is none and it may not be made."""
    if not uri.endswith(SUFFIX):
        raise ValueError(
            f"{OWNER}: `uri` must be a path that ends in {SUFFIX}, for Milvus Lite, or an address such as "
            f"http://localhost:19530, got {uri!r}."
        )
    file = Path(os.path.abspath(check_path(OWNER, "uri", uri)))
    if file.exists() and not file.is_dir():
        raise ValueError(
            f"{OWNER}: `uri` must be what Milvus Lite writes, which is a folder, got {uri}, which is a file; give "
            "another path."
        )
    if not file.exists() and not may_create:
        raise FileNotFoundError(f"{OWNER}: `uri` must be a file of Milvus Lite, got {uri}, which does not exist.")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{OWNER}: `uri` must be in a folder that exists, got {uri}; create {file.parent}.")
    return file


def _release(file: Path) -> None:
    """End Milvus Lite for this file, if no other connection of this process needs it."""
    from milvus_lite.server_manager import server_manager_instance

    with _changing:
        _connections[file] -= 1
        if _connections[file] == 0:
            server_manager_instance.release_server(os.fspath(file))


def _is_locked(file: Path) -> bool:
    """Whether a process holds the lock of Milvus Lite."""
    try:
        with (file / "LOCK").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _import_pymilvus(with_lite: bool) -> Any:
    """Import the client. If nobody has before, what it and Milvus Lite log goes to the handlers of the program only.

    They would print each error with its traceback, and it is raised as well.
    """
    was_loaded = "pymilvus" in sys.modules
    with optional_import(MISSING):
        import pymilvus

        if with_lite:
            import milvus_lite  # noqa: F401

            logging.getLogger("grpc._server").addFilter(_is_no_missing_method)
    if not was_loaded:
        for name in ("pymilvus", "milvus_lite"):
            logger = logging.getLogger(name)
            logger.handlers = [logging.NullHandler()]
            logger.propagate = True
    return pymilvus


def _is_no_missing_method(record: logging.LogRecord) -> bool:
    """Whether a record says more than that the client has tried a method that Milvus Lite does not have."""
    return record.exc_info is None or not isinstance(record.exc_info[1], NotImplementedError)


def _reason(error: Exception) -> str:
    """The message of an error of pymilvus on one line."""
    return first_line(Exception(getattr(error, "message", "") or str(error)))
