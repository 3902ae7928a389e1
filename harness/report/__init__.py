"""The run's page, table and figure: `report.html`, `ledger.csv`, `waterfall.svg`, from the ledger's records alone."""

from harness.report.figures import waterfall_svg
from harness.report.page import render, write
from harness.report.rows import RunData
from harness.report.table import csv

__all__ = ["RunData", "csv", "render", "waterfall_svg", "write"]
