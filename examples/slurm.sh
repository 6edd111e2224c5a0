#!/usr/bin/env bash
# The main example on two nodes with four GPUs each, under SLURM. A worker that fails is started again, and the run goes
# on from its newest checkpoint. If a node fails, the run goes on with the other nodes:
#
#   sbatch examples/slurm.sh logs/products
#
# The folder of the run must be on a file system that all nodes share. `sbatch` with the same folder continues the run,
# also after its time limit. If the node fails on which this script runs, the first one, SLURM ends the job; because of
# --requeue, SLURM then submits it again.
#SBATCH --job-name=retrieval
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --no-kill
#SBATCH --requeue
set -euo pipefail
run_folder=${1:?the first argument must be the folder of the run}
shift
gpus=${GPUS_PER_NODE:-4} # as in --gpus-per-node
nodes=${SLURM_NNODES:?slurm.sh must be started by sbatch}
first=$(hostname)

# The agents of torchrun meet at this store. It is a process of its own: otherwise, it would belong to the agent of one
# node, and the run would end with that node.
store='import sys, time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
while True: time.sleep(60)'
python -c "$store" 29500 &
trap 'kill %1' EXIT

# torchrun knows the number of nodes only when it starts a worker, and Lightning must be told.
worker='exec python -m lightning_retrieval.cli fit "$@" --trainer.num_nodes $((WORLD_SIZE / LOCAL_WORLD_SIZE))'

# Without it, workers that are started again may meet at the address of the start before, and wait for ever.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# A process in a collective with a worker that has died raises an error after this time.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1

# srun does not take --cpus-per-task from sbatch.
srun --kill-on-bad-exit=0 --no-kill --cpus-per-task "${SLURM_CPUS_PER_TASK:-32}" torchrun \
    --nnodes "1:$nodes" --nproc_per_node "$gpus" --max-restarts 10 \
    --rdzv_backend c10d --rdzv_endpoint "$first:29500" --rdzv_id "$SLURM_JOB_ID" --rdzv_conf is_host=0 \
    --no-python bash -c "$worker" fit \
    --config examples/glyphs.yaml --run_folder "$run_folder" \
    --trainer.strategy ddp --trainer.devices "$gpus" "$@"
