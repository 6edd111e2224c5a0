"""Ranked lists without any network: similarity, hard ranks, labels, query expansion."""
