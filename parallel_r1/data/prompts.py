"""Templates around a problem, and the token ids a model is prompted with. Strings and ids only, no torch.

A model answers as it was trained only to the prompt it was trained with, so the template travels inside the model
folder (`parallel_r1.json`): evaluation and prediction then use the right one without being told.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from parallel_r1.structure.grammar import TAGS, Structure

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKER = "{problem}"
WRAPPED = "{#- parallel_r1: the prompt ends here +#}"
"""Where, in the chat template of an exported folder, the tokenizer's own begins (`chat_template`)."""
PROMPT_FILE = "parallel_r1.json"
AUTO = "auto"


@dataclass(frozen=True)
class Prompt:
    """A template and what it was made for, as a model folder keeps it.

    name: of a template that comes with the package, or of the user's file; for people only.
    text: holds `{problem}` once. structure: of the responses that the model learnt to give to it.
    """

    name: str
    text: str
    structure: Structure

    @property
    def names_tags(self) -> bool:
        """Whether the instruction speaks of the control tags."""
        return any(tag in self.text for tag in TAGS)


def named_prompt(name_or_path: str | Path, structure: Structure) -> Prompt:
    """The prompt of a template; raises what `load_template` raises."""
    return Prompt(Path(name_or_path).name, load_template(name_or_path), structure)


def attach_prompt(folder: Path, prompt: Prompt) -> None:
    """Write the prompt into a model folder, in place of the one there."""
    (folder / PROMPT_FILE).write_text(json.dumps({"prompt": asdict(prompt)}, indent=2) + "\n", encoding="utf-8")


def attached_prompt(folder: Path) -> Prompt | None:
    """The prompt that a model folder brings along, or None. Raises ValueError for a file that cannot be read."""
    file = Path(folder) / PROMPT_FILE
    return read_prompt(file) if file.is_file() else None


def read_prompt(file: Path) -> Prompt:
    """The prompt in a `parallel_r1.json`. Raises ValueError, naming the file, for anything else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["prompt"]
        prompt = Prompt(*(found[key] for key in ("name", "text", "structure")))
        if not isinstance(prompt.name, str) or prompt.structure not in get_args(Structure):
            raise ValueError(f"structure is {prompt.structure!r}, name is {prompt.name!r}")
        _split(prompt.text, "its text")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{file}: not a prompt that an export wrote ({type(error).__name__}: {error}); name a template instead "
            f"(generation.prompt), or write {{'prompt': {{'name', 'text', 'structure'}}}} there"
        ) from None
    return prompt


def choose_prompt(name_or_path: str | Path | None, structure: Structure, folder: Path) -> Prompt:
    """The prompt named; for None and `auto` the one that the model folder brings, else the one for the structure.

    A sequential stage, which never samples the tags, never takes an instruction to write them from a folder.
    Raises what `load_template` and `attached_prompt` raise.
    """
    if name_or_path not in (None, AUTO):
        return named_prompt(name_or_path, structure)
    attached = attached_prompt(folder)
    if attached is not None and not (structure == "sequential" and attached.names_tags):
        return Prompt(attached.name, attached.text, structure)
    return named_prompt("sequential" if structure == "sequential" else "parallel", structure)


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
    own = own_template(getattr(tokenizer, "chat_template", None))
    has_chat = own is not None
    if chat and not has_chat:
        raise ValueError("chat is true, but the tokenizer has no chat template; set chat to null or false")
    if has_chat if chat is None else chat:
        message = [{"role": "user", "content": text}]
        chat_text = tokenizer.apply_chat_template(
            message, chat_template=own, tokenize=False, add_generation_prompt=True
        )
        return tuple(tokenizer(chat_text, add_special_tokens=False)["input_ids"])
    ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if adds_bos(tokenizer) and ids[:1] != (tokenizer.bos_token_id,):
        ids = (tokenizer.bos_token_id, *ids)
    return ids


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer puts a beginning-of-sequence token in front by itself."""
    # Asked of its behaviour: attributes such as `add_bos_token` are missing or wrong on some fast tokenizers.
    # Special tokens it would put at the end (an EOS on some) are no part of a prompt and are left out.
    bos = tokenizer.bos_token_id
    return bos is not None and list(tokenizer("a", add_special_tokens=True)["input_ids"][:1]) == [bos]


def own_template(chat_template: str | None) -> str | None:
    """The chat template that a tokenizer had before it was exported with a prompt in it; None for none."""
    if not chat_template or WRAPPED not in chat_template:
        return chat_template or None
    return chat_template.split(WRAPPED, 1)[1] or None


def _split(template: str, what: str) -> tuple[str, str]:
    parts = template.split(MARKER)
    if len(parts) != 2:
        raise ValueError(f"{what} must hold the marker {MARKER} exactly once, and holds it {len(parts) - 1} times")
    return parts[0], parts[1]
