"""A report of what a model gets wrong: what is found, the page and the table that show it, and a callback."""
