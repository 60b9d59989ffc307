"""``make report``: python -m analysis.page [FOLDER ...] writes report.html into tables folders, and sweep.html for several."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.page.build import SWEEP, write_page, write_sweep
from xcompress.config import ROOT
from xcompress.schema import UsageError


def main(arguments: Sequence[str]) -> list[Path]:
    """Write the pages and return them: of the newest run (no argument), of the runs named, or of a folder that holds several.

    Raises:
        UsageError: there is no run, or a folder is neither a tables folder nor holds one.
    """
    given = [Path(argument) for argument in arguments]
    if not given:
        finished = _inside(ROOT / "results" / "runs" / "tables")
        if not finished:
            raise UsageError("no run below results/runs/tables yet; run make reproduce-table1, or give RUN=<tables folder>")
        return [write_page(max(finished, key=lambda folder: (folder / "table1.json").stat().st_mtime))]
    if len(given) == 1 and not (given[0] / "table1.json").is_file():
        folders = _inside(given[0])
        if not folders:
            raise UsageError(f"{given[0]} holds no table1.json, nor do its subfolders; give a folder below <run root>/tables")
        return [*map(write_page, folders), write_sweep(folders, given[0] / SWEEP)]
    pages = [write_page(folder) for folder in given if len(given) == 1 or (folder / "table1.json").is_file()]
    if len(given) > 1:
        common = Path(os.path.commonpath([folder.resolve().parent for folder in given]))
        pages.append(write_sweep(given, common / SWEEP))
    return pages


def _inside(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/table1.json"))


if __name__ == "__main__":
    try:
        for page in main(sys.argv[1:]):
            print(page)
    except UsageError as error:
        raise SystemExit(f"error: {error}") from None
