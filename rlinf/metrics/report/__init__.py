"""report.html: one self-contained page about one run or several, made from the files in their folders."""

from rlinf.metrics.report.write import write_report

__all__ = ["write_report"]
