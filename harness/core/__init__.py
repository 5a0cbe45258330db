"""Ids, errors, canonical JSON and the types shared by all parts."""
