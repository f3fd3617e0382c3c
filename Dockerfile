# Firnline with Python and Java. The folder /pipeline holds firnline.yml: docs/how-to/run-in-a-container.md
FROM python:3.11-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE CHANGELOG.md ./
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnss-wrapper openjdk-17-jre-headless \
    && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/constraints.txt
COPY deploy/entrypoint.sh /usr/local/bin/firnline-entrypoint
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /wheels/*.whl)[kafka,mysql,openlineage,otel,postgres,redis]" \
    && rm -r /wheels /tmp/constraints.txt \
    && useradd --uid 10001 --create-home firnline && chmod -R a+rwX /home/firnline \
    && mkdir /pipeline && chown firnline /pipeline \
    && firnline prepare

# Any user may run the image (`docker run --user`). What `prepare` compiled serves all of them.
ENV HOME=/home/firnline PYTHONUNBUFFERED=1
# Probes ask without a token. /metrics asks for the one in the file, which Firnline makes if it is missing.
ENV FIRNLINE_METRICS_PORT=9464 FIRNLINE_METRICS_HOST=0.0.0.0 FIRNLINE_METRICS_TOKEN_FILE=/home/firnline/metrics-token
USER firnline

WORKDIR /pipeline
STOPSIGNAL SIGTERM
EXPOSE 9464
HEALTHCHECK --start-period=90s --interval=30s --timeout=10s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ['FIRNLINE_METRICS_PORT'] + '/healthz', timeout=8)"]
ENTRYPOINT ["firnline-entrypoint"]
CMD ["run"]
