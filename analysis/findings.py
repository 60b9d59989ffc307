"""The pages that speak about the published study, from templates and tables: python -m analysis.findings

``results/FINDINGS.md``, ``results/README.md`` and the headline of the front page. Every figure is looked up when a page is
rendered, so none can disagree with the tables; a test renders them again and compares.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from analysis.study import ALL, SELECTORS, shown
from xcompress.config import ROOT
from xcompress.store import write_atomically

TEMPLATES = Path(__file__).parent
START, END = "<!-- study: python -m analysis.findings -->\n", "<!-- end of study -->"
READERS = ("smollm2_135m", "gemma3_270m")  # who read the study's candidates
HEADLINE = ("random", "shortest", "lowest_ppl", "lowest_sps", "xcompress", "oracle")


class Figures:
    """Figures of a published study, as the template asks for them.

    Args:
        folder: ``results/<reader>`` with ``study.json`` and a folder for each data set.
    """

    def __init__(self, folder: Path) -> None:
        self.study: dict[str, Any] = json.loads((folder / "study.json").read_text(encoding="utf-8"))
        self.tables = {
            name: json.loads((folder / name / "table1.json").read_text(encoding="utf-8")) for name in self.study["datasets"]
        }
        self.work = {
            name: json.loads((folder / name / "provenance.json").read_text(encoding="utf-8"))["work"]
            for name in self.study["datasets"]
        }
        self.ablations = {
            name: json.loads((folder / name / "ablations.json").read_text(encoding="utf-8"))["rows"]
            for name in self.study["datasets"]
        }
        self.specification = {
            name: (folder / name / "specification.md").read_text(encoding="utf-8").splitlines()
            for name in self.study["datasets"]
        }

    @property
    def datasets(self) -> dict[str, int]:
        """Questions of each data set."""
        found: dict[str, int] = self.study["datasets"]
        return found

    @property
    def n(self) -> int:
        """Questions of all data sets."""
        return sum(self.datasets.values())

    def hours(self, *left_out: str) -> str:
        """Processor hours of all stages (one thread), those left out that another reader's run made."""
        seconds = sum(stage["seconds"] for work in self.work.values() for name, stage in work.items() if name not in left_out)
        return f"{seconds / 3600:.1f}"

    def select(self, selector: str, key: str = "em_difference", dataset: str = ALL, digits: int = 1) -> str:
        """A figure of a selector: ``em``, ``em_difference``, ``f1_difference``, ``em_share``, ..."""
        (row,) = [r for r in self.study["selection"] if (r["dataset"], r["selector"]) == (dataset, selector)]
        return shown(row[key], digits, signed=key not in {"em", "f1"})

    def against(self, other: str, metric: str = "em", dataset: str = ALL) -> str:
        """Lowest SPS minus another selector."""
        rows = self.study["comparisons"]
        (row,) = [r for r in rows if (r["dataset"], r["against"], r["metric"]) == (dataset, other, metric)]
        return shown(row)

    def high(self, selector: str, key: str = "em_difference") -> float:
        """Upper end of a pooled interval."""
        (row,) = [r for r in self.study["selection"] if (r["dataset"], r["selector"]) == (ALL, selector)]
        return float(row[key]["high"])

    def detectable(self, selector: str, metric: str = "em") -> str:
        """The smallest difference to CompAct that the pooled questions could have detected."""
        (row,) = [r for r in self.study["selection"] if (r["dataset"], r["selector"]) == (ALL, selector)]
        return f"{row[f'{metric}_difference']['detectable']:.1f}"

    def r(self, metric: str, quality: str = "em", form: str = "within", dataset: str = ALL) -> str:
        """A correlation, with the number of questions that vary."""
        key = (dataset, metric, quality, form)
        (row,) = [r for r in self.study["correlations"] if (r["dataset"], r["metric"], r["quality"], r["form"]) == key]
        return f"{shown(row, 2)} ({row['n']} questions)"

    def explained(self, variant: str = "first_token=True", dataset: str = ALL) -> str:
        """Share of the variance of SPS that the first token explains."""
        (row,) = [r for r in self.study["explained"] if (r["variant"], r["dataset"]) == (variant, dataset)]
        return "n/a" if row["share"] is None else f"{row['share']:.3f}"

    def variant(self, name: str, reference: str = "compact") -> str:
        """A variant's EM difference to CompAct or to a random candidate."""
        (row,) = [r for r in self.study["variants"] if r["variant"] == name]
        return shown(row[reference])

    def layers(self) -> str:
        """The layers whose SPS reads best and worst against a random candidate."""
        rows = [r for r in self.study["variants"] if r["variant"].startswith("layer=")]
        best, worst = max(rows, key=_value), min(rows, key=_value)
        name = {row["variant"]: row["variant"].partition("=")[2] for row in rows}
        return (
            f"best layer {name[best['variant']]}: {shown(best['random'])}; worst layer {name[worst['variant']]}:"
            f" {shown(worst['random'])}"
        )

    def gate(self, value: str, dataset: str, key: str = "em_difference") -> str:
        """A point of a data set's gate curve: EM against CompAct."""
        (row,) = [r for r in self.ablations[dataset] if r["ablation"].startswith("gate") and r["value"] == value]
        bounds = {
            name: row[f"{key}{suffix}"] for name, suffix in (("value", ""), ("low", "_low"), ("high", "_high"), ("n", "_n"))
        }
        return shown(bounds)

    def saved(self, value: str, dataset: str) -> str:
        """Share of the compressor tokens that a point of the gate curve saves against no gate."""
        rows = {r["value"]: r["compressor_tokens"] for r in self.ablations[dataset] if r["ablation"].startswith("gate")}
        return f"{1 - rows[value] / rows['0.0']:.0%}"

    def skipped(self, dataset: str) -> str:
        """Questions whose initial summary the gate kept; of all data sets too."""
        tables = self.tables if dataset == ALL else {dataset: self.tables[dataset]}
        rows = [row for table in tables.values() for row in table["rows"] if row["method"] == "xcompress"]
        return f"{sum(row['gate_skipped'] for row in rows)} of {sum(row['n'] for row in rows)}"

    def curve(self, dataset: str) -> str:
        """The two sentences of a data set's specification curve."""
        return " ".join(line for line in self.specification[dataset] if " variants (" in line or line.startswith("Median"))


def _value(row: dict[str, Any]) -> float:
    return float(row["random"]["value"])


class Readers:
    """Figures of two readers on the same candidates, over all data sets.

    Args:
        path: ``readers.json``.
    """

    def __init__(self, path: Path) -> None:
        self.record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))

    @property
    def chance(self) -> str:
        """Per cent of questions on which two blind choices are the same."""
        return f"{100 / self.record['candidates']:.1f}"

    def same(self, score: str) -> str:
        """Per cent of questions with the same choice by the lowest score."""
        return shown(self._agreement(score)["same"], signed=False)

    def r(self, score: str) -> str:
        """Correlation within questions of one reader's score with the other's."""
        return shown(self._agreement(score)["r"], 2)

    def own(self, reader: str, choice: str, metric: str = "em") -> str:
        """A reader on its own choice minus the same reader on the other's."""
        key = (reader, choice, metric, ALL)
        rows = self.record["exchanged"]
        (row,) = [r for r in rows if (r["reader"], r["choice"], r["metric"], r["dataset"]) == key]
        return shown(row)

    def _agreement(self, score: str) -> dict[str, Any]:
        (row,) = [r for r in self.record["agreement"] if (r["score"], r["dataset"]) == (score, ALL)]
        found: dict[str, Any] = row
        return found


def render(template: str, results: Path, selectors: Sequence[str] = tuple(SELECTORS)) -> str:
    """A template over the published tables: ``f`` and ``g`` are the two readers' figures, ``both`` their comparison.

    ``labels`` holds the selectors that the template shows.
    """
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    text = environment.from_string((TEMPLATES / template).read_text(encoding="utf-8"))
    first, second = READERS
    return text.render(
        f=Figures(results / first),
        g=Figures(results / second),
        both=Readers(results / "readers.json"),
        labels={name: SELECTORS[name] for name in selectors},
    )


def pages(root: Path) -> dict[Path, str]:
    """Every page and what it must hold."""
    results = root / "results"
    front = (root / "README.md").read_text(encoding="utf-8")
    before, _, rest = front.partition(START)
    after = rest.partition(END)[2]
    return {
        results / "FINDINGS.md": render("findings.md.jinja", results),
        results / "README.md": render("results.md.jinja", results),
        root / "README.md": f"{before}{START}{render('headline.md.jinja', results, HEADLINE)}{END}{after}",
    }


if __name__ == "__main__":
    for path, text in pages(ROOT).items():
        write_atomically(path, text.encode())
        print(path)
