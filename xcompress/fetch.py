"""Public data files: downloaded with progress, resumed after an interruption, and verified.

What there is stands in ``configs/dataset/*.yaml`` (``downloads``). A file is there whole and verified, or not at all: bytes are
collected in ``<file>.part`` and get their name once size and SHA-256 fit. Where no checksum is published, the one of the first
download is recorded in ``checksums.json`` beside the file, and later calls verify against it. With ``XCOMPRESS_OFFLINE`` or
``HF_HUB_OFFLINE`` set, nothing is attempted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from tqdm import tqdm

from xcompress.schema import UsageError
from xcompress.settings import DatasetSettings, DownloadSettings, HubSettings
from xcompress.store import write_json

log = logging.getLogger(__name__)
SWITCHES = ("XCOMPRESS_OFFLINE", "HF_HUB_OFFLINE")
TRIES = 5  # of one file; each goes on where the one before broke off
_BLOCK = 1 << 18
_TIMEOUT = 20.0  # seconds without an answer


def offline() -> str | None:
    """The switch that forbids the network, if one is set."""
    return next((name for name in SWITCHES if os.environ.get(name, "").strip().lower() in {"1", "true", "yes", "on"}), None)


@dataclass(frozen=True)
class Checked:
    """A file that is there: its SHA-256 and whether that is ``"published"`` or ``"recorded"`` at the first download."""

    path: Path
    sha256: str
    known: str


def fetch(dataset: DatasetSettings, root: Path, only: str | None = None, pause: float = 1.0) -> list[str]:
    """Get what is missing of a data set's public files into ``root``, verify what is there; returns what to tell.

    Args:
        dataset: its ``downloads`` and ``by_hand``.
        root: the data set's folder, made if need be.
        only: the one file wanted.
        pause: seconds before a broken download is tried again, doubled each time.

    Raises:
        UsageError: a file could not be had or does not fit its checksum, after all others were tried; or offline and missing.
    """
    wanted = [entry for entry in dataset.downloads if only in (None, entry.file)]
    if not wanted and only is not None:
        names = ", ".join(entry.file for entry in dataset.downloads) or "none"
        raise UsageError(f"dataset={dataset.name} has no public file {only}; there is: {names}")
    lines, failures = [], []
    missing = [entry for entry in wanted if not (root / entry.file).exists()]
    if missing and (switch := offline()):
        named = ", ".join(f"{root / entry.file} (from {entry.url})" for entry in missing)
        failures.append(f"offline ({switch} is set), so nothing is fetched; missing: {named}")
        wanted = [entry for entry in wanted if entry not in missing]
    for entry in wanted:
        try:
            lines.append(_one(entry, root, pause))
        except UsageError as error:
            failures.append(str(error))
    if failures:
        for line in lines:
            log.info("%s", line)
        raise UsageError("; ".join(failures))
    return lines


def next_steps(dataset: DatasetSettings, root: Path) -> list[str]:
    """What is to be done by hand, and the command that looks at each file that is there."""
    lines = [f"by hand: {dataset.by_hand}"] if dataset.by_hand else []
    look = f"next: python scripts/run.py stages=[prepare] dataset={dataset.name} dataset.path="
    return lines + [f"{look}{root / entry.file}" for entry in dataset.downloads if (root / entry.file).exists()]


def _one(entry: DownloadSettings, root: Path, pause: float) -> str:
    path = root / entry.file
    if path.exists():
        return f"{path}: is there already, {_fits(verify(entry, root))}"
    started = time.monotonic()
    root.mkdir(parents=True, exist_ok=True)
    with _lock(path):
        if entry.archive is None:
            part = download(entry.url, path, entry.size, entry.sha256, pause)
            part.replace(path)
        else:
            archive = path.with_name(f"{path.name}.archive")
            if not archive.exists():
                download(entry.url, archive, entry.archive.size, entry.archive.sha256, pause).replace(archive)
            _extract(archive, entry.archive.member, path)
            try:
                verify(entry, root)
            except UsageError:
                path.unlink()
                raise
            archive.unlink()
        checked = verify(entry, root, record=True)
    megabytes, seconds = path.stat().st_size / 1e6, time.monotonic() - started
    return f"{path}: fetched ({megabytes:.1f} MB, {seconds:.0f} s), {_fits(checked)}"


def _fits(checked: Checked) -> str:
    if checked.known == "published":
        return "checksum as published"
    return f"SHA-256 {checked.sha256[:16]}... as recorded at the first download (none is published)"


def verify(entry: DownloadSettings, root: Path, record: bool = False) -> Checked:
    """Compare a file with its published size and checksum, or with those recorded at the first download.

    Args:
        record: store the checksum where none is published or recorded.

    Raises:
        UsageError: it does not fit.
    """
    path = root / entry.file
    book = root / "checksums.json"
    known: dict[str, Any] = json.loads(book.read_text(encoding="utf-8")) if book.exists() else {}
    found = sha256_of(path)
    expected, how = entry.sha256, "published"
    if expected is None:
        expected, how = known.get(entry.file, {}).get("sha256"), "recorded"
    if entry.sha256 is None and entry.size is not None and path.stat().st_size != entry.size:
        raise UsageError(
            f"{path} has {path.stat().st_size:,} bytes, not the published {entry.size:,}; delete it and fetch again"
        )
    if expected is None:
        how = "recorded"
        if record or entry.file not in known:
            known[entry.file] = {"sha256": found, "size": path.stat().st_size, "url": entry.url}
            write_json(book, known)
    elif found != expected:
        raise UsageError(
            f"{path} is damaged or another version: its SHA-256 is {found}, {how} is {expected}; delete it and fetch again"
        )
    return Checked(path, found, how)


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- one download


def download(url: str, path: Path, size: int | None, sha256: str | None, pause: float = 1.0) -> Path:
    """Bytes of ``url`` in ``<path>.part``, complete and verified; an earlier part is gone on with.

    A part belongs to one version of the file: the server is asked to go on only if its validator (ETag or date) is still the
    same, and to send everything otherwise.

    Raises:
        UsageError: the server cannot be reached, refuses, breaks off again and again, or sends what does not fit.
    """
    part = path.with_name(f"{path.name}.part")
    host = urlsplit(url).netloc
    problem = ""
    for attempt in range(TRIES):
        if attempt:
            time.sleep(pause * 2 ** (attempt - 1))
        try:
            if _receive(url, part, size):
                break
            problem = "the connection broke off"
        except HTTPError as error:
            if error.code < 500 and error.code not in (408, 429):
                raise UsageError(
                    f"{url}: the server answers {error.code} {error.reason}; get the file by hand and put it at {path}"
                ) from None
            problem = f"the server answers {error.code} {error.reason}"
        except URLError as error:
            raise UsageError(
                f"{host} cannot be reached ({error.reason}); without a network get {url} elsewhere and put it at {path}"
            ) from None
        except (OSError, HTTPException) as error:  # reset, timed out, cut short
            problem = str(error) or type(error).__name__
    else:
        raise UsageError(f"{url}: {problem}, {TRIES} times; what has arrived is kept, run the same command to go on")
    if size is not None and part.stat().st_size != size:
        arrived = part.stat().st_size
        _discard(part)
        raise UsageError(
            f"{url} gave {arrived:,} bytes, not the published {size:,}: it has changed, or a page came instead of it"
        )
    if sha256 is not None and (found := sha256_of(part)) != sha256:
        _discard(part)
        raise UsageError(f"{url} gave bytes with SHA-256 {found}, not the published {sha256}; nothing of it is kept")
    part.with_name(f"{part.name}.json").unlink(missing_ok=True)
    return part


def _receive(url: str, part: Path, size: int | None) -> bool:
    """One request; True if the file is complete then."""
    note = part.with_name(f"{part.name}.json")
    stored: dict[str, Any] = json.loads(note.read_text(encoding="utf-8")) if note.exists() and part.exists() else {}
    have = part.stat().st_size if stored.get("url") == url else 0
    headers = {"User-Agent": "xcompress", "Accept-Encoding": "identity"}
    if have and stored.get("validator"):
        headers |= {"Range": f"bytes={have}-", "If-Range": stored["validator"]}
    else:
        have = 0
    try:
        response: HTTPResponse = urlopen(Request(url, headers=headers), timeout=_TIMEOUT)
    except HTTPError as error:
        if error.code == 416:  # nothing beyond what is there: complete, or a part of something else
            if stored.get("total") == have:
                return True
            _discard(part)
            return False
        raise
    with response:
        if response.status == 206:
            start, total = _content_range(response.headers.get("Content-Range", ""))
            if start != have:
                _discard(part)
                return False
        else:
            have = 0
            length = response.headers.get("Content-Length")
            total = int(length) if length and length.isdigit() else None
        free = shutil.disk_usage(part.parent).free
        if (missing := (total or size or 0) - have) > free:
            raise UsageError(f"{part.parent} has {free / 1e9:.1f} GB free, and {missing / 1e9:.1f} GB are to come")
        validator = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if validator is not None and validator.startswith("W/"):
            validator = None  # a weak validator does not promise the same bytes
        write_json(note, {"url": url, "validator": validator, "total": total})
        with part.open("ab" if have else "wb") as file:
            return _copy(response, file, part.name.removesuffix(".part"), have, total)


def _copy(source: HTTPResponse, target: IO[bytes], name: str, have: int, total: int | None) -> bool:
    with tqdm(total=total, initial=have, unit="B", unit_scale=True, desc=name, dynamic_ncols=True) as bar:
        while block := source.read(_BLOCK):
            target.write(block)
            have += len(block)
            bar.update(len(block))
    return total is None or have == total


def _content_range(text: str) -> tuple[int, int | None]:
    """First byte and total of ``bytes 5-9/10`` (-1 where it cannot be read)."""
    unit, _, rest = text.partition(" ")
    place, _, total = rest.partition("/")
    first = place.partition("-")[0]
    if unit != "bytes" or not first.isdigit():
        return -1, None
    return int(first), int(total) if total.isdigit() else None


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    part.with_name(f"{part.name}.json").unlink(missing_ok=True)


def _extract(archive: Path, member: str, path: Path) -> None:
    """One member of a zip or tar file under a name of ours (names inside an archive are never used as paths)."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _open_member(archive, member) as source, temporary.open("wb") as target:
            shutil.copyfileobj(source, target, _BLOCK)
        temporary.replace(path)
    except KeyError:
        raise UsageError(f"{archive} holds no {member}") from None
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, OSError) as error:
        archive.unlink(missing_ok=True)
        raise UsageError(f"{archive} is no archive that can be read ({error}); it is deleted, fetch again") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _open_member(archive: Path, member: str) -> Iterator[IO[bytes]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed, packed.open(member) as source:
            yield source
        return
    with tarfile.open(archive) as tape:
        found = tape.extractfile(member)
        if found is None:
            raise KeyError(member)
        with found:
            yield found


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process at a time fetches a file: two would write into the same part."""
    lock = path.with_name(f".{path.name}.lock")
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{path} is being fetched by another process") from None
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


# ---- the hub's copy


def fetch_hub(hub: HubSettings) -> str:
    """Download the files of a hub copy into the hub's own cache (resumed and verified by its client); returns what to tell.

    Raises:
        UsageError: offline, or the hub cannot be reached or does not have it.
    """
    from xcompress.hub import HubRows

    rows = HubRows(hub)
    try:
        files = rows.files()
    except UsageError as error:
        if switch := offline():
            raise UsageError(f"offline ({switch} is set), so nothing is fetched: {error}") from None
    else:
        return f"{rows}: {len(files)} files are there already, in {files[0].parent}"
    from huggingface_hub import snapshot_download

    patterns = ["README.md", *hub.files] if hub.files else None
    try:
        snapshot_download(hub.id, repo_type="dataset", revision=hub.revision, allow_patterns=patterns)
    except Exception as error:  # no route, no such data set, no permission: the client has many of its own
        raise UsageError(f"{rows} could not be fetched: {' '.join(str(error).split())[:300]}") from error
    files = rows.files()
    return f"{rows}: {len(files)} files fetched, in {files[0].parent}"
