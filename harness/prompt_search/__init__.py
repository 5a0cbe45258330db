"""Prompt search: one pass per environment before RL (docs/prompt-search.md)."""
