"""Run a post-training program on an open model and know which of its runs is really better."""

__version__ = "0.1.0.dev0"
