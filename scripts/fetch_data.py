"""Get a data set's public files and verify them: python scripts/fetch_data.py dataset=hotpotqa.

Takes the overrides of scripts/run.py (data_root=..., dataset.origin=hub: the hub's copy) and file=NAME for one file of several.
XCOMPRESS_OFFLINE=1 (or HF_HUB_OFFLINE=1) forbids the network: what is there is verified, what is missing is named.
"""

import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from xcompress.config import checked_main, compose, to_settings
from xcompress.fetch import fetch, fetch_hub, next_steps


def main() -> None:
    """Fetch, verify, and say what is to be done by hand and what comes next."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = to_settings(compose(sys.argv[1:]))
    dataset = settings.dataset
    if dataset.origin == "hub" and dataset.hub is not None:
        print(fetch_hub(dataset.hub))
        print(f"next: python scripts/run.py stages=[prepare] dataset={dataset.name} dataset.origin=hub")
        return
    root = Path(settings.data_root) / dataset.name
    if not dataset.downloads:
        print(f"dataset={dataset.name} has no public file to fetch ({dataset.path})")
    try:
        for line in fetch(dataset, root, only):
            print(line)
    finally:
        for line in next_steps(dataset, root):
            print(line)


if __name__ == "__main__":
    only = next((a.partition("=")[2] for a in sys.argv[1:] if a.startswith("file=")), None)
    sys.argv[1:] = [a for a in sys.argv[1:] if not a.startswith("file=")]
    checked_main(main)
