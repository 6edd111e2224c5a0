"""Whether Weights & Biases would find an API key on this machine."""

import netrc
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


def has_wandb_key() -> bool:
    """Return whether Weights & Biases would find an API key, without asking the user and without going online."""
    if os.environ.get("WANDB_API_KEY", "").strip() or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts: Sequence[str] = _HOSTS
    server = os.environ.get("WANDB_BASE_URL")
    if server:
        hosts = [urlsplit(server).netloc]
    return any(_has_password(path, hosts) for path in _netrc_files())


def _netrc_files() -> list[Path]:
    path = os.environ.get("NETRC")
    if path:
        return [Path(path)]
    return [Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()]


def _has_password(path: Path, hosts: Sequence[str]) -> bool:
    """Return whether a netrc file has a password for one of the hosts; a file that cannot be read has none."""
    try:
        entries = netrc.netrc(path)
        for host in hosts:
            login = entries.authenticators(host)
            if login is not None and login[2]:
                return True
    except (netrc.NetrcParseError, OSError, UnicodeError):
        return False
    return False
