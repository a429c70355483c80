"""What the package never does: load pickles, run a model's code unasked. Read from source."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import parallel_r1
from parallel_r1.policy import PolicySource
from parallel_r1.vocabulary import load_vocabulary

ROOT = Path(parallel_r1.__file__).parent
FILES = sorted([*ROOT.rglob("*.py"), *(ROOT.parent / "tools").rglob("*.py")])
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def unsafe(source: str) -> Iterator[str]:
    """Every way to run code from a file that is only meant to hold data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"imports {name}" for name in names if name.split(".")[0] in PICKLES)
        if not isinstance(node, ast.Call):
            continue
        called, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        if called in ("torch.load", "load_from_checkpoint") or called.endswith(".load_from_checkpoint"):
            safe = given.get("weights_only") == "True"
            yield from () if safe else (f"{called} without weights_only=True",)
        elif given.get("weights_only") not in (None, "True"):
            yield f"{called} with weights_only={given['weights_only']}"
        if called in ("eval", "exec"):
            yield called
        if given.get("allow_pickle", "False") != "False":
            yield f"{called} with allow_pickle"
        if called in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            yield called
        if given.get("trust_remote_code") == "True":
            yield f"{called} trusts remote code"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT.parent)))
def test_no_file_that_holds_data_can_run_code(path: Path) -> None:
    assert list(unsafe(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "Module.load_from_checkpoint(path)",
        "trainer.fit(module, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "eval(text)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(code: str) -> None:
    assert len(list(unsafe(code))) == 1


def test_remote_code_is_off_unless_asked() -> None:
    assert PolicySource(name="x").trust_remote_code is False
    assert inspect.signature(load_vocabulary).parameters["trust_remote_code"].default is False


def test_a_folder_with_code_of_its_own_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The model's own Python file is not imported; the message says what to set."""
    import json
    import shutil

    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="trust_remote_code"):
        PolicySource(name=str(folder)).prepare(tmp_path / "base", 0)
    assert not (tmp_path / "ran").exists()
