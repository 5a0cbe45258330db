"""Run configurations and the semantic difference between two of them."""
