"""Finding a model by the folder a user names: a run, a stage of it, or a model folder; and what is known of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from parallel_r1.data.prompts import PROMPT_FILE, attached_prompt
from parallel_r1.policy import is_model_folder

_PARTS, _PART_BYTES = 64, 1 << 16


@dataclass(frozen=True)
class Found:
    """A model folder. name: for people and for folders named after it; stage, run: the folders it belongs to."""

    model: Path
    name: str
    stage: Path | None = None
    run: Path | None = None


def find_model(path: Path | str) -> Found:
    """The model that a folder stands for: itself, that of a stage, or that of the last finished stage of a run.

    Raises FileNotFoundError for no folder, ValueError for one that holds no finished model, saying what it holds.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {str(path)!r}; give a run, a stage of one, or a model folder")
    if is_model_folder(folder):
        stage = folder.absolute().parent
        if folder.absolute().name == "model" and (stage / "stage.json").is_file():
            return _of_stage(folder.parent, folder)
        return Found(folder, folder.absolute().name)
    if (folder / "stage.json").is_file() and is_model_folder(folder / "model"):
        return _of_stage(folder, folder / "model")
    if (folder / "stages").is_dir():
        done = [s for s in _stages(folder) if (s / "stage.json").is_file() and is_model_folder(s / "model")]
        if done:
            return _of_stage(done[-1], done[-1] / "model")
        raise ValueError(f"{path}: no stage of this run is finished; train it on, or give one of its model folders")
    raise ValueError(
        f"{path} is neither a run (with stages/), nor a finished stage (with stage.json and model/), nor a model "
        "folder (with config.json and safetensors)"
    )


def _of_stage(stage: Path, model: Path) -> Found:
    run = stage.absolute().parent.parent
    return Found(model, stage.absolute().name, stage, run if (run / "config.yaml").is_file() else None)


def _stages(run: Path) -> list[Path]:
    """The stage folders of a run, in the order of its configuration; others first."""
    order = list(((run_config(run) or {}).get("curriculum") or {}).get("stages") or {})
    rank = {name: i for i, name in enumerate(order)}
    return sorted((run / "stages").iterdir(), key=lambda s: (rank.get(s.name, -1), s.name))


def run_config(run: Path) -> dict[str, Any] | None:
    """The configuration kept with a run, or None. Raises ValueError for one that cannot be read."""
    path = run / "config.yaml"
    if not path.is_file():
        return None
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a readable YAML file: {error}") from None
    return found if isinstance(found, dict) else None


def generation_settings(found: Found) -> dict[str, Any]:
    """The arguments of `Generation` that a model was trained with, as far as its folders tell; the defaults rule else.

    An export keeps them beside the prompt; a stage has them in the configuration of its run; other folders may say how
    many tokens they generate (`generation_config.json`) and for which structure their prompt was made.
    """
    file = found.model / PROMPT_FILE
    if file.is_file():
        kept = json.loads(file.read_text(encoding="utf-8")).get("generation")
        if isinstance(kept, dict):
            return kept
    config = run_config(found.run) if found.run else None
    stage = (((config or {}).get("curriculum") or {}).get("stages") or {}).get(found.name) or {}
    kept = ((stage.get("module") or {}).get("init_args") or {}).get("generation")
    if isinstance(kept, dict):
        return kept
    settings: dict[str, Any] = {}
    prompt = attached_prompt(found.model)
    if prompt is not None:
        settings["structure"] = prompt.structure
    file = found.model / "generation_config.json"
    if file.is_file() and (limit := json.loads(file.read_text(encoding="utf-8")).get("max_new_tokens")):
        settings["max_tokens"] = int(limit)
    return settings


def fingerprint(model: Path) -> str:
    """A short name for what a model folder holds: its config, its words, and evenly spread parts of its weights.

    Training changes every weight a little, so parts tell two stages apart without reading gigabytes.
    """
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(model.iterdir()):
        if file.name in ("config.json", "tokenizer.json", PROMPT_FILE):
            digest.update(file.name.encode() + file.read_bytes())
        elif file.suffix == ".safetensors":
            size = file.stat().st_size
            digest.update(f"{file.name} {size}".encode())
            with file.open("rb") as data:
                for i in range(_PARTS):
                    data.seek(i * size // _PARTS)
                    digest.update(data.read(_PART_BYTES))
    return digest.hexdigest()
