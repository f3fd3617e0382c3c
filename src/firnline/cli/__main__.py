"""`python -m firnline.cli`: the command, also where no script is installed."""

from firnline.cli.main import main

main()
