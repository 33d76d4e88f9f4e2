"""Reports: the results of a study as an HTML page, in the terminal, and as CSV and JSON files.

result ─► build_report ─► ReportContent: sections of tables, figures and notes ─► page, terminal, CSV
"""

from qkflow.report.export import export_csv, export_json, terminal
from qkflow.report.html import write_report
from qkflow.report.study import build_report

__all__ = ["build_report", "export_csv", "export_json", "terminal", "write_report"]
