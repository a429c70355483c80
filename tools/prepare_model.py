"""Make a base model ready for parallel thinking: `python tools/prepare_model.py MODEL OUT [--prompt parallel]`.

MODEL is a hub id or a local model folder; OUT becomes a Hugging Face folder whose tokenizer holds the six control tags,
one token each, with embeddings that differ from each other, and whose `parallel_r1.json` holds the prompt template. The
report says what changed. Exit status: 0, or 2 for a model or template that cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from parallel_r1.structure.grammar import TAGS, Structure

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TagRow:
    """One tag in one embedding table.

    typical: norm / median norm of the table's other rows; nearest: the largest cosine with another tag's row.
    """

    tag: str
    id: int
    new: bool
    norm: float
    typical: float
    nearest: float


def embedding_tables(model: nn.Module) -> dict[str, Tensor]:
    """The input embedding [V, D] and, where it is another tensor, the output embedding [V, D], by name."""
    found = {"input": model.get_input_embeddings().weight.detach()}
    head = model.get_output_embeddings()
    if head is not None and head.weight is not model.get_input_embeddings().weight:
        found["output"] = head.weight.detach()
    return found


def tag_rows(table: Tensor, tokenizer: PreTrainedTokenizerBase, new: list[str]) -> list[TagRow]:
    """What became of the rows of the tags in a table [V, D]."""
    import torch

    ids = tokenizer.convert_tokens_to_ids(list(TAGS))
    rows = table[ids].float()
    others = torch.ones(len(table), dtype=torch.bool)
    others[ids] = False
    median = float(table[others].float().norm(dim=1).median())
    unit = torch.nn.functional.normalize(rows, dim=1)
    cosines = (unit @ unit.T).fill_diagonal_(-1.0)
    return [
        TagRow(tag, i, tag in new, float(row.norm()), float(row.norm()) / median if median else 0.0, float(c.max()))
        for tag, i, row, c in zip(TAGS, ids, rows, cosines, strict=True)
    ]


def table_lines(name: str, rows: list[TagRow]) -> list[str]:
    """The report of one table, a line a tag."""
    lines = [f"{name} embedding    id  token  norm (of the median row)  largest cosine with another tag"]
    for row in rows:
        kind = "new" if row.new else "known"
        norm = f"{row.norm:8.4f} ({row.typical:4.2f})"
        lines.append(f"  {row.tag:<12} {row.id:>8}  {kind:<5}  {norm}  {row.nearest:8.4f}")
    return lines


def prepare(options: argparse.Namespace) -> list[str]:
    """Do it. Returns the report, line by line; raises ValueError or FileNotFoundError for a user's mistake."""
    from parallel_r1.data.prompts import Prompt, named_prompt
    from parallel_r1.policy import PolicySource, add_tags, eos_ids_of, is_model_folder, save_folder

    # a mistake in the template is found before a model is loaded
    named = named_prompt(options.prompt or default_prompt(options.structure), options.structure)
    if options.out.exists() and not options.force:
        raise ValueError(f"{options.out} exists; give another OUT, or --force to replace it")
    if options.out.exists() and not is_model_folder(options.out):
        raise ValueError(f"{options.out} is no model folder, so --force does not replace it; give another OUT")
    source = PolicySource(name=options.model, dtype=options.dtype, trust_remote_code=options.trust_remote_code)
    model, tokenizer, attached = source.load(seed=0)
    keeps = attached is not None and options.prompt is None
    prompt: Prompt = attached if keeps else named
    words, rows = len(tokenizer), model.get_input_embeddings().weight.shape[0]
    new = add_tags(model, tokenizer)
    eos = eos_ids_of(model, tokenizer)
    save_folder(model, tokenizer, dict(model.state_dict()), options.out, prompt)

    rows_now = model.get_input_embeddings().weight.shape[0]
    lines = [
        f"tags       {len(new)} new, {len(TAGS) - len(new)} known; words of the tokenizer {words} -> {len(tokenizer)}",
        f"rows       {rows} -> {rows_now} ({rows_now - rows} added, {max(0, rows - words)} were spare)",
        f"ends       {', '.join(f'{i} {tokenizer.convert_ids_to_tokens(i)!r}' for i in eos)}",
        f"prompt     {prompt.name!r} for {prompt.structure} responses ({'kept from MODEL' if keeps else 'attached'}); "
        + ("inside the tokenizer's chat template" if tokenizer.chat_template else "no chat template: as plain text"),
    ]
    for name, table in embedding_tables(model).items():
        lines += table_lines(name, tag_rows(table, tokenizer, new))
    return [*lines, f"written    {options.out} ({options.dtype})"]


def default_prompt(structure: Structure) -> str:
    return "sequential" if structure == "sequential" else "parallel"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a hub id or a local model folder")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write")
    parser.add_argument(
        "--prompt",
        help="parallel, sequential, plain, or a text file with one {problem} (default: MODEL's own, else by structure)",
    )
    parser.add_argument("--structure", choices=get_args(Structure), default="seen", help="default: %(default)s")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="default: %(default)s"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with MODEL")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        lines = prepare(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}".replace("policy.name=", "MODEL "), file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
