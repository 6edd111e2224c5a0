#!/usr/bin/env bash
# The main example on two nodes with four GPUs each, under SLURM. A worker or a node that fails is started again, and
# the run goes on from its newest checkpoint:
#
#   sbatch examples/slurm.sh logs/products
#
# The folder of the run must be on a file system that all nodes share. `sbatch` with the same folder continues the run,
# also after its time limit.
#SBATCH --job-name=retrieval
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
set -euo pipefail
run_folder=${1:?the first argument must be the folder of the run}
shift
gpus=${GPUS_PER_NODE:-4} # as in --gpus-per-node
nodes=${SLURM_NNODES:?slurm.sh must be started by sbatch}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Without it, workers that are started again may meet at the address of the start before, and wait for ever.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# A process in a collective with a worker that has died raises an error after this time.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1

exec srun --kill-on-bad-exit=0 torchrun \
    --nnodes "$nodes" --nproc_per_node "$gpus" --max-restarts 10 \
    --rdzv_backend c10d --rdzv_endpoint "$first:29500" --rdzv_id "$SLURM_JOB_ID" \
    -m lightning_retrieval.cli fit --config examples/glyphs.yaml --run_folder "$run_folder" \
    --trainer.strategy ddp --trainer.devices "$gpus" --trainer.num_nodes "$nodes" "$@"
