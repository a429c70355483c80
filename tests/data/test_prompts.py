"""Templates, and the ids a model is prompted with, on tokenizers that differ in what they add by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parallel_r1.data.prompts import (
    AUTO,
    MARKER,
    PROMPT_FILE,
    Prompt,
    attach_prompt,
    attached_prompt,
    choose_prompt,
    encode_prompt,
    load_template,
    named_prompt,
    render_prompt,
    template_names,
)
from parallel_r1.structure.grammar import TAGS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS = "<s>", "</s>"
CHAT = (
    "{% for m in messages %}<user>{{ m['content'] }}</user>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def byte_tokenizer(
    *, bos: bool = False, adds: str = "", chat: str | None = None, more: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes. adds: what it puts around a text by itself, as in `<s> $A </s>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS, *more])
    if adds:
        special = [(token, tokenizer.token_to_id(token)) for token in (BOS, EOS)]
        tokenizer.post_processor = processors.TemplateProcessing(single=adds, special_tokens=special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS if bos else None, eos_token=EOS)
    fast.chat_template = chat
    return fast


def test_shipped_templates() -> None:
    assert template_names() == ["parallel", "plain", "sequential"]
    assert load_template("plain") == "{problem}\n"
    for name in template_names():
        assert load_template(name).count(MARKER) == 1
    for name in ("parallel", "sequential"):
        assert '"Final Answer: "' in load_template(name)
    assert all(tag in load_template("parallel") for tag in TAGS)
    assert not any(tag in load_template("sequential") for tag in TAGS)


def test_a_template_may_be_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("Q: {problem}\nA:", encoding="utf-8")
    assert load_template(file) == load_template(str(file)) == "Q: {problem}\nA:"


def test_template_errors(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"'paralel' is neither a file nor one of parallel, plain, sequential; "
    ):
        load_template("paralel")
    for text, times in (("no marker", 0), ("{problem} {problem}", 2)):
        (tmp_path / "bad.txt").write_text(text)
        with pytest.raises(ValueError, match=rf"bad\.txt' must hold the marker .* holds it {times} times"):
            load_template(tmp_path / "bad.txt")
        with pytest.raises(ValueError, match="exactly once"):
            render_prompt(text, "x")


def test_a_problem_is_inserted_as_it_stands() -> None:
    problem = r"$\frac{a}{b}$ {problem} {0} %s \1"
    assert render_prompt("a {b} {problem}{c}", problem) == f"a {{b}} {problem}{{c}}"


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_base_models_get_the_bare_prompt() -> None:
    tokenizer = byte_tokenizer()
    ids = encode_prompt(tokenizer, "Q {problem}\n", "{é}")
    assert ids == ids_of(tokenizer, "Q {é}\n")
    assert tokenizer.decode(ids) == "Q {é}\n"
    assert all(type(i) is int for i in ids)


@pytest.mark.parametrize("adds", ["<s> $A", "<s> $A </s>"])
def test_one_bos_and_no_eos_where_the_tokenizer_adds_them(adds: str) -> None:
    tokenizer = byte_tokenizer(bos=True, adds=adds)
    expected = (tokenizer.bos_token_id, *ids_of(tokenizer, "Q x"))
    assert encode_prompt(tokenizer, "Q {problem}", "x") == expected
    assert encode_prompt(tokenizer, "<s>Q {problem}", "x") == expected, "a template that writes its own BOS"


def test_no_bos_where_the_tokenizer_adds_none() -> None:
    for adds in ("", "$A </s>"):
        tokenizer = byte_tokenizer(bos=True, adds=adds)
        assert encode_prompt(tokenizer, "Q {problem}", "x") == ids_of(tokenizer, "Q x")


def test_chat_templates_are_used_when_there_is_one() -> None:
    tokenizer = byte_tokenizer(chat=CHAT)
    chat = ids_of(tokenizer, "<user>Q {x}</user><bot>")
    assert encode_prompt(tokenizer, "Q {problem}", "{x}") == chat
    assert encode_prompt(tokenizer, "Q {problem}", "{x}", chat=True) == chat
    assert encode_prompt(tokenizer, "Q {problem}", "{x}", chat=False) == ids_of(tokenizer, "Q {x}")
    with pytest.raises(ValueError, match="chat is true, but the tokenizer has no chat template"):
        encode_prompt(byte_tokenizer(), "{problem}", "x", chat=True)


@pytest.mark.parametrize("template_bos", [True, False])
def test_a_chat_template_decides_about_bos(template_bos: bool) -> None:
    """The usual trap: the template writes a BOS and the tokenizer adds another one."""
    tokenizer = byte_tokenizer(bos=True, adds="<s> $A", chat="{{ bos_token }}" * template_bos + CHAT)
    ids = encode_prompt(tokenizer, "{problem}", "x")
    assert ids.count(tokenizer.bos_token_id) == int(template_bos)
    encoded = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True)
    assert ids == tuple(encoded["input_ids"])


def test_tags_of_the_instruction_are_single_tokens() -> None:
    tokenizer = byte_tokenizer(more=(*TAGS, "<spare_0>", "<spare_1>"))
    ids = encode_prompt(tokenizer, load_template("parallel"), "x")
    for tag in TAGS:
        assert tokenizer.convert_tokens_to_ids(tag) in ids
    assert tokenizer.decode(ids) == render_prompt(load_template("parallel"), "x")


# --------------------------------------------------------------------------- the prompt that a folder brings along


def test_a_folder_keeps_its_prompt(tmp_path: Path) -> None:
    assert attached_prompt(tmp_path) is None
    for prompt in (named_prompt("parallel", "seen"), Prompt("mine.txt", "é {problem}", "sequential")):
        attach_prompt(tmp_path, prompt)
        assert attached_prompt(tmp_path) == prompt
    assert named_prompt("plain", "unseen") == Prompt("plain", "{problem}\n", "unseen")


def test_a_file_of_the_users_own_is_named_without_its_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("Q: {problem}")
    assert named_prompt(tmp_path / "mine.txt", "seen").name == "mine.txt"


def test_what_is_named_wins_then_the_folder_then_the_structure(tmp_path: Path) -> None:
    assert choose_prompt(None, "seen", tmp_path) == named_prompt("parallel", "seen")
    assert choose_prompt(None, "sequential", tmp_path) == named_prompt("sequential", "sequential")
    attach_prompt(tmp_path, Prompt("mine.txt", "Q: {problem}", "seen"))
    assert choose_prompt(None, "unseen", tmp_path) == Prompt("mine.txt", "Q: {problem}", "unseen")
    assert choose_prompt(None, "sequential", tmp_path) == Prompt("mine.txt", "Q: {problem}", "sequential")
    assert choose_prompt(AUTO, "seen", tmp_path).name == "mine.txt"
    assert choose_prompt("plain", "seen", tmp_path) == named_prompt("plain", "seen")


def test_a_sequential_stage_is_never_told_to_write_tags_by_a_folder(tmp_path: Path) -> None:
    attach_prompt(tmp_path, named_prompt("parallel", "seen"))
    assert choose_prompt(None, "sequential", tmp_path) == named_prompt("sequential", "sequential")
    assert choose_prompt("parallel", "sequential", tmp_path).name == "parallel", "unless the user says so"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"prompt": null}',
        '{"prompt": {"name": "x", "text": "no marker", "structure": "seen"}}',
        '{"prompt": {"name": "x", "text": "{problem}", "structure": "sen"}}',
        '{"prompt": {"name": "x", "text": 3, "structure": "seen"}}',
    ],
)
def test_a_broken_prompt_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / PROMPT_FILE).write_text(content)
    with pytest.raises(ValueError, match=r"parallel_r1\.json: not a prompt that an export wrote .*generation\.prompt"):
        attached_prompt(tmp_path)
