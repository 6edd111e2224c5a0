"""The two kinds of index that the commands write and search: in a folder, and in Milvus."""

from lightning_retrieval.search.store.index import RetrievalIndex
from lightning_retrieval.search.store.milvus_store import MilvusStore

EmbeddingStore = RetrievalIndex | MilvusStore  # both have the same methods
