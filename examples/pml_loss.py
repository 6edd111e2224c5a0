"""A loss of pytorch-metric-learning in a RetrievalModule, alone and together with a loss of this library.

pip install pytorch-metric-learning && python examples/pml_loss.py

The first module also ranks a memory of past batches, the second embeds its batches in chunks. Both give the same
results on several GPUs.
"""

import pytorch_lightning as pl
from pytorch_metric_learning.losses import MultiSimilarityLoss

from lightning_retrieval import CrossBatchMemory, Embedder, RetrievalModule, SmoothAPLoss
from lightning_retrieval.callbacks import RetrievalEvaluation
from lightning_retrieval.datamodules import Glyphs
from lightning_retrieval.losses import WeightedSum

if __name__ == "__main__":
    memory = CrossBatchMemory(size=1024, start_step=40)  # the first steps change fast
    alone = RetrievalModule(Embedder("glyph_net", 128), MultiSimilarityLoss(), memory=memory)
    both = WeightedSum({"ap": (1.0, SmoothAPLoss(tau=0.01)), "pairs": (0.1, MultiSimilarityLoss())})
    for module in (alone, RetrievalModule(Embedder("glyph_net", 128), both, chunk_size=128)):
        trainer = pl.Trainer(max_epochs=1, callbacks=[RetrievalEvaluation()], logger=False, enable_checkpointing=False)
        trainer.fit(module, datamodule=Glyphs())
