"""LoRA: what trains, what the engine is sent, what an export holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import tiny_model, tiny_tokenizer, write_tiny_model
from torch import Tensor

from parallel_r1.lora import Lora, adapters_off
from parallel_r1.policy import Policy, PolicySource, export_policy, load_policy
from parallel_r1.rollout.weights import full_weights

IDS = torch.tensor([[8, 20, 21, 22, 23]])


def adapted(folder: Path, **more) -> Policy:
    """A policy whose adapters have moved away from zero."""
    policy = load_policy(folder, PolicySource(name=str(folder), lora=Lora(r=4, alpha=8.0, **more)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if ".lora_B." in name:
                p.copy_(0.05 * torch.randn(p.shape, generator=generator))
    policy.model.eval()
    return policy


def loaded(weights: dict[str, Tensor], kind: str = "qwen3") -> torch.nn.Module:
    """A bare model that got these weights by name."""
    model = tiny_model(kind)
    own = dict(model.named_parameters(remove_duplicate=False))
    assert own.keys() == weights.keys()
    with torch.no_grad():
        for name, weight in weights.items():
            own[name].copy_(weight)
    return model


@torch.no_grad()
def test_the_merged_stream_is_the_adapted_model(tiny_model_dir: Path) -> None:
    policy = adapted(tiny_model_dir)
    plain = load_policy(tiny_model_dir, PolicySource(name=str(tiny_model_dir))).model.eval()
    assert [name for name, _ in policy.weights()] == [name for name, _ in full_weights(plain)]
    expected = policy.model(IDS).logits
    torch.testing.assert_close(loaded(dict(policy.weights()))(IDS).logits, expected, rtol=1e-4, atol=1e-3)
    assert (plain(IDS).logits - expected).abs().max() > 0.1  # the adapter does something
    with adapters_off(policy.model):
        torch.testing.assert_close(policy.model(IDS).logits, plain(IDS).logits)
    torch.testing.assert_close(policy.model(IDS).logits, expected)


@torch.no_grad()
def test_layers_with_a_bias_merge_too(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "qwen2", "qwen2")
    policy = adapted(folder, target_modules=["q_proj", "v_proj"])
    merged = loaded(dict(policy.weights()), "qwen2")
    torch.testing.assert_close(merged(IDS).logits, policy.model(IDS).logits, rtol=1e-4, atol=1e-3)


def test_only_adapters_train(tiny_model_dir: Path) -> None:
    policy = adapted(tiny_model_dir)
    trained = [name for name, p in policy.model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".lora_" in name for name in trained)
    with adapters_off(policy.model):
        pass
    assert [name for name, p in policy.model.named_parameters() if p.requires_grad] == trained


@torch.no_grad()
def test_an_export_holds_the_merged_model_and_the_adapter(tmp_path: Path, tiny_model_dir: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    policy = adapted(tiny_model_dir)
    expected = policy.model(IDS).logits
    export_policy(policy, tmp_path / "stage" / "model", dict(policy.weights()))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "stage" / "model").eval()
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-4, atol=1e-3)
    base = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    with_adapter = PeftModel.from_pretrained(base, tmp_path / "stage" / "adapter").eval()
    torch.testing.assert_close(with_adapter(IDS).logits, expected, rtol=1e-4, atol=1e-3)
    again = load_policy(tmp_path / "stage" / "model", PolicySource(name=str(tiny_model_dir)))
    assert again.tokenizer.get_vocab() == tiny_tokenizer().get_vocab()


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (Lora(r=0), r"policy\.lora\.r=0"),
        (Lora(alpha=0.0), r"policy\.lora\.alpha=0\.0"),
        (Lora(target_modules=[]), r"policy\.lora\.target_modules is empty"),
    ],
)
def test_what_cannot_work_is_refused_by_name(lora: Lora, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PolicySource(name="org/model", lora=lora).check()


def test_an_unknown_layer_is_refused_by_name(tiny_model_dir: Path) -> None:
    source = PolicySource(name=str(tiny_model_dir), lora=Lora(target_modules=["no_such_layer"]))
    with pytest.raises(ValueError, match=r"policy\.lora\.target_modules=\['no_such_layer'\]"):
        load_policy(tiny_model_dir, source)
