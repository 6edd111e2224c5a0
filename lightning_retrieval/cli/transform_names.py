"""The names of the transforms that `index` accepts, in a module that needs no torch."""

GLYPHS = "glyphs"
TRANSFORMS = ("plain", "smooth_ap", "roadmap", "ap_gem", GLYPHS)
