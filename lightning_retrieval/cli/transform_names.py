"""The names of the preparations that the help of the commands shows, in a module that needs no torch."""

TRANSFORMS = ("plain", "smooth_ap", "roadmap", "ap_gem", "glyphs")
