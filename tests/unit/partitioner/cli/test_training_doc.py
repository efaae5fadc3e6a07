"""docs/reference/training.md shows a settings file that is read."""

import re
from pathlib import Path

from partitioner.config import read_config

DOC = (Path(__file__).parents[4] / "docs/reference/training.md").read_text()


def test_the_settings_file_that_is_shown_is_read(tmp_path: Path) -> None:
    shown = re.search(r"```toml\n(.*?)```", DOC, re.DOTALL)
    assert shown is not None
    (tmp_path / "run.toml").write_text(shown[1])
    config = read_config(tmp_path / "run.toml")
    assert (config.schedule.epochs, config.augmentation.variants) == (10, 12)
