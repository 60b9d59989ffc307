"""One offline HTML page per run (``report.html``) and per sweep (``sweep.html``)."""

from analysis.page.build import write_page, write_sweep

__all__ = ["write_page", "write_sweep"]
