"""Who may import whom: data flows one way, heavy packages stay behind their doors. Read from source, nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import parallel_r1

ROOT = Path(parallel_r1.__file__).parent

# From the bottom up; a module imports from its own layer and from those below. The longest matching prefix decides.
LAYERS: list[tuple[str, ...]] = [
    ("types", "structure", "methods", "vocabulary", "files", "changes", "plan"),
    (
        "objective",
        "optim",
        "attention",
        "scores",
        "reward",
        "data",
        "rollout.engine",
        "rollout.weights",
        "rollout.model_folder",
        "checkpoint",
    ),
    ("policy", "lora", "sharding", "rollout", "evaluation", "runs"),
    ("tiny", "traces"),
    ("modules", "resume", "evaluate_options", "model_card"),
    # the table and the bar read what the runner recorded of a stage: they stand above it, and it knows neither
    ("curriculum",),
    ("callbacks", "evaluate", "planning"),
    ("shell", "cli"),
    ("__main__",),
]
LAYER = {prefix: level for level, prefixes in enumerate(LAYERS) for prefix in prefixes}


@dataclass(frozen=True)
class Import:
    """importer, imported: dotted names; late: inside a function; typing: under TYPE_CHECKING only."""

    importer: str
    imported: str
    late: bool
    typing: bool

    def __str__(self) -> str:
        return f"{self.importer} imports {self.imported}"


def imports() -> Iterator[Import]:
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield from _of(ast.parse(path.read_text(encoding="utf-8")), "" if name == "__init__" else name, False, False)


def _of(node: ast.AST, importer: str, late: bool, typing: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(importer, alias.name, late, typing)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{importer}: relative imports hide what is imported"
        for alias in node.names:  # `from package import module` imports the module
            inner = f"{node.module}.{alias.name}"
            known = inner.startswith("parallel_r1.") and _is_module(inner.removeprefix("parallel_r1."))
            yield Import(importer, inner if known else str(node.module), late, typing)
    late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    typing = typing or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    for child in ast.iter_child_nodes(node):
        yield from _of(child, importer, late, typing)


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def layer(name: str) -> int:
    parts = name.split(".")
    found = [LAYER[".".join(parts[:n])] for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in LAYER]
    assert found, f"{name} has no layer: give it one in {Path(__file__).name}"
    return found[0]


IMPORTS = list(imports())


def outside(package: str) -> list[Import]:
    return [i for i in IMPORTS if i.imported.split(".")[0] == package]


def test_the_imports_were_found() -> None:
    assert len(IMPORTS) > 150
    assert Import("modules.batching", "parallel_r1.structure.layout", late=False, typing=False) in IMPORTS
    assert Import("structure.layout", "torch", late=True, typing=False) in IMPORTS
    assert Import("structure.layout", "torch", late=False, typing=True) in IMPORTS
    assert Import("structure.tokens", "parallel_r1.structure.grammar", late=False, typing=False) in IMPORTS


def test_imports_point_downward() -> None:
    inner = [i for i in IMPORTS if i.imported.startswith("parallel_r1.")]
    upward = [str(i) for i in inner if layer(i.importer or "types") < layer(i.imported.removeprefix("parallel_r1."))]
    assert not upward


def test_nothing_imports_itself_in_a_circle() -> None:
    """Within a layer, too: late imports may hide a circle from Python, not from a reader."""
    edges: dict[str, set[str]] = {}
    for i in IMPORTS:
        if i.imported.startswith("parallel_r1.") and not i.typing:
            edges.setdefault(i.importer, set()).add(i.imported.removeprefix("parallel_r1."))
    # `shell` starts the CLI once it has found that stored help is no answer, and the CLI shares its list of tasks
    edges["shell"] -= {"cli"}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for following in sorted(edges.get(name, ())):
                visit(following, (*path, name))
            done.add(name)

    for name in sorted(edges):
        visit(name, ())


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        (
            "lightning",
            (
                "modules",
                "data.base",
                "data.datamodules",
                "data.embedded",
                "resume",
                "callbacks",
                "curriculum",
                "evaluate",
                "planning",
                "cli",
            ),
        ),
        ("vllm", ("rollout",)),
        ("math_verify", ("reward",)),
        ("sympy", ("reward",)),
        ("jsonargparse", ("cli", "shell", "curriculum")),
        ("rich", ("callbacks", "cli", "shell")),
        (
            "transformers",
            (
                "policy",
                "vocabulary",
                "attention",
                "tiny",
                "traces.teachers",
                "modules",
                "rollout",
                "data.prompts",
                "data.chat_template",
            ),
        ),
    ],
)
def test_packages_stay_behind_their_doors(package: str, allowed: tuple[str, ...]) -> None:
    used = {i.importer for i in outside(package)}
    assert used
    assert not {name for name in used if not any(name == a or name.startswith(f"{a}.") for a in allowed)}


def test_heavy_packages_are_imported_late() -> None:
    """`fit --help` and the data path must not pay for vLLM, transformers or SymPy; typing costs nothing."""
    late = ("vllm", "transformers", "datasets", "sacrebleu", "pyarrow")
    # what derives from vLLM's classes imports it, and is itself imported late, through one module
    inside = ("rollout.kv_splice", "rollout.structured_models")
    early = [i for i in IMPORTS if not i.late and not i.typing]
    assert not [str(i) for i in early if i.imported.split(".")[0] in late and i.importer not in inside]
    doors = {i.importer for i in early if i.imported.removeprefix("parallel_r1.") in inside}
    assert doors == {"rollout.vllm_branching"}
    assert not [str(i) for i in early if i.imported == "parallel_r1.rollout.vllm_branching"]
    # SymPy is loaded by a process of its own, through one module that is itself imported late
    assert {i.importer for i in outside("sympy") + outside("math_verify")} == {"reward.symbolic"}
    assert all(i.late for i in IMPORTS if i.imported == "parallel_r1.reward.symbolic")


@pytest.mark.parametrize("pure", ["structure.grammar", "structure.tokens", "data.prompts", "data.doors", "reward"])
def test_what_is_text_knows_no_tensors(pure: str) -> None:
    mine = [i for i in IMPORTS if i.importer == pure or i.importer.startswith(f"{pure}.")]
    assert mine
    heavy = [str(i) for i in mine if i.imported.split(".")[0] in ("torch", "lightning", "numpy") and not i.typing]
    assert not heavy


def test_records_and_layout_need_torch_for_typing_or_late_only() -> None:
    for name in ("types", "structure.layout", "rollout.engine"):
        assert all(i.late or i.typing for i in outside("torch") if i.importer == name)
