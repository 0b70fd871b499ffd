#!/usr/bin/env bash
# sbatch configs/accelerate/slurm.sh --config configs/llama-3.1-8b-instruct.yaml --output_dir runs/NAME
# From the folder of the checkout, with the environment active; what follows the script's name goes to train.py. The same
# command goes on with a run that was cut off, but with --overwrite_output_dir it begins again. A launcher on each node
# starts a process for each of its GPUs. Five minutes before the time limit they save a checkpoint, and the job is queued
# again. Not run on SLURM.
#SBATCH --job-name=speculator
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
set -euo pipefail

gpus=${SLURM_GPUS_ON_NODE:-8}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
# A port of this job's own: jobs may share a node.
port=$((20000 + SLURM_JOB_ID % 20000))
export SPECULATOR_CACHE=${SPECULATOR_CACHE:-$PWD/runs/cache} # the nodes have to share it
export gpus first port
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280 # torch's launcher kills processes 30 seconds after SIGTERM otherwise

# The node's number is known on the node alone. A launcher that ends with an error takes those of the other nodes along.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-64}" bash -c 'exec accelerate launch --config_file configs/accelerate/two_nodes.yaml \
  --num_machines "$SLURM_NNODES" --num_processes "$((SLURM_NNODES * gpus))" --machine_rank "$SLURM_NODEID" \
  --main_process_ip "$first" --main_process_port "$port" train.py "$@"' train "$@" &
step=$!
# To this shell alone, since `scancel` sends it no USR1: a job that was cancelled stays so. `srun` passes TERM on.
trap 'again=1; kill -TERM "$step"' USR1
wait "$step" && code=0 || code=$? # a signal ends this wait, not the step
if [ "${again:-}" ]; then
  wait "$step" || true
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
