"""Models, clocks and processes that all measurements share."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Size of a Qwen3."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


TINY = Shape(4, 128, 384, 4, 4, 32)


def random_qwen3(
    folder: Path, shape: Shape, vocabulary: int, *, context: int = 8192, end_rate: float | None = None
) -> None:
    """Write a random Qwen3 whose words are `w8`, `w9`, ... after <pad>, <eos> and the six tags.

    end_rate: the probability of <eos> at every token, about: responses then have geometric lengths. The first dimension
    of every embedding is made constant, and the output row of <eos> reads it.
    """
    import math

    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    from parallel_r1.structure.grammar import TAGS

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=context,
        tie_word_embeddings=end_rate is None,
        eos_token_id=1,
        pad_token_id=0,
    )
    words = ["<pad>", "<eos>", *TAGS, *(f"w{i}" for i in range(8, vocabulary))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model = Qwen3ForCausalLM(config)
    if end_rate is not None:
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = 10.0  # so large that every hidden state points there
            hidden = math.sqrt(shape.hidden)  # its first entry after the last norm
            model.lm_head.weight[:, 0] = 0.0
            model.lm_head.weight[1, 0] = math.log(end_rate * vocabulary) / hidden
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)


def resident_bytes() -> int:
    """Memory of this process now; where the system does not say, its peak so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_bytes()


def peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass
class Clock:
    """CPU-seconds (of all threads of this process) and wall seconds, by phase."""

    cpu: dict[str, float] = field(default_factory=dict)
    wall: dict[str, float] = field(default_factory=dict)

    def timed(self, phase: str, function: Callable) -> Callable:
        """The function, its time added to a phase."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            cpu, wall = time.process_time(), time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.cpu[phase] = self.cpu.get(phase, 0.0) + time.process_time() - cpu
                self.wall[phase] = self.wall.get(phase, 0.0) + time.perf_counter() - wall

        return run

    def reset(self) -> None:
        self.cpu.clear()
        self.wall.clear()


def run_child(script: Path, args: Sequence[str], name: str) -> dict[str, Any]:
    """One measurement in a process of its own: its last line is a JSON object."""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    command = [sys.executable, str(script), *args]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed with status {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def alternate(names: Sequence[str], repeats: int, run: Callable[[str], dict[str, Any]]) -> dict[str, list[dict]]:
    """A B A B ...: what makes the machine slow hurts all alike."""
    runs: dict[str, list[dict]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            runs[name].append(run(name))
    return runs


def medians(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: median(run[key] for run in runs) for key in runs[0]}
