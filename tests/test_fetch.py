"""Downloads against a real server that supports ranges, breaks off, changes its file, refuses, and is not there."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from xcompress import fetch as fetch_module
from xcompress.config import ROOT, compose, to_settings
from xcompress.fetch import Checked, download, fetch, sha256_of, verify
from xcompress.schema import UsageError
from xcompress.settings import ArchiveSettings, DatasetSettings, DownloadSettings

CONTENT = bytes(range(256)) * 4000  # about 1 MB
SHA = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Site:
    """What a server has and how it behaves."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)  # bytes after which the next answers break off
    errors: list[int] = field(default_factory=list)  # status codes of the next answers
    etag: str | None = '"one"'
    ranges: bool = True
    shift: int = 0  # a range answer starts so many bytes too late
    seen: list[tuple[str, str | None]] = field(default_factory=list)  # path and Range of each request


@pytest.fixture
def site() -> Iterator[Site]:
    state = Site(files={"/data.json": CONTENT})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *arguments: object) -> None:
            pass

        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            state.seen.append((self.path, asked))
            if state.errors:
                self.send_error(state.errors.pop(0))
                return
            body = state.files.get(self.path)
            if body is None:
                self.send_error(404)
                return
            start = 0
            if asked and state.ranges and self.headers.get("If-Range") == state.etag:
                start = int(asked.removeprefix("bytes=").rstrip("-"))
                if start >= len(body):
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(body)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                start += state.shift
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            else:
                self.send_response(200)
            if state.etag:
                self.send_header("ETag", state.etag)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            if state.cuts:
                self.wfile.write(body[start : start + state.cuts.pop(0)])
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()
                return
            self.wfile.write(body[start:])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.address = f"http://127.0.0.1:{server.server_address[1]}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests run with the switch set."""
    for name in fetch_module.SWITCHES:
        monkeypatch.delenv(name, raising=False)


def dataset(*entries: DownloadSettings, by_hand: str = "") -> DatasetSettings:
    return DatasetSettings("x", "dev", None, downloads=entries, by_hand=by_hand)


def get(site: Site, path: Path, size: int | None = len(CONTENT), sha256: str | None = SHA) -> Path:
    return download(f"{site.address}/data.json", path, size, sha256, pause=0.01)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_whole_file(site: Site, tmp_path: Path) -> None:
    assert get(site, tmp_path / "a.json").read_bytes() == CONTENT
    assert left(tmp_path) == ["a.json.part"], "the caller gives the name"


def test_it_goes_on_where_it_broke_off(site: Site, tmp_path: Path) -> None:
    """Twice, within one call: every byte is asked for once."""
    site.cuts = [300_000, 200_000]
    assert get(site, tmp_path / "a.json").read_bytes() == CONTENT
    assert site.seen[0][1] is None and len(site.seen) == 3
    second, third = (int(str(asked).removeprefix("bytes=").rstrip("-")) for _, asked in site.seen[1:])
    assert 0 < second <= 300_000 and second < third <= second + 200_000


def test_it_goes_on_in_a_later_call(site: Site, tmp_path: Path) -> None:
    site.cuts = [100_000] * fetch_module.TRIES
    with pytest.raises(UsageError, match=r"5 times; what has arrived is kept, run the same command to go on"):
        get(site, tmp_path / "a.json")
    have = (tmp_path / "a.json.part").stat().st_size
    assert have > 300_000
    site.seen.clear()
    assert get(site, tmp_path / "a.json").read_bytes() == CONTENT
    assert site.seen == [("/data.json", f"bytes={have}-")]


@pytest.mark.parametrize("etag", ['"two"', None, 'W/"one"'])
def test_a_file_that_changed_meanwhile_is_begun_anew(site: Site, tmp_path: Path, etag: str | None) -> None:
    """Two versions are never joined; a weak or missing validator cannot promise that they are one."""
    site.cuts, site.errors = [400_000], []
    site.etag = '"one"' if etag == '"two"' else etag
    other = CONTENT[::-1]

    class Change(list[int]):
        def pop(self, at: int = -1) -> int:  # type: ignore[override]
            site.etag = etag
            value = super().pop(at)
            site.files["/data.json"] = other
            return value

    site.cuts = Change([400_000])
    path = get(site, tmp_path / "a.json", len(other), hashlib.sha256(other).hexdigest())
    assert path.read_bytes() == other


def test_a_server_without_ranges(site: Site, tmp_path: Path) -> None:
    site.ranges, site.cuts = False, [500_000]
    assert get(site, tmp_path / "a.json").read_bytes() == CONTENT


def test_an_answer_that_starts_elsewhere_is_not_appended(site: Site, tmp_path: Path) -> None:
    site.cuts, site.shift = [500_000], 7
    assert get(site, tmp_path / "a.json").read_bytes() == CONTENT


def test_a_complete_part_is_not_fetched_again(site: Site, tmp_path: Path) -> None:
    """Killed between the last byte and the new name: the server says 416, and the part is verified."""
    (tmp_path / "a.json.part").write_bytes(CONTENT)
    note = {"url": f"{site.address}/data.json", "validator": '"one"', "total": len(CONTENT)}
    (tmp_path / "a.json.part.json").write_text(json.dumps(note))
    assert get(site, tmp_path / "a.json").read_bytes() == CONTENT
    assert site.seen == [("/data.json", f"bytes={len(CONTENT)}-")]


def test_a_part_of_another_address_is_not_gone_on_with(site: Site, tmp_path: Path) -> None:
    (tmp_path / "a.json.part").write_bytes(b"old" * 1000)
    (tmp_path / "a.json.part.json").write_text(json.dumps({"url": "http://elsewhere/x", "validator": '"one"', "total": 9}))
    assert get(site, tmp_path / "a.json").read_bytes() == CONTENT
    assert site.seen == [("/data.json", None)]


def test_a_busy_server_is_asked_again(site: Site, tmp_path: Path) -> None:
    site.errors = [503, 429]
    assert get(site, tmp_path / "a.json").read_bytes() == CONTENT
    assert len(site.seen) == 3


@pytest.mark.parametrize("code", [404, 403])
def test_a_refusal_is_said_at_once(site: Site, tmp_path: Path, code: int) -> None:
    site.errors = [code]
    with pytest.raises(UsageError, match=f"answers {code} .*get the file by hand and put it at .*a.json"):
        get(site, tmp_path / "a.json")
    assert len(site.seen) == 1


@pytest.mark.parametrize(
    ("size", "sha256", "message"),
    [(5, SHA, "gave 1,024,000 bytes, not the published 5"), (None, "0" * 64, f"SHA-256 {SHA}, not the published 0000")],
)
def test_what_does_not_fit_is_not_kept(site: Site, tmp_path: Path, size: int | None, sha256: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        get(site, tmp_path / "a.json", size, sha256)
    assert left(tmp_path) == []


def test_a_full_disk_is_said_before_anything_is_written(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(fetch_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UsageError, match=r"0.0 GB free"):
        get(site, tmp_path / "a.json")


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"127.0.0.1:9 cannot be reached .*put it at .*a.json"):
        download("http://127.0.0.1:9/x", tmp_path / "a.json", None, None, pause=0.01)


# ---- data sets


def test_fetch_verifies_what_is_there_and_gets_the_rest(site: Site, tmp_path: Path) -> None:
    site.files["/b.json"] = b"[1]"
    entries = (
        DownloadSettings("data.json", f"{site.address}/data.json", len(CONTENT), SHA),
        DownloadSettings("b.json", f"{site.address}/b.json"),
    )
    first = fetch(dataset(*entries), tmp_path / "x")
    assert "fetched (1.0 MB" in first[0] and first[0].endswith("checksum as published")
    assert "as recorded at the first download (none is published)" in first[1]
    assert left(tmp_path / "x") == ["b.json", "checksums.json", "data.json"]
    recorded = json.loads((tmp_path / "x" / "checksums.json").read_text())
    assert recorded == {"b.json": {"sha256": hashlib.sha256(b"[1]").hexdigest(), "size": 3, "url": f"{site.address}/b.json"}}
    site.seen.clear()
    assert all("is there already" in line for line in fetch(dataset(*entries), tmp_path / "x"))
    assert site.seen == []
    for name, how in (("data.json", "published"), ("b.json", "recorded")):
        (tmp_path / "x" / name).write_bytes(b"other")
        with pytest.raises(UsageError, match=f"{name} is damaged or another version: .*{how} is"):
            fetch(dataset(*entries), tmp_path / "x", only=name)
    with pytest.raises(UsageError, match=r"no public file c.json; there is: data.json, b.json"):
        fetch(dataset(*entries), tmp_path / "x", only="c.json")


def test_one_failure_does_not_stop_the_others(site: Site, tmp_path: Path) -> None:
    entries = (
        DownloadSettings("gone.json", f"{site.address}/gone"),
        DownloadSettings("data.json", f"{site.address}/data.json"),
    )
    with pytest.raises(UsageError, match=r"gone: the server answers 404"):
        fetch(dataset(*entries), tmp_path)
    assert (tmp_path / "data.json").read_bytes() == CONTENT


def test_a_published_size_without_a_checksum_is_compared(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"123")
    with pytest.raises(UsageError, match="has 3 bytes, not the published 4"):
        verify(DownloadSettings("a.json", "http://x/a.json", 4), tmp_path)
    assert verify(DownloadSettings("a.json", "http://x/a.json", 3), tmp_path) == Checked(
        tmp_path / "a.json", sha256_of(tmp_path / "a.json"), "recorded"
    )


def packed(kind: str, name: str = "folder/dev.json") -> bytes:
    """An archive with the content as its member ``name``."""
    buffer = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("other.txt", "x")
            archive.writestr(name, CONTENT)
    else:
        with tarfile.open(fileobj=buffer, mode="w:gz") as tape:
            entry = tarfile.TarInfo(name)
            entry.size = len(CONTENT)
            tape.addfile(entry, io.BytesIO(CONTENT))
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_a_member_of_an_archive(site: Site, tmp_path: Path, kind: str) -> None:
    site.files["/a"] = body = packed(kind)
    site.cuts = [100]
    archive = ArchiveSettings("folder/dev.json", len(body), hashlib.sha256(body).hexdigest())
    fetch(dataset(DownloadSettings("dev.json", f"{site.address}/a", len(CONTENT), SHA, archive)), tmp_path, pause=0.01)
    assert (tmp_path / "dev.json").read_bytes() == CONTENT
    assert left(tmp_path) == ["dev.json"]


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"<html>log in</html>", "is no archive that can be read"), (packed("zip", "else.json"), r"holds no folder/dev.json")],
)
def test_an_archive_that_is_none_or_lacks_the_member(site: Site, tmp_path: Path, body: bytes, message: str) -> None:
    site.files["/a"] = body
    with pytest.raises(UsageError, match=message):
        fetch(dataset(DownloadSettings("dev.json", f"{site.address}/a", archive=ArchiveSettings("folder/dev.json"))), tmp_path)
    assert not (tmp_path / "dev.json").exists()


def test_two_at_once(site: Site, tmp_path: Path) -> None:
    entry = DownloadSettings("data.json", f"{site.address}/data.json", len(CONTENT), SHA)
    with fetch_module._lock(tmp_path / "data.json"), pytest.raises(UsageError, match="is being fetched by another process"):
        fetch(dataset(entry), tmp_path)
    assert site.seen == []
    fetch(dataset(entry), tmp_path)


@pytest.mark.parametrize("switch", ["XCOMPRESS_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_nothing_is_attempted(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    monkeypatch.setenv(switch, "1")
    entries = (
        DownloadSettings("data.json", f"{site.address}/data.json", len(CONTENT), SHA),
        DownloadSettings("there.json", f"{site.address}/there.json"),
    )
    (tmp_path / "there.json").write_bytes(b"[]")
    with pytest.raises(UsageError, match=rf"offline \({switch} is set\), so nothing is fetched; missing: .*data.json \(from "):
        fetch(dataset(*entries), tmp_path)
    assert site.seen == []
    (line,) = fetch(dataset(*entries), tmp_path, only="there.json")
    assert "is there already" in line


# ---- the command


GUARD = """
import os, socket, sys
def refuse(*arguments, **named):
    open(os.environ["ATTEMPTS"], "a").write(repr(arguments[1:2]) + "\\n")
    raise OSError("no network in this test")
socket.socket.connect = socket.socket.connect_ex = refuse
socket.getaddrinfo = lambda *arguments, **named: refuse(None, *arguments)
"""


def guarded(tmp_path: Path, script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script in a process that notes and refuses every attempt to reach a network."""
    (tmp_path / "guard").mkdir(exist_ok=True)
    (tmp_path / "guard" / "sitecustomize.py").write_text(GUARD, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(tmp_path / "guard"), os.environ.get("PYTHONPATH")]))
    clean = {key: value for key, value in os.environ.items() if key not in fetch_module.SWITCHES}
    given = {
        **clean,
        "PYTHONPATH": path,
        "ATTEMPTS": str(tmp_path / "attempts"),
        "HF_HOME": str(tmp_path / "hf"),
        **environment,
    }
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("origin", ["file", "hub"])
def test_the_command_offline(tmp_path: Path, origin: str) -> None:
    arguments = ("dataset=hotpotqa", f"data_root={tmp_path}", f"dataset.origin={origin}")
    done = guarded(tmp_path, "fetch_data.py", *arguments, XCOMPRESS_OFFLINE="1")
    assert done.returncode == 2
    assert (
        done.stderr.startswith("error: offline (XCOMPRESS_OFFLINE is set), so nothing is fetched")
        and done.stderr.count("\n") == 1
    )
    assert not (tmp_path / "attempts").exists()
    if origin == "file":
        assert "by hand: CompAct's retrieval file" in done.stdout


def test_the_command_without_a_route(tmp_path: Path) -> None:
    """The switch is not set; the answer still comes at once, with what to do."""
    done = guarded(tmp_path, "fetch_data.py", "dataset=nq", f"data_root={tmp_path}")
    assert done.returncode == 2
    assert "cannot be reached" in done.stderr and "put it at" in done.stderr and "Traceback" not in done.stderr
    assert len((tmp_path / "attempts").read_text().splitlines()) == 1, "said after the first attempt"


def test_every_public_file_has_an_address_and_a_place() -> None:
    for name in ("hotpotqa", "2wikimqa", "musique", "nq", "triviaqa"):
        settings = to_settings(compose([f"dataset={name}"])).dataset
        assert settings.downloads and settings.by_hand
        for entry in settings.downloads:
            assert entry.url.startswith(("https://", "http://")) and "/" not in entry.file
            for sha256 in (entry.sha256, entry.archive.sha256 if entry.archive else None):
                assert sha256 is None or len(bytes.fromhex(sha256)) == 32
