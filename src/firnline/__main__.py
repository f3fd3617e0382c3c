"""Runs the `firnline` command as `python -m firnline`."""

from firnline.cli.main import main

main()
