"""Search with a trained model: an index of embeddings, its storage in a folder, and the parts that they are made of."""
