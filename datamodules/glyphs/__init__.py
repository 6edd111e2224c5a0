"""Glyphs, a data set drawn from fonts."""
