"""From the files of a tables folder to one offline HTML page, and from several folders to the page of a sweep.

The page is made from the files alone, so it can be made again for any stored run. It loads nothing: styles, scripts, figures
and data are inside, and its content security policy forbids everything else. What models and data sets wrote is escaped by the
template engine in the fixed part and set as text, never as mark-up, by the script of the question browser.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from analysis.page import browser, figures, tables
from xcompress.config import ROOT
from xcompress.schema import UsageError
from xcompress.store import write_atomically

_HERE = Path(__file__).parent
PAGE, SWEEP = "report.html", "sweep.html"
PROVENANCE = ("<!-- provenance -->", "<!-- /provenance -->")  # between these a page may differ for the same rows


def write_page(folder: Path) -> Path:
    """Write ``report.html`` into a tables folder; byte-identical for the same stored rows outside the provenance part.

    Raises:
        UsageError: ``folder`` is not a finished tables folder.
    """
    table = _json(folder, "table1.json")
    if table is None:
        raise UsageError(f"{folder} holds no table1.json; give a folder below <run root>/tables")
    verdicts = _json(folder, "verdicts.json") or {"rows": [], "rests_on": ""}
    labels = {row["method"]: row["label"] for row in table["rows"]}
    held = browser.load(folder, labels)
    scripts = {"theme": _asset("theme.js"), **({"browser": _asset("browser.js")} if held else {})}
    text = _render(
        "run.html",
        scripts,
        table=table,
        facts=tables.facts(table),
        headline=tables.headline(table),
        verdicts=tables.verdicts(verdicts["rows"]),
        rests_on=verdicts["rests_on"],
        methods=tables.methods(table),
        figures=figures.figures(folder, table),
        differences=tables.generic((_json(folder, "differences.json") or {"rows": []})["rows"]),
        counts=_json(folder, "counts.json") or {},
        browser=held,
        provenance=_json(folder, "provenance.json") or {},
        commands=_commands(folder),
        config=(folder / "config.yaml").read_text(encoding="utf-8") if (folder / "config.yaml").is_file() else "",
    )
    write_atomically(folder / PAGE, text.encode())
    return folder / PAGE


def write_sweep(folders: Sequence[Path], target: Path) -> Path:
    """Write the page of a sweep to ``target``: a grid of readers and data sets that links to each run's page.

    Args:
        folders: tables folders in the order wanted; one that is absent or unfinished is shown as missing, never left out.
    """
    runs: list[dict[str, Any]] = []
    missing = []
    for folder in folders:
        table = _json(folder, "table1.json")
        if table is None:
            missing.append(folder.name)
            continue
        claims = (_json(folder, "verdicts.json") or {"rows": []})["rows"]
        runs.append(tables.run(table, claims, folder.name, quote(_relative(folder / PAGE, target.parent))))
    grid = tables.grid(runs)
    text = _render("sweep.html", {"theme": _asset("theme.js")}, runs=runs, grid=grid, missing=missing, total=len(folders))
    write_atomically(target, text.encode())
    return target


def _commands(folder: Path) -> list[tuple[str, str]]:
    """What made the run, and what makes parts of it again: (what for, command line)."""
    provenance = _json(folder, "provenance.json") or {}
    place = shlex.quote(_relative(folder, ROOT) if folder.resolve().is_relative_to(ROOT) else str(folder.resolve()))
    found = []
    if provenance.get("command"):
        found.append(("This run", provenance["command"]))
        found.append(("Its tables again, without a model", provenance["command"] + " 'stages=[analyse]'"))
    found.append(("This page again", f"make report RUN={place}"))
    found.append(("Numbers and plots into results/, without texts", f"make publish RUN={place}"))
    return found


def _render(template: str, scripts: dict[str, str], **values: Any) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = tables.number
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts.values()
    )
    policy = f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    return environment.get_template(template).render(
        **values,
        policy=policy,
        style=Markup(_asset("page.css")),
        scripts={name: Markup(text) for name, text in scripts.items()},
        provenance_begins=Markup(PROVENANCE[0]),
        provenance_ends=Markup(PROVENANCE[1]),
    )


def _relative(path: Path, start: Path) -> str:
    return Path(os.path.relpath(path.resolve(), start.resolve())).as_posix()


def _asset(name: str) -> str:
    return (_HERE / "assets" / name).read_text(encoding="utf-8")


def _json(folder: Path, name: str) -> Any:
    path = folder / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
