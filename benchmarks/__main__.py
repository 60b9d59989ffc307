"""``python -m benchmarks``: run the comparisons, print them, store ``results/bench.md`` and ``results/bench.json``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from analysis.provenance import code, machine, versions
from benchmarks.table import Section, record, render
from benchmarks.workload import Setting, model_folder
from xcompress.config import ROOT, quiet_libraries
from xcompress.store import write_atomically, write_json

NAMES = ("rates", "scoring", "generation", "basis", "ablations", "end_to_end")


def main(arguments: list[str]) -> int:
    """0, or 1 if a comparison failed (the others are still made and stored)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"comparisons to run: {', '.join(NAMES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to try it out; the figures mean nothing")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of every side")
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="folder of bench.md and bench.json")
    parser.add_argument("--lmeval-python", default=os.environ.get("XCOMPRESS_LMEVAL_PYTHON"), metavar="FILE")
    parser.add_argument("--vllm-python", default=os.environ.get("XCOMPRESS_VLLM_PYTHON"), metavar="FILE")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in NAMES]
    if unknown:
        parser.error(f"there is no comparison {unknown[0]}; there are {', '.join(NAMES)}")
    import torch

    torch.set_num_threads(options.threads)
    quiet_libraries()
    setting = Setting(
        folder=model_folder(),
        threads=options.threads,
        quick=options.quick,
        pythons={"lm-evaluation-harness": options.lmeval_python, "vLLM": options.vllm_python},
        say=lambda line: print(f"  {line}", flush=True),
    )
    chosen = options.names or NAMES
    started = time.monotonic()
    about = _about(arguments, options.threads)
    sections, failed = [], []
    for name in chosen:
        print(f"{name} ...", flush=True)
        begun = time.monotonic()
        run: Callable[[Setting], Section] = import_module(f"benchmarks.{name}").run
        try:
            section = run(setting)
        except Exception as error:  # one comparison that cannot be made leaves the others
            traceback.print_exc()
            section = Section(name, notes=[f"FAILED: {type(error).__name__}: {error}"])
            failed.append(name)
        section.raw["seconds"] = round(time.monotonic() - begun, 1)
        sections.append(section)
        print("\n" + render(section), flush=True)
        about["seconds"] = round(time.monotonic() - started, 1)
        _store(options.output, about, chosen, sections)
    print(f"stored {options.output / 'bench.md'}; {about['seconds']:.0f} s in all")
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _about(arguments: list[str], threads: int) -> dict[str, Any]:
    return {
        "command": f"python -m benchmarks {shlex.join(arguments)}".rstrip(),
        "date": datetime.now(UTC).date().isoformat(),
        "code": code(),
        "packages": versions(),
        "machine": machine(),
        "threads": threads,
        "load_before": [round(value, 2) for value in os.getloadavg()],
    }


def _store(folder: Path, about: dict[str, Any], names: Sequence[str], sections: list[Section]) -> None:
    """Written after every section, so what is measured is there whatever follows."""
    hardware, packages = about["machine"], about["packages"]
    changed = " with uncommitted changes" if about["code"]["uncommitted_changes"] else ""
    used = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformers", "numpy") if name in packages)
    # A comparison that is run again replaces its own part; the others stay, each with its command and commit.
    kept = _stored(folder, about)
    by = f"`{about['command']}` at commit {about['code']['commit']}{changed}"
    for name, section in zip(names, sections, strict=False):
        kept[name] = {**record(section), "text": render(section), "by": by}
    parts = [kept[name] for name in NAMES if name in kept]
    lines = [
        "# Speed and memory, measured side by side",
        "",
        f"{hardware['processor']}, {hardware['cores']} cores, {about['threads']} threads,"
        f" {hardware['memory_gb']} GB; {used}; {about['date']}. SmolLM2-135M-Instruct in float32 unless said otherwise.",
        "",
        "A ratio is the median over interleaved repetitions of (time of the other) / (ours), with its range. Before times are",
        "compared, both sides are checked to compute the same. Every single measurement: [bench.json](bench.json).",
        "",
        "\n".join(f"{part['text'].rstrip()}\n\nMeasured by {part['by']}.\n" for part in parts),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "bench.md", "\n".join(lines).encode())
    write_json(folder / "bench.json", {**about, "sections": {name: kept[name] for name in NAMES if name in kept}})


def _stored(folder: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Parts measured before by name; none of another machine or with other packages."""
    path = folder / "bench.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    same = all(found.get(key) == about[key] for key in ("machine", "packages", "threads"))
    return dict(found["sections"]) if same else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
