# Training and serving on a GPU. torch brings CUDA's libraries; the host has the driver and NVIDIA's container toolkit.
#   docker build -t speculator .
#   docker run --gpus all -v "$PWD/runs:/speculator/runs" -v ~/.cache/huggingface:/root/.cache/huggingface speculator \
#       accelerate launch --config_file configs/accelerate/single.yaml train.py
FROM python:3.12-slim

# Triton compiles with a C compiler, and runs record the git commit. Debian keeps no old versions to pin.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc git libc6-dev make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /speculator
COPY . .
RUN pip install --no-cache-dir -c constraints.txt -e ".[train,gguf,peft,serve]"
CMD ["speculator", "--help"]
