"""What one of two ranks does in `test_ranks.py`: python two_ranks.py RANK RANKS FOLDER; FOLDER holds the model."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for conftest
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from hosts import Host, some_groups
from torch.distributed.device_mesh import init_device_mesh

from parallel_r1.methods import Objective
from parallel_r1.policy import PolicySource, load_policy
from parallel_r1.sharding import ShardedLoad

OBJECTIVES = {
    "ppo": Objective(),
    "gspo": Objective(loss="gspo", old_logprobs="engine", clip_low=0.3, clip_high=0.3, entropy_coef=0.01),
    "dr_grpo": Objective(loss="dr_grpo", mismatch="token_truncate"),
}


def shares(rank: int, ranks: int) -> list:
    """Uneven shares: rank 0 has four groups, rank 1 one; on one rank all five."""
    groups = some_groups(problems=5)
    if ranks == 1:
        return groups
    return groups[:4] if rank == 0 else groups[4:]


def main(rank: int, ranks: int, folder: Path) -> None:
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    out = {}
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
    spreads = {"plain": None}
    if mesh is not None:
        spreads["sharded"] = ShardedLoad(mesh, "float64")
        spreads["offloaded"] = ShardedLoad(mesh, "float64", cpu_offload=True)
    for kind, spread in spreads.items():
        for name, objective in OBJECTIVES.items():
            policy = load_policy(folder, PolicySource(name=str(folder)), spread)
            policy.model.double()  # float64 already where it is spread
            host = Host(policy, "unseen", max_tokens=120)
            host.averages = spread is not None
            done = host.run(shares(rank, ranks), objective)
            out[kind, name] = (host.gradient, done)
            # the weights on their way out are whole, on every rank
            assert all(not hasattr(w, "full_tensor") for _, w in policy.weights())
    if rank == 0:
        torch.save(out, folder / f"result{ranks}.pt")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
