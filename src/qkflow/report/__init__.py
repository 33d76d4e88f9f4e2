"""What a study has found, shown: one page, the terminal, CSV and JSON, all from the same `Summary`."""

from qkflow.report.export import read_json, write_csv, write_json
from qkflow.report.page import write_report
from qkflow.report.tables import terminal

__all__ = ["read_json", "terminal", "write_csv", "write_json", "write_report"]
