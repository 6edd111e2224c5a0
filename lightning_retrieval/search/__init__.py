"""Search with a trained model: an index of embeddings, and its storage in a folder or in Milvus."""
