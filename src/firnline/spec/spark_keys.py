"""Which Spark settings a spec may pass through, why others are refused, and what the values must look like."""

from __future__ import annotations

import re

ALLOWED_KEYS = frozenset(
    {
        "spark.app.name",
        "spark.authenticate",
        "spark.authenticate.secret",
        "spark.cores.max",
        "spark.default.parallelism",
        "spark.driver.bindAddress",
        "spark.driver.blockManager.port",
        "spark.driver.cores",
        "spark.driver.host",
        "spark.driver.maxResultSize",
        "spark.driver.memory",
        "spark.driver.memoryOverhead",
        "spark.driver.memoryOverheadFactor",
        "spark.driver.port",
        "spark.io.encryption.enabled",
        "spark.kubernetes.authenticate.driver.serviceAccountName",
        "spark.kubernetes.container.image",
        "spark.kubernetes.container.image.pullPolicy",
        "spark.kubernetes.executor.limit.cores",
        "spark.kubernetes.executor.request.cores",
        "spark.kubernetes.namespace",
        "spark.local.dir",
        "spark.log.level",
        "spark.master",
        "spark.network.crypto.enabled",
        "spark.network.timeout",
        "spark.python.worker.memory",
        "spark.python.worker.reuse",
        "spark.scheduler.mode",
        "spark.shuffle.compress",
        "spark.shuffle.service.enabled",
        "spark.shuffle.service.port",
        "spark.speculation",
        "spark.task.cpus",
        "spark.task.maxFailures",
        "spark.ui.enabled",
        "spark.ui.port",
        "spark.yarn.queue",
    }
)
ALLOWED_PREFIXES = (
    "spark.dynamicAllocation.",
    "spark.eventLog.",
    "spark.executor.",
    "spark.hadoop.fs.",
    "spark.locality.",
    "spark.memory.",
    "spark.rpc.",
    "spark.speculation.",
    "spark.sql.adaptive.",
    "spark.sql.execution.arrow.",
    "spark.sql.shuffle.",
)

# The first match gives the reason; these come before the allowlist, so that no prefix lets them in.
_REFUSED = (
    (r"JavaOptions$", "it can load any code into the JVM"),
    (r"extraLibraryPath|(^|\.)jars(\.|$)|^spark\.(files|archives|submit\.)|ClassPath", "it brings code into Spark"),
    (r"plugins?(\.|$)|listeners?$|spark\.sql\.extensions|registrator", "it names classes that Spark would load"),
    (r"class(es|name)?$|\.impl$|provider|signers?$|serializer$|filters$", "it names a class that Spark would load"),
    (r"script$", "it names a script that Spark would run"),
    (r"^spark\.remote$", "Spark Connect is not supported; name the cluster with spark.master"),
    (r"^spark\.pyspark\.|^spark\.executorEnv\.", "Firnline sets the workers' Python itself"),
)


def find_refusal(key: str) -> str | None:
    """Return why this key is not allowed under `spark`, or None when it is."""
    for pattern, reason in _REFUSED:
        if re.search(pattern, key, re.IGNORECASE):
            return f"not allowed in a spec: {reason}"
    if key in ALLOWED_KEYS or (key.startswith(ALLOWED_PREFIXES) and not key.endswith(".")):
        return None
    if not key.startswith("spark."):
        whole = f"spark.{key}"
        if find_refusal(whole) is None:
            return f'not a Spark setting; write its whole name below `spark`: "{whole}": ...'
        return 'not a Spark setting (they start with "spark.")'
    return "not among the Spark settings that a spec may pass"


# -- values -------------------------------------------------------------------------------------------

_HOSTS = r"[^\s,:/]+:\d{1,5}(,[^\s,:/]+:\d{1,5})*"
_COUNT = r"[1-9]\d{0,8}"
_MASTER = (
    "local",
    rf"local\[({_COUNT}|\*)(\s*,\s*{_COUNT})?\]",
    rf"local-cluster\[\s*{_COUNT}\s*,\s*{_COUNT}\s*,\s*{_COUNT}\s*\]",
    rf"spark://{_HOSTS}",
    "yarn",
    r"k8s://\S+",
)
_FORMS = (  # keys, the form of their values, and the form in words
    (r"spark\.master", "|".join(_MASTER), "local, local[4], local[*], spark://HOST:PORT, yarn or k8s://HOST:PORT"),
    (
        r"spark\.(cores\.max|default\.parallelism|driver\.cores|task\.(cpus|maxFailures)|sql\.shuffle\.partitions"
        r"|executor\.(cores|instances))",
        _COUNT,
        "a whole number above 0",
    ),
    (
        r"spark\.(ui|driver|driver\.blockManager|shuffle\.service)\.port",
        r"\d{1,5}",
        "the number of a port",
    ),
    (
        r"spark\.(driver|executor)\.(memory|memoryOverhead)|spark\.driver\.maxResultSize|spark\.python\.worker\.memory"
        r"|spark\.executor\.pyspark\.memory",
        r"\d+\s*([kmgtp]b?|b)?",
        "a size such as 512m or 4g",
    ),
    (
        r"spark\.network\.timeout|spark\.executor\.heartbeatInterval|spark\.dynamicAllocation\.\w+Timeout",
        r"\d+\s*(us|ms|s|m|min|h|d)?",
        "a time such as 120s or 5min",
    ),
    (
        r"spark\.(authenticate|speculation|shuffle\.compress|python\.worker\.reuse)|spark\.[\w.]+\.enabled",
        "true|false",
        "true or false",
    ),
    (r"spark\.scheduler\.mode", "fifo|fair", "FIFO or FAIR"),
    (
        r"spark\.log\.level",
        "all|debug|error|fatal|info|off|trace|warn",
        "ALL, DEBUG, ERROR, FATAL, INFO, OFF, TRACE or WARN",
    ),
)


def find_value_problem(key: str, value: str) -> str | None:
    """Return what the value of a Spark setting must be, or None when it is so, or only Spark can know."""
    for keys, form, words in _FORMS:
        if re.fullmatch(keys, key):
            flags = 0 if key == "spark.master" else re.IGNORECASE
            return None if re.fullmatch(form, value.strip(), flags) else f'must be {words}, not "{value}"'
    return None
