"""`lightning-retrieval embed` and `index --embeddings`: what writing costs, memory, and what is left after kills.

    python benchmarks/embedding.py

The loop embeds glyphs with GlyphNet, whose images and network are so small that the files weigh more than in practice.
Memory is that of the process after each batch, from the 25th batch on, when the pools of the allocators are filled.
For the kills, one of several processes is killed with SIGKILL at a random moment and the others up to a second later,
and the same command is started again, with another number of processes in turn in the last line. At the end each image
must have one row, and the files must have the bytes of an undisturbed run. The last lines compare the memory that
building an index of random embeddings adds with the vectors of the index. Takes a quarter of an hour on two cores.
"""

import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from PIL import Image
from timing import Timing, arguments, environment, launcher_variables, peak_added_memory, process_context, report

from lightning_retrieval import Embedder, RetrievalIndex, RetrievalModule, SmoothAPLoss
from lightning_retrieval.cli.main import main as main_of_command
from lightning_retrieval.datamodules.glyphs.drawing import load_glyph_images
from lightning_retrieval.search.commands.embed import embed_images
from lightning_retrieval.search.commands.embedding import ImageEmbedder
from lightning_retrieval.search.commands.index import index_embeddings
from lightning_retrieval.search.embedding_folder import EmbeddingFolder, EmbeddingManifest, ShardRows

COMMAND = ["embed", "--device=cpu", "--shard_size=50"]
BATCH, DIM, SETTLED, MIB = 64, 512, 25, 1 << 20
PROCESSES = ([1], [2], [3], [1, 2, 3])


def write_inputs(folder: Path, images: int) -> None:
    """A checkpoint, and a folder of images."""
    folder.mkdir()
    torch.manual_seed(0)
    module = RetrievalModule(Embedder("glyph_net", embedding_dim=DIM), SmoothAPLoss())
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(folder / "model.ckpt", weights_only=True)
    glyphs = load_glyph_images().images
    for number in range(images):
        path = folder / "images" / f"{number // 1000}" / f"{number:06d}.bmp"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(glyphs[number % len(glyphs)])).save(path)


def resident() -> int:
    """Memory of this process in bytes."""
    import resource

    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Recorder:
    """Wraps the two functions of the loop: the seconds of each, and the memory after each batch."""

    def __init__(self) -> None:
        self.begin = 0.0
        self.end = 0.0
        self.memory: list[int] = []
        self.writes: list[float] = []

    def batch(self, embed_items: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.begin = self.begin or time.perf_counter()
            self.memory.append(resident())
            return embed_items(*args)

        return run

    def write(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            written = write(*args)
            self.end = time.perf_counter()
            self.writes.append(self.end - start)
            return written

        return run


def one(seconds: float) -> Timing:
    return Timing(seconds, seconds, seconds, 1)


def measure_loop(folder: Path, images: int) -> dict[str, Any]:
    """The line of a loop over all images in one process."""
    recorder = Recorder()
    originals = ImageEmbedder.embed_items, EmbeddingFolder.write
    ImageEmbedder.embed_items = recorder.batch(originals[0])  # type: ignore[method-assign]
    EmbeddingFolder.write = recorder.write(originals[1])  # type: ignore[method-assign]
    try:
        settings = {"shard_size": 1000, "batch_size": BATCH, "device": "cpu"}
        embed_images(folder / "model.ckpt", folder / "images", folder / "embeddings", **settings)
    finally:
        ImageEmbedder.embed_items, EmbeddingFolder.write = originals  # type: ignore[method-assign]
    loop, writer = recorder.end - recorder.begin, sum(recorder.writes)
    settled = recorder.memory[min(SETTLED, len(recorder.memory) - 1) :]
    return {
        "what": "loop",
        "images": images,
        "batches": len(recorder.memory),
        "loop": one(loop),
        "writer": one(writer),
        "writer's share": writer / loop,
        "memory in MiB": settled[0] / MIB,
        "growth in MiB": (max(settled) - settled[0]) / MIB,
    }


def run_command(words: list[str], variables: dict[str, str]) -> None:
    """What a process does that a launcher has started: the command, without what it prints."""
    os.environ.update(variables)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    torch.set_num_threads(1)
    main_of_command(words)


def start(folder: Path, output: Path, processes: int) -> list[BaseProcess]:
    """Start the command in this number of processes, as a launcher does."""
    of_launcher = launcher_variables(processes)
    words = [*COMMAND, f"--checkpoint={folder / 'model.ckpt'}", f"--images={folder / 'images'}", f"--output={output}"]
    words.append(f"--devices={processes}")
    started = []
    for rank in range(processes):
        variables = {"OMP_NUM_THREADS": "1"}
        if processes > 1:
            variables |= {**of_launcher, "LOCAL_RANK": str(rank)}
        process = process_context().Process(target=run_command, args=(words, variables))  # type: ignore[attr-defined]
        process.start()
        started.append(process)
    return started


def files(output: Path) -> int:
    return len(list(output.glob("*.parquet")))


def kill_once(folder: Path, output: Path, processes: int, dice: random.Random) -> bool:
    """Start the command and kill its processes; whether there was something to kill."""
    before = files(output)
    started = start(folder, output, processes)
    while files(output) == before and all(process.is_alive() for process in started):
        time.sleep(0.01)
    time.sleep(0.2 * dice.random())
    dice.shuffle(started)
    was_running = started[0].is_alive()
    for process in started:
        process.kill()
        time.sleep(dice.random() * (process is started[0]))
    for process in started:
        process.join()
    return was_running


def measure_kills(folder: Path, images: int, kills: int, processes: list[int]) -> dict[str, Any]:
    """The line of a run that is killed again and again."""
    output = folder / f"kills-{'-'.join(map(str, processes))}"
    dice = random.Random(0)
    killed, attempt = 0, 0
    begin = time.perf_counter()
    while killed < kills:
        killed += kill_once(folder, output, processes[attempt % len(processes)], dice)
        attempt += 1
        complete = sorted(output.glob("*.parquet"))
        for file in dice.sample(complete, len(complete) // 2):  # so that there is enough to do for the next run
            file.unlink()
    for process in start(folder, output, processes[-1]):
        process.join()
    embeddings = EmbeddingFolder.load(output)
    ids = np.concatenate([embeddings.read(shard).ids for shard in range(len(embeddings))])
    whole = folder / "whole"
    different = [
        file.name for file in whole.glob("*.parquet") if file.read_bytes() != (output / file.name).read_bytes()
    ]
    return {
        "what": f"kills, {' '.join(map(str, processes))} processes",
        "images": images,
        "loop": one(time.perf_counter() - begin),
        "kills": killed,
        "missing ids": images - len(np.unique(ids)),
        "repeated ids": len(ids) - len(np.unique(ids)),
        "other files": len(different),
    }


def write_embeddings(folder: Path, rows: int) -> None:
    """A folder of random embeddings."""
    what = {"images_sha256": "", "model_sha256": "", "preparation": {}}
    embeddings = EmbeddingFolder.create(folder, EmbeddingManifest(images=rows, dim=DIM, **what))
    for shard in range(len(embeddings)):
        ids = np.array(embeddings.positions(shard))
        values = np.random.default_rng(shard).standard_normal((len(ids), DIM), np.float32)
        embeddings.write(shard, ShardRows(ids, values, [f"{id_}.jpg" for id_ in ids], [None] * len(ids)))


def prepared_index(folder: Path, factory: str) -> Callable[[], Any]:
    """A function that builds an index, whose memory is measured: faiss is loaded before."""
    RetrievalIndex(DIM).add(torch.randn(10, DIM))
    return lambda: index_embeddings(folder, folder.with_name(f"index-{factory}"), factory=factory)


def measure_index(folder: Path, rows: int, factory: str) -> dict[str, Any]:
    """The line of an index of a folder."""
    added = peak_added_memory(prepared_index, "cpu", folder, factory)
    vectors = sum(file.stat().st_size for file in folder.with_name(f"index-{factory}").glob("*/*.faiss"))
    sizes = {"vectors in MiB": vectors / MIB, "added in MiB": added / MIB}
    return {"what": f"index, {factory}", "images": rows, **sizes}


def main() -> None:
    options = arguments("The loop of `embed`, and kills of it.")
    images, killed_images, kills, processes = 250 * BATCH, 3000, 10, PROCESSES
    rows, factories = 200_000, ("Flat", "IVF64,PQ32")
    if options.quick:
        images, killed_images, kills, processes = 4 * BATCH, 200, 1, ([1],)
        rows, factories = 3000, ("Flat", "IVF4,PQ4x4")
    table = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "loop")
        write_inputs(folder, images)
        table.append(measure_loop(folder, images))
        print(table[-1], file=sys.stderr)
        folder = Path(name, "kills")
        write_inputs(folder, killed_images)
        for process in start(folder, folder / "whole", 1):
            process.join()
        for numbers in processes:
            table.append(measure_kills(folder, killed_images, kills, numbers))
            print(table[-1], file=sys.stderr)
        write_embeddings(Path(name, "embeddings"), rows)
        for factory in factories:
            table.append(measure_index(Path(name, "embeddings"), rows, factory))
            print(table[-1], file=sys.stderr)
    title = f"embed, D = {DIM}, batches of {BATCH}, GlyphNet"
    report(title, environment("cpu", "pytorch-lightning"), table, options.json)


if __name__ == "__main__":
    main()
