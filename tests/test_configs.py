"""Every YAML file in configs/ is understood by the command line, alone or on the file that it says it stacks on."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from parallel_r1.cli import CurriculumCLI

CONFIGS = Path(__file__).parents[1] / "configs"
STACKED = {"quickstart_sequential.yaml": "quickstart.yaml", "quickstart_unseen.yaml": "quickstart.yaml"}
FILES = sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))


@pytest.mark.integration  # two seconds a file
@pytest.mark.parametrize("name", FILES)
def test_it_parses(name: str) -> None:
    below = "miniature/seen.yaml" if name.startswith("miniature/") and name != "miniature/seen.yaml" else None
    names = [*filter(None, [STACKED.get(name, below)]), name]
    has_stages = any("stages" in (yaml.safe_load((CONFIGS / n).read_text()).get("curriculum") or {}) for n in names)
    words = [word for n in names for word in ("--config", str(CONFIGS / n))]
    curriculum = CurriculumCLI(["fit" if has_stages else "test", *words]).curriculum()
    assert bool(curriculum.stages) == has_stages
    if has_stages:
        curriculum.source.check()
    for stage in curriculum.stages.values():
        stage.module.check()
        assert stage.trainer.max_steps > 0
