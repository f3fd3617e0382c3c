"""The service: REST, supervision of runs, access; and the metrics and health of one run."""
