"""Accounts of a bank that spans several pipelines: each row that comes in is kept in part and passed on in part."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from firnline.operators import MAIN, Assigned, Batch, EpochContext, Operator, Result


class Accounts(Operator):
    """Keeps the balance of each account. Settings: `keys`, `me` (accounts begin with it), `to` (who gets the rest).

    A row in has `account`, `id`, `amount` and `hops`. The row out says what was kept, and is a transfer of the rest:
    its `account`, `amount` and `hops` are those of the recipient. `number` counts the rows of an account.
    """

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.settings["keys"])

    @property
    def state_schema(self) -> pa.Schema:
        return pa.schema([("balance", pa.int64()), ("rows", pa.int64())])

    def output_schema(self, port: str = MAIN) -> pa.Schema:
        texts = [(name, pa.string()) for name in ("account", "owner", "via")]
        numbers = ("id", "amount", "hops", "number", "taken", "kept", "balance")
        return pa.schema([*texts, *((name, pa.int64()) for name in numbers)])

    def assign(self, rows: pa.Table, source: str, context: EpochContext) -> Assigned:
        mine = pc.fill_null(pc.starts_with(rows.column("account"), self.settings["me"]), False)
        found = np.flatnonzero(np.asarray(mine))
        return Assigned(found, rows.select(list(self.keys)).take(pa.array(found)))

    def fold(self, batch: Batch, context: EpochContext) -> Result:
        owners = batch.keys.column("account").to_pylist()
        balances = batch.state.column("balance").fill_null(0).to_pylist()
        counts = batch.state.column("rows").fill_null(0).to_pylist()
        made = []
        for via, rows in sorted(batch.rows.items()):
            for row, key in zip(rows.to_pylist(), batch.key_of[via].tolist(), strict=True):
                account, sent = pass_on(row["id"], row["amount"], row["hops"], self.settings["to"])
                balances[key] += row["amount"] - sent
                counts[key] += 1
                made.append({
                    "account": account, "owner": owners[key], "via": via, "id": row["id"], "amount": sent,
                    "hops": row["hops"] - 1, "number": counts[key], "taken": row["amount"],
                    "kept": row["amount"] - sent, "balance": balances[key],
                })  # fmt: skip
        state = pa.table({"balance": balances, "rows": counts}, schema=self.state_schema)
        output = pa.Table.from_pylist(made, schema=self.output_schema())
        return Result(np.arange(len(owners)), state, output={MAIN: output})


def pass_on(number: int, amount: int, hops: int, to: list[str]) -> tuple[str | None, int]:
    """Return who gets a part of an amount, and how much."""
    sent = amount - 1 - amount // 8
    if not to or hops <= 0 or sent <= 0:
        return None, 0
    return f"{to[(number + hops) % len(to)]}{number % 3}", sent
