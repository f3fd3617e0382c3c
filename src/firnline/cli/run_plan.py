"""The plan of `firnline run --fresh-after` and `--from-savepoint`: shown first, and done only with `--yes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from firnline.cli.output import count_text, size_text

if TYPE_CHECKING:
    from firnline.cli.common import Common
    from firnline.cli.consent import Consent
    from firnline.history.edits.begin_plan import BeginPlan, TablePlan


def confirm(plan: BeginPlan, common: Common, say: Callable[[str], None], consent: Consent) -> bool:
    """Show the plan, and ask unless the command line has said it. Returns whether to go on.

    Raises:
        ConfigError: there is nobody to ask; nothing was changed.
    """
    if plan.already and not consent.dry_run:
        return True
    lines = plan_lines(plan)
    if consent.decided:
        for line in lines:
            say(line)
        return True
    if common.json:
        common.out.json({**asdict(plan), "done": False})
    else:
        for line in lines:
            common.out.line(line)
    return consent.is_given("Do this, then run", common.out)


def plan_lines(plan: BeginPlan) -> list[str]:
    """Return the plan as lines for people."""
    what = "a fresh start" if plan.kind == "fresh-start" else f"the restore of epoch {plan.to_epoch}"
    if plan.already:
        return [f"plan: {what} was done already by an earlier attempt; the run goes on"]
    lines = [f"plan: {what} after epoch {plan.from_epoch}", *(_table_line(table) for table in plan.tables)]
    if plan.files_again is None or plan.bytes_again is None:
        again = "the input cannot be counted now"
    else:
        again = f"{count_text(plan.files_again, 'file')}, {size_text(plan.bytes_again)}"
    start = "from the beginning" if plan.kind == "fresh-start" else "after the savepoint"
    known = f"; {count_text(plan.records_again, 'record')} were read before" if plan.records_again is not None else ""
    lines.append(f"  then read: all input {start}: {again}{known}")
    return lines


def _table_line(table: TablePlan) -> str:
    facts = []
    if table.rows_now is None:
        facts.append("its rows cannot be counted")
    if table.rows_removed:
        facts.append(f"{count_text(table.rows_removed, 'row')} removed")
    if table.rows_restored:
        facts.append(f"{count_text(table.rows_restored, 'row')} restored")
    if table.rows_now and not table.rows_removed:
        facts.append(f"{count_text(table.rows_now, 'row')} stay")
    if table.rows_twice:
        facts.append(f"up to {count_text(table.rows_twice, 'row')} come twice (--truncate removes them first)")
    return f"  table {table.name} ({table.table}): {', '.join(facts) or 'no rows'}"
