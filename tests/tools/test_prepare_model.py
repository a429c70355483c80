"""tools/prepare_model.py on the five kinds of tokenizer there are: right ids, distinct rows, the template attached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import tiny_model
from loading import load_tool
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from parallel_r1.data.prompts import attached_prompt, encode_prompt, load_template, render_prompt
from parallel_r1.structure.grammar import TAGS
from parallel_r1.structure.tokens import TagIds

BOS, EOS = "<s>", "</s>"
CHAT = "{% for m in messages %}U:{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"


tool = load_tool("prepare_model")


def byte_tokenizer(bos: bool = False, chat: bool = False, tags: bool = False) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS, *(TAGS if tags else ())])
    if bos:
        special = [(BOS, tokenizer.token_to_id(BOS))]
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS)
    fast.chat_template = CHAT if chat else None
    return fast


CASES: dict[str, Callable[[], tuple[PreTrainedTokenizerFast, int]]] = {
    "chat template": lambda: (byte_tokenizer(chat=True), 258),
    "no chat template": lambda: (byte_tokenizer(), 258),
    "adds BOS": lambda: (byte_tokenizer(bos=True), 258),
    "holds the tags": lambda: (byte_tokenizer(tags=True), 264),
    "spare rows": lambda: (byte_tokenizer(), 320),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("case", CASES)
def test_right_ids_and_distinct_rows(case: str, tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, rows = CASES[case]()
    model = tiny_model(tied=tied, vocab_size=rows)
    with torch.no_grad():
        for table in tool.embedding_tables(model).values():
            table[258:] = 0.01  # spare rows, and untrained rows of known tags, are all alike
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    out = tmp_path / "out"
    assert tool.main([str(tmp_path / "base"), str(out), "--dtype", "float32"]) == 0

    said = capsys.readouterr().out
    known = case == "holds the tags"
    assert f"{0 if known else 6} new, {6 if known else 0} known; words of the tokenizer {len(tokenizer)} -> 264" in said
    assert f"{rows} -> {max(264, rows)} ({max(264, rows) - rows} added, {rows - len(tokenizer)} were spare)" in said
    assert "'parallel' for seen responses (attached)" in said

    again, policy = AutoTokenizer.from_pretrained(out), AutoModelForCausalLM.from_pretrained(out)
    assert TagIds.from_tokenizer(again).all() == tuple(range(258, 264))
    found = tool.embedding_tables(policy)
    assert list(found) == (["input"] if tied else ["input", "output"])
    for table in found.values():
        assert len(table) == max(264, rows)
        distances = torch.cdist(table[258:264], table[258:264]) + torch.eye(6) * 1e9
        assert distances.min() > 0.05 * table[:258].norm(dim=1).median()

    prompt = attached_prompt(out)
    assert prompt is not None
    assert (prompt.name, prompt.text, prompt.structure) == ("parallel", load_template("parallel"), "seen")
    ids = encode_prompt(again, prompt.text, "1 + 1?")
    text = render_prompt(prompt.text, "1 + 1?")
    expected = {"adds BOS": BOS + text, "chat template": f"U:{text}\nA:"}.get(case, text)
    assert again.decode(ids) == expected
    for tag_id in range(258, 264):  # the instruction names every tag, as one token each
        assert tag_id in ids


def test_a_second_pass_changes_nothing_and_keeps_the_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, rows = CASES["no chat template"]()
    tiny_model(vocab_size=rows).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    arguments = ["--dtype", "float32"]
    assert tool.main([str(tmp_path / "base"), str(tmp_path / "one"), "--prompt", "plain", *arguments]) == 0
    assert tool.main([str(tmp_path / "one"), str(tmp_path / "two"), *arguments]) == 0
    assert "0 new, 6 known" in capsys.readouterr().out
    assert attached_prompt(tmp_path / "two") == attached_prompt(tmp_path / "one")
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["{tmp}/missing", "{tmp}/out"], "no config.json there"),
        (["{tiny}", "{tmp}/out", "--prompt", "paralel"], "'paralel' is neither a file nor one of"),
        (["{tiny}", "{tmp}"], "exists; give another OUT, or --force"),
        (["{tiny}", "{tmp}", "--force"], "is no model folder, so --force does not replace it"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], complaint: str, tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([a.format(tmp=tmp_path, tiny=tiny_model_dir) for a in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert complaint in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()
