"""The chunk size of a run with `chunk_size="auto"`."""

from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_retrieval.training.chunk_size import largest_chunk_size
from lightning_retrieval.training.optimizers import trainable_parameters


class ChunkSizeSearch:
    """Finds the largest chunk size of a run, again for each batch that is longer than all before."""

    def __init__(self) -> None:
        self.chunk_size = 0
        self.rows = 0  # of the batch that the chunk size was found for

    def find(self, module: nn.Module, images: Tensor, keep_graphs: int) -> int:
        """The largest chunk size for a batch.

        Args:
            module: embeds images. Memory is reserved for Adam's two moments, which do not exist before the first step,
                and for the flat copy in which several processes sum gradients.
            images: of this process.
            keep_graphs: number of chunks whose graphs are kept.
        """
        if len(images) > self.rows:
            size = sum(parameter.numel() * parameter.element_size() for parameter in trainable_parameters(module))
            self.chunk_size = largest_chunk_size(module, images, keep_graphs=keep_graphs, reserve=3 * size)
            self.rows = len(images)
            rank_zero_info(
                f"{type(module).__name__}: chunks of {self.chunk_size} of {self.rows} images fit into memory."
            )
        return self.chunk_size
