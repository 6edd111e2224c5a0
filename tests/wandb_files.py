"""Reads the file of an offline run of Weights & Biases, a log in LevelDB's format."""

import json
import struct
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32_768, struct.Struct("<IHB")  # checksum, length, kind: 1 whole record, 2 first, 3 middle, 4 last part
START = 7  # bytes before the first record


def records(file: Path) -> list[Any]:
    """The records of the file, each of which may consist of several parts."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = file.read_bytes()
    at, parts, found = START, b"", []
    while at + HEADER.size <= len(data):
        if BLOCK - at % BLOCK < HEADER.size:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        parts += data[at : at + length]
        at += length
        if kind in (1, 4):
            found.append(Record.FromString(parts))
            parts = b""
    return found


class OfflineRun:
    """The id, config, last summary, history of metrics and artifacts of a run."""

    def __init__(self, folder: Path) -> None:
        (file,) = folder.glob("*.wandb")
        self.folder, self.id, self.name = folder, "", ""
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.artifacts: list[dict[str, Any]] = []
        for record in records(file):
            kind = record.WhichOneof("record_type")
            content = getattr(record, kind)
            if kind == "run":
                self.id, self.name = content.run_id, content.display_name
            elif kind in ("config", "summary"):
                getattr(self, kind).update(_values(content.update))
            elif kind == "history":
                self.history.append(_values(content.item))
            elif kind == "artifact":
                files = [entry.path for entry in content.manifest.contents]
                metadata = json.loads(content.metadata)
                self.artifacts.append(
                    {"type": content.type, "aliases": set(content.aliases), "metadata": metadata, "files": files}
                )

    def column(self, name: str) -> list[Any]:
        """All logged values of a metric."""
        return [row[name] for row in self.history if name in row]


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
