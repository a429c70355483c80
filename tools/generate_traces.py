"""Cold-start traces: ask a teacher for k candidates a problem, keep what is well formed and right.

  with a server:   generate_traces.py OUT --problems FILE --source gsm8k --model NAME --base-url http://HOST/v1
  in this process: generate_traces.py OUT --problems FILE --source gsm8k --model FOLDER
  from a run:      generate_traces.py OUT --from-rollouts FILE_OR_FOLDER [--problems FILE --source gsm8k]

OUT becomes a folder:
  raw.jsonl          every candidate; a run that ended early, or was killed, goes on from it and repeats none
  train.jsonl        the traces in the columns of Parallel-GSM8K, for the DataModule ParallelGSM8K with `path: OUT`
  yield.json         how many candidates were kept, and why the others were not
  solve_rates.jsonl  how often each problem was solved, for the DataModules' `solve_rate_file`

Exit status: 0; 1 where the teacher could not go on (start the command again); 2 for a user's mistake.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from parallel_r1.data import sources
from parallel_r1.data.prompts import choose_prompt
from parallel_r1.data.reading import read_rows
from parallel_r1.reward.grading import grade
from parallel_r1.traces.endpoint import Endpoint, EndpointTeacher
from parallel_r1.traces.pipeline import RAW, TRACES, by_problem, fingerprint, generate, write_results
from parallel_r1.traces.rollouts import read_rollouts
from parallel_r1.traces.selection import Rules, Selection, select
from parallel_r1.traces.store import CandidateFile
from parallel_r1.traces.teachers import EngineTeacher, Teacher, TeacherError
from parallel_r1.types import Problem

SOURCES = {
    "gsm8k": sources.gsm8k,
    "math": sources.math,
    "dapo": sources.dapo,
    "benchmark": sources.benchmark,
    "columns": None,
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read_problems(options: argparse.Namespace) -> list[Problem]:
    """The distinct problems with a gold answer. Raises ValueError or FileNotFoundError for a file that has none."""
    adapter = SOURCES[options.source] or sources.columns(options.problem_column, options.answer_column)
    problems, report = sources.collect(
        f"{options.source} {options.split} ({options.problems})",
        read_rows(options.problems, options.split, options.hub_config),
        adapter,
        options.source,
        lambda problem: "no gold answer" if problem.answer == sources.UNKNOWN else None,
        options.max_prompt_chars,
    )
    say(str(report))
    if not problems:
        raise ValueError(f"--problems {options.problems}: no problem is left; see the line above")
    return list(islice(problems, options.limit))


def make_teacher(options: argparse.Namespace) -> tuple[Teacher, dict[str, Any]]:
    """The teacher, and all that decides what it writes. Loads nothing and asks nobody yet."""
    local = None if options.base_url else local_folder(options.model)
    prompt = choose_prompt(options.prompt, "seen", local or Path())
    sampling = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    settings = {"model": options.model, "prompt": prompt.text, "seed": options.seed, **sampling}
    if local is None:
        endpoint = Endpoint(
            options.base_url,
            options.model,
            options.api,
            os.environ.get(options.api_key_env) or None,
            options.extra,
            options.timeout,
            options.tries,
        )
        teacher = EndpointTeacher(endpoint, prompt.text, concurrency=options.concurrency, **sampling)
        return teacher, {**settings, "api": options.api, "extra": options.extra}
    from parallel_r1.rollout.vllm_engine import VLLMEngine

    engine = VLLMEngine(max_model_len=options.max_model_len, gpu_memory_utilization=0.9)
    teacher = EngineTeacher(engine, local, prompt.text, batch=options.batch, **sampling)
    return teacher, {**settings, "api": "engine", "weights": fingerprint(local)}


def local_folder(model: str) -> Path:
    """The folder of a local model, or of the copy of one from the hub."""
    folder = Path(model).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.exists() or model.startswith((".", "/", "~")):
        raise ValueError(f"--model {model}: no config.json there; give a model folder, a hub id, or a --base-url")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, ignore_patterns=["*.bin", "*.pth", "*.gguf", "original/*"]))
    except Exception as error:  # the hub client raises dozens of types, all meaning: no such model here
        cause = str(error).strip().split("\n")[0]
        raise ValueError(f"--model {model}: neither a folder nor to be had from the hub ({cause})") from None


def from_teacher(options: argparse.Namespace, rules: Rules) -> Selection:
    problems = read_problems(options)
    teacher, settings = make_teacher(options)
    with CandidateFile(options.out / RAW, settings) as file:
        if file.dropped:
            say(f"{file.path}: dropped a torn last line of {file.dropped} bytes")
        refused = generate(file, teacher, problems, options.candidates, options.seed, say)
        selection = select(problems, by_problem(file, options.candidates), rules, grade)
        write_results(options.out, selection, refused, settings, asdict(rules))
    for cause, count in refused.most_common():
        say(f"{count:,} candidates were refused by the teacher, and are asked for again next time: {cause}")
    return selection


def from_rollouts(options: argparse.Namespace, rules: Rules) -> Selection:
    problems = read_problems(options) if options.problems else []
    found, candidates = read_rollouts(options.from_rollouts, problems)
    selection = select(found, candidates, rules, grade)
    write_results(options.out, selection, {}, {"rollouts": options.from_rollouts}, asdict(rules))
    return selection


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, least = parser.add_argument, at_least
    add("out", metavar="OUT", type=Path, help="the folder to write to, or to go on with")
    add(
        "--from-rollouts",
        metavar="PATH",
        help="rows {question, response, answer?, finished?, reward?}, or the `rollouts` folder of a stage; asks no "
        "teacher",
    )

    group = parser.add_argument_group("problems")
    add = group.add_argument
    add("--problems", metavar="PATH", help="a local file or folder, or a hub id")
    add("--source", choices=SOURCES, default="columns", help="whose columns it has (default: %(default)s, named below)")
    add("--problem-column", default="problem", help="default: %(default)s")
    add("--answer-column", default="answer", help="default: %(default)s")
    add("--split", choices=("train", "test"), default="train", help="of a folder or hub id (default: %(default)s)")
    add("--hub-config", help="configuration of a hub id that has several (GSM8K: main)")
    add("--limit", type=least(1), help="the first problems only")
    add("--max-prompt-chars", type=least(1), help="leave longer questions out")

    group = parser.add_argument_group("teacher")
    add = group.add_argument
    add("--model", help="a model folder or hub id; with --base-url, the name that the server knows it by")
    add("--base-url", help="an OpenAI-compatible server, up to and with /v1")
    add("--api", choices=("chat", "completions"), default="chat", help="default: %(default)s")
    add("--api-key-env", default="OPENAI_API_KEY", metavar="VAR", help="where the key stands (default: %(default)s)")
    add(
        "--extra",
        type=fields,
        default={},
        metavar="JSON",
        help="more fields of each request; a vLLM server of a model with tags needs '{\"skip_special_tokens\": false}'",
    )
    add("--prompt", help="parallel, plain, or a text file with one {problem} (default: the model's own, else parallel)")
    add("-k", "--candidates", type=least(1), default=4, help="a problem (default: %(default)s)")
    add("--max-tokens", type=least(1), default=2048, help="of a candidate (default: %(default)s)")
    add("--temperature", type=float, default=1.0, help="default: %(default)s")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--concurrency", type=least(1), default=16, help="requests to the server at once (default: %(default)s)")
    add("--timeout", type=float, default=600.0, help="seconds for a request (default: %(default)g)")
    add("--tries", type=least(1), default=6, help="for a request that fails (default: %(default)s)")
    add("--batch", type=least(1), default=256, help="candidates a call, in this process (default: %(default)s)")
    add("--max-model-len", type=least(1), help="context of the engine in this process, in tokens")

    group = parser.add_argument_group("what is kept")
    add = group.add_argument
    add("--per-problem", type=least(0), default=1, help="traces of a problem at most; 0: all (default: %(default)s)")
    add("--blocks", type=least(0), default=1, help="least number of blocks in a trace (default: %(default)s)")
    add(
        "--white-space",
        choices=("canonical", "keep"),
        help="around the tags: one kind, or as sampled (default: canonical; with --from-rollouts, keep)",
    )
    options = parser.parse_args(arguments)
    if not options.from_rollouts and not (options.problems and options.model):
        parser.error("give --problems and --model, or --from-rollouts")
    if not options.from_rollouts and options.temperature < 0:
        parser.error(f"--temperature {options.temperature}: give 0 or more")
    return options


def at_least(least: int):
    def number(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of {least} or more")
        return int(text)

    return number


def fields(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object; give one such as '{{\"top_p\": 0.95}}'")
    return value


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    white_space = options.white_space or ("keep" if options.from_rollouts else "canonical")
    rules = Rules(options.per_problem or None, options.blocks, white_space == "canonical")
    try:
        selection = (from_rollouts if options.from_rollouts else from_teacher)(options, rules)
    except TeacherError as error:
        say(f"error: {error}\nwhat was written is kept: start the same command again to go on")
        return 1
    except (ValueError, OSError) as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted; what was written is kept: start the same command again to go on")
        sys.stderr.flush()
        os._exit(130)  # requests that are under way would be waited for
    print("\n".join(selection.lines()))
    print(f"{options.out / TRACES}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
