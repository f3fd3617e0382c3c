"""One run of a pipeline: the runner, the steps of an epoch, recovery, standby and control."""
