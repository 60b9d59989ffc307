"""Run the stages of one configuration: python scripts/run.py reader=llama3_8b dataset=hotpotqa (see configs/config.yaml)."""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from xcompress.config import checked_main, run_config


@hydra.main(version_base="1.3", config_path="../configs", config_name="config")
def main(config: DictConfig) -> None:
    """Hydra entry; everything happens in :func:`xcompress.config.run_config`."""
    run_config(config)


if __name__ == "__main__":
    checked_main(main)
