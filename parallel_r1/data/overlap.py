"""Which problems of one set also stand in another: benchmarks in a training set, validation sets of other stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from parallel_r1.data import sources
from parallel_r1.data.reading import read_rows
from parallel_r1.data.sources import Known, Overlap, Report, contamination
from parallel_r1.types import Problem


def check_sets(sets: Mapping[str, str | None], where: str) -> None:
    """Raise ValueError for a set that has neither a place nor a known home."""
    if homeless := [tier for tier, place in sets.items() if not place and tier not in sources.BENCHMARK_HOMES]:
        raise ValueError(
            f"{where}: no known home of {homeless}; give a path, or name one of {', '.join(sources.BENCHMARK_HOMES)}"
        )


def read_benchmark(tier: str, place: str | None) -> tuple[list[Problem], Report]:
    """The problems of one evaluation set, from `place` or from its home on the hub, and the account of its rows."""
    home, config = sources.BENCHMARK_HOMES.get(tier, ("", None))
    rows = read_rows(place or home, "test", None if place else config)
    adapter = sources.gsm8k if tier == "gsm8k" else sources.benchmark
    return sources.collect(f"{tier} ({place or home})", rows, adapter, tier)


def named(overlap: Overlap, of: int) -> str:
    """`5 the same and 3 alike of 40`."""
    return f"{overlap.same:,} the same and {overlap.similar:,} alike of {of:,}"


def overlap_lines(
    train: Sequence[Problem], others: Mapping[str, Sequence[Problem]], all_of_them: bool = False
) -> list[str]:
    """One line a set of `others`, by its name, that shares problems with `train`; with all_of_them, a line for each."""
    labelled = [replace(problem, tier=name) for name, problems in others.items() for problem in problems]
    found = contamination(train, labelled)
    return [
        f"{name}: {named(found[name], len(problems))} are training problems"
        for name, problems in others.items()
        if problems and (all_of_them or found[name] != Overlap())
    ]


def without(train: Iterable[Problem], benchmark: Iterable[Problem]) -> list[Problem]:
    """The training problems that are in no way in the benchmark: neither the same nor alike."""
    known = Known(benchmark)
    return [problem for problem in train if known.kind(problem) is None]


def stage_overlaps(trains: Mapping[str, Sequence[Problem]], vals: Mapping[str, Sequence[Problem]]) -> list[str]:
    """What a stage of a curriculum trains on that another stage is validated on, one line a pair that shares any.

    trains, vals: by the name of the stage. A stage's own two are disjoint by construction.
    """
    lines = []
    for name, train in trains.items():
        own = [problem.id for problem in vals.get(name, ())]
        others = {f"validation of stage {other}": val for other, val in vals.items() if [p.id for p in val] != own}
        lines += [f"stage {name}: {line}" for line in overlap_lines(train, others)]
    return lines
