"""The preparation of images: every step between an image file and the network."""
