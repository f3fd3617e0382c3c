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
class NoQuestion:
    """The same options for commands that only add, and so do it at once."""

    dry_run: Annotated[bool, Flag, Parameter(help="Only show the plan, even with --yes.")] = False
    yes: Annotated[bool, Flag, Parameter(help="Accepted as everywhere; this command asks nothing.")] = False


@Parameter(name="*")
@dataclass(frozen=True)
class Consent:
    """Options of every command that changes something, for commands that show a plan and then ask."""

    dry_run: Annotated[bool, Flag, Parameter(help="Only show the plan, even with --yes.")] = False
    yes: Annotated[bool, Flag, Parameter(help="Do it without asking; needed where there is no terminal.")] = False

    @property
    def decided(self) -> bool:
        """Whether the change was asked for on the command line, so that nobody needs to read a plan."""
        return self.yes and not self.dry_run

    def is_given(self, question: str, out: Output) -> bool:
        """Whether to go on after the plan was shown: True with `--yes`, False with `--dry-run`, else the person says.

        Args:
            question: What to ask, without its question mark: "Roll back to epoch 41".
            out: Where the plan went; a program that reads JSON is not asked.

        Raises:
            ConfigError: there is nobody to ask; exit code 2, nothing was changed.
        """
        if self.decided:
            return True
        if self.dry_run:
            return self._report_unchanged(out, "nothing was changed; add --yes to do it")
        if not out.as_json and sys.stdin.isatty() and sys.stderr.isatty():
            sys.stderr.write(f"{safe(question)}? [y/N] ")
            sys.stderr.flush()
            try:
                is_given = sys.stdin.readline().strip().lower() in ("y", "yes")
            except KeyboardInterrupt:
                sys.stderr.write("\n")
                self._report_unchanged(out, "nothing was changed")
                raise
            return is_given or self._report_unchanged(out, "nothing was changed")
        raise ConfigError(
            "nothing was changed: without a terminal this needs --yes",
            hint="Read the plan, then repeat the command with --yes; --dry-run only shows the plan.",
        )

    def _report_unchanged(self, out: Output, text: str) -> bool:
        if not out.as_json:
            out.line(text)
        return False
