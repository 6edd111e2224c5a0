#!/usr/bin/env bash
# The main example on several processes, one for each GPU, with the same batches, ranked lists and metrics as on one.
#
#   bash examples/ddp.sh 4                             the Trainer starts the other processes
#   LAUNCHER=torchrun bash examples/ddp.sh 4           torchrun starts all processes
#   bash examples/ddp.sh 2 --trainer.accelerator cpu   without GPUs; further arguments are passed to `fit`
#
# On several machines, run this on each of them, with the address of the first machine. A worker that fails is started
# again with the others, and the run goes on in its folder, which must be on a file system that all machines share:
#   TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 --nproc_per_node 4 --max-restarts 10 \
#       --rdzv_backend c10d --rdzv_endpoint first:29500 --rdzv_id products -m lightning_retrieval.cli \
#       fit --config examples/glyphs.yaml --run_folder logs/products \
#       --trainer.strategy ddp --trainer.devices 4 --trainer.num_nodes 2
set -euo pipefail
processes=${1:?the first argument must be the number of processes}
shift
command=(-m lightning_retrieval.cli fit --config "$(dirname "$0")/glyphs.yaml"
         --trainer.strategy ddp --trainer.devices "$processes" "$@")
case ${LAUNCHER:-trainer} in
    trainer) exec python "${command[@]}" ;;
    torchrun) exec torchrun --standalone --nproc_per_node "$processes" "${command[@]}" ;;
    *) echo "ddp.sh: LAUNCHER must be trainer or torchrun, got $LAUNCHER" >&2 && exit 2 ;;
esac
