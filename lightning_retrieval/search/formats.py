"""The manifests of the folders that the commands write; no torch is imported."""

from lightning_retrieval.files import Manifest

REBUILD = "build the index again"
INDEX = Manifest("index", "manifest.json", "index", REBUILD)
EMBEDDINGS = Manifest("embeddings", "_manifest.json", "embed", "restore it from a copy, or give another folder")
