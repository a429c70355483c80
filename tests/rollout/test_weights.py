"""Weight streams: names, tied copies, wrappers; sharded over two real ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from conftest import tiny_model

from parallel_r1.rollout.weights import clean_name, full_weights, parameter_names, recorded, require_names


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


def test_activation_checkpointing_and_compile_leave_the_names_alone():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    expected = [name for name, _ in full_weights(tiny_model())]
    model = tiny_model()
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    assert [name for name, _ in full_weights(torch.compile(model))] == expected


def test_a_folder_names_what_its_model_streams(tiny_model_dir, untied_model_dir):
    assert parameter_names(tiny_model_dir) == {name for name, _ in full_weights(tiny_model(tied=True))}
    assert parameter_names(untied_model_dir) == {name for name, _ in full_weights(tiny_model(tied=False))}


def test_missing_weights_are_an_error_that_names_them():
    seen: set[str] = set()
    assert list(recorded([("a", torch.ones(1))], seen)) == [("a", torch.ones(1))]
    require_names(["a"], seen)
    with pytest.raises(RuntimeError, match=r"left out 2 weights \(b, c"):
        require_names(["c", "a", "b"], seen)


def test_ddp_and_fsdp2_stream_the_same_full_weights_on_every_rank(tmp_path: Path):
    mp.spawn(_compare_on_rank, args=(2, str(tmp_path)), nprocs=2)
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0", "rank1"]


def _compare_on_rank(rank: int, ranks: int, folder: str) -> None:
    """Runs in a process of its own: shards a model, takes a step so that the shards matter, compares with the plain one."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    for tied in (True, False):
        plain = dict(full_weights(tiny_model(tied=tied)))
        replicated = DistributedDataParallel(tiny_model(tied=tied))
        _assert_same(dict(full_weights(replicated)), plain)
        sharded = tiny_model(tied=tied)
        for layer in sharded.model.layers:
            fully_shard(layer)
        fully_shard(sharded)
        assert any(parameter.to_local().numel() < parameter.numel() for parameter in sharded.parameters())
        _assert_same(dict(full_weights(sharded)), plain)
    dist.destroy_process_group()
    (Path(folder) / f"rank{rank}").touch()


def _assert_same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(weights) == list(expected)
    for name, weight in weights.items():
        assert torch.equal(weight, expected[name]), name
