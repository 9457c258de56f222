# Gemma Gateway as a container: one process, no shell needed, nothing written to disk.
#
#   docker build -t gemma-gateway .
#   docker run -p 8080:8080 -v ./FOLDER:/etc/gemma-gateway:ro gemma-gateway
#
# The folder contains gateway.yaml. (A single file, once replaced by an editor, would stay the old one.)
#
# In the configuration, listen on 0.0.0.0:8080: the container's own loopback cannot be published.

FROM python:3.13-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/gemma-gateway
WORKDIR /src

# Dependencies first: that layer is cached as long as the lock file is unchanged.
COPY requirements.lock ./
RUN /opt/gemma-gateway/bin/pip install --require-hashes --no-deps -r requirements.lock

COPY pyproject.toml README.md LICENSE ./
COPY gateway ./gateway
RUN /opt/gemma-gateway/bin/pip install --no-deps . \
    && /opt/gemma-gateway/bin/pip check

FROM python:3.13-slim-bookworm
COPY --from=build /opt/gemma-gateway /opt/gemma-gateway

# A prompt of 200,000 tokens is a body of about 1 MB. By default glibc requests every block above 128 KB
# from the kernel and returns it when it is freed, so that each such request pays for zeroing the same
# pages again. With these settings it keeps them.
ENV PATH=/opt/gemma-gateway/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    MALLOC_TRIM_THRESHOLD_=268435456 \
    MALLOC_MMAP_THRESHOLD_=268435456 \
    MALLOC_TOP_PAD_=67108864

# A number, so that an orchestrator can see that it is not root.
USER 65532:65532
EXPOSE 8080 9090
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=15s --timeout=5s --start-period=15s \
    CMD ["gemma-gateway", "healthcheck", "http://127.0.0.1:8080/livez"]
ENTRYPOINT ["gemma-gateway"]
CMD ["serve", "--config", "/etc/gemma-gateway/gateway.yaml"]
