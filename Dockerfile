# Training and serving on a GPU. torch brings CUDA's libraries; the host has the driver and NVIDIA's container toolkit.
#   docker build -t speculator .
#   docker run --gpus all -v "$PWD/runs:/speculator/runs" -v ~/.cache/huggingface:/root/.cache/huggingface speculator \
#       speculator train --config configs/llama-3.1-8b-instruct.yaml
# `docker stop --timeout 300` tells a run to save a checkpoint and end; the same command resumes it. `accelerate launch` passes
# SIGTERM on to several processes, which TORCH_ELASTIC_SHUTDOWN_TIMEOUT=280 gives time, but not to one.
FROM python:3.12-slim

# Triton compiles with a C compiler, and runs record the git commit. Debian keeps no old versions to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc git libc6-dev make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /speculator
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e ".[train,gguf,peft,serve]"
# Prepared rows, and the chats that a target writes for hours, belong into the volume and not into the container's layer.
ENV SPECULATOR_CACHE=/speculator/runs/cache
CMD ["speculator", "--help"]
