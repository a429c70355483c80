"""Checkpoints inside a stage: two kept, each whole or not there, none ever unpickled.

<checkpoints>/step-00000012/   complete: it was renamed into place
    rank-00000.pt              first rank: every tensor that is whole, its shards, its random states, the progress
    rank-00001.pt              each other rank: its shards, its random states
    manifest.json              size and SHA-256 of each file

Files are those of `torch.save` and are read with weights_only=True. Sharded tensors (FSDP2: cut along their first
dimension) may be read by another number of ranks than wrote them, or by one that does not shard.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from parallel_r1.files import PARTIAL, publish, sync, write_json

MANIFEST = "manifest.json"
_SHARDED = "__sharded__"  # stands in a tree for a tensor whose parts lie in the files of all ranks


# --------------------------------------------------------------------------- what a checkpoint holds


@dataclass(frozen=True)
class Progress:
    """Where a stage stands, as plain values.

    step: optimizer steps; iteration: training batches; logged: the logger's own count of them; validate: a validation
    is due before the next batch; ended: nothing is left to train; seconds: of the stage so far; before: metrics at its
    start; sizes: bytes of each event file, by path below the run's folder.
    """

    step: int
    iteration: int
    logged: int
    validate: bool
    ended: bool
    seconds: float
    before: dict[str, float]
    sizes: dict[str, int]


def random_states() -> dict[str, Any]:
    """The random states of Python, NumPy and torch (the current GPU's too), in types that need no unpickling."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), position, has_gauss, gauss],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_random_states(states: dict[str, Any]) -> None:
    """Undo what happened to the random states since `random_states`."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model short of its frozen parameters, which come back with the folder the stage starts from."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: value.detach() for name, value in model.state_dict().items() if name not in frozen}


# --------------------------------------------------------------------------- trees of tensors, some of them sharded


def split(tree: Any) -> tuple[Any, dict[str, Tensor]]:
    """(the tree with marks in place of sharded tensors, this rank's shards by path). Tensors come to the CPU."""
    shards: dict[str, Tensor] = {}

    def take(path: str, value: Any) -> Any:
        if isinstance(value, DTensor):
            _require_rows(path, value)
            shards[path] = _own(value.to_local())
            return {_SHARDED: list(value.shape)}
        return _own(value) if isinstance(value, Tensor) else value

    return _walk(tree, take), shards


def _own(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    # a view of a larger storage would be saved with all of it
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def _walk(tree: Any, leaf: Callable[[str, Any], Any], path: str = "") -> Any:
    if isinstance(tree, dict) and _SHARDED not in tree:
        return {key: _walk(value, leaf, f"{path}/{key}") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_walk(value, leaf, f"{path}/{i}") for i, value in enumerate(tree))
    return leaf(path, tree)


def _require_rows(name: str, value: DTensor) -> None:
    if value.device_mesh.ndim != 1 or not isinstance(value.placements[0], Shard) or value.placements[0].dim != 0:
        raise ValueError(
            f"{name} is laid out as {value.placements} over the ranks; checkpoints know data-parallel shards alone: "
            "set the strategy's tensor_parallel_size to 1"
        )


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint, read when asked for. parts: along the first dimension, one a rank that wrote it."""

    parts: Sequence[Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0]
        return (sum(len(p) for p in self.parts), *first.shape[1:]) if len(self.parts) > 1 else tuple(first.shape)

    def whole(self) -> Tensor:
        return torch.cat(list(self.parts)) if len(self.parts) > 1 else self.parts[0].clone()

    def part(self, rank: int, ranks: int) -> Tensor:
        """The rows that belong to one of `ranks` ranks, as FSDP2 cuts them."""
        if len(self.parts) == ranks:
            return self.parts[rank].clone()
        rows = self.whole().chunk(ranks)
        return rows[rank].clone() if rank < len(rows) else rows[0][:0].clone()

    def like(self, target: Tensor) -> Tensor:
        """This tensor, laid out as `target` of the same shape is."""
        if self.shape != tuple(target.shape):
            raise ValueError(f"the checkpoint holds a tensor of shape {self.shape}, the model {tuple(target.shape)}")
        if not isinstance(target, DTensor):
            return self.whole()
        _require_rows("a parameter", target)
        mesh = target.device_mesh
        local = self.part(mesh.get_local_rank(), mesh.size())
        # not DTensor.from_local, which moves shards that are offloaded to the CPU to the device of the mesh
        out = torch.empty_like(target, dtype=local.dtype)
        out.to_local().copy_(local)
        return out


@torch.no_grad()
def load_weights(model: nn.Module, stored: dict[str, Stored]) -> None:
    """Copy stored tensors into a model that may be sharded. Raises ValueError where names or shapes differ."""
    target = trained_state(model)
    if target.keys() != stored.keys():
        raise ValueError(
            f"the checkpoint holds other tensors than the model trains: {sorted(target.keys() ^ stored.keys())[:4]}"
        )
    for name, value in target.items():
        value.copy_(stored[name].like(value))


@torch.no_grad()
def load_optimizer(optimizer: torch.optim.Optimizer, stored: dict[str, Any]) -> None:
    """Restore an optimizer whose parameters may be sharded, where the stored one was or was not."""
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))

    def laid_out(value: Any, parameter: Tensor) -> Any:
        if not isinstance(value, Stored):
            return value
        return value.like(parameter) if value.shape == tuple(parameter.shape) else value.whole()

    state = {i: {k: laid_out(v, parameters[i]) for k, v in values.items()} for i, values in stored["state"].items()}
    optimizer.load_state_dict({"state": state, "param_groups": plain(stored["param_groups"])})


def plain(tree: Any) -> Any:
    """A stored tree with its tensors read."""
    return _walk(tree, lambda _, value: value.whole() if isinstance(value, Stored) else value)


# --------------------------------------------------------------------------- writing


class CheckpointError(OSError):
    """A checkpoint could not be written, those before it being untouched, or none could be read."""


def place(root: Path, stage: str) -> Path:
    """Where the checkpoints of a stage lie in a run's folder."""
    return root / "stages" / stage / "checkpoints"


def folder_of(checkpoints: Path, step: int) -> Path:
    return checkpoints / f"step-{step:08d}"


def require_space(checkpoints: Path, needed: int, what: str) -> None:
    """Raise CheckpointError unless `needed` bytes are free where checkpoints go."""
    free = shutil.disk_usage(checkpoints).free
    if free < needed:
        raise CheckpointError(errno.ENOSPC, _full(checkpoints, what, needed, free))


def _full(checkpoints: Path, what: str, needed: int, free: int) -> str:
    kept = [str(path) for path in complete(checkpoints)]
    go_on = f"it goes on from {kept[0]}, which is untouched" if kept else "it starts the stage again"
    return (
        f"no space for {what} in {checkpoints}: it takes {needed:,} bytes, {free:,} are free. Free space there, or "
        f"move the run's folder to a larger disk and set curriculum.root, then run the same command again: {go_on}"
    )


def bytes_of(*trees: Any) -> int:
    """Bytes that the tensors of some trees take."""
    sizes: list[int] = []
    for tree in trees:
        _walk(tree, lambda _, value: sizes.append(value.nbytes if isinstance(value, Tensor) else 64))
    return sum(sizes)


def write_part(draft: Path, rank: int, content: dict[str, Any], what: str) -> tuple[str, dict[str, Any]]:
    """Write one rank's file into a draft and sync it. Returns (its name, its line in the manifest).

    Raises CheckpointError, naming path, bytes and remedy, when it cannot be written.
    """
    path = draft / f"rank-{rank:05d}.pt"
    try:
        with path.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch's writer turns a failed write into a RuntimeError
        checkpoints, free = draft.parent, shutil.disk_usage(draft.parent).free
        full = getattr(error, "errno", None) == errno.ENOSPC or free < bytes_of(content)
        text = _full(checkpoints, what, bytes_of(content), free) if full else f"{what} could not be written: {error}"
        raise CheckpointError(getattr(error, "errno", None) or errno.EIO, text) from error
    return path.name, _fingerprint(path)


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def begin(checkpoints: Path, step: int) -> Path:
    """An empty folder to write the parts of a checkpoint into."""
    draft = folder_of(checkpoints, step)
    draft = draft.with_name(draft.name + PARTIAL)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    return draft


def commit(draft: Path, files: dict[str, dict[str, Any]], keep: Sequence[Path]) -> Path:
    """Make a draft count, then delete everything beside it but `keep`. Returns its folder."""
    write_json(draft / MANIFEST, {"files": files})
    folder = draft.with_name(draft.name.removesuffix(PARTIAL))
    publish(draft, folder)
    for path in folder.parent.iterdir():
        if path != folder and path not in keep:
            shutil.rmtree(path, ignore_errors=True)
    sync(folder.parent)
    return folder


# --------------------------------------------------------------------------- reading


def complete(checkpoints: Path) -> list[Path]:
    """Folders that were renamed into place, the newest first; whether their files are intact is `damage`'s to say."""
    found = checkpoints.glob("step-*") if checkpoints.is_dir() else ()
    return sorted((path for path in found if not path.name.endswith(PARTIAL)), reverse=True)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files; None if size and hash of each are those it was written with."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        listed = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    if not listed:
        return f"{MANIFEST} lists no file"
    for name, (size, digest) in listed.items():
        path = folder / Path(name).name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes of {size:,}"
        if _fingerprint(path)["sha256"] != digest:
            return f"{name} does not hold what was written"
    return None


class Checkpoint:
    """An intact checkpoint, its tensors mapped from disk and read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = sorted(folder.glob("rank-*.pt"))
        self._ranks = [torch.load(path, map_location="cpu", mmap=True, weights_only=True) for path in paths]
        self.progress = Progress(**self._ranks[0]["progress"])

    def state(self) -> Any:
        """The tree that was saved, with a `Stored` for each tensor."""

        def leaf(path: str, value: Any) -> Any:
            if isinstance(value, dict):
                return Stored([rank["shards"][path] for rank in self._ranks])
            return Stored([value]) if isinstance(value, Tensor) else value

        return _walk(self._ranks[0]["state"], leaf)

    def random(self, rank: int, ranks: int) -> dict[str, Any] | None:
        """The random states of a rank; None where another number of ranks wrote them."""
        return self._ranks[rank]["random"] if len(self._ranks) == ranks else None


def newest(checkpoints: Path, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest intact checkpoint, None where there is none at all. Damaged ones are skipped, and said.

    Raises CheckpointError if there are some but none is intact.
    """
    found = complete(checkpoints)
    for folder in found:
        if (wrong := damage(folder)) is None:
            return Checkpoint(folder)
        say(f"checkpoint {folder} is damaged ({wrong}) and is not used")
    if found:
        raise CheckpointError(
            f"every checkpoint in {checkpoints} is damaged; if no copy of one can be brought back, delete that folder: "
            "the stage then starts again from where it started"
        )
    return None


# --------------------------------------------------------------------------- event files


def event_files(root: Path, stage: str) -> list[Path]:
    """The TensorBoard files of a stage. (Rollouts are cut back by `modules.rollout_log`, by iteration.)"""
    return sorted((root / "tensorboard" / stage).rglob("events.out.tfevents.*"))


def sizes(root: Path, stage: str) -> dict[str, int]:
    """Bytes of each event file, by path below the run's folder."""
    return {path.relative_to(root).as_posix(): path.stat().st_size for path in event_files(root, stage)}


def cut_back(root: Path, stage: str, known: dict[str, int]) -> None:
    """Drop the events that were written after `known` was taken, so that no step stands there twice.

    Event files only grow, so their length says what they held. Empty: drop all.
    """
    for path in event_files(root, stage):
        size = known.get(path.relative_to(root).as_posix(), 0)
        if size == 0:
            path.unlink()
        elif path.stat().st_size > size:
            os.truncate(path, size)
