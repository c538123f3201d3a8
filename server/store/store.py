"""Everything that must survive a restart, by kind of record."""

from sqlalchemy import Engine

from .database.database import Database
from .tables.checkpoint_table import CheckpointTable
from .tables.copy_table import CopyTable
from .tables.key_table import KeyTable
from .tables.lease_table import LeaseTable
from .tables.logged_metrics_table import LoggedMetricsTable
from .tables.operation_table import OperationTable
from .tables.result_table import ResultTable
from .tables.run_table import RunTable
from .tables.sampler_table import SamplerTable
from .tables.session_table import SessionTable
from .tables.tenant_table import TenantTable


class Store(Database):
    """A database with the queries on each of its tables.

    Every query is awaited; a write has been committed when it returns. A duplicate key raises
    sqlalchemy.exc.IntegrityError. Get and find return None for a missing row; update and delete then do nothing. The
    SQL is portable: it uses no types or upserts of one dialect.
    """

    def __init__(self, writing: Engine, reading: Engine) -> None:
        super().__init__(writing, reading)
        self.tenants = TenantTable(self)
        self.keys = KeyTable(self)
        self.sessions = SessionTable(self)
        self.runs = RunTable(self)
        self.checkpoints = CheckpointTable(self)
        self.copies = CopyTable(self)
        self.leases = LeaseTable(self)
        self.samplers = SamplerTable(self)
        self.results = ResultTable(self)
        self.operations = OperationTable(self)
        self.logged_metrics = LoggedMetricsTable(self)
