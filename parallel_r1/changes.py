"""What may change between two commands on one run folder, and what then becomes of what is there.

A stage that has begun was computed under the configuration in `<root>/config.yaml`. Going on under another one silently
would give a run that no configuration describes, so a difference that touches it is an error, unless the user says how:

    error     refuse, showing the differences
    continue  take the new configuration from here on: finished stages stay, a stage in progress goes on from its
              checkpoint
    restart   do the first stage that a difference touches, and all stages after it, anew; what they left is moved to
              `<root>/aside/<n>/`, and so is the base policy where `policy` or the seed differs

Differences never matter in options that say how a run is carried out (`NEUTRAL`), and in stages that have not begun.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

OnChange = Literal["error", "continue", "restart"]

NEUTRAL = (
    "config",
    "curriculum.root",
    "curriculum.name",
    "curriculum.only",
    "curriculum.start_at",
    "curriculum.fresh",
    "curriculum.on_change",
    "curriculum.plan_only",
    "curriculum.checkpoint_every",
    "curriculum.checkpoint_minutes",
    "evaluation",
    "predict",
    "problem",
    "evaluation",
    "predict",
    "problem",
    "trainer.enable_progress_bar",
    "trainer.enable_model_summary",
    "trainer.profiler",
)
"""Options, with all below them, that change nothing that is computed."""

_BASE = ("policy", "seed_everything")
_STAGES = "curriculum.stages"
_ABSENT = "(not there)"


@dataclass(frozen=True)
class Change:
    """One value that differs. key: dotted path; old, new: as text. stage: the only stage it concerns, None for all."""

    key: str
    old: str
    new: str
    stage: str | None

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Values that differ between two configurations and may matter, by dotted key; a list is one value."""
    before, after = _flat(old), _flat(new)
    changes = []
    for key in dict.fromkeys([*before, *after]):
        was, now = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if was != now and not any(_below(key, neutral) for neutral in NEUTRAL):
            stage = key.removeprefix(_STAGES + ".").split(".")[0] if _below(key, _STAGES) else None
            changes.append(Change(key, _short(was), _short(now), stage))
    return changes


def _flat(tree: Any, key: str = "") -> dict[str, str]:
    if isinstance(tree, dict) and tree:
        return {k: v for name, part in tree.items() for k, v in _flat(part, f"{key}.{name}" if key else name).items()}
    return {key: json.dumps(tree, default=str, ensure_ascii=False)}


def _below(key: str, top: str) -> bool:
    return key == top or key.startswith(top + ".")


def _short(value: str, limit: int = 120) -> str:
    return value if len(value) <= limit else value[: limit - 4] + " ..."


def has_begun(root: Path, stage: str) -> bool:
    """Whether a stage has left something that a further command would build on."""
    folder = root / "stages" / stage
    return (folder / "stage.json").is_file() or any(folder.glob("checkpoints/step-*"))


def touched(root: Path, old: dict[str, Any], new: dict[str, Any]) -> tuple[list[Change], list[str]]:
    """(differences that concern what is in the folder, the stages to be done anew on account of them, in order)."""
    was, now = (_stage_names(config) for config in (old, new))
    begun = [name for name in dict.fromkeys([*now, *was]) if has_begun(root, name)]
    changes, first = [], len(now)
    for change in differences(old, new):
        on_base = any(_below(change.key, key) for key in _BASE) and (root / "base").is_dir()
        on_all = change.stage is None and bool(begun)
        if not (on_base or on_all or change.stage in begun):
            continue
        changes.append(change)
        first = min(first, 0 if change.stage is None else now.index(change.stage) if change.stage in now else first)
    for name in begun:  # `previous` means another stage where others have come between
        if name in was and name in now and (earlier := was[: was.index(name)]) != now[: now.index(name)]:
            key, before = f"{_STAGES} (those before {name})", now[: now.index(name)]
            changes.append(Change(key, ", ".join(earlier) or "none", ", ".join(before) or "none", name))
            first = min(first, now.index(name))
    later = [*now[first:], *(name for name in begun if name not in now)]
    return changes, [name for name in later if (root / "stages" / name).exists()]


def _stage_names(config: dict[str, Any]) -> list[str]:
    return list((config.get("curriculum") or {}).get("stages") or {})


def settle(root: Path, new: dict[str, Any], on_change: OnChange) -> list[str]:
    """Hold a new configuration against that of the run folder. Returns what was done, for the user to read.

    Raises ValueError, showing the differences, where they matter and `on_change` is `error`.
    """
    kept = root / "config.yaml"
    if not kept.is_file():
        return []
    old = yaml.safe_load(kept.read_text(encoding="utf-8")) or {}
    changes, again = touched(root, old, new)
    if not changes:
        return []
    shown = "".join(f"\n  {change}" for change in changes)
    if on_change == "error":
        what = f"does stage(s) {', '.join(again)} anew" if again else "makes the base policy anew"
        raise ValueError(
            f"the configuration is not the one {root} was begun with ({kept}):{shown}\nGive the old values, another "
            "--curriculum.root, or say what to do: --curriculum.on_change=continue takes the new values from here on "
            "(finished stages stay, a stage in progress goes on from its checkpoint); --curriculum.on_change=restart "
            f"{what} and keeps what there was in {root / 'aside'}"
        )
    if on_change == "continue":
        return [f"the configuration has changed, and holds from here on:{shown}"]
    base = any(_below(change.key, key) for change in changes for key in _BASE)
    return [f"the configuration has changed:{shown}", *put_aside(root, again, base)]


def put_aside(root: Path, stages: Sequence[str], base: bool) -> list[str]:
    """Move what stages left, and the base policy if asked, to `<root>/aside/<n>/`. Returns what was moved, as text."""
    names = [f"{place}/{stage}" for stage in stages for place in ("stages", "tensorboard")]
    names = [name for name in [*names, *(["base"] if base else [])] if (root / name).exists()]
    if not names:
        return []
    number = 1
    while (root / "aside" / str(number)).exists():
        number += 1
    target = root / "aside" / str(number)
    target.mkdir(parents=True)
    if (root / "config.yaml").is_file():
        (target / "config.yaml").write_bytes((root / "config.yaml").read_bytes())
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        (root / name).rename(target / name)
    return [f"moved to {target}: {', '.join(names)}"]
