"""Export a model so that it works without this package.

    python tools/export.py runs/quickstart models/quickstart                     the last finished stage of a run
    python tools/export.py runs/quickstart/stages/easy models/easy               a stage, or any model folder
    python tools/export.py runs/x/stages/hard/checkpoints/step-00000012 models/x    a checkpoint inside a stage

OUT holds safetensors, the tokenizer with a chat template that writes the prompt of training, generation_config.json,
parallel_r1.json and README.md, a model card with use, metrics, data and recipe. It loads with transformers and with
`vllm serve`. Exit status: 0, or 2 for what cannot be exported.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel_r1.runs import Found, find_model, generation_settings, run_config


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("source", metavar="SOURCE", type=Path, help="a run, a stage, a checkpoint, or a model folder")
    out.add_argument("out", metavar="OUT", type=Path, help="the folder to write")
    out.add_argument("--name", help="of the model, in its card (default: the name of OUT)")
    out.add_argument(
        "--report", metavar="FILE", type=Path, action="append", help="a report.json to show; may be repeated"
    )
    out.add_argument("--force", action="store_true", help="replace OUT if it is a model folder")
    out.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    return out


def export(options: argparse.Namespace) -> list[str]:
    """Write OUT. Returns what to tell the user. Raises ValueError or FileNotFoundError for a user's mistake."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    from parallel_r1.data.chat_template import with_prompt
    from parallel_r1.data.prompts import PROMPT_FILE, choose_prompt
    from parallel_r1.files import PARTIAL, publish
    from parallel_r1.modules.responder import Generation
    from parallel_r1.policy import is_model_folder
    from parallel_r1.vocabulary import load_vocabulary

    if options.out.exists() and not options.force:
        raise ValueError(f"{options.out} exists; give another OUT, or --force to replace it")
    if options.out.exists() and not is_model_folder(options.out):
        raise ValueError(f"{options.out} is no model folder, so --force does not replace it; give another OUT")
    reports = {str(path): read_report(path) for path in options.report or []}
    draft = options.out.with_name(options.out.name + PARTIAL)
    shutil.rmtree(draft, ignore_errors=True)
    found = write_weights(options, draft)

    settings = generation_settings(found)
    generation = Generation(**settings)
    words = load_vocabulary(found.model, options.trust_remote_code)
    prompt = choose_prompt(generation.prompt, generation.structure, found.model)
    tokenizer = AutoTokenizer.from_pretrained(draft, trust_remote_code=options.trust_remote_code)
    tokenizer.chat_template = with_prompt(tokenizer, prompt.text)
    tokenizer.save_pretrained(draft)
    GenerationConfig(
        do_sample=True,
        temperature=generation.temperature,
        top_p=1.0,
        top_k=0,
        eos_token_id=list(words.eos_ids),
        pad_token_id=words.pad_id,
        bos_token_id=tokenizer.bos_token_id,
        max_new_tokens=generation.max_tokens,
    ).save_pretrained(draft)
    kept = {"prompt": asdict(prompt), "generation": {**asdict(generation), "prompt": "auto"}}
    (draft / PROMPT_FILE).write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    write_card(options, found, draft, asdict(generation), reports)
    AutoConfig.from_pretrained(draft, trust_remote_code=options.trust_remote_code)
    publish(draft, options.out)
    size = sum(path.stat().st_size for path in options.out.glob("*.safetensors"))
    return [
        f"model      {found.model}",
        f"prompt     {prompt.name!r} for {prompt.structure} responses, in the chat template",
        f"written    {options.out} ({size / 1e6:,.1f} MB of weights)",
    ]


def write_weights(options: argparse.Namespace, draft: Path) -> Found:
    """Put the model folder that SOURCE stands for at `draft`. Returns where its settings are to be found."""
    if (options.source / "manifest.json").is_file():
        return write_checkpoint(options.source, draft, options.trust_remote_code)
    found = find_model(options.source)
    shutil.copytree(found.model, draft, ignore=shutil.ignore_patterns("README.md", "*.partial"))
    return found


def write_checkpoint(folder: Path, draft: Path, trust_remote_code: bool) -> Found:
    """The weights of a checkpoint inside a stage, in the shape of the run's other models."""
    from parallel_r1.checkpoint import Checkpoint, damage, load_weights
    from parallel_r1.policy import PolicySource, is_model_folder, load_policy, save_folder

    if (wrong := damage(folder)) is not None:
        raise ValueError(f"{folder} is damaged ({wrong}); take the other checkpoint of the stage")
    stage = folder.absolute().parent.parent
    run = stage.parent.parent
    folders = [run / "base", *sorted(run.glob("stages/*/model"))]
    same = next((path for path in folders if is_model_folder(path)), None)
    config = run_config(run) or {}
    if same is None:
        raise ValueError(
            f"{folder}: the run {run.name} holds no model folder that tells the architecture; finish the stage"
        )
    if (config.get("policy") or {}).get("lora"):
        raise ValueError(
            f"{folder}: it holds adapters alone (policy.lora); finish the stage, whose model has them merged"
        )
    policy = load_policy(same, PolicySource(name=str(same), trust_remote_code=trust_remote_code))
    load_weights(policy.model, Checkpoint(folder).state()["model"])
    dtype = next(policy.model.parameters()).dtype
    weights = {name: tensor.detach().to(dtype) for name, tensor in policy.weights()}
    save_folder(policy.model, policy.tokenizer, weights, draft)
    prompt_file = same / "parallel_r1.json"
    if prompt_file.is_file():
        shutil.copy(prompt_file, draft)
    return Found(same, stage.name, stage, run if (run / "config.yaml").is_file() else None)


def write_card(
    options: argparse.Namespace,
    found: Found,
    draft: Path,
    generation: dict[str, Any],
    reports: dict[str, dict[str, Any]],
) -> None:
    from parallel_r1.model_card import model_card, read_json

    stage = read_json(found.stage / "stage.json") if found.stage else None
    if found.run and not reports:
        report = read_json(found.run / "test" / found.name / "report.json")
        reports = {f"test/{found.name}": report} if report else {}
    if (options.source / "manifest.json").is_file():
        stage, reports = None, {}  # they are of the finished stage, not of this
    config = run_config(found.run) if found.run else None
    places = [str(path) if not path.is_absolute() else path.name for path in (options.source, options.out)]
    command = shlex.join(["python", "tools/export.py", *places])
    name = options.name or options.out.absolute().name
    card = model_card(name, options.out.name, generation, stage, reports, config, command)
    (draft / "README.md").write_text(card, encoding="utf-8")


def read_report(path: Path) -> dict[str, Any]:
    from parallel_r1.model_card import read_json

    report = read_json(path)
    if report is None:
        raise FileNotFoundError(f"--report {path}: there is no such file")
    if "tiers" not in report:
        raise ValueError(f"--report {path}: no report of `test`; give its report.json")
    return report


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        lines = export(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
