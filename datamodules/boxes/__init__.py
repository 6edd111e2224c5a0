"""Images with boxes around objects: their list, their dataset, and the data modules that read them."""
