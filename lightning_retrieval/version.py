"""The version of this library, which setup.cfg reads from this file."""

__version__ = "0.1.0"
