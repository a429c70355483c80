"""Positions and visibility of a response, as a table or JSON and as a picture.

    python tools/show_layout.py --text response.txt --png layout.png
    python tools/show_layout.py --ids 9,2,4,9,5,4,9,9,5,3,6,9,7 --tags 2,3,4,5,6,7

A text is cut into tokens by the tokenizer of `--model`, or, without one, at tags and white space. Exit status: 0, or 2
for an input that cannot be read.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel_r1.structure.grammar import TAGS
from parallel_r1.structure.layout import layout
from parallel_r1.structure.tokens import TagIds, segments

if TYPE_CHECKING:
    from PIL.Image import Image

_MAIN, _SUMMARY, _PROMPT = (90, 90, 90), (40, 130, 60), (170, 170, 170)
_PATHS = ((31, 119, 180), (214, 92, 20), (148, 70, 189), (190, 40, 60), (20, 150, 150), (150, 120, 20))


def words(text: str) -> tuple[list[str], TagIds, list[int]]:
    """A text cut at tags and white space: the words, ids for the tags, and an id for each word."""
    parts = re.split("(" + "|".join(map(re.escape, TAGS)) + ")", text)
    pieces = [piece for part in parts for piece in ([part] if part in TAGS else re.findall(r"\s*\S+|\s+", part))]
    number = {tag: i for i, tag in enumerate(TAGS)}
    ids = [number.setdefault(piece, len(number)) for piece in pieces]
    return pieces, TagIds(*range(len(TAGS))), ids


def read(options: argparse.Namespace) -> tuple[list[str], TagIds, list[int]]:
    """Shown text of each token, the tags' ids, the tokens' ids. Raises ValueError for an input that says too little."""
    if options.ids is not None:
        if options.model is None and options.tags is None:
            raise ValueError("--ids needs --tags or --model: which ids are the six tags?")
        tokenizer = load_tokenizer(options.model) if options.model else None
        tags = TagIds(*options.tags) if options.tags else TagIds.from_tokenizer(tokenizer)
        names = dict(zip(tags.all(), TAGS, strict=True))
        shown = [names.get(i) or (tokenizer.decode([i]) if tokenizer else str(i)) for i in options.ids]
        return shown, tags, options.ids
    text = options.text.read_text(encoding="utf-8")
    if options.model is None:
        return words(text)
    tokenizer = load_tokenizer(options.model)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return [tokenizer.decode([i]) for i in ids], TagIds.from_tokenizer(tokenizer), ids


def load_tokenizer(folder: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """One record a token of the response, and the mask [T, T] as rows of 0 and 1, prompt included."""
    import torch

    from parallel_r1.structure.layout import visibility

    shown, tags, ids = read(options)
    where = layout(options.prompt_length, ids, tags, options.structure, options.positions)
    kinds = [segment.kind for segment in segments(ids, tags) for _ in range(segment.start, segment.end)]
    start = options.prompt_length
    tokens = [
        {
            "index": start + i,
            "position": where.positions[start + i],
            "kind": kind,
            "block": where.block[start + i],
            "path": where.path[start + i],
            "token": token,
        }
        for i, (token, kind) in enumerate(zip(shown, kinds, strict=True))
    ]
    mask = visibility(torch.tensor(where.block), torch.tensor(where.path))
    return {
        "structure": options.structure,
        "positions": options.positions,
        "prompt_length": start,
        "causal": where.is_causal,
        "tokens": tokens,
        "mask": mask.int().tolist(),
    }


def colour(token: dict[str, Any]) -> tuple[int, int, int]:
    if token["kind"] == "path":
        return _PATHS[token["path"] % len(_PATHS)] if token["path"] >= 0 else _MAIN
    return _SUMMARY if token["kind"] == "summary" else _MAIN


def draw(result: dict[str, Any]) -> Image:
    """The mask, a row a query, in the colours of the keys that it sees; above it the position of each token."""
    from PIL import Image, ImageDraw

    mask = result["mask"]
    total = len(mask)
    start = result["prompt_length"]
    colours = [_PROMPT] * start + [colour(token) for token in result["tokens"]]
    positions = list(range(start)) + [token["position"] for token in result["tokens"]]
    cell = max(1, min(16, 1200 // max(1, total)))
    band = max(40, total * cell // 4)
    image = Image.new("RGB", (total * cell, band + total * cell), "white")
    pen = ImageDraw.Draw(image)
    highest = max([1, *positions])
    for key, position in enumerate(positions):
        y = band - 4 - round(position / highest * (band - 8))
        pen.rectangle((key * cell, y, key * cell + cell - 1, band - 3), fill=colours[key])
    gap = 1 if cell > 3 else 0
    for query, row in enumerate(mask):
        top = band + query * cell
        for key, seen in enumerate(row):
            if seen:
                pen.rectangle((key * cell, top, key * cell + cell - 1 - gap, top + cell - 1 - gap), fill=colours[key])
    return image


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.replace(",", " ").split()]


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = out.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, metavar="FILE", help="a response, without its prompt")
    source.add_argument("--ids", type=numbers, metavar="I,J,...", help="the ids of a response")
    add = out.add_argument
    add("--model", metavar="DIR", help="a model folder whose tokenizer holds the six tags")
    add("--tags", type=numbers, metavar="A,B,C,D,E,F", help=f"ids of {' '.join(TAGS)}")
    add("--prompt-length", type=int, default=0, metavar="N", help="tokens of the prompt before it (default: 0)")
    add("--structure", default="unseen", choices=("seen", "unseen", "sequential"), help="default: %(default)s")
    add("--positions", default="longest", choices=("longest", "index"), help="after a block (default: %(default)s)")
    add("--png", type=Path, metavar="FILE", help="draw positions and mask")
    add("--json", action="store_true", help="print JSON, the mask included")
    return out


def table(tokens: Sequence[dict[str, Any]]) -> str:
    rows = [f"{'index':>6} {'pos':>6} {'kind':8} {'block':>5} {'path':>4}  token"]
    for t in tokens:
        block, path = (t[key] if t[key] >= 0 else "" for key in ("block", "path"))
        rows.append(f"{t['index']:>6} {t['position']:>6} {t['kind']:8} {block:>5} {path:>4}  {t['token']!r}")
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.tags is not None and len(options.tags) != len(TAGS):
        parser().error(f"--tags takes {len(TAGS)} ids, in the order {' '.join(TAGS)}")
    try:
        result = describe(options)
        if options.png:
            draw(result).save(options.png)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result) if options.json else table(result["tokens"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
