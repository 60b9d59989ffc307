"""Which process computes which shard, so that commands started together share the work instead of doing it twice.

One file a stage folder, one byte of it a shard, locked with POSIX record locks: the kernel gives them back the moment their
process ends, however it ends, so a killed command never blocks the next one. They hold between the hosts of an NFS or Lustre
mount that supports locks; on one mounted without (``nolock``), hosts do not see each other's claims and may do a shard twice,
which costs time and nothing else: shards appear whole, under names made of their content.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from hashlib import blake2b
from pathlib import Path

from xcompress.store import alive, write_atomically

log = logging.getLogger(__name__)
_HELD = {errno.EACCES, errno.EAGAIN}


class Claims:
    """The claims of this process on the shards of one folder (a second object for the same folder must wait for its end)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "claims").open("ab")
        self._card = folder / f".worker-{socket.gethostname()}-{os.getpid()}.json"
        self._mine: list[str] = []
        self._locks = True

    def take(self, stem: str) -> bool:
        """Claim a shard; False if another process has it."""
        try:
            if self._locks:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _place(stem))
        except OSError as error:
            if error.errno in _HELD:
                return False
            log.warning("%s cannot lock files (%s): do not start the same command twice there", self._folder, error.strerror)
            self._locks = False
        self._mine.append(stem)
        self._show()
        return True

    def give_back(self, stem: str) -> None:
        """The shard is stored, or somebody else's."""
        self._mine.remove(stem)
        if self._locks:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _place(stem))
        self._show()

    def others(self) -> list[str]:
        """The other processes that are at work here, as ``host pid N``."""
        found = []
        for path in sorted(self._folder.glob(".worker-*.json")):
            try:
                card = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                continue  # gone, or being written
            if card["host"] == socket.gethostname() and not alive(card["pid"]):
                path.unlink(missing_ok=True)
            elif path != self._card and card["shards"]:
                found.append(f"{card['host']} pid {card['pid']}")
        return found

    def close(self) -> None:
        """Give everything back."""
        self._file.close()
        self._card.unlink(missing_ok=True)

    def _show(self) -> None:
        """For messages alone: who is at work. What counts are the locks."""
        card = {"host": socket.gethostname(), "pid": os.getpid(), "shards": self._mine}
        write_atomically(self._card, json.dumps(card).encode(), durable=False)


def _place(stem: str) -> int:
    """A byte for each name; two names that met would only wait for each other."""
    return int.from_bytes(blake2b(stem.encode(), digest_size=6).digest(), "big")
