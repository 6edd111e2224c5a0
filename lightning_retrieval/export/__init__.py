"""Models for services: programs without this library, checked against the model that they were made from."""

from lightning_retrieval.export.program import EmbeddingProgram, export_program

__all__ = ["EmbeddingProgram", "export_program"]
