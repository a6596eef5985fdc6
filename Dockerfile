# The daemon alone: Debian slim and the wheel. Two targets: `runtime` (the default) computes on the
# CPU with a fast BLAS, `cuda` on an NVIDIA card. To develop: Dockerfile.dev.
#
#   docker build -t rootstock .                      # or --target cuda, and docker run --gpus all
#   docker run --rm -p 127.0.0.1:8000:8000 -e ROOTSTOCK_API_KEY=change-me -v models:/models rootstock
#   docker run --rm -p 127.0.0.1:8000:8000 -e ROOTSTOCK_API_KEY=change-me -v models:/models \
#       rootstock serve --model mlx-community/Qwen3-4B-4bit
FROM python:3.13-slim-bookworm AS build

WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim-bookworm AS base

# libopenblas0-pthread: MLX's own BLAS on Linux is a slow reference implementation. On x86-64 MKL is
# preferred to it.
# g++: MLX compiles fused CPU kernels at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libopenblas0-pthread \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 rootstock \
    && install --directory --owner rootstock /models

COPY constraints.txt /tmp/
COPY --from=build /wheels /tmp/wheels

# Other machines can reach a container, so the daemon requires an API key.
# GLIBC_TUNABLES: large pages for MLX's allocations from glibc's malloc.
ENV HF_HOME=/models ROOTSTOCK_HOST=0.0.0.0 ROOTSTOCK_PORT=8000 GLIBC_TUNABLES=glibc.malloc.hugetlb=1
VOLUME /models
EXPOSE 8000
# The first start may download a model for minutes.
HEALTHCHECK --start-period=15m CMD ["python", "-c", \
    "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"ROOTSTOCK_PORT\"]}/health')"]

ENTRYPOINT ["rootstock"]
CMD ["serve"]

# SmolLM2 and MiniLM, so that a container needs no network. SmolLM2 is converted here, as MLX for CUDA
# does not start without a card.
FROM base AS weights
RUN set -- /tmp/wheels/*.whl \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "$1[cpu]" \
    && export PIP_NO_CACHE_DIR=1 XDG_CACHE_HOME=/cache \
    && rootstock pull smollm2 \
    && rootstock pull minilm

FROM base AS cuda
RUN set -- /tmp/wheels/*.whl \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "$1[cuda]" \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt --no-deps mlx-vlm pillow
COPY --from=weights --chown=10001 /cache /home/rootstock/.cache
USER 10001

FROM base AS runtime
# MKL is a faster BLAS for x86-64, 1 GB: --build-arg EXTRAS="[cpu]" leaves it out.
ARG EXTRAS="[cpu,mkl]"
RUN set -- /tmp/wheels/*.whl \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "$1$EXTRAS" \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt --no-deps mlx-vlm pillow
COPY --from=weights --chown=10001 /cache /home/rootstock/.cache
USER 10001
