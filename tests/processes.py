"""One process of the fixture `run_processes`, run as a script: `python processes.py FOLDER RANK WORLD_SIZE`."""

import importlib.util
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist

# The script's own folder, whose lightning_retrieval/ holds tests, would stand in for the package of that name.
sys.path.remove(str(Path(__file__).parent))


def main(folder, rank, world_size):
    file, name, args, backend = pickle.loads((folder / "job").read_bytes())
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    try:
        result = getattr(module, name)(rank, world_size, *args)
    finally:
        dist.destroy_process_group()
    (folder / f"result{rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
