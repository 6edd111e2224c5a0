"""Batch samplers that draw the global batch."""
