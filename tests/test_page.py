"""The page of a run and of a sweep as files: what is in them, what is escaped, what changes and what does not."""

from __future__ import annotations

import base64
import fnmatch
import gzip
import itertools
import json
import re
import shutil
import time
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import synthetic

from analysis.load import to_pool
from analysis.page import browser, drawing, write_page, write_sweep
from analysis.page.__main__ import main
from analysis.page.build import PROVENANCE
from analysis.publish import publish
from analysis.report import write_tables
from analysis.table1 import choose
from xcompress.config import ROOT
from xcompress.schema import UsageError

HOSTILE = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked=1">&amp;{{ 7*7 }}<!--'


class Parsed(HTMLParser):
    """Start tags with attributes, ids, and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        """How many elements of a kind there are."""
        return sum(name == tag for name, _ in self.tags)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A made-up run of 120 questions and its tables folder."""
    collected = synthetic.make(tmp_path_factory.mktemp("page"), 120, passages=3)
    return collected, write_tables(collected, time.monotonic())


def stable(text: str) -> str:
    """A page without its provenance part."""
    begin, end = PROVENANCE
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    assert rest and tail
    return head + tail


def unpack(text: str) -> dict[str, Any]:
    """The question browser's data in a page."""
    packed = re.search(r'id="data">([^<]*)<', text)
    assert packed
    content: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed.group(1))))
    return content


def test_every_run_makes_its_page(made: tuple[Any, Path]) -> None:
    """All parts stand in their order, with the run's figures; ids are unique and every inner link has a target."""
    _, folder = made
    text = (folder / "report.html").read_text(encoding="utf-8")
    page = Parsed(text)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    order = [name for name in ids if name in {"verdicts", "table1", "figures", "questions", "counts", "provenance"}]
    assert order == ["verdicts", "table1", "figures", "questions", "counts", "provenance"]
    links = [attributes["href"] for tag, attributes in page.tags if tag == "a"]
    assert links and all(link and link.startswith("#") and link[1:] in ids for link in links)
    table = json.loads((folder / "table1.json").read_text())
    for row in table["rows"]:
        assert row["label"] in page.text and f"{row['em']:.1f}" in page.text
    for claim in json.loads((folder / "verdicts.json").read_text())["rows"]:
        assert claim["claim"] in page.text
    for entries in json.loads((folder / "counts.json").read_text()).values():
        assert all(name in page.text for name in entries)
    assert f"make report RUN={folder.resolve()}" in page.text
    for slug in ("cost", "regret", "correlation", "ablations", "specification"):
        assert f"figure-{slug}" in ids
    assert page.text.count("n = 119 questions") >= 5, "each caption says its n"


def test_the_page_asks_for_nothing(made: tuple[Any, Path]) -> None:
    """No element loads anything, no style does, and the policy forbids it to whatever comes in."""
    text = (made[1] / "report.html").read_text(encoding="utf-8")
    text = re.sub(r'(id="data">)[^<]*', r"\1", text)  # any letters may stand in there
    page = Parsed(text)
    assert not {tag for tag, _ in page.tags} & {"link", "img", "iframe", "object", "embed", "base", "form", "video", "audio"}
    assert not [attributes for _, attributes in page.tags if "src" in attributes or "srcset" in attributes]
    assert "url(" not in text and "@import" not in text and "http" not in text.replace("http-equiv", "")
    policy = next(attributes["content"] for tag, attributes in page.tags if tag == "meta" and "http-equiv" in attributes)
    assert policy and policy.startswith("default-src 'none'; script-src 'sha256-")
    assert not [key for _, attributes in page.tags for key in attributes if key.startswith("on")]


def test_flags_are_what_they_say(made: tuple[Any, Path]) -> None:
    """Every filter against the pool's arrays and the choices of Table 1."""
    collected, folder = made
    pool = to_pool(collected)
    choices = choose(pool, collected.settings)
    picks = choices["lowest_sps"].picks
    assert picks is not None
    known, right = pool.labelled, pool.quality.em == 100
    chosen = right[np.arange(len(picks)), picks]
    cut = {row["question_id"] for row in collected.candidates for r in row["rounds"] if r["finish_reason"] == "length"}
    expected = {
        "rescued": known & chosen & ~right[:, 0],
        "harmed": known & ~chosen & right[:, 0],
        "missed": known & ~chosen & right.any(1),
        "all_wrong": known & ~right.any(1),
        "all_right": known & right.all(1),
        "gate_skipped": pool.initial_ratio(collected.settings.method) > pool.threshold(collected.settings.method),
        "cut_off": np.array([question.id in cut for question in pool.questions]),
        "blank": np.array([any(not text.strip() for text in row) for row in pool.summaries]),
        "unlabelled": ~known,
    }
    assert set(expected) == set(browser.FLAGS)
    found = unpack((folder / "report.html").read_text(encoding="utf-8"))["questions"]
    for name, holds in expected.items():
        assert [name in question["f"] for question in found] == holds.tolist(), name
    counted = {flag["name"]: flag["count"] for flag in browser.load(folder, {}).flags}  # type: ignore[union-attr]
    assert counted == {name: int(holds.sum()) for name, holds in expected.items()}
    assert all(counted[name] for name in expected), "the made-up run has each case"
    assert counted["gate_skipped"] == choices["xcompress"].skipped


def test_the_browser_holds_the_rows(made: tuple[Any, Path]) -> None:
    """Texts to the letter, scores to six figures, and who chose what."""
    collected, folder = made
    pool = to_pool(collected)
    sps = pool.view(collected.settings.method)
    found = unpack((folder / "report.html").read_text(encoding="utf-8"))
    assert found["labels"]["lowest_sps"] == "lowest SPS"
    for at, question in enumerate(found["questions"]):
        assert question["q"] == pool.questions[at].question and question["a"] == list(pool.questions[at].answers)
        assert [text for _, text, _ in question["p"]] == [passage.text for passage in pool.questions[at].passages]
        assert [candidate["s"] for candidate in question["c"]] == pool.summaries[at]
        for k, candidate in enumerate(question["c"]):
            stored, ppl, longppl, tokens = candidate["m"]
            if stored is None:
                assert np.isnan(sps[at, k]) and not pool.summaries[at][k]
                continue
            assert stored == pytest.approx(sps[at, k], rel=1e-5) and tokens == pool.tokens[at, k]
            assert ppl == pytest.approx(np.exp(pool.nll[at, k]), rel=1e-5)
            assert longppl is None or longppl == pytest.approx(np.exp(pool.longppl[at, k]), rel=1e-5)
        assert sum("lowest_sps" in candidate["w"] for candidate in question["c"]) == 1


def test_same_rows_same_bytes(made: tuple[Any, Path], tmp_path: Path) -> None:
    """Made again elsewhere and later: equal but for the provenance part, which is allowed to differ and does."""
    _, folder = made
    other = synthetic.make(tmp_path / "again", 120, passages=3)
    again = write_tables(other, time.monotonic() - 100)
    first, second = ((f / "report.html").read_text(encoding="utf-8") for f in (folder, again))
    assert stable(first) == stable(second) and first != second
    before = (folder / "report.html").read_bytes()
    assert write_page(folder).read_bytes() == before, "from the files alone"


def test_hostile_texts_stay_texts(tmp_path: Path) -> None:
    """Mark-up in every text of a run and in its names: no element of the page comes from it."""
    texts = dict.fromkeys(("question", "summary", "prediction", "title", "passage", "answer"), HOSTILE)
    folder = write_tables(synthetic.make(tmp_path, 3, passages=2, **texts), time.monotonic())
    plain = Parsed((folder / "report.html").read_text(encoding="utf-8"))
    for name in ("table1.json", "verdicts.json", "counts.json", "provenance.json"):
        stored = (folder / name).read_text(encoding="utf-8")
        for word in ("smollm2_135m", "mini"):
            stored = stored.replace(f'"{word}"', json.dumps(HOSTILE))
        (folder / name).write_text(stored.replace('"used"', json.dumps(HOSTILE)), encoding="utf-8")
    (folder / "config.yaml").write_text(f"run_root: {HOSTILE}\n")
    text = write_page(folder).read_text(encoding="utf-8")
    page = Parsed(text)
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    assert page.count("script") == 3 and page.count("img") == 0
    assert page.text.count("{{ 7*7 }}") >= 5 and HOSTILE in page.text
    first = unpack(text)["questions"][0]
    assert first["q"] == first["c"][0]["s"] == first["p"][0][1] == HOSTILE


def test_a_page_is_bounded_and_says_what_it_left_out(made: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the budget, the first questions are kept, the page names both numbers, and counts are of what it holds."""
    _, folder = made
    whole = browser.load(folder, {})
    assert whole and whole.held == whole.all == 120
    budget = len(whole.data) // 3
    monkeypatch.setattr(browser, "BUDGET", budget)
    part = browser.load(folder, {})
    assert part and len(part.data) <= budget and 20 < part.held < 50 and part.all == 120
    page = Parsed(write_page(folder).read_text(encoding="utf-8"))
    assert f"first {part.held} of 120 questions" in " ".join(page.text.split())
    monkeypatch.undo()
    write_page(folder)


def test_old_and_incomplete_folders(made: tuple[Any, Path], tmp_path: Path) -> None:
    """A folder without question rows still gets its page, without what is missing; one without a table is an error."""
    _, folder = made
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    (old / "questions.parquet").unlink()
    (old / "specification.json").unlink()
    rows = [{"point": "lowest <SPS>", "em": 25.04, "em_low": -50.0, "em_high": 75.0, "em_n": 9, "same_candidate": 0.5}]
    (old / "differences.json").write_text(json.dumps({"rows": rows}))
    page = Parsed(write_page(old).read_text(encoding="utf-8"))
    ids = {attributes.get("id") for _, attributes in page.tags}
    assert "questions" not in ids and "figure-specification" not in ids and {"figure-regret", "table1"} <= ids
    words = " ".join(page.text.split())
    assert "lowest <SPS>25.0 \N{MINUS SIGN}50.0 to 75.00.50" in words  # three cells
    with pytest.raises(UsageError, match=r"no table1\.json"):
        write_page(tmp_path)


def test_a_sweep_is_a_grid_and_shows_what_is_missing(made: tuple[Any, Path], tmp_path: Path) -> None:
    """Readers down, data sets across, links that lead to the pages, and a line for each run that is not there."""
    _, folder = made
    names = {"a": ("r1", "d1"), "b": ("r1", "d<2>"), "c": ("r2", "d1"), "d": ("r2", "d1")}
    for name, (reader, dataset) in names.items():
        target = tmp_path / name
        target.mkdir()
        for file in ("verdicts.json", "counts.json"):
            shutil.copy(folder / file, target / file)
        table = json.loads((folder / "table1.json").read_text()) | {"reader": reader, "dataset": dataset}
        (target / "table1.json").write_text(json.dumps(table))
    pages = main([str(tmp_path)])
    assert [path.relative_to(tmp_path).as_posix() for path in pages] == [*(f"{n}/report.html" for n in names), "sweep.html"]
    lost = tmp_path / "lost & found"
    page = Parsed(write_sweep([tmp_path / name for name in [*names]] + [lost], pages[-1]).read_text(encoding="utf-8"))
    words = " ".join(page.text.split())
    assert "1 of 5 runs are missing" in words and words.count("lost & found") == 2
    assert "d<2>" in words and words.count("no run") == 1
    links = [attributes["href"] or "" for tag, attributes in page.tags if tag == "a"]
    assert sum(link.endswith("report.html") for link in links) == 8
    assert all((tmp_path / link).is_file() for link in links if link.endswith("report.html"))
    empty = Parsed(write_sweep([lost], tmp_path / "none.html").read_text(encoding="utf-8"))
    assert "No run of this sweep has finished" in empty.text
    several = main([str(tmp_path / "a"), str(lost), str(tmp_path / "c")])
    assert several[-1] == tmp_path / "sweep.html" and "1 of 3 runs are missing" in several[-1].read_text(encoding="utf-8")
    with pytest.raises(UsageError, match="nor do its subfolders"):
        main([str(tmp_path / "nothing")])


def test_a_page_is_not_published(made: tuple[Any, Path], tmp_path: Path) -> None:
    """Texts of questions and summaries stay in the run's folder."""
    _, folder = made
    target = publish(folder, tmp_path)
    assert {"report.html", "questions.parquet", "candidates.parquet"} <= {path.name for path in folder.iterdir()}
    assert {path.suffix for path in target.iterdir()} == {".md", ".csv", ".json", ".svg", ".yaml", ".parquet"}
    question = made[0].questions[5].question
    texts = [path.read_text(encoding="utf-8") for path in target.iterdir() if path.suffix != ".parquet"]
    assert not [text for text in texts if question in text]
    (numbers,) = target.glob("*.parquet")
    assert question not in str(pq.read_table(numbers).to_pylist()) and question in str(
        pq.read_table(folder / "candidates.parquet").to_pylist()
    )


def test_an_installed_package_has_all_parts_of_the_page() -> None:
    """Every template and asset matches the package data that a wheel takes along."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "analysis.page" in declared["packages"]
    patterns = declared["package-data"]["analysis.page"]
    base = ROOT / "analysis" / "page"
    parts = [p.relative_to(base).as_posix() for p in base.rglob("*") if p.suffix in {".html", ".css", ".js"}]
    assert len(parts) == 7 and all(any(fnmatch.fnmatch(part, pattern) for pattern in patterns) for part in parts)


def test_ticks_are_round_and_inside() -> None:
    """Few, evenly spaced, inside the range; a point has one."""
    for low, high, most in ((0, 100, 6), (-57.3, 12.2, 5), (0.001, 0.0017, 4), (5600, 12301, 7)):
        found = drawing.ticks(low, high, most)
        assert 1 < len(found) <= most + 1 and found[0] >= low - 1e-9 and found[-1] <= high + 1e-9
        assert len({round(b - a, 9) for a, b in itertools.pairwise(found)}) == 1
    assert drawing.ticks(3, 3, 5) == [3]


def test_labels_of_the_scatter_do_not_cover_each_other() -> None:
    """Fifteen points, several in one place: every label is drawn, and no two overlap."""
    points = [drawing.Point(f"method number {k}", [0, 0, 6700, 6900, 1100][k % 5], [10, 40, 40][k % 3]) for k in range(15)]
    svg = str(drawing.scatter(points, ("tokens", "EM"), 760, 430))
    labels = re.findall(r'class="label" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+)<', svg)
    assert len(labels) == 15
    boxes = [(float(x), float(y) - 11, float(x) + 6 * len(text), float(y)) for x, y, text in labels]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if drawing._overlap(a, b) > 0]
