"""`--yes` and `--dry-run`, with one meaning for every command: the plan first, then a question, then the change."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from firnline.cli.output import Output
from firnline.cli.text import safe
from firnline.errors import ConfigError

Flag = Parameter(negative="", show_default=False)


@Parameter(name="*")
@dataclass(frozen=True)
class Consent:
    """Options of every command that changes something, for commands that show a plan and then ask."""

    dry_run: Annotated[bool, Flag, Parameter(help="Only show the plan, even with --yes.")] = False
    yes: Annotated[bool, Flag, Parameter(help="Do it without asking; needed where there is no terminal.")] = False

    def is_given(self, question: str, *, can_ask: bool = True) -> bool:
        """Whether to go on after the plan was shown: True with `--yes`, False with `--dry-run`, else the person says.

        Args:
            question: What to ask, without its question mark: "Roll back to epoch 41".
            can_ask: False if the plan was not shown to a person, but written as JSON.

        Raises:
            ConfigError: there is nobody to ask; exit code 2, nothing was changed.
        """
        if self.dry_run:
            return False
        if self.yes:
            return True
        if can_ask and sys.stdin.isatty() and sys.stderr.isatty():
            sys.stderr.write(f"{safe(question)}? [y/N] ")
            sys.stderr.flush()
            return sys.stdin.readline().strip().lower() in ("y", "yes")
        raise ConfigError(
            "nothing was changed: without a terminal this needs --yes",
            hint="Read the plan, then repeat the command with --yes; --dry-run only shows the plan.",
        )

    def report_unchanged(self, out: Output) -> None:
        """Say after a plan that nothing was done."""
        out.line("nothing was changed; add --yes to do it" if self.dry_run else "nothing was changed")
