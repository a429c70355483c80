"""Checkpoints: whole or absent, damage found, nothing unpickled, space asked for first; files published whole."""

from __future__ import annotations

import errno
import json
import pickle
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from parallel_r1 import checkpoint
from parallel_r1.checkpoint import Checkpoint, CheckpointError, Stored, newest
from parallel_r1.files import publish, write_json
from parallel_r1.optim import MuonWithAdamW

PROGRESS = {"step": 3, "iteration": 3, "logged": 3, "validate": False, "ended": False, "seconds": 1.5}
PROGRESS |= {"before": {"easy/accuracy": 0.5}, "sizes": {}}


def write(folder: Path, step: int, state: dict | None = None, keep: tuple[Path, ...] = ()) -> Path:
    whole, shards = checkpoint.split(state or {"model": {"w": torch.arange(6.0).view(2, 3) + step}})
    content = {"state": whole, "shards": shards, "random": checkpoint.random_states()}
    content["progress"] = {**PROGRESS, "step": step}
    draft = checkpoint.begin(folder, step)
    part = checkpoint.write_part(draft, 0, content, "a checkpoint")
    return checkpoint.commit(draft, dict([part]), keep)


def test_what_is_written_is_read_and_two_are_kept(tmp_path: Path) -> None:
    kept: tuple[Path, ...] = ()
    for step in (1, 2, 3):
        kept = (write(tmp_path, step, keep=kept),)
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["step-00000003", "step-00000002"]
    found = newest(tmp_path, pytest.fail)
    assert found.progress.step == 3
    assert found.progress.before == {"easy/accuracy": 0.5}
    torch.testing.assert_close(found.state()["model"]["w"].whole(), torch.arange(6.0).view(2, 3) + 3)


def test_an_empty_folder_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest(tmp_path / "none", pytest.fail) is None
    (tmp_path / "step-00000001.partial").mkdir()
    assert newest(tmp_path, pytest.fail) is None, "a draft counts as absent"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("rank-00000.pt", cut, "bytes of"),
        ("rank-00000.pt", flip, "does not hold what was written"),
        ("rank-00000.pt", Path.unlink, "is missing"),
        ("manifest.json", cut, "manifest.json cannot be read"),
        ("manifest.json", lambda path: path.write_text("[]"), "manifest.json cannot be read"),
        ("manifest.json", Path.unlink, "manifest.json cannot be read"),
    ],
)
def test_a_damaged_one_is_said_and_the_older_is_used(tmp_path: Path, name: str, harm, said: str) -> None:
    older = write(tmp_path, 1)
    harm(write(tmp_path, 2, keep=(older,)) / name)
    told: list[str] = []
    found = newest(tmp_path, told.append)
    assert found.folder == older
    assert len(told) == 1
    assert "step-00000002" in told[0]
    assert said in told[0]
    harm_all = older / "manifest.json"
    harm_all.unlink()
    with pytest.raises(CheckpointError, match=r"every checkpoint .* is damaged; .* delete that folder"):
        newest(tmp_path, told.append)


def test_nothing_from_the_folder_is_unpickled(tmp_path: Path) -> None:
    folder, marker = write(tmp_path, 1), tmp_path / "run"

    class Harm:
        def __reduce__(self):
            return (Path.touch, (marker,))

    torch.save({"progress": Harm()}, folder / "rank-00000.pt")
    with pytest.raises(pickle.UnpicklingError):
        Checkpoint(folder)
    assert not marker.exists()


# --------------------------------------------------------------------------- a full disk


def test_space_is_asked_for_before_anything_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=999))
    checkpoint.require_space(tmp_path, 999, "a checkpoint")
    with pytest.raises(CheckpointError) as error:
        checkpoint.require_space(tmp_path, 1_000_000, "the checkpoint of stage hard at step 2")
    text = error.value.strerror
    for part in (
        "stage hard at step 2",
        str(tmp_path),
        "1,000,000 bytes",
        "999 are free",
        "curriculum.root",
        "step-00000001",
    ):
        assert part in text
    assert newest(tmp_path, pytest.fail).progress.step == 1


def test_a_write_that_fails_half_way_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(CheckpointError) as error:
        write(tmp_path, 2)
    assert error.value.errno == errno.ENOSPC
    assert "no space for a checkpoint" in error.value.strerror
    monkeypatch.undo()
    assert newest(tmp_path, pytest.fail).progress.step == 1


def test_a_device_that_is_really_full_is_named(tmp_path: Path) -> None:
    """/dev/full takes no byte: torch's writer turns that into an error of its own."""
    draft = checkpoint.begin(tmp_path, 1)
    (draft / "rank-00000.pt").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match=r"a checkpoint|no space"):
        checkpoint.write_part(draft, 0, {"state": torch.zeros(1 << 16)}, "a checkpoint")


# --------------------------------------------------------------------------- tensors


def test_a_view_is_saved_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    big = torch.zeros(1_000_000)
    folder = write(tmp_path, 1, {"w": big[:10]})
    assert (folder / "rank-00000.pt").stat().st_size < 100_000


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize(("wrote", "read"), [(1, 3), (3, 1), (3, 3), (3, 2), (2, 4)])
def test_rows_go_to_ranks_as_fsdp2_cuts_them(rows: int, wrote: int, read: int) -> None:
    full = torch.arange(rows * 2.0).view(rows, 2)
    parts = [*full.chunk(wrote), *[full[:0]] * wrote][:wrote]
    stored = Stored(parts)
    assert stored.shape == (rows, 2)
    assert torch.equal(stored.whole(), full)
    expected = [*full.chunk(read), *[full[:0]] * read][:read]
    for rank in range(read):
        assert torch.equal(stored.part(rank, read), expected[rank])


def trained(steps: range, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(x).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_training_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        named = list(model.named_parameters())
        return MuonWithAdamW(named, lr=1e-2) if kind == "muon" else torch.optim.AdamW(named, lr=1e-2)

    model = small()
    optimizer = make(model)
    trained(range(3), model, optimizer)
    write(tmp_path, 3, {"model": checkpoint.trained_state(model), "optimizer": optimizer.state_dict()})
    trained(range(3, 6), model, optimizer)

    again = small()
    other = make(again)
    state = newest(tmp_path, pytest.fail).state()
    checkpoint.load_weights(again, state["model"])
    checkpoint.load_optimizer(other, state["optimizer"])
    trained(range(3, 6), again, other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_frozen_parameters_are_not_saved_and_other_models_refused(tmp_path: Path) -> None:
    model = small()
    model[0].requires_grad_(False)
    assert set(checkpoint.trained_state(model)) == {"1.weight", "1.bias"}
    write(tmp_path, 1, {"model": checkpoint.trained_state(model)})
    stored = newest(tmp_path, pytest.fail).state()["model"]
    with pytest.raises(ValueError, match="other tensors than the model trains"):
        checkpoint.load_weights(small(), stored)


def test_random_states_come_back(tmp_path: Path) -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(7)
    np.random.standard_normal()  # leaves half a pair behind
    folder = write(tmp_path, 1)

    def draw() -> tuple:
        return random.random(), np.random.standard_normal(), np.random.rand(), torch.rand(2).tolist()

    expected = draw()
    draw()
    checkpoint.set_random_states(Checkpoint(folder).random(0, 1))
    assert draw() == expected
    assert Checkpoint(folder).random(0, 2) is None, "another number of ranks has states of its own"


# --------------------------------------------------------------------------- event files


def test_events_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    writer = SummaryWriter(tmp_path / "tensorboard" / "hard")
    for step in range(6):
        writer.add_scalar("loss", 1.0, step)
        if step == 3:
            writer.flush()
            known = checkpoint.sizes(tmp_path, "hard")
    writer.close()
    later = SummaryWriter(tmp_path / "tensorboard" / "hard", filename_suffix=".later")
    later.add_scalar("loss", 1.0, 4)
    later.close()
    other = SummaryWriter(tmp_path / "tensorboard" / "easy")
    other.add_scalar("loss", 1.0, 9)
    other.close()

    for _ in range(2):  # a kill right after it changes nothing
        checkpoint.cut_back(tmp_path, "hard", known)
        (path,) = checkpoint.event_files(tmp_path, "hard")
        assert [event.step for event in EventFileLoader(str(path)).Load() if event.summary.value] == [0, 1, 2, 3]
    checkpoint.cut_back(tmp_path, "hard", {})
    assert not checkpoint.event_files(tmp_path, "hard")
    assert len(checkpoint.event_files(tmp_path, "easy")) == 1


# --------------------------------------------------------------------------- files


def test_files_and_folders_are_replaced_whole(tmp_path: Path) -> None:
    write_json(tmp_path / "a" / "x.json", {"n": 1})
    assert json.loads((tmp_path / "a" / "x.json").read_text()) == {"n": 1}
    for text in ("old", "new"):
        draft = tmp_path / "model.partial"
        draft.mkdir()
        (draft / text).write_text(text)
        publish(draft, tmp_path / "model")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["new"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "model"]
