"""The decisions of an epoch: a pure state machine and its messages, without I/O."""
