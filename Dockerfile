# The REST service. `docker build --build-arg FLAVOUR=cuda .` takes the CUDA build of FBGEMM. pip's own settings may be
# given the same way, for example PIP_EXTRA_INDEX_URL=<index of CPU builds> for an image without torch's CUDA packages.

FROM docker.io/library/python:3.11-slim AS build
ARG FLAVOUR=cpu
ARG PIP_EXTRA_INDEX_URL
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# The compiler of the search, which the image that runs has no need of.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/autoshard
COPY requirements /src/requirements/
RUN /opt/autoshard/bin/python -m pip install -r /src/requirements/${FLAVOUR}.txt -r /src/requirements/otel.txt \
      -r /src/requirements/s3.txt \
 && /opt/autoshard/bin/python -m pip install --no-deps -r /src/requirements/no-deps.txt
COPY pyproject.toml README.md LICENSE /src/
COPY autoshard /src/autoshard/
COPY bench /src/bench/
COPY costmodel /src/costmodel/
COPY env /src/env/
COPY policies /src/policies/
COPY server /src/server/
RUN /opt/autoshard/bin/python -m pip install --no-deps --no-build-isolation /src

FROM docker.io/library/python:3.11-slim
# A volume that is first mounted on the folder takes its owner over.
RUN useradd --uid 10001 --create-home --home-dir /var/lib/autoshard --shell /usr/sbin/nologin autoshard \
 && install -d -o autoshard -g autoshard /var/lib/autoshard/.local/share/autoshard
COPY --from=build /opt/autoshard /opt/autoshard
ENV PATH=/opt/autoshard/bin:/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001
WORKDIR /var/lib/autoshard
# All that the service writes: its root file system may be read-only. Copies of a registry on object storage are in the volume.
ENV XDG_CACHE_HOME=/var/lib/autoshard/.local/share/autoshard/cache
VOLUME ["/var/lib/autoshard/.local/share/autoshard", "/tmp"]
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["python3", "-c", "from urllib.request import ProxyHandler, build_opener; build_opener(ProxyHandler({})).open('http://127.0.0.1:8000/readyz', timeout=4)"]
CMD ["autoshard", "serve", "--host", "0.0.0.0", "--port", "8000", "--first-key"]
