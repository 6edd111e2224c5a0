"""What an offline run of Weights & Biases has kept: its file, a log in LevelDB's format, read without its own code."""

import json
import struct
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32_768, struct.Struct("<IHB")  # checksum, length, and 1 for whole, 2, 3, 4 for first, middle, last part
START = 7  # bytes before the first record


def records(file: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, found = file.read_bytes(), START, b"", []
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
    """Its id, configuration, last summary, history of each metric and artifacts."""

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
        return [row[name] for row in self.history if name in row]


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
