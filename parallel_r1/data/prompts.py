"""Templates around a problem, and the token ids a model is prompted with. Strings and ids only, no torch."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKER = "{problem}"


def template_names() -> list[str]:
    """The names of the templates that come with the package."""
    folder = resources.files(__package__) / "templates"
    return sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".txt"))


def load_template(name_or_path: str | Path) -> str:
    """The text of a template: one of `template_names()`, or a text file of the user's own.

    Raises FileNotFoundError for neither, ValueError unless the text holds `{problem}` exactly once.
    """
    if str(name_or_path) in template_names():
        text = (resources.files(__package__) / "templates" / f"{name_or_path}.txt").read_text(encoding="utf-8")
    elif Path(name_or_path).expanduser().is_file():
        text = Path(name_or_path).expanduser().read_text(encoding="utf-8")
    else:
        raise FileNotFoundError(
            f"prompt template {str(name_or_path)!r} is neither a file nor one of {', '.join(template_names())}; "
            f"give one of these names or the path of a text file that holds {MARKER} once"
        )
    _split(text, f"prompt template {str(name_or_path)!r}")
    return text


def render_prompt(template: str, problem: str) -> str:
    """The template with its marker replaced by the problem, which may itself hold braces, markers or tags.

    Raises ValueError unless the template holds `{problem}` exactly once.
    """
    head, tail = _split(template, "a prompt template")
    return f"{head}{problem}{tail}"


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, template: str, question: str, chat: bool | None = None
) -> tuple[int, ...]:
    """The prompt as token ids, ready for a response: no padding, no truncation, no end-of-sequence token.

    chat: wrap the prompt as a user message by the tokenizer's chat template; None does so if it has one.
    A chat template writes a beginning-of-sequence token or, by its own choice, none; without a chat template there is
    one exactly if the tokenizer adds one by itself. Never two. Raises ValueError for chat without a chat template.
    """
    text = render_prompt(template, question)
    has_chat = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_chat:
        raise ValueError("chat is true, but the tokenizer has no chat template; set chat to null or false")
    if has_chat if chat is None else chat:
        message = [{"role": "user", "content": text}]
        chat_text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return tuple(tokenizer(chat_text, add_special_tokens=False)["input_ids"])
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if _adds_bos(tokenizer) and ids[:1] != (tokenizer.bos_token_id,):
        ids = (tokenizer.bos_token_id, *ids)
    return ids


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    # Asked of its behaviour: attributes such as `add_bos_token` are missing or wrong on some fast tokenizers.
    # Special tokens it would put at the end (an EOS on some) are no part of a prompt and are left out.
    bos = tokenizer.bos_token_id
    return bos is not None and list(tokenizer("a", add_special_tokens=True)["input_ids"][:1]) == [bos]


def _split(template: str, what: str) -> tuple[str, str]:
    parts = template.split(MARKER)
    if len(parts) != 2:
        raise ValueError(f"{what} must hold the marker {MARKER} exactly once, and holds it {len(parts) - 1} times")
    return parts[0], parts[1]
