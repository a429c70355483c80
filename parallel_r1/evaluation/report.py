"""A report as Markdown: the paper's columns first, then every metric with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

MODES = {
    "fork_join": "isolated paths: the response forks at `<Parallel>` and joins for the summary",
    "plain": "one causal stream that may hold blocks",
    "sequential": "one stream, the tags are never sampled",
    "forced": "one stream that starts with `<Parallel>`",
}
_PAPER = ("aime25", "aime24", "amc23", "math")
_DETAILS = {
    "parallel_ratio": ".3f",
    "format_valid": ".3f",
    "truncated": ".3f",
    "critical_tokens": ".1f",
    "total_tokens": ".1f",
    "parallel_speedup": ".3f",
    "path_agreement": ".3f",
    "path_diversity": ".3f",
    "parallel_position": ".3f",
    "parallel_token_share": ".3f",
    "accuracy_at_critical": ".3f",
}


def markdown(report: Json) -> str:
    """The text of `report.md`."""
    tiers, modes = report["tiers"], report["settings"]["modes"]
    parts = [
        f"# {report['name']}",
        f"Model `{report['model']}`, temperature {report['settings']['temperature']:g}, at most "
        f"{report['settings']['generation']['max_tokens']} tokens a response, seed {report['settings']['seed']}. "
        "Intervals: 95 %, cluster bootstrap over problems (Wilson where every problem says the same).",
        "## Accuracy",
        "In %: mean@k / pass@k. Parallel ratio: share of responses with a block, mean over the sets.",
        _table(
            ["", "parallel ratio", *(_title(tiers, tier) for tier in _ordered(tiers))],
            [[mode, _ratio(tiers, mode), *(_cell(tiers[tier], mode) for tier in _ordered(tiers))] for mode in modes],
        ),
        "\n".join(f"- `{mode}`: {MODES[mode]}" for mode in modes),
    ]
    if len(modes) > 1:
        parts += [
            "## At equal total tokens",
            "The budget of a problem is what its cheapest mode spent on all its samples; `samples` is how many of its "
            "own a mode gets for it, on average. Majority and pass: over that many. In %.",
            _table(
                ["set", "mode", "tokens a problem", "samples", "mean", "majority", "pass"],
                [_equal(tier, mode, tiers[tier]["equal_tokens"]) for tier in _ordered(tiers) for mode in modes],
            ),
        ]
    for tier in _ordered(tiers):
        found = tiers[tier]
        names = list(dict.fromkeys(name for mode in modes for name in found["modes"][mode]))
        parts += [
            f"## {tier}",
            f"{found['problems']} problems, {found['samples']} samples each.",
            _table(["", *modes], [[name, *(_detail(found["modes"][mode], name) for mode in modes)] for name in names]),
        ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _ordered(tiers: Json) -> list[str]:
    """The sets of the paper in its order, then the others in their own."""
    known = [tier for start in _PAPER for tier in tiers if tier.startswith(start)]
    return [*known, *(tier for tier in tiers if tier not in known)]


def _title(tiers: Json, tier: str) -> str:
    return f"{tier} (n={tiers[tier]['problems']}, k={tiers[tier]['samples']})"


def _ratio(tiers: Json, mode: str) -> str:
    values = [found["modes"][mode]["parallel_ratio"]["value"] for found in tiers.values()]
    return _percent(sum(values) / len(values))


def _cell(found: Json, mode: str) -> str:
    k, metrics = found["samples"], found["modes"][mode]
    mean = metrics[f"mean@{k}"]
    text = _percent(mean["value"])
    if mean["ci95"]:
        text += f" [{_percent(mean['ci95'][0])}, {_percent(mean['ci95'][1])}]"
    return text + (f" / {_percent(metrics[f'pass@{k}']['value'])}" if k > 1 else "")


def _equal(tier: str, mode: str, found: Json) -> list[str]:
    mine = found["modes"][mode]
    shown = [_with_interval(mine[name], 100, ".1f") for name in ("mean", "majority", "pass")]
    return [tier, mode, f"{found['budget']:.0f}", f"{mine['samples']:.2f}", *shown]


def _detail(metrics: Json, name: str) -> str:
    if name not in metrics:
        return ""
    return _with_interval(metrics[name], 1, _DETAILS.get(name, ".3f"))


def _with_interval(estimate: Json, scale: float, form: str) -> str:
    text = format(estimate["value"] * scale, form)
    if estimate["ci95"] is None:
        return text
    low, high = (format(end * scale, form) for end in estimate["ci95"])
    return f"{text} [{low}, {high}]"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
