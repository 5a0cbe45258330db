"""Gates, decisions and certificates."""
