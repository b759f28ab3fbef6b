"""What a process needs to run sagas: a pool of their own, its lease, and their engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from idemconsumer.engine.engine import Engine
from idemconsumer.ports.observer import Observer
from idemconsumer.sagas.saga_engine import LeasedEngine
from idemconsumer.stores.heartbeat import Heartbeat
from idemconsumer.stores.leased_saga import Runs
from idemconsumer.stores.leases import PostgresLeases
from idemconsumer.stores.pool import Pool


class SagaLease:
    """Shared by all sagas of a process. `close` gives up the lease, so that other workers can resume them at once."""

    def __init__(self, pool: Pool, heartbeat: Heartbeat, leases: PostgresLeases, engine: LeasedEngine) -> None:
        self.pool = pool
        self._heartbeat = heartbeat
        self.leases = leases
        self.engine = engine

    @classmethod
    async def open(
        cls,
        dsn: str,
        schema: str,
        engine: Engine,
        observer: Observer,
        *,
        connections: int,
        lease: float,
        longest_run: float,
        runs: Sequence[Runs] = (),
        build: str,
        takes: bool = True,
        require_standby: bool = False,
        parties: Iterable[str] = (),
        stuck: Callable[[str], None] = lambda _: None,
        left_open: Callable[[], None] = lambda: None,
    ) -> SagaLease:
        """Register the lease and begin to renew it. Raises StoreUnavailable.

        The database itself was checked when the store of `engine` was opened (R7); here only a session for sagas is.
        `runs`: the handlers and versions that this process runs; it takes no due saga of another version of these
        handlers, unless no worker runs that version any more (L28). `build`: the build of its code. `takes`: it takes
        due sagas, so other builds may leave theirs to it (L29). `stuck` and `left_open` are those of Heartbeat.
        """
        pool = Pool(
            dsn,
            schema,
            connections=connections,
            longest_run=longest_run,
            lease=lease,
            require_standby=require_standby,
            parties=parties,
        )
        await pool.open()
        try:
            async with pool.connection():  # check what a session of sagas must be (R17) before any is needed
                pass
            heartbeat = Heartbeat(
                dsn, schema, lease=lease, patience=longest_run, runs=runs, build=build if takes else None, stuck=stuck,
                left_open=left_open,
            )  # fmt: skip
            versions = {(each.app, each.handler): each.version for each in runs}
            leases = PostgresLeases(pool, heartbeat, versions, build=build)
            sagas = LeasedEngine(engine, leases, observer, lease=lease)
            await heartbeat.start(sagas.lose, sagas.standing, sagas.patience)
        except BaseException:
            await pool.close()
            raise
        return cls(pool, heartbeat, leases, sagas)

    async def close(self) -> None:
        await self._heartbeat.stop()
        await self.pool.close()
