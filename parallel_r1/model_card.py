"""The README.md of an exported model: what it is, how to use it, what it scored, how it was made. Text only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml

Json = Mapping[str, Any]

_USE = """\
## Use

The chat template wraps one user message in the prompt that the model was trained with, and `generation_config.json`
samples as training did (temperature {temperature:g}, no top-p, no top-k).

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{place}")
model = AutoModelForCausalLM.from_pretrained("{place}")
messages = [{{"role": "user", "content": "{question}"}}]
ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
out = model.generate(**ids)
print(tokenizer.decode(out[0, ids["input_ids"].shape[1]:]))
```

```bash
vllm serve {place}
curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{{
  "model": "{place}", "max_tokens": {max_tokens}, "skip_special_tokens": false,
  "messages": [{{"role": "user", "content": "{question}"}}]}}'
```

`skip_special_tokens: false` shows the tags. Weights in float32 keep their type with `vllm serve --dtype float32`. Where
the `vllm` command is missing, `python -m vllm.entrypoints.openai.api_server --model {place}` starts the same server.

Both generate one causal stream: no path is isolated from its siblings, none is computed beside another. With the
package, `python -m parallel_r1 predict --evaluation.model {place} --predict.mode fork_join` forks.
"""


def model_card(
    name: str,
    place: str,
    generation: Json,
    stage: Json | None,
    reports: Mapping[str, Json],
    config: Json | None,
    command: str,
) -> str:
    """The card. stage: a `stage.json`; reports: those of `test`, by their place; config: that of the run."""
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- parallel-thinking\n---",
        f"# {name}",
        "A language model that thinks in parallel: a response is ordinary text that may hold blocks `"
        "<Parallel><Path> one way </Path><Path> another </Path></Parallel><Summary> what they say together </Summary>`."
        " Trained with parallel_r1, after Parallel-R1 (arXiv 2509.07980).",
        _USE.format(
            place=place,
            question="What is 1 + 1?",
            temperature=generation.get("temperature", 1.0),
            max_tokens=generation.get("max_tokens", 1024),
        ).strip(),
    ]
    parts += _metrics(stage, reports)
    if config is not None:
        parts += _recipe(name, config)
    return "\n\n".join([*parts, f"## Export\n\n```bash\n{command}\n```"]) + "\n"


def _metrics(stage: Json | None, reports: Mapping[str, Json]) -> list[str]:
    parts: list[str] = []
    if stage and stage.get("after"):
        found: dict[str, dict[str, float]] = {}
        for key, value in stage["after"].items():
            tier, _, metric = key.partition("/")
            found.setdefault(tier, {})[metric] = value
        names = ("accuracy", "accuracy_ci95", "parallel_ratio", "format_valid", "n")
        rows = [[tier, *(_number(values.get(name)) for name in names)] for tier, values in found.items()]
        parts += [
            "## Held-out problems, at the end of training",
            f"Stage `{stage.get('name')}` ({stage.get('module')}, {stage.get('steps')} steps), one sample a problem; "
            "accuracy_ci95 is the half-width of the 95 % interval.",
            _table(["set", *names], rows),
        ]
    for place, report in reports.items():
        rows = []
        for tier, result in report["tiers"].items():
            k = result["samples"]
            for mode, metrics in result["modes"].items():
                shown = [_estimate(metrics.get(f"{name}@{k}")) for name in ("mean", "pass", "majority")]
                rows.append([tier, mode, str(result["problems"]), str(k), *shown])
        parts += [
            f"## Test ({place})",
            _table(["set", "mode", "problems", "k", "mean@k", "pass@k", "majority@k"], rows),
        ]
    return parts


def _recipe(name: str, config: Json) -> list[str]:
    kept = _without_places({key: config[key] for key in ("seed_everything", "policy", "curriculum") if key in config})
    kept.get("curriculum", {}).pop("root", None)
    stages = kept.get("curriculum", {}).get("stages", {})
    data = [
        f"- `{stage}`: {_short_name(found.get('data'))} {_arguments(found.get('data'))}, "
        f"{(found.get('trainer') or {}).get('max_steps')} steps of {_short_name(found.get('module'))}"
        + (" (this model)" if stage == name else "")
        for stage, found in stages.items()
    ]
    text = yaml.safe_dump(kept, sort_keys=False, allow_unicode=True).strip()
    return [
        "## Data and recipe",
        "\n".join(data),
        "`python -m parallel_r1 fit --config config.yaml` with this config.yaml (folders left out of paths):",
        f"```yaml\n{text}\n```",
    ]


def _short_name(part: Json | None) -> str:
    return str((part or {}).get("class_path", "?")).rsplit(".", 1)[-1]


def _arguments(part: Json | None) -> str:
    found = (part or {}).get("init_args") or {}
    kept = {k: v for k, v in found.items() if k in ("path", "sets", "train", "batch_size", "eval_size", "solve_rate")}
    return json.dumps(kept, ensure_ascii=False) if kept else ""


def _without_places(value: Any) -> Any:
    """Absolute paths are of no use elsewhere, and nobody's business: the last name stays."""
    if isinstance(value, Mapping):
        return {key: _without_places(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_places(item) for item in value]
    if isinstance(value, str) and value.startswith(("/", "~")) and len(PurePath(value).parts) > 1:
        return f".../{PurePath(value).name}"
    return value


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.0f}" if value == int(value) and value > 1 else f"{value:.3f}"


def _estimate(found: Json | None) -> str:
    if not found:
        return ""
    ends = found.get("ci95")
    return f"{found['value']:.3f}" + (f" [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else "")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, or None where there is no such file. Raises ValueError, naming it, for anything else."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return found
