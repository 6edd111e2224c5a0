"""What happens to an image between its file and the network."""
