"""Image files: indexes, datasets and data modules for the user's own images."""
