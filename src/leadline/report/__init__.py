"""The HTML report of a run directory."""

from leadline.report.build import REPORT_FILE, build_report

__all__ = ["REPORT_FILE", "build_report"]
