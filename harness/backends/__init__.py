"""Who executes a run: launch and collect."""
