"""Searching with a trained model: an index of embeddings, images of a folder, a page of results."""
