"""Weight streams: names, tied copies, wrappers; sharded over two real ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import tiny_model
from torch import nn
from torch.distributed.tensor import DTensor

from parallel_r1.rollout import weights
from parallel_r1.rollout.weights import WeightStream, clean_name, full_weights, parameter_names


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("module.model.norm.weight", "model.norm.weight"),
        ("_orig_mod.model.norm.weight", "model.norm.weight"),
        ("module._orig_mod.lm_head.weight", "lm_head.weight"),
        ("model.layers.1._checkpoint_wrapped_module.mlp.weight", "model.layers.1.mlp.weight"),
        ("model.module.weight", "model.module.weight"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ],
)
def test_names_lose_what_wrappers_added_and_nothing_else(name, clean):
    assert clean_name(name) == clean


def test_tied_weights_come_under_both_names():
    model = tiny_model(tied=True)
    weights = dict(full_weights(model))
    assert set(weights) == {*model.state_dict()} | {"lm_head.weight"}
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    assert not any(weight.requires_grad for weight in weights.values())


def test_untied_weights_are_their_own():
    weights = dict(full_weights(tiny_model(tied=False)))
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_activation_checkpointing_leaves_the_names_alone():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    expected = [name for name, _ in full_weights(tiny_model())]
    model = tiny_model()
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    assert [name for name, _ in full_weights(model)] == expected


def test_a_folder_names_what_its_model_streams(tiny_model_dir, untied_model_dir):
    assert parameter_names(tiny_model_dir) == {name for name, _ in full_weights(tiny_model(tied=True))}
    assert parameter_names(untied_model_dir) == {name for name, _ in full_weights(tiny_model(tied=False))}


def test_missing_weights_are_an_error_that_names_them():
    stream = WeightStream(iter([("a", torch.ones(1))]))
    assert list(stream) == [("a", torch.ones(1))]
    stream.check(["a"])
    with pytest.raises(RuntimeError, match=r"left out 2 weights \(b, c"):
        stream.check(["c", "a", "b"])


def test_a_source_that_fails_ends_the_stream_and_raises_afterwards():
    def broken():
        yield "a", torch.ones(1)
        raise OSError("a rank is gone")

    stream = WeightStream(broken())
    assert len(list(stream)) == 1
    with pytest.raises(OSError, match="a rank is gone"):
        stream.check(["a"])


def test_ddp_and_fsdp2_stream_what_the_plain_model_streams(tmp_path: Path):
    """On one rank; the integration tests shard over two."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        expected = dict(full_weights(tiny_model()))
        _assert_same(dict(full_weights(DistributedDataParallel(tiny_model()))), expected)
        sharded = fully_shard(tiny_model())
        assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
        _assert_same(dict(full_weights(sharded)), expected)
    finally:
        dist.destroy_process_group()


def _assert_same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(weights) == list(expected)
    assert not any(isinstance(weight, DTensor) for weight in weights.values())
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name


def test_no_tensor_outlives_its_turn():
    """A gathered tensor is gone before the next one is made: the extra memory is that of the largest parameter."""
    live: set[int] = set()
    most = []

    class Whole(torch.Tensor):
        def __del__(self):
            live.discard(id(self))

    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(12))

    def gathered(parameter):
        most.append(len(live))
        tensor = parameter.detach().clone().as_subclass(Whole)
        live.add(id(tensor))
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_full", gathered)
        stream = iter(weights.WeightStream(weights.full_weights(model)))
        names = []
        while (pair := next(stream, None)) is not None:
            names.append(pair[0])
            del pair
    assert len(names) == 12
    assert most == [0] * 12
