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
        split = self.settings.split
        splits: dict[str, Any] = dict(self._builder().config.data_files or {})
        if split not in splits:
            raise UsageError(f"data set {self} has no split {split!r} in {self.folder()}; it has {', '.join(splits) or 'none'}")
        files = [Path(str(name)) for name in splits[split]]
        self._check_parts(files)
        return files

    def _builder(self) -> Any:
        """The library's reader of the split, or of all splits where the card does not name their files.

        Of a card's configuration the wanted split alone is given to the library, which refuses a folder that lacks one of the
        others: of a large data set only the test split may have been downloaded.
        """
        from datasets import load_dataset_builder

        logging.getLogger("datasets").setLevel(logging.CRITICAL)  # what it logs, it raises as well
        folder, split = self.folder(), self.settings.split
        patterns = self._named_files(folder)
        if patterns is not None and split not in patterns:
            raise UsageError(f"data set {self} has no split {split!r} in {folder}; it has {', '.join(patterns) or 'none'}")
        try:
            if patterns is None:
                return load_dataset_builder(str(folder), self.settings.config)
            return load_dataset_builder(str(folder), data_files={split: patterns[split]})
        except FileNotFoundError:
            raise UsageError(f"data set {self}: its files are not in {folder}; get them with `{self.how_to_get()}`") from None
        except Exception as error:  # the library raises in its own ways for cards and folders it does not understand
            raise UsageError(f"data set {self}: {_one_line(error)} (looked at {folder})") from error

    def _named_files(self, folder: Path) -> dict[str, list[str]] | None:
        """File name patterns of each split as the card's ``configs`` have them; None where it names none."""
        card = folder / "README.md"
        if not card.is_file():
            return None
        from huggingface_hub import DatasetCard

        try:
            configs = DatasetCard.load(card, ignore_metadata_errors=True).data.to_dict().get("configs") or []
            named = {str(entry["config_name"]): entry.get("data_files") for entry in configs}
        except Exception as error:  # a card is YAML written by people
            raise UsageError(f"{card} cannot be read: {_one_line(error)}") from error
        if not named:
            return None
        wanted = self.settings.config
        if wanted is None:
            default = next((str(entry["config_name"]) for entry in configs if entry.get("default")), "default")
            wanted = default if default in named else next(iter(named)) if len(named) == 1 else None
        if wanted not in named:
            what = f"has no configuration {wanted!r}" if wanted else "has several configurations"
            raise UsageError(f"data set {self} {what}; set dataset.hub.config to one of {', '.join(named)}")
        return _patterns(named[wanted])

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
        log.info("%s: %s", self, self.files()[0].parent)
        position = 0
        try:
            rows = self._builder().as_streaming_dataset(split=self.settings.split)
            for position, row in enumerate(rows, start=1):
                yield Record(position, None, row)
        except (UsageError, GeneratorExit):
            raise
        except Exception as error:
            raise UsageError(f"data set {self} cannot be read after row {position}: {_one_line(error)}") from error
        if position == 0:
            raise UsageError(f"data set {self} is empty: it holds no rows")


def _patterns(data_files: Any) -> dict[str, list[str]] | None:
    """A configuration's ``data_files`` by split; the layout allows a pattern, a list of them, and a list of {split, path}."""
    if not data_files:
        return None
    entries = data_files if isinstance(data_files, list) else [data_files]
    if not all(isinstance(entry, dict) and {"split", "path"} <= set(entry) for entry in entries):
        return {"train": [str(entry) for entry in entries]}
    return {str(e["split"]): list(map(str, e["path"] if isinstance(e["path"], list) else [e["path"]])) for e in entries}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
