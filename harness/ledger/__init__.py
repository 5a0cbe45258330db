"""The append-only event ledger and its fold to run state."""
