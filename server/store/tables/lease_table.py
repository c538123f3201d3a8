"""Queries on leases. `Database.required_lease` makes writes depend on one."""

from collections.abc import Collection

from sqlalchemy import Connection, insert, select, update

from ..database.records import LeaseRecord
from ..database.rows import record_of
from ..database.schema import leases
from .record_table import RecordTable


class LeaseTable(RecordTable[LeaseRecord]):
    table, record_type = leases, LeaseRecord

    async def acquire(
        self, base_models: Collection[str], holder: str, url: str, now: float, seconds: float
    ) -> tuple[LeaseRecord, ...] | None:
        """Takes all leases for `seconds`, in the order of `base_models`; None if another holder has one that has not
        expired.

        A lease that changes hands has its epoch raised by one. Its holder may take it again without that, expired or
        not. The clock is the database's if it has one (PostgreSQL), since the clocks of servers differ; else `now`,
        which all processes of one machine share.
        """
        of_these = select(leases).where(leases.c.base_model.in_(base_models)).order_by(leases.c.base_model)

        def statements(connection: Connection) -> tuple[LeaseRecord, ...] | None:
            rows = connection.execute(of_these.with_for_update())
            known = {row.base_model: record_of(LeaseRecord, row) for row in rows}
            clock = self.database.clock(connection, now)
            if any(lease.holder != holder and lease.expires_at > clock for lease in known.values()):
                return None
            taken = []
            for name in base_models:
                if (lease := known.get(name)) is None:
                    epoch, change = 1, insert(leases)
                else:
                    epoch = lease.epoch if lease.holder == holder else lease.epoch + 1
                    change = update(leases).where(leases.c.base_model == name)
                taken.append(LeaseRecord(name, holder, url, epoch, clock + seconds))
                connection.execute(change.values(**vars(taken[-1])))
            return tuple(taken)

        return await self.database.write(statements)

    async def renew(self, holder: str, now: float, seconds: float) -> bool:
        """Extends the holder's leases by `seconds`, by the clock of `acquire`. False if one has expired.

        After False nothing has been renewed. Acquiring the leases again shows whether another server has taken one.
        """
        his = leases.c.holder == holder

        def statements(connection: Connection) -> bool:
            # key_share: this holder's own writes, which lock the row to check the lease, can run concurrently.
            mine = select(leases.c.expires_at).where(his).with_for_update(key_share=True)
            expiries = connection.execute(mine).scalars().all()
            clock = self.database.clock(connection, now)
            if not expiries or min(expiries) <= clock:
                return False
            connection.execute(update(leases).where(his).values(expires_at=clock + seconds))
            return True

        return await self.database.write(statements)

    async def release(self, holder: str) -> None:
        """Expires the holder's leases, so that any server may take them. Their epochs stay."""
        await self._update(leases.c.holder == holder, expires_at=0.0)

    async def list_all(self) -> tuple[LeaseRecord, ...]:
        """Returns all leases that were ever taken, by base model; expired and released ones included."""
        return await self._all(select(leases).order_by(leases.c.base_model))
