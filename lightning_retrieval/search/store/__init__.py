"""Where embeddings are kept to be searched: indexes of faiss in files, on disk, or in Milvus."""
