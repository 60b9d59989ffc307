"""Data sets in the hub's layout: a local folder, or a copy that is in the local hub cache. Never the network, never their code.

The library ``datasets`` knows the layout (the card's ``configs``, file name patterns, splits, column types); what it gives is
read row by row. By name it finds nothing in the hub's cache when it is offline, so the folder is looked up here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xcompress.files import Record
from xcompress.schema import UsageError
from xcompress.settings import HubSettings

log = logging.getLogger(__name__)
_PART = re.compile(r"(.*)-(\d+)-of-(\d+)(\.[A-Za-z.]+)")


@dataclass(frozen=True)
class HubRows:
    """The rows of one split. Each iteration reads them anew, streaming; nothing is copied to a cache.

    Raises:
        UsageError: the data set, its configuration or its split is not on this machine, or is there in part only.
    """

    settings: HubSettings

    def __str__(self) -> str:
        return f"{self.settings.id} ({'/'.join(part for part in (self.settings.config, self.settings.split) if part)})"

    def folder(self) -> Path:
        """Where the data set lies: the given folder, or the snapshot of the given revision in the hub's cache."""
        name, revision = self.settings.id, self.settings.revision
        folder = Path(name).expanduser()
        if folder.is_dir():
            return folder
        if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
            raise UsageError(f"data set folder {name} does not exist (dataset.hub.id is a folder or a name like owner/data)")
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(name, repo_type="dataset", revision=revision, local_files_only=True))
        except HFValidationError:
            raise UsageError(f"data set {name} is neither an existing folder nor a possible name on the hub") from None
        except (LocalEntryNotFoundError, OSError):
            raise UsageError(
                f"data set {name}{f' at revision {revision}' if revision else ''} is not on this machine; get it with"
                f" `{self.how_to_get()}`, or set dataset.hub.id to a local folder of it"
            ) from None

    def how_to_get(self) -> str:
        """The command that downloads the files of this split."""
        s = self.settings
        only = "".join(f" --include '{pattern}'" for pattern in ("README.md", *s.files)) if s.files else ""
        return f"hf download {s.id} --repo-type dataset{f' --revision {s.revision}' if s.revision else ''}{only}"

    def files(self) -> list[Path]:
        """The files that hold the rows, in order."""
        from datasets import load_dataset_builder

        folder = self.folder()
        try:
            builder = load_dataset_builder(str(folder), self.settings.config)
        except Exception as error:  # the library raises in its own ways for cards and folders it does not understand
            raise UsageError(f"data set {self}: {_one_line(error)} (looked at {folder})") from error
        splits: dict[str, Any] = dict(builder.config.data_files or {})
        if self.settings.split not in splits:
            raise UsageError(
                f"data set {self} has no split {self.settings.split!r} in {folder}; it has {', '.join(splits) or 'none'}"
            )
        files = [Path(str(name)) for name in splits[self.settings.split]]
        self._check_parts(files)
        return files

    def _check_parts(self, files: list[Path]) -> None:
        """A split in numbered parts is there whole or not at all: half of it would be taken for the data set."""
        parts: dict[tuple[str, int, str], set[int]] = {}
        for path in files:
            if match := _PART.fullmatch(path.name):
                parts.setdefault((match[1], int(match[3]), match[4]), set()).add(int(match[2]))
        for (name, total, _), found in parts.items():
            if len(found) < total:
                raise UsageError(
                    f"data set {self}: only {len(found)} of the {total} parts of {name} are on this machine; get all with"
                    f" `{self.how_to_get()}`"
                )

    def __iter__(self) -> Iterator[Record]:
        from datasets import load_dataset

        files = self.files()
        log.info("%s: %s", self, files[0].parent)
        try:
            rows = load_dataset(str(self.folder()), self.settings.config, split=self.settings.split, streaming=True)
            position = 0
            for position, row in enumerate(rows, start=1):
                yield Record(position, None, row)
        except (UsageError, GeneratorExit):
            raise
        except Exception as error:
            raise UsageError(f"data set {self} cannot be read: {_one_line(error)}") from error
        if position == 0:
            raise UsageError(f"data set {self} is empty: it holds no rows")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
