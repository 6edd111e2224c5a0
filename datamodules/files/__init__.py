"""Helpers that read lists, folders and pickles of data sets."""
