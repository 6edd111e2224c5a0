"""Image files: indexes, data sets, data modules for one's own images."""
