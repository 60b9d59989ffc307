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
from typing import Any, NoReturn

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from xcompress.schema import UsageError
from xcompress.selectors import load_selectors
from xcompress.settings import Settings, from_config

log = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"


def run_config(config: DictConfig) -> Path | None:
    """Run one composed configuration; returns the folder of its tables, if they were made.

    As a job of a Hydra command it keeps its own log and status in Hydra's folder of the job (:mod:`xcompress.jobs`).

    Raises:
        UsageError: see :class:`xcompress.pipeline.Run`. As the only job of a Hydra command it ends the program instead.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized():
        return _run(to_settings(config))
    from xcompress.jobs import JobRecord, reason

    about = HydraConfig.get()
    alone = about.mode == RunMode.RUN
    try:
        with JobRecord(Path(about.runtime.output_dir), list(about.overrides.task)) as job:
            settings = to_settings(config)
            job.describe(settings)
            tables = _run(settings, job.folder)
            job.finished(tables)
            return tables
    except UsageError as error:
        if alone:
            _end(error)  # Hydra would print the overrides beside the sentence
        log.error("this job failed: %s", error)  # said at once: Hydra raises it only after the sweep's other jobs
        raise
    except Exception as error:
        if not alone:
            log.error("this job failed: %s", reason(error))
        raise


def _run(settings: Settings, job: Path | None = None) -> Path | None:
    """The stages and the tables; ``job`` is the job's folder, whose name sets its tracked run apart."""
    quiet_libraries()
    from xcompress.tracking import open_tracker

    started = time.monotonic()
    with open_tracker(settings, job) as tracker:
        from xcompress.pipeline import Run

        collected = Run(settings, tracker).execute()
        if collected is None:
            return None
        from analysis.report import write_tables

        tables = write_tables(collected, started)
        tracker.tables(tables)
        return tables


def _end(error: UsageError) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2) from None


def to_settings(config: DictConfig) -> Settings:
    """Typed settings of a composed configuration; file names in it are relative to the repository."""
    try:
        plain: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        raise UsageError(f"configuration key {error.full_key or '?'}: {str(error).splitlines()[0]}") from None
    plain.pop("hydra", None)
    settings = from_config(_absolute(plain))
    load_selectors(settings.selectors)  # a function that is not there is said now, not after hours of generation
    return settings


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
        # Jobs in other processes (joblib, SLURM, Ray) find this package where it is not installed, too.
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        try:
            main()
        except Exception:
            if _sweep_failed():
                raise SystemExit(1) from None
            raise
        except (KeyboardInterrupt, SystemExit):
            _sweep_failed()
            raise
        if _sweep_failed():
            raise SystemExit(1)
    except UsageError as error:
        _end(error)
    except OSError as error:
        from xcompress.store import disk_trouble

        if sentence := disk_trouble(error):
            _end(UsageError(sentence))
        raise
    except KeyboardInterrupt:
        print("stopped; run the same command to go on", file=sys.stderr)
        raise SystemExit(130) from None


def _sweep_failed() -> bool:
    """Write the table of this process's sweep if there is one; True if it is one that has a job without its tables."""
    module = sys.modules.get("analysis.sweep")
    if module is None:
        return False
    from xcompress.jobs import FINISHED

    return any(cell.state != FINISHED for cell in module.finish())


def check_overrides(arguments: list[str]) -> None:
    """Compose with the given overrides, without running anything.

    Raises:
        UsageError: a choice or key does not exist (the sentence names near matches and what there is), or a value is refused.
    """
    if {"--help", "-h", "--hydra-help", "--version", "--info", "--cfg", "-c", "--shell-completion", "-sc"} & set(arguments):
        return
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Glob
    from hydra.errors import HydraException

    if {argument.partition("=")[0] for argument in arguments} & _OTHER_CONFIG:
        return  # the configuration is another one; its overrides are checked when it is composed
    overrides = [
        argument for argument in arguments if not argument.startswith("-") and ("=" in argument or argument.startswith("~"))
    ]
    stray = [a for a in arguments if "=" not in a and not a.startswith(("-", "~"))]
    if stray:
        raise UsageError(f"{stray[0]!r} is not an override; write key=value, for example dataset=hotpotqa")
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        quoting = "quote values with commas, spaces or = for Hydra and the shell: 'dataset.path=\"my file,1.json\"'"
        raise UsageError(f"an override cannot be parsed ({str(error).splitlines()[0]}); {quoting}") from None
    sweeping = bool({"-m", "--multirun"} & set(arguments)) or any(text.startswith("hydra.mode=") for text in overrides)
    single = []
    for override, text in zip(parsed, overrides, strict=True):
        key = override.key_or_group
        known = sorted(path.stem for path in (CONFIGS / key).glob("*.yaml")) if (CONFIGS / key).is_dir() else []
        if not override.is_sweep_override():
            if known and not override.is_delete():
                _check_choice(key, "null" if override.value() is None else str(override.value()), known)
            single.append(text)
            continue
        if not sweeping:
            raise UsageError(f"{text} lists several values; add -m to run them all, or quote the value: '{key}=\"...\"'")
        if isinstance(pattern := override.value(), Glob):
            values = pattern.filter(known)
        else:
            values = [str(value) for value in override.sweep_string_iterator()]
        for value in values if known else ():
            _check_choice(key, value, known)
        if not values:
            raise UsageError(f"{text} stands for no value; choices: {', '.join(known)}")
        single.append(f"{override.get_key_element()}={values[0]}")
    _compose([text for text in single if not text.startswith("hydra")])


_OTHER_CONFIG = {
    "--config-name",
    "-cn",
    "--config-path",
    "-cp",
    "--config-dir",
    "-cd",
    "--package",
    "-p",
    "--experimental-rerun",
}


def _check_choice(group: str, name: str, known: list[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"{group}={name} does not exist; {hint}Choices: {', '.join(known)}")


def compose(overrides: list[str]) -> DictConfig:
    """The configuration that the command line with these overrides would run."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    # A program that uses Hydra itself keeps its own: the library is called from inside it.
    own = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra_compose("config", overrides)
    finally:
        GlobalHydra.instance().hydra = own


def settings_of(overrides: list[str]) -> Settings:
    """Typed settings of the configuration that the command line with these overrides would run.

    Raises:
        UsageError: an override is misspelt or refused (see :func:`check_overrides`), or there is no configuration.
    """
    if not CONFIGS.is_dir():
        raise UsageError(f"there is no {CONFIGS}: configurations lie in a checkout; install it with `pip install -e CHECKOUT`")
    check_overrides(overrides)
    return to_settings(compose(overrides))


def _compose(overrides: list[str]) -> None:
    from hydra.errors import HydraException

    try:
        config = compose(overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(_explain(error)) from None
    to_settings(config)


def _explain(error: Exception) -> str:
    text = str(error)
    if plugin := re.search(r"hydra/launcher/(submitit|joblib)", text):
        extra = {"submitit": "cluster", "joblib": "joblib"}[plugin.group(1)]
        return f"this needs Hydra's {plugin.group(1)} launcher: pip install -e '.[{extra}]'"
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
