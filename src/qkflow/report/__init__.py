"""What a study has found, shown: one page, the terminal, CSV and JSON, all from the same `ExperimentResult`."""

from qkflow.report.export import read_json, write_csv, write_json, write_recall_csv
from qkflow.report.page import write_report
from qkflow.report.sharpened import write_sharpened
from qkflow.report.sharpened_export import sharpened_csv, sharpened_json
from qkflow.report.sharpened_tables import sharpened_terminal
from qkflow.report.tables import terminal

__all__ = [
    "read_json",
    "sharpened_csv",
    "sharpened_json",
    "sharpened_terminal",
    "terminal",
    "write_csv",
    "write_json",
    "write_recall_csv",
    "write_report",
    "write_sharpened",
]
