"""A strategy that shards the network over the processes by FSDP2."""

from datetime import timedelta

from lightning_retrieval.arguments import PositiveInt, checked
from lightning_retrieval.backend import ModelParallelStrategy
from lightning_retrieval.checkpoints import check_can_be_sharded
from lightning_retrieval.invalid import InvalidValue, owned_by


class FSDP2Strategy(ModelParallelStrategy):
    """Lightning's `ModelParallelStrategy` for a `RetrievalModule`: the network is sharded over processes by FSDP2.

    All processes share the batch. By default, a checkpoint is one file, as with one process.

    Args:
        shard_size: number of processes that hold one copy of the network together, >= 1. It must divide the number of
            processes. The processes of a node have consecutive ranks, so the number of GPUs of a node shards the
            network within each node, and replicates it between nodes. If None, all processes hold one copy together.
        sharded_checkpoints: whether a checkpoint is a folder in which each process writes its shards, so that no
            process holds all weights. Each node must see the folder. All functions and commands of this library read
            such a checkpoint like a file, and any number of processes can continue from it.
        timeout: timeout of collective operations; if None, the default of the backend.

    Raises:
        ValueError: if `shard_size` is < 1 or, at the start of a run, does not divide the number of processes.
        ModuleNotFoundError: if `sharded_checkpoints` is True, and torch is older than 2.9 or safetensors is not
            installed.
        TypeError: if `shard_size` is not an integer.

    Example:
        >>> from lightning_retrieval import FSDP2Strategy
        >>> strategy = FSDP2Strategy(shard_size=8)  # for Trainer(num_nodes=4, devices=8, strategy=strategy)
        >>> strategy.shard_size
        8

    Cost:
        Between two steps, 12 bytes for each parameter divided by `shard_size`, with AdamW in float32.
    """

    def __init__(
        self,
        *,
        shard_size: PositiveInt | None = None,
        sharded_checkpoints: bool = False,
        timeout: timedelta | None = None,
    ) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False, timeout=timeout)
        self.shard_size = checked(self, shard_size=shard_size)
        self.sharded_checkpoints = sharded_checkpoints
        if sharded_checkpoints:
            with owned_by(type(self).__name__):
                check_can_be_sharded()

    def setup_environment(self) -> None:
        """Join the processes of the run; raise before if `shard_size` does not divide their number."""
        processes = self.num_nodes * self.num_processes
        if processes % (self.shard_size or 1):
            rule = f"must divide the number of processes, {processes}"
            cure = "use the number of GPUs of a node, or None to shard over all processes"
            raise InvalidValue(rule, type(self).__name__, "shard_size", got=self.shard_size, cure=cure)
        self._data_parallel_size = processes
        super().setup_environment()
