"""The `firnline` command: one module per verb, or per family of verbs."""
