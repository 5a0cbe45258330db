"""Runs of other tools, read into the ledger with provenance `imported`; nothing here executes what it reads."""
