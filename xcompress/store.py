"""Folders named by what made them, shards that appear whole or not at all, and checks that they are still what was written.

A stage's folder is named by a hash of everything that changes its rows. A shard's file name is
``<index>-<input>-<content>.parquet``: ``input`` is a hash of the rows it was made from, ``content`` of the file itself. So a
finished shard is found by name, serves every run that needs the same input (also one with another ``limit``), and a damaged one
shows at once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

log = logging.getLogger(__name__)
_PART = ".part"


def digest(value: Any, length: int = 12) -> str:
    """Hex digest of a JSON-able value; the order of keys does not matter, of lists it does."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return blake2b(text.encode(), digest_size=16).hexdigest()[:length]


def write_atomically(path: Path, data: bytes, durable: bool = True) -> None:
    """Write ``data`` so that ``path`` is either absent, old, or complete: never half written, whatever happens.

    ``durable`` waits until it is on the disk, so that a power cut changes nothing either.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}{_PART}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.errno is not None:
            error.filename = error.filename or str(path)  # a full disk does not say where
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


_DISK = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EROFS: "it is read-only"}
_DISK |= {errno.EACCES: "writing there is not permitted", errno.EPERM: "writing there is not permitted"}


def disk_trouble(error: OSError) -> str | None:
    """One sentence for an error of the disk that the user can mend, None for any other error."""
    what = _DISK.get(error.errno or 0)
    if what is None:
        return None
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{what}; finished shards are kept, run the same command to go on"


def write_json(path: Path, value: Any) -> None:
    """Strict JSON (no NaN), UTF-8, atomically."""
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


@dataclass(frozen=True)
class Shard:
    """One shard of a stage: its place in the order and the hash of what it is made from."""

    index: int
    input: str

    @property
    def stem(self) -> str:
        return f"{self.index:05d}-{self.input}"


class StageFolder:
    """The shards of one stage.

    Args:
        root: the run root.
        stage: "questions", "candidates", "scores" or "answers".
        label: readable part of the folder's name.
        identity: everything that changes the rows; hashed into the name and stored beside the shards.
        schema: of the shards.
    """

    def __init__(self, root: Path, stage: str, label: str, identity: Mapping[str, Any], schema: pa.Schema) -> None:
        self.path = root / stage / f"{label}-{digest(identity)}"
        self.identity = dict(identity)
        self.schema = schema
        self._listing: dict[str, list[Path]] | None = None
        self._whole: dict[Path, tuple[int, int]] = {}
        self._noted = 0  # bytes of work.jsonl that the listing knows of

    def find(self, shard: Shard) -> Path | None:
        """The file of ``shard`` if it is there and undamaged. A damaged one is named, set aside, and counts as missing."""
        if self._listing is None:
            self._list()
        assert self._listing is not None
        for path in self._listing.get(shard.stem, []):
            try:
                status = path.stat()
                seen = (status.st_mtime_ns, status.st_size)
                if self._whole.get(path) == seen or content_digest(path.read_bytes()) == path.stem.rpartition("-")[2]:
                    self._whole[path] = seen  # read in full once a process, unless it changes
                    return path
                log.warning("shard %s is damaged: it is set aside and computed again", path)
                path.replace(path.with_suffix(".damaged"))
            except FileNotFoundError:
                continue  # gone, or another process has set it aside
        return None

    def catch_up(self, all_files: bool = False) -> None:
        """See the shards that other processes have stored: by their notes in the log of work, or by listing all files."""
        if all_files:
            self._list()
            return
        try:
            with (self.path / "work.jsonl").open("rb") as file:
                file.seek(self._noted)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._noted += len(whole)
        for note in _notes(whole.decode("utf-8", errors="replace")):
            self._add(self.path / str(note.get("file", "")))

    def _list(self) -> None:
        """The shards that are there; temporary files of this host's dead processes are removed."""
        self._listing = {}
        self._noted = (self.path / "work.jsonl").stat().st_size if (self.path / "work.jsonl").exists() else 0
        for path in sorted(self.path.glob("*.parquet")):
            self._add(path)
        for path in self.path.glob(f".*.{socket.gethostname()}.*{_PART}"):
            pid = path.name.removesuffix(_PART).rpartition(".")[2]
            if pid.isdecimal() and not alive(int(pid)):
                path.unlink(missing_ok=True)

    def _add(self, path: Path) -> None:
        paths = self._listing.setdefault(path.name.rpartition("-")[0], []) if self._listing is not None else []
        if path not in paths and path.suffix == ".parquet":
            paths.append(path)

    def write(self, shard: Shard, rows: Sequence[Mapping[str, Any]], note: Mapping[str, Any] | None = None) -> Path:
        """Store the rows of a shard; ``note`` (timings, token counts) is appended to the folder's log of work."""
        identity = self.path / "identity.json"
        if not identity.exists():
            write_json(identity, self.identity)
        table = pa.Table.from_pylist([dict(row) for row in rows], schema=self.schema)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        data = sink.getvalue().to_pybytes()
        path = self.path / f"{shard.stem}-{content_digest(data)}.parquet"
        write_atomically(path, data)
        self._add(path)
        if note is not None:
            with (self.path / "work.jsonl").open("ab+") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                torn = file.read(1) not in (b"", b"\n")  # by a kill; the new note must not be lost with the old one
                file.write(
                    (b"\n" if torn else b"") + json.dumps({"shard": shard.stem, "file": path.name, **note}).encode() + b"\n"
                )
        return path

    def read(self, shard: Shard) -> list[dict[str, Any]]:
        """The rows of a finished shard.

        Raises:
            FileNotFoundError: the shard is not there.
        """
        table = self.table(shard)
        # Long lists of floats (all SPS variants) as arrays: as Python floats they would take eight times the memory.
        arrays = {name: _arrays(table[name]) for name in table.column_names if _holds_arrays(table, name)}
        rows: list[dict[str, Any]] = table.drop_columns(list(arrays)).to_pylist()
        for name, values in arrays.items():
            for row, value in zip(rows, values, strict=True):
                row[name] = value
        return rows

    def table(self, shard: Shard, columns: Sequence[str] | None = None) -> pa.Table:
        """A finished shard as a table, all columns or some.

        No thread is started: pyarrow waits for ever for threads that a process out of memory cannot have, and a shard is small.

        Raises:
            FileNotFoundError: the shard is not there.
        """
        path = self.find(shard)
        if path is None:
            raise FileNotFoundError(f"{self.path} has no shard {shard.stem}")
        with pq.ParquetFile(path) as file:
            return file.read(columns=None if columns is None else list(columns), use_threads=False)

    def work(self, shards: Iterable[Shard]) -> list[dict[str, Any]]:
        """The notes of the shards that are in use (the last one of each), in shard order."""
        path = self.path / "work.jsonl"
        if not path.exists():
            return []
        notes: dict[str, dict[str, Any]] = {}
        for note in _notes(path.read_text(encoding="utf-8")):
            notes[note["shard"]] = note
        return [notes[shard.stem] for shard in shards if shard.stem in notes]


def _notes(text: str) -> Iterator[dict[str, Any]]:
    for line in text.split("\n"):
        try:
            note = json.loads(line)
        except json.JSONDecodeError:
            continue  # a line cut off by a kill: only timings are lost
        if isinstance(note, dict) and "shard" in note:
            yield note


def alive(pid: int) -> bool:
    """Whether a process of this host is there (a zombie counts as gone)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state not in {"Z", "X"}


def _holds_arrays(table: pa.Table, name: str) -> bool:
    column = table[name].combine_chunks()
    kind = column.type
    return bool(pa.types.is_list(kind) and pa.types.is_floating(kind.value_type) and column.flatten().null_count == 0)


def _arrays(column: pa.ChunkedArray) -> list[Any]:
    """Each row's list as a numpy array (None where it is null)."""
    whole = column.combine_chunks()
    values, offsets = whole.values.to_numpy(zero_copy_only=False), whole.offsets.to_numpy()
    present = whole.is_valid().to_pylist()
    return [values[offsets[at] : offsets[at + 1]] if present[at] else None for at in range(len(whole))]


def file_digest(path: Path) -> str:
    """Digest of a file's bytes and ending, which says how they are read (of a folder: of its files' names and bytes)."""
    digest = blake2b(digest_size=16)
    for part in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
        name = part.relative_to(path).as_posix() if path.is_dir() else part.suffix.lower()
        digest.update(f"{name}\0{part.stat().st_size}\0".encode())
        with part.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def content_digest(data: bytes) -> str:
    """16 hex digits that name a file's content."""
    return blake2b(data, digest_size=8).hexdigest()
