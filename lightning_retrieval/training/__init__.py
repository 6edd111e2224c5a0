"""Training: RetrievalModule, the training step, chunked backward, the memory of past batches."""
