#!/bin/bash
# Four nodes of 8 GPUs under Slurm: sbatch configs/trainer/slurm.sh
# One task a GPU; Lightning reads ranks and addresses from Slurm. After a pre-emption or a fault the same line goes on
# from the last checkpoint.
#SBATCH --job-name=parallel_r1
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=48:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
set -euo pipefail
export OMP_NUM_THREADS=1
# the run folder must be on a file system that all nodes share
srun uv run --no-sync python -m parallel_r1 fit --config configs/seen.yaml --config configs/trainer/several_nodes.yaml
