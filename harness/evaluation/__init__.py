"""The held-out protocol and its statistics."""
