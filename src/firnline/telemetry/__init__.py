"""What a run tells other systems: traces (OpenTelemetry) and lineage (OpenLineage). Neither can hold up a run."""
