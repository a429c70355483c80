"""What a Hugging Face model folder says about its model, read without loading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Keys that name the past of a folder or of its tokenizer: none changes a single tensor or kernel.
_VOLATILE = (
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def read_config(model_dir: Path) -> dict[str, Any]:
    """The parsed `config.json`; ValueError naming the folder when there is none."""
    path = Path(model_dir) / "config.json"
    if not path.is_file():
        raise ValueError(f"{model_dir} is no model folder: it has no config.json")
    return json.loads(path.read_text())


def named_config(name: str, trust_remote_code: bool = False) -> dict[str, Any]:
    """The same of a local folder or a model on the hub; ValueError where it cannot be read."""
    from transformers import AutoConfig

    local = Path(name).expanduser()
    if (local / "config.json").is_file():
        return read_config(local)
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code).to_dict()
    except (OSError, ValueError) as error:
        raise ValueError(f"policy.name={name!r} could not be loaded: {error}") from error


def architecture(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that decides shapes and semantics: equal for two folders that one engine can serve."""
    return {key: value for key, value in config.items() if key not in _VOLATILE}


def stored_dtype(config: dict[str, Any]) -> str:
    """The dtype the folder was saved in, such as "float32"; "float32" when it does not say."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def has_weights(model_dir: Path) -> bool:
    """Whether the folder holds weight files, or the architecture alone."""
    return any(next(Path(model_dir).glob(pattern), None) for pattern in ("*.safetensors", "pytorch_model*.bin"))
