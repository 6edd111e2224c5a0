"""The command line: fit, validate, test, predict, check, embed, export, index, search and demo."""
