"""Glyphs, the built-in data set: images of characters, drawn from the fonts that matplotlib ships."""
