"""tools/export.py: the prompt travels in the chat template, settings and card come along, weights are the same bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from loading import load_tool
from test_prepare_model import CASES, CHAT
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from parallel_r1.data.chat_template import with_prompt
from parallel_r1.data.prompts import attach_prompt, encode_prompt, named_prompt, own_template
from parallel_r1.policy import PolicySource
from parallel_r1.runs import find_model, fingerprint, generation_settings
from parallel_r1.tiny import TinyQwen3

tool = load_tool("export")
TEMPLATES = ["{problem}", 'A "quoted" \\ {{ brace }} {% tag %}\n{problem}\nπ 😀 }} \'', "  {problem}\n\n"]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("case", CASES)
def test_the_chat_template_gives_the_ids_of_training(case: str, template: str) -> None:
    tokenizer, _ = CASES[case]()
    before = tokenizer.chat_template
    questions = ["1 + 1?", "a\n{{ b }} {% c %} <Path>", "  spaces  ", "π 😀"]
    wanted = [list(encode_prompt(tokenizer, template, q)) for q in questions]
    tokenizer.chat_template = with_prompt(tokenizer, template)
    for question, ids in zip(questions, wanted, strict=True):
        message = [{"role": "user", "content": question}]
        assert tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False) == ids
        assert list(encode_prompt(tokenizer, template, question)) == ids, "here the export is what it was exported from"
    assert own_template(tokenizer.chat_template) == before
    once = tokenizer.chat_template
    assert with_prompt(tokenizer, template) == once, "an export of an export is the same"


def test_white_space_of_an_own_template_stays() -> None:
    tokenizer, _ = CASES["chat template"]()
    tokenizer.chat_template = f"\n  \n{CHAT}"
    wanted = list(encode_prompt(tokenizer, "P {problem}", "q"))
    tokenizer.chat_template = with_prompt(tokenizer, "P {problem}")
    assert list(encode_prompt(tokenizer, "P {problem}", "q")) == wanted


@pytest.mark.parametrize(
    "messages", [[("user", "u"), ("user", "v")], [("system", "s"), ("user", "u")], [("assistant", "a")]]
)
def test_conversations_it_was_not_trained_to_are_refused(messages: list[tuple[str, str]]) -> None:
    tokenizer, _ = CASES["no chat template"]()
    tokenizer.chat_template = with_prompt(tokenizer, "{problem}")
    with pytest.raises(Exception, match="one message of the role user"):
        tokenizer.apply_chat_template([{"role": r, "content": c} for r, c in messages], tokenize=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a finished stage leaves."""
    root = tmp_path_factory.mktemp("run")
    stage = root / "stages" / "hard"
    PolicySource(init=TinyQwen3()).prepare(stage / "model", seed=0)
    attach_prompt(stage / "model", named_prompt("parallel", "seen"))
    after = {"easy/accuracy": 0.5, "easy/accuracy_ci95": 0.1, "easy/n": 32.0}
    record = {"name": "hard", "module": "RLModule", "steps": 3, "wall_s": 1.0, "before": {}, "after": after}
    (stage / "stage.json").write_text(json.dumps(record))
    generation = "{structure: seen, prompt: plain, max_tokens: 33, temperature: 0.8, paths: 3}"
    data = "{class_path: parallel_r1.data.datamodules.GSM8K, init_args: {path: /mnt/someone/gsm8k/train.jsonl}}"
    (root / "config.yaml").write_text(
        f"curriculum:\n  root: {root}\n  stages:\n    hard:\n      module: {{class_path: m.RLModule, "
        f"init_args: {{generation: {generation}}}}}\n      data: {data}\n      trainer: {{max_steps: 3}}\n"
    )
    return root


def test_a_run_a_stage_and_a_folder_give_the_same_weights(run: Path, tmp_path: Path) -> None:
    for name, source in {"a": run, "b": run / "stages" / "hard", "c": run / "stages" / "hard" / "model"}.items():
        assert tool.main([str(source), str(tmp_path / name)]) == 0
        mine = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        other = AutoModelForCausalLM.from_pretrained(run / "stages" / "hard" / "model").state_dict()
        assert all(torch.equal(mine[key], other[key]) for key in other)
        assert "0.500" in (tmp_path / name / "README.md").read_text()


def test_settings_and_card(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert tool.main([str(run), str(out)]) == 0
    config = GenerationConfig.from_pretrained(out)
    assert (config.do_sample, config.temperature, config.max_new_tokens, config.top_k) == (True, 0.8, 33, 0)
    tokenizer = AutoTokenizer.from_pretrained(out)
    message = [{"role": "user", "content": "q"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "q\n", "the prompt that the stage named"
    kept = generation_settings(find_model(out))
    assert (kept["paths"], kept["max_tokens"], kept["prompt"]) == (3, 33, "auto")
    card = (out / "README.md").read_text()
    for part in ("vllm serve out", "| easy | 0.500 |", "GSM8K", "train.jsonl", "temperature 0.8"):
        assert part in card
    for private in (str(run), "/mnt/someone"):
        assert private not in "".join(p.read_text() for p in out.iterdir() if p.suffix in (".md", ".json", ".jinja"))


def test_nothing_is_replaced_unasked(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("x")
    for more in ([], ["--force"]):
        assert tool.main([str(run), str(out), *more]) == 2
        assert capsys.readouterr().err.startswith("error: ")
    assert (out / "thesis.txt").is_file()
    shutil.rmtree(out)
    assert tool.main([str(run), str(out)]) == 0
    assert tool.main([str(run), str(out)]) == 2
    assert tool.main([str(run), str(out), "--force"]) == 0


def test_what_holds_no_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for source, part in ((tmp_path / "nowhere", "there is no folder"), (tmp_path, "neither a run")):
        assert tool.main([str(source), str(tmp_path / "out")]) == 2
        assert part in capsys.readouterr().err
    (tmp_path / "stages" / "hard").mkdir(parents=True)
    assert tool.main([str(tmp_path), str(tmp_path / "out")]) == 2
    assert "no stage of this run is finished" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_fingerprints_tell_models_apart_and_copies_not(run: Path, tmp_path: Path) -> None:
    model = run / "stages" / "hard" / "model"
    shutil.copytree(model, tmp_path / "copy")
    assert fingerprint(tmp_path / "copy") == fingerprint(model)
    PolicySource(init=TinyQwen3()).prepare(tmp_path / "other", seed=1)
    attach_prompt(tmp_path / "other", named_prompt("parallel", "seen"))
    assert fingerprint(tmp_path / "other") != fingerprint(model)
