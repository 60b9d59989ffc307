"""Is a run still what was written? python -m analysis.verify [RUN] (make verify RUN=...; the newest run where none is given).

RUN is a tables folder, or a run root with everything below it. Hashes are computed anew: of shards against their names, of
folders against the identity that names them, of tables against ``checksums.json``; rows are counted against the run's record.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from analysis.stored import TABLES, newest
from xcompress.config import ROOT
from xcompress.schema import UsageError
from xcompress.store import content_digest, digest, write_json

CHECKSUMS = "checksums.json"
STAGES = ("questions", "candidates", "scores", "rivals", "stepwise", "answers")
FOLDERS = {"calibration": "scores", "stepwise_answers": "answers"}  # shards of a run that lie in another stage's folder
_NOT_SEALED = {CHECKSUMS, "report.html"}  # the page is made of the other files, and may be made again


@dataclass
class Found:
    """What was looked at, and what is wrong with it."""

    files: int = 0
    rows: int = 0
    bytes: int = 0
    damaged: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def seal(folder: Path) -> None:
    """Write the checksums of a tables folder; called when its tables are complete."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name not in _NOT_SEALED)
    sums = {path.name: content_digest(path.read_bytes()) for path in files if not path.name.startswith(".")}
    write_json(folder / CHECKSUMS, {"files": sums})


def verify(folder: Path) -> Found:
    """Check a tables folder with the shards it was made from, or everything below a run root.

    Raises:
        UsageError: ``folder`` is neither.
    """
    found = Found()
    if (folder / "table1.json").is_file() or (folder / "provenance.json").is_file():
        _tables(folder, found)
    elif any((folder / stage).is_dir() for stage in STAGES):
        for stage in STAGES:
            for shards in sorted(path for path in (folder / stage).glob("*") if path.is_dir()):
                _folder(shards, found)
        for tables in sorted((folder / "tables").glob("*/")):
            _tables(tables, found, shards_too=False)
    else:
        raise UsageError(f"{folder} is neither a run's tables folder nor a run root")
    return found


def _folder(folder: Path, found: Found) -> None:
    """Every shard of a stage's folder."""
    shards = sorted(folder.glob("*.parquet"))
    for path in shards:
        _shard(path, found)
    if shards or (folder / "identity.json").exists():
        _identity(folder, found)
    else:
        found.notes.append(f"{folder}: nothing stored yet")
    for kind, what in (("*.damaged", "set aside as damaged earlier"), (".*.part", "left by a killed process")):
        found.notes += [f"{path}: {what}" for path in sorted(folder.glob(kind))]


def _identity(folder: Path, found: Found) -> None:
    identity = _json(folder / "identity.json", found)
    if identity is not None and digest(identity) != folder.name.rpartition("-")[2]:
        found.damaged.append(f"{folder / 'identity.json'}: does not give the folder's name")


def _shard(path: Path, found: Found) -> int:
    """Rows of a shard; what is wrong with it is noted."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        found.damaged.append(f"{path}: missing")
        return 0
    found.files += 1
    found.bytes += len(data)
    if content_digest(data) != path.stem.rpartition("-")[2]:
        found.damaged.append(f"{path}: its content is not what its name says")
        return 0
    try:
        rows: int = pq.read_metadata(pa.BufferReader(data)).num_rows
    except (pa.ArrowException, OSError) as error:
        found.damaged.append(f"{path}: {error}")
        return 0
    found.rows += rows
    return rows


def _tables(folder: Path, found: Found, shards_too: bool = True) -> None:
    sums = _json(folder / CHECKSUMS, found) if (folder / CHECKSUMS).exists() else None
    if sums is None:
        found.notes.append(f"{folder}: no {CHECKSUMS} (made by an earlier version, or stopped before its end)")
        if not (folder / "provenance.json").exists():
            return  # stopped while the tables were being made: unfinished, not damaged; the next run makes them
    for name, expected in (sums or {"files": {}})["files"].items():
        path = folder / name
        if not path.is_file():
            found.damaged.append(f"{path}: missing")
            continue
        found.files += 1
        data = path.read_bytes()
        found.bytes += len(data)
        if content_digest(data) != expected:
            found.damaged.append(f"{path}: is not what was written")
    record = _json(folder / "provenance.json", found)
    if record is None or not shards_too:
        return
    root, folders = folder.resolve().parents[1], set()
    for stage, names in record["shards"].items():
        paths = [root / FOLDERS.get(stage, stage) / name for name in names]
        folders |= {path.parent for path in paths}
        rows = sum([_shard(path, found) for path in paths])
        expected = record.get("rows", {}).get(stage)
        if expected is not None and rows != expected and not any(str(path) in line for path in paths for line in found.damaged):
            found.damaged.append(f"{folder / 'provenance.json'}: says {expected} rows of {stage}, the shards hold {rows}")
    for shards in sorted(folders):
        _identity(shards, found)
        if shards.parent.name == "scores":
            _json(shards / "axes.json", found)


def _json(path: Path, found: Found) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found.damaged.append(f"{path}: missing")
        return None
    except ValueError as error:
        found.damaged.append(f"{path}: {error}")
        return None
    found.files += 1
    return value


def report(found: Found) -> Iterator[str]:
    """The lines of the answer."""
    yield from (f"note: {line}" for line in found.notes)
    yield from (f"DAMAGED {line}" for line in found.damaged)
    what = f"{found.files} files, {found.rows} rows, {found.bytes / 1e6:.1f} MB"
    if found.damaged:
        yield f"{len(found.damaged)} damaged ({what} looked at); the run's own command makes shards and tables again"
    else:
        yield f"OK: {what}"


if __name__ == "__main__":
    if len(sys.argv) > 2:
        raise SystemExit("usage: python -m analysis.verify [TABLES_FOLDER or RUN_ROOT]")
    try:
        looked = verify(Path(sys.argv[1]) if len(sys.argv) == 2 else newest(ROOT / TABLES))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(*report(looked), sep="\n")
    sys.exit(bool(looked.damaged))
