# The same installation as `make setup`, as an image:
#   make docker && docker run --rm -it grpo-vlm:cpu make train
#   make docker DEVICE=cuda && docker run --rm -it --gpus all --ipc=host grpo-vlm:cuda make train
FROM python:3.12-slim
ARG DEVICE=cpu
# Kept in the image so that `make` finds the same stamp again when it runs.
ENV DEVICE=${DEVICE}
# make and git for the workflow; a C++ compiler because torch.compile and Triton build kernels when a model starts.
RUN apt-get update \
    && apt-get install -y --no-install-recommends make git g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/grpo_vlm
# The environment first: it stays cached while only the code changes.
COPY Makefile setup.cfg pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY grpo_vlm/__init__.py grpo_vlm/__init__.py
RUN make setup PIP_NO_CACHE_DIR=1
COPY . .
CMD ["make", "help"]
