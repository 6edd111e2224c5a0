"""The command line: fit, validate, test, predict, check, index and search."""
