"""The prompt of a model as a chat template, for programs that know nothing of `parallel_r1.json`.

    [wrap the user's message in the prompt] WRAPPED [the tokenizer's own template, where it had one]

`prompts.own_template` undoes it, so that an exported folder behaves here as the folder it was exported from.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from parallel_r1.data.prompts import MARKER, WRAPPED, adds_bos, encode_prompt, own_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The response was trained to one message. More are refused: leaving some out silently would answer another question.
_ONE_MESSAGE = (
    "{%- if messages | length != 1 or messages[0]['role'] != 'user' -%}"
    "{{ raise_exception('this model answers one message of the role user') }}"
    "{%- endif -%}"
)


def with_prompt(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """A chat template that gives, for one user message, the prompt ids of `encode_prompt`.

    template: holds `{problem}` once. Raises ValueError where the ids differ on a trial, which no known tokenizer does.
    """
    before, after = (json.dumps(part, ensure_ascii=False) for part in template.split(MARKER))
    text = f"{before} ~ messages[0]['content'] ~ {after}"
    own = own_template(tokenizer.chat_template)
    if own is None:
        bos = "bos_token ~ " if adds_bos(tokenizer) else ""
        chat = f"{_ONE_MESSAGE}{{{{- {bos}{text} -}}}}{WRAPPED}"
    else:
        chat = f"{_ONE_MESSAGE}{{%- set messages = [{{'role': 'user', 'content': {text}}}] -%}}{WRAPPED}{own}"
    for question in ("What is 1 + 1?", " {{ braces }} <Path>\n"):
        wanted = list(encode_prompt(tokenizer, template, question))
        message = [{"role": "user", "content": question}]
        shown = tokenizer.apply_chat_template(message, chat_template=chat, tokenize=False, add_generation_prompt=True)
        if (found := tokenizer(shown, add_special_tokens=False)["input_ids"]) != wanted:
            raise ValueError(f"the chat template gives the prompt ids {found[:20]}..., training used {wanted[:20]}...")
    return chat
