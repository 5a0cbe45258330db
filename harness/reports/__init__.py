"""Plots and reports that people read in pull requests."""

from harness.reports.write import ReportResult, check_report, write_report

__all__ = ["ReportResult", "check_report", "write_report"]
