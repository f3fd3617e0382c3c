"""`firnline --install-completion` and `--show-completion`: completion of commands and options in your shell."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias, cast, get_args

from cyclopts import App, Parameter

from firnline.cli.common import Common
from firnline.cli.consent import Consent
from firnline.errors import ConfigError

Shell: TypeAlias = Literal["bash", "zsh", "fish"]
ShellOption = Annotated[Shell | None, Parameter(help="The shell. [default: the one that you use]", show_default=False)]

INSTALL_EPILOGUE = """\
Shows which files it would write or change, then asks; without a terminal it
needs --yes. Running it again after an upgrade replaces the script.

Output (JSON fields):
  shell, script (the file with the completion), startup (the file that gets a
  line that loads it; null if the shell needs none), startup_line, done

Environment:
  SHELL               the shell, if it cannot be told from the parent process
  ZSH, ZSH_CUSTOM     the folder of oh-my-zsh

Examples:
  firnline --install-completion --dry-run
  firnline --install-completion --shell zsh --yes
"""

SHOW_EPILOGUE = """\
Prints the script that `--install-completion` would write, and changes nothing.

Output (JSON fields):
  shell, script (its text)

Environment:
  SHELL               the shell, if it cannot be told from the parent process

Examples:
  firnline --show-completion
  firnline --show-completion --shell fish > firnline.fish
"""

install_app = App(name="--install-completion", help_epilogue=INSTALL_EPILOGUE)
show_app = App(name="--show-completion", help_epilogue=SHOW_EPILOGUE)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the completion of a shell goes."""

    script: Path
    startup: Path | None = None  # gets a line, unless it has it already
    line: str | None = None


@install_app.default
def install(*, shell: ShellOption = None, consent: Consent = Consent(), common: Common = Common()) -> int:
    """Install completion of commands and options in your shell; asks first."""
    from firnline.cli.main import app

    shell = shell or find_shell()
    places = find_places(shell)
    facts = {
        "shell": shell,
        "script": str(places.script),
        "startup": str(places.startup) if places.startup else None,
        "startup_line": places.line,
    }
    if not common.json:
        common.out.line(f"{'replace' if places.script.exists() else 'write'} {places.script}")
        if places.startup is not None:
            common.out.line(f"add to {places.startup}: {places.line}")
    elif not consent.yes or consent.dry_run:
        common.out.json({**facts, "done": False})
    if not consent.is_given("Change these files", common.out):
        return 0
    try:
        app.install_completion(shell=shell, output=places.script, add_to_startup=places.startup is not None)
    except OSError as error:
        raise ConfigError(
            f"cannot write {error.filename or places.script}: {error.strerror or error}",
            hint="firnline --show-completion prints the script; put it where your shell finds it.",
        ) from error
    if common.json:
        common.out.json({**facts, "done": True})
    else:
        common.out.line("done; it works in new shells")
    return 0


@show_app.default
def show(*, shell: ShellOption = None, common: Common = Common()) -> int:
    """Print the completion script of your shell, and change nothing."""
    from firnline.cli.main import app

    shell = shell or find_shell()
    script = app.generate_completion(shell=shell)
    if common.json:
        common.out.json({"shell": shell, "script": script})
    else:
        common.out.text(script)
    return 0


def find_shell() -> Shell:
    """Find the shell that this command was typed in."""
    from cyclopts.completion.detect import ShellDetectionError, detect_shell

    try:
        found = str(detect_shell())
    except ShellDetectionError:
        found = ""
    if found in get_args(Shell):
        return cast(Shell, found)
    known = ", ".join(get_args(Shell))
    raise ConfigError(f"your shell is none of {known}", hint="Name one of them with --shell.")


def find_places(shell: Shell) -> Places:
    """Find the files to write and change; creates nothing."""
    import os

    home = Path.home()
    if shell == "fish":
        return Places(home / ".config" / "fish" / "completions" / "firnline.fish")
    if shell == "bash":
        script = home / ".local" / "share" / "bash-completion" / "completions" / "firnline"
        return _with_startup(script, home / ".bashrc", f'[ -f "{script}" ] && . "{script}"')
    custom = os.environ.get("ZSH_CUSTOM") or (f"{os.environ['ZSH']}/custom" if os.environ.get("ZSH") else "")
    if custom and Path(custom).parent.is_dir():  # oh-my-zsh loads what lies there
        return Places(Path(custom) / "completions" / "_cyclopts_firnline")
    folder = home / ".zsh" / "completions"
    return _with_startup(folder / "_cyclopts_firnline", home / ".zshrc", f"fpath=({folder} $fpath)")


def _with_startup(script: Path, startup: Path, line: str) -> Places:
    is_there = startup.is_file() and line in startup.read_text(encoding="utf-8", errors="replace")
    return Places(script) if is_there else Places(script, startup, line)
