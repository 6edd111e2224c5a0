"""The commands that use a trained model: adapt, demo, embed, export, index and search."""
