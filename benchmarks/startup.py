"""Start of the commands: CPU seconds until the help appears, and until `search` has embedded its query.

    python benchmarks/startup.py

Each command runs in a process of its own, with one thread. `search` is compared with a process that only imports what
its network needs: torch, torchvision, faiss and Pillow. The network is that of the Glyphs example with random weights,
so that reading the weights takes no time. `search` also searches 10,000 glyphs and prints ten of them. Takes about two
minutes on two cores.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytorch_lightning as pl
from PIL import Image
from timing import PROGRAM, Timing, arguments, cpu_seconds, environment, report

from lightning_retrieval import Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.datamodules.glyphs.drawing import load_glyph_images

IMPORTS = [sys.executable, "-c", "import torch, torchvision, faiss, PIL.Image"]
HELP = [
    ["--help"],
    ["check", "--help"],
    ["embed", "--help"],
    ["export", "--help"],
    ["index", "--help"],
    ["search", "--help"],
    ["demo", "--help"],
]
IMAGES = 10000


def interleaved_cpu(commands: Mapping[str, list[str]], runs: int, warm_up: int) -> dict[str, Timing]:
    """CPU time of each command, in turn, after `warm_up` runs that are not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for run in range(-warm_up, runs):
        for name, command in commands.items():
            spent = cpu_seconds(command)
            if run >= 0:
                seconds[name].append(spent)
    return {name: Timing(median(s), min(s), max(s), len(s)) for name, s in seconds.items()}


def search_command(folder: Path, count: int) -> list[str]:
    """Index `count` glyphs with a random network; the command that searches for one of them."""
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(RetrievalModule(Embedder("glyph_net", embedding_dim=128), SmoothAPLoss()))
    trainer.save_checkpoint(folder / "model.ckpt", weights_only=True)
    (folder / "images").mkdir()
    for position, glyph in enumerate(load_glyph_images().images[:count]):
        Image.fromarray(np.asarray(glyph)).save(folder / "images" / f"{position:04d}.png")
    given = [f"--checkpoint={folder / 'model.ckpt'}", f"--images={folder / 'images'}", f"--output={folder / 'index'}"]
    subprocess.run([*PROGRAM, "index", *given, "--device=cpu"], check=True, stdout=subprocess.DEVNULL)
    query = folder / "images" / "0000.png"
    return [*PROGRAM, "search", f"--index={folder / 'index'}", "--device=cpu", str(query)]


def main() -> None:
    options = arguments("CPU seconds that the commands need to start.")
    runs, warm_up, count, helps = 9, 1, IMAGES, HELP
    if options.quick:
        runs, warm_up, count, helps = 1, 0, 20, HELP[:1]
    with tempfile.TemporaryDirectory() as folder:
        commands = {"imports alone": IMPORTS, "search": search_command(Path(folder), count)}
        for given in helps:
            commands[" ".join(given)] = [*PROGRAM, *given]
        times = interleaved_cpu(commands, runs, warm_up)
    floor = times.pop("imports alone")
    table: list[dict[str, Any]] = []
    for name, spent in times.items():
        row: dict[str, Any] = {"command": name, "CPU time": spent}
        if name == "search":
            row |= {"imports alone": floor, "seconds above": spent.median - floor.median}
        table.append(row)
    report("start of lightning-retrieval; median (lowest to highest)", environment("cpu"), table, options.json)


if __name__ == "__main__":
    main()
