"""What it takes to prompt a model folder and to read its responses: everything but the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel_r1.structure.tokens import TagIds

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Vocabulary:
    """The words of a policy. Fields as in `Policy`."""

    tokenizer: PreTrainedTokenizerBase
    tags: TagIds
    eos_ids: tuple[int, ...]
    pad_id: int
    folder: Path

    def decode(self, response_ids: Sequence[int]) -> str:
        """The text of a response: tags kept, end-of-sequence and padding left out."""
        kept = [i for i in response_ids if i not in self.eos_ids and i != self.pad_id]
        return self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token alone, for people: a character that spans tokens shows as replacement characters."""
        distinct = list(dict.fromkeys(ids))
        texts = self.tokenizer.batch_decode(
            [[i] for i in distinct], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        text_of = dict(zip(distinct, texts, strict=True))
        return [text_of[i] for i in ids]


def load_vocabulary(folder: Path, trust_remote_code: bool = False) -> Vocabulary:
    """The vocabulary of a model folder. Raises ValueError if a tag is missing from its tokenizer."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    generation = GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None
    eos = eos_ids(generation, config, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
    return Vocabulary(tokenizer, TagIds.from_tokenizer(tokenizer), eos, pad, Path(folder))


def eos_ids(generation: Any, config: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All ids that end a response, from whichever of the three names one. Raises ValueError when there is none."""
    found: dict[int, None] = {}
    for ids in (getattr(generation, "eos_token_id", None), config.eos_token_id, tokenizer.eos_token_id):
        for i in ids if isinstance(ids, list | tuple) else [ids]:
            if i is not None:
                found[int(i)] = None
    if not found:
        raise ValueError("the model names no end-of-sequence token: set eos_token_id in its config.json")
    return tuple(found)
