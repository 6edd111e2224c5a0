"""Images with objects in boxes, for training and evaluating detectors."""
