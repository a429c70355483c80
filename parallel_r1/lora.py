"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft, injected into the model in place.

The model stays the Hugging Face class it was. Whoever reads its weights (engine, export) gets them merged, that is
W + (alpha / r) B A under W's own name, one tensor at a time; nobody but the trainer knows that there is an adapter.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

_NAME = "default"  # peft's own name for the first adapter
_BASE, _A, _B = ".base_layer.", f".lora_A.{_NAME}.", f".lora_B.{_NAME}."


@dataclass
class Lora:
    """Train low-rank adapters instead of all weights. Embeddings, those of the tags included, stay as they are.

    Args:
        r: rank of the adapters.
        alpha: their output is scaled by alpha / r.
        target_modules: names of the linear layers that get one; `all-linear` for all but the output embedding.
    """

    r: int = 16
    alpha: float = 32.0
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])

    def check(self) -> None:
        """Raise ValueError for settings that cannot work, or when peft is not installed."""
        from importlib.util import find_spec

        if self.r < 1:
            raise ValueError(f"policy.lora.r={self.r}: the rank of an adapter is 1 or more (16 is usual)")
        if not self.alpha > 0:
            raise ValueError(f"policy.lora.alpha={self.alpha}: the adapter's output is scaled by alpha / r; give > 0")
        if not self.target_modules:
            raise ValueError("policy.lora.target_modules is empty: name the layers to adapt, or all-linear")
        if find_spec("peft") is None:
            raise ValueError(
                "policy.lora needs the package peft, which is not installed: install it or unset policy.lora"
            )


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Freeze the model and give its target modules adapters that start as zero. Raises ValueError if none is found."""
    from peft import LoraConfig, inject_adapter_in_model

    targets = "all-linear" if lora.target_modules == ["all-linear"] else lora.target_modules
    config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=targets, task_type="CAUSAL_LM")
    model.requires_grad_(False)
    try:
        inject_adapter_in_model(config, model, adapter_name=_NAME)
    except ValueError as error:
        raise ValueError(f"policy.lora.target_modules={lora.target_modules}: {error}") from error


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return _A in name or _B in name


def merged(weights: Iterable[tuple[str, Tensor]], scaling: float) -> Iterator[tuple[str, Tensor]]:
    """A stream of (name, full tensor) with adapters, as one of the merged weights under the names of the bare model.

    Relies on the order of `named_parameters`: a layer's weight, its A, its B. One merged tensor lives at a time.
    """
    waiting: tuple[str, Tensor] | None = None
    down: Tensor | None = None
    for name, tensor in weights:
        if _A in name:
            down = tensor
        elif _B in name:
            assert waiting is not None, f"{name} does not follow its layer's weight"
            assert down is not None, f"{name} does not follow its layer's A"
            # in float32: in bfloat16 a small delta would round away
            delta = scaling * (tensor.float() @ down.float())
            yield waiting[0], (waiting[1].float() + delta).to(waiting[1].dtype)
            waiting = down = None
        elif name.endswith(_BASE + "weight"):
            assert waiting is None, f"{name} came before the adapter of {waiting and waiting[0]}"
            waiting = name.replace(_BASE, "."), tensor
        else:
            # a bias of an adapted layer stands between its weight and its A
            yield name.replace(_BASE, "."), tensor
    assert waiting is None, f"{waiting and waiting[0]} has no adapter"


def recorded(weights: Iterable[tuple[str, Tensor]], kept: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Pass a stream on, keeping copies of the adapter's tensors in `kept`."""
    for name, tensor in weights:
        if is_adapter(name):
            kept[name] = tensor.detach().cpu().clone()
        yield name, tensor
        del tensor


def save_adapter(tensors: dict[str, Tensor], lora: Lora, base: Path, folder: Path) -> None:
    """Write an adapter as peft's `PeftModel.from_pretrained(base model, folder)` reads it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    named = {f"base_model.model.{n.replace(f'.{_NAME}.', '.')}": t.contiguous() for n, t in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = sorted({n.split(_A)[0].rsplit(".", 1)[-1] for n in tensors if _A in n})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "target_modules": targets,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before its adapters: the policy a stage started from."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
