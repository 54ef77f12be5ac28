# One image for every role: SuperLink, SuperNode, the two SuperExecs, and the command line.
#
#   docker build -t piecework .
#
# Where wheels come from (docs/howto/containers.md):
#   PIECEWORK_TORCH   what is installed as torch; it must be a CPU build
#   PIP_OPTIONS       options for pip, --index-url, --find-links, ...: with them pip installs torch too, and nothing else is asked
#   PIECEWORK_EXTRAS  extras of Piecework, separated by commas: simulation for a node of a Ray cluster (docs/howto/cluster.md)
#   BASE              a Debian or Ubuntu image with Python 3.11 or newer, its venv module and pip
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS dependencies
ARG PIECEWORK_TORCH="torch>=2.11"
ARG PIP_OPTIONS=""
ARG PIECEWORK_EXTRAS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv --without-pip /opt/piecework
# torch first and alone: a CUDA build is refused before gigabytes of CUDA libraries are fetched. It would also raise what an
# idle client takes from about 250 to about 550 MB, and the memory limits of the containers are made for the former.
# uv knows PyTorch's index of CPU builds. Where that cannot be reached, pip takes what the settings of BASE lead it to.
RUN if [ -n "${PIP_OPTIONS}" ] || ! pip install --quiet --target /opt/uv uv \
 || ! /opt/uv/bin/uv pip install --no-cache --python /opt/piecework/bin/python --no-deps --torch-backend=cpu "${PIECEWORK_TORCH}"; \
    then pip --python /opt/piecework/bin/python install ${PIP_OPTIONS} --no-deps "${PIECEWORK_TORCH}"; \
    fi \
 && /opt/piecework/bin/python -c "import runpy, sys, sysconfig; \
cuda = runpy.run_path(sysconfig.get_path('platlib') + '/torch/version.py')['cuda']; \
sys.exit(cuda and f'PIECEWORK_TORCH gave a build for CUDA {cuda}: name a CPU build by the build arguments PIECEWORK_TORCH and PIP_OPTIONS')"
# An editable install is a pointer to /app, so the sources come in last and a change of theirs installs nothing again.
WORKDIR /app
COPY pyproject.toml LICENSE ./
COPY deploy/piecework-health deploy/
RUN mkdir piecework conf && touch README.md piecework/__init__.py \
 && pip --python /opt/piecework/bin/python install ${PIP_OPTIONS} --editable ".${PIECEWORK_EXTRAS:+[${PIECEWORK_EXTRAS}]}" \
 && rm -rf /app/*
# Headers, CMake files and test programs of torch (torch_shm_manager is needed where tensors are shared between processes), and
# the tests of two pure Python libraries: 130 MB that nothing imports.
RUN cd /opt/piecework/lib/python3*/site-packages \
 && rm -rf torch/include torch/share torch/test \
 && find torch/bin -type f ! -name torch_shm_manager -delete \
 && find sympy networkx -type d -name tests -prune -exec rm -rf {} +

FROM ${BASE}
COPY --from=dependencies /opt/piecework /opt/piecework
# Health checks run both; Debian's ca-certificates brings openssl.
RUN command -v bash && command -v openssl || { echo "BASE has no bash or no openssl: install them there" >&2; exit 1; }
# Any user of group 0 may write where this one may: certificates readable by their owner alone need `--user OWNER:0`.
RUN useradd --uid 10001 --gid 0 --home-dir /tmp piecework \
 && mkdir /state /store /runs /data /certs \
 && chown 10001:0 /state /store /runs \
 && chmod 0775 /state /store /runs
# Python may write compiled modules: without them every message to a client compiles torch again, which takes twice as long.
# A message is pushed and pulled array by array, two at once by default; with many nodes on one machine the SQLite of Flower's own
# SuperLink then refuses some ("database is locked"), and what a client trained is lost. piecework-superlink refuses none.
ENV PATH=/opt/piecework/bin:$PATH \
    HOME=/tmp \
    USER=piecework \
    FLWR_HOME=/tmp/flower \
    PYTHONDONTWRITEBYTECODE= \
    PYTHONUNBUFFERED=1 \
    FLWR_TELEMETRY_ENABLED=0 \
    FLWR_DISABLE_UPDATE_CHECK=1 \
    FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 \
    FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.2 \
    FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PUSHES=1 \
    FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PULLS=1
COPY . /app
RUN chmod -R a+rX /app && python -m compileall -q /app
# Runs are written to ./runs, that is /runs.
WORKDIR /
USER 10001:0
CMD ["piecework", "--help"]
