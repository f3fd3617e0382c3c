"""The names of inputs and outputs as datasets, by the naming rules of OpenLineage. No name holds a credential."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from firnline.options import SinkOptions, SourceOptions
from firnline.postgres_client import place_of
from firnline.sinks.delta.options import DeltaPartsOptions, DeltaSinkOptions
from firnline.sinks.kafka.options import KafkaSinkOptions
from firnline.sinks.postgres.options import PostgresSinkOptions
from firnline.sources.delta.options import DeltaSourceOptions
from firnline.sources.files.options import FileSourceOptions
from firnline.sources.kafka.options import KafkaSourceOptions
from firnline.sources.mysql.options import MySqlSourceOptions
from firnline.sources.postgres.options import PostgresSourceOptions
from firnline.storage import is_remote, normalise

MYSQL_PORT = 3306


@dataclass(frozen=True, slots=True, order=True)
class DatasetName:
    """Where a dataset lies, and its name there."""

    namespace: str
    name: str


def inputs_of(source: SourceOptions) -> list[DatasetName]:
    """Return the datasets that a source reads; a pattern of tables or topics stands for all that fit."""
    match source:
        case FileSourceOptions():
            return [_of_path(source.path)]
        case DeltaSourceOptions():
            return [_of_path(source.table)]
        case KafkaSourceOptions():
            topics = sorted(source.topics) or [source.pattern]
            return [DatasetName(_of_brokers(source.brokers), topic) for topic in topics]
        case PostgresSourceOptions():
            namespace, database = _of_postgres(source.dsn)
            tables = (table if "." in table else f"public.{table}" for table in source.tables or ("*.*",))
            return [DatasetName(namespace, f"{database}.{table}") for table in tables]
        case MySqlSourceOptions():
            parts = urlsplit(source.dsn)
            host = parts.netloc.rpartition("@")[2].partition(",")[0]
            namespace = f"mysql://{host}" if ":" in host.rpartition("]")[2] else f"mysql://{host}:{MYSQL_PORT}"
            default = source.database or "*"
            tables = (table if "." in table else f"{default}.{table}" for table in source.tables or ("*",))
            return [DatasetName(namespace, table) for table in tables]
    return [_of_location(source.type, source.location)]


def output_of(sink: SinkOptions) -> DatasetName:
    """Return the dataset that a sink writes; a template stands for all of its tables or topics."""
    match sink:
        case DeltaSinkOptions() | DeltaPartsOptions():
            return _of_path(sink.table)
        case KafkaSinkOptions():
            return DatasetName(_of_brokers(sink.brokers), sink.topic)
        case PostgresSinkOptions():
            namespace, database = _of_postgres(sink.dsn)
            return DatasetName(namespace, f"{database}.{'.'.join(sink.table_name)}")
    return _of_location(sink.type, sink.location)


def _of_path(path: str) -> DatasetName:
    """A folder of this machine is `file` and its path; one of an object store is its bucket and the key."""
    if not is_remote(path):
        return DatasetName("file", normalise(path))
    parts = urlsplit(path)
    return DatasetName(f"{parts.scheme}://{parts.netloc}", parts.path.strip("/") or "/")


def _of_brokers(brokers: str) -> str:
    return f"kafka://{brokers.partition(',')[0].strip()}"


def _of_postgres(dsn: str) -> tuple[str, str]:
    """Return namespace and database."""
    parts = urlsplit(place_of(dsn))
    return f"postgres://{parts.netloc.partition(',')[0]}", parts.path.strip("/")


def _of_location(kind: str, location: str) -> DatasetName:
    parts = urlsplit(location)
    if parts.scheme and parts.netloc:
        return DatasetName(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}", parts.path.strip("/") or "/")
    return DatasetName(kind, location)
