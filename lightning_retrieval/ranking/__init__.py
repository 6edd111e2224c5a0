"""Ranked lists, independent of any network: similarity, hard ranks, labels, query expansion."""
