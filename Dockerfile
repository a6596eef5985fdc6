# The daemon alone: Debian slim, a fast BLAS and the wheel. It computes on the CPU. For an NVIDIA card:
# docker build --build-arg EXTRAS="[cuda]", and docker run --gpus all.
#
#   docker build -t rootstock .
#   docker run --rm -p 127.0.0.1:8000:8000 -e ROOTSTOCK_API_KEY=change-me -v models:/models rootstock
#   docker run --rm -p 127.0.0.1:8000:8000 -e ROOTSTOCK_API_KEY=change-me -v models:/models \
#       rootstock serve --model mlx-community/Qwen3-4B-4bit
FROM python:3.13-slim-bookworm AS build

WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim-bookworm

# libopenblas0-pthread: MLX's own BLAS on Linux is a reference one, many times slower. On x86-64 MKL
# comes before it.
# g++: MLX compiles fused CPU kernels at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libopenblas0-pthread \
    && rm -rf /var/lib/apt/lists/*

# What MLX computes with, and a faster BLAS for x86-64, 1 GB: --build-arg EXTRAS="[cpu]" leaves it out.
ARG EXTRAS="[cpu,mkl]"
COPY constraints.txt /tmp/
COPY --from=build /wheels /tmp/wheels
RUN set -- /tmp/wheels/*.whl \
    && pip install --no-cache-dir --constraint /tmp/constraints.txt "$1$EXTRAS" \
    && rm -r /tmp/wheels \
    && useradd --create-home --uid 10001 rootstock \
    && install --directory --owner rootstock /models

USER 10001
# Other machines can reach a container, so the daemon asks for an API key.
# GLIBC_TUNABLES: large pages for what MLX takes from glibc's malloc.
ENV HF_HOME=/models ROOTSTOCK_HOST=0.0.0.0 ROOTSTOCK_PORT=8000 GLIBC_TUNABLES=glibc.malloc.hugetlb=1
VOLUME /models
EXPOSE 8000
# The first minutes may go by with a download.
HEALTHCHECK --start-period=15m CMD ["python", "-c", \
    "import os, urllib.request as r; r.urlopen(f'http://127.0.0.1:{os.environ[\"ROOTSTOCK_PORT\"]}/health')"]

ENTRYPOINT ["rootstock"]
CMD ["serve"]
