"""Exports models to programs that do not need this library, and checks them against the original model."""

from lightning_retrieval.search.export.program import EmbeddingProgram, export_program

__all__ = ["EmbeddingProgram", "export_program"]
