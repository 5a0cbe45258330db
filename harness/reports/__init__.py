"""Plots and reports that people read in pull requests."""
