"""Helpers for data sets on disk: find their files, read their lists and pickles, report what is there."""
