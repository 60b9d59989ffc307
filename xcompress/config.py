"""From the command line to a run: overrides are checked before anything is loaded, errors are one sentence."""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from xcompress.schema import UsageError
from xcompress.settings import Settings, from_config

log = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"


def run_config(config: DictConfig) -> Path | None:
    """Run one composed configuration; returns the folder of its tables, if they were made.

    Raises:
        UsageError: see :class:`xcompress.pipeline.Run`.
    """
    quiet_libraries()
    settings = to_settings(config)
    from xcompress.pipeline import Run

    started = time.monotonic()
    collected = Run(settings).execute()
    if collected is None:
        return None
    from analysis.report import write_tables

    return write_tables(collected, time.monotonic() - started)


def to_settings(config: DictConfig) -> Settings:
    """Typed settings of a composed configuration; file names in it are relative to the repository."""
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UsageError(f"configuration key {error.full_key or '?'}: {str(error).splitlines()[0]}") from None
    plain.pop("hydra", None)
    return from_config(_absolute(plain))


def _absolute(config: dict[str, Any]) -> dict[str, Any]:
    """Paths that a config file ships are found from any working folder; a path that exists here is taken as it is."""
    for group, key in (
        ("reader", "prompt_file"),
        ("compressor", "prompt_file"),
        ("dataset", "demos_file"),
        ("dataset", "path"),
        ("dataset", "corpus"),
        ("dataset", "calibration_path"),
    ):
        value = config.get(group, {}).get(key) if isinstance(config.get(group), dict) else None
        if isinstance(value, str) and value and not Path(value).exists() and (ROOT / value).exists():
            config[group][key] = str(ROOT / value)
    return config


def quiet_libraries() -> None:
    """No network attempts, no advice and no progress bars from libraries; our own log says what is being done."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    for name in ("httpx", "urllib3", "bm25s", "matplotlib", "fontTools"):
        logging.getLogger(name).setLevel(logging.WARNING)


def checked_main(main: Callable[[], None]) -> None:
    """Run a Hydra main. Misspelt choices and keys answer with near matches; a :class:`UsageError` is one line, exit code 2."""
    try:
        check_overrides(sys.argv[1:])
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra would hide our exception behind its own exit
        main()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("stopped; run the same command to go on", file=sys.stderr)
        raise SystemExit(130) from None


def check_overrides(arguments: list[str]) -> None:
    """Compose with the given overrides, without running anything.

    Raises:
        UsageError: a choice or key does not exist; the sentence names near matches and what there is.
    """
    if {"--help", "-h", "--hydra-help", "--version", "--info", "--cfg", "-c", "--shell-completion", "-sc"} & set(arguments):
        return
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    overrides = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    stray = [a for a in arguments if "=" not in a and not a.startswith(("-", "~"))]
    if stray:
        raise UsageError(f"{stray[0]!r} is not an override; write key=value, for example dataset=hotpotqa")
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        quoting = "quote values with commas, spaces or = for Hydra and the shell: 'dataset.path=\"my file,1.json\"'"
        raise UsageError(f"an override cannot be parsed ({str(error).splitlines()[0]}); {quoting}") from None
    single = []
    for override, text in zip(parsed, overrides, strict=True):
        values = [str(v) for v in override.sweep_iterator()] if override.is_sweep_override() else [None]
        key = override.key_or_group
        if (CONFIGS / key).is_dir():
            names = values if values != [None] else [str(override.value())]
            for name in names:
                _check_choice(key, str(name))
        single.append(text if values == [None] else f"{override.get_key_element()}={values[0]}")
    _compose([text for text in single if not text.startswith("hydra")])


def _check_choice(group: str, name: str) -> None:
    known = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
    if name in known or name in {"None", "null"}:
        return
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"{group}={name} does not exist; {hint}Choices: {', '.join(known)}")


def compose(overrides: list[str]) -> DictConfig:
    """The configuration that the command line with these overrides would run."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra_compose("config", overrides)


def _compose(overrides: list[str]) -> None:
    from hydra.errors import HydraException

    try:
        config = compose(overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_explain(error)) from None
    known = _keys(OmegaConf.to_container(config, resolve=False))
    for text in overrides:
        key = text.split("=", 1)[0].lstrip("+~")
        if text.startswith("+") and key.split(".")[0] not in {k.split(".")[0] for k in known}:
            raise UsageError(f"unknown setting {key}")


def _explain(error: Exception) -> str:
    text = str(error)
    match = re.search(r"Could not override '([^']+)'", text) or re.search(r"Key '([^']+)' is not in struct", text)
    if match is None:
        group = re.search(r"Could not override '([^']+)'\.\s*No match in the defaults list", text)
        return group.group(0) if group else text.splitlines()[0]
    key = match.group(1)
    known = _keys(OmegaConf.to_container(compose([]), resolve=False))
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
    if not near:
        near = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]][:3]
    hint = f"did you mean {' or '.join(near)}?" if near else "see configs/config.yaml for what there is"
    return f"setting {key} does not exist; {hint}"


def _keys(value: Any, prefix: str = "") -> list[str]:
    """All dotted keys of a nested configuration."""
    keys: list[str] = []
    if isinstance(value, dict):
        for name, inner in value.items():
            keys += [f"{prefix}{name}", *_keys(inner, f"{prefix}{name}.")]
    return keys
