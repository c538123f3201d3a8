"""Runs one of several servers on one database: it serves while it holds the lease, and forwards requests otherwise."""

import asyncio
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from ..config.server_config import ServerConfig
from ..files.state_lock import LiveState, StartError
from ..routes.services import Services
from ..serving.server_process import HttpServer, leading, opened_store, say
from ..store import LeaseLost
from ..store.database.database_errors import OUTAGE_ERRORS
from .leases import Lease, LeaseExpired, Tenure
from .standby import LeaseGuard, Standby, SwitchableApp, TakeoverApp

logger = logging.getLogger(__name__)

_HOLDER_SECONDS = 0.5
"""Interval at which a standby checks whether the lease has another holder."""
_REST_SECONDS = 5.0
"""Wait of a server after a failed takeover, so that other servers, which look twice a second, can take the lease."""


async def serve_shared(
    config: ServerConfig, listener: socket.socket, url: str, greet: Callable[[], str], announce: Callable[[str], None]
) -> None:
    """Serves until cancelled, and releases the lease at the end. Raises StartError.

    Args:
        url: where other servers reach this one, unless the config says it.
    """
    store = opened_store(config)
    names = [model.name for model in config.models.base_models]
    lease = Lease(store, names, config.store.advertise_url or url, config.store.lease_seconds)
    try:
        await _prepare(lease, config.store.state_dir)
        await LeasedServer(config, lease, greet, announce).run(listener)
    finally:
        try:
            await lease.release()
        except SQLAlchemyError as error:
            logger.error("the lease could not be released, and will expire by itself: %s", error)
        store.close()


async def _prepare(lease: Lease, state_dir: Path) -> None:
    try:
        await lease.prepare(state_dir)
    except OSError as error:
        raise StartError(f"state directory {state_dir} cannot be used: {error.strerror}") from None
    except ValueError as error:
        raise StartError(str(error)) from None
    except SQLAlchemyError as error:
        raise StartError(f"the leases cannot be read: {error}") from None


class LeasedServer:
    """Runs one of several servers that share a database and a state directory: alternates standby and leading.

    greet: returns the ready message of a leading server.
    announce: called with a message for the user when requests are first answered, and at each change.
    """

    def __init__(
        self,
        config: ServerConfig,
        lease: Lease,
        greet: Callable[[], str],
        announce: Callable[[str], None],
    ) -> None:
        self._config = config
        self._lease = lease
        self._greet = greet
        self._announce = announce
        self._standby = Standby(lease)
        self._switch = SwitchableApp(TakeoverApp())
        self._services: Services | None = None
        self._is_stopping = False

    async def run(self, listener: socket.socket) -> None:
        """Serves until cancelled. Raises StartError if the server cannot take over."""
        http = HttpServer(self._config, self._switch, lambda: self._services, lambda: None)
        serving = asyncio.create_task(http.run_until_cancelled(listener))
        turns = asyncio.create_task(self._take_turns())
        try:
            await asyncio.wait({serving, turns}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._is_stopping = True
            self._standby.drop(keeps_present=False)
            for task in (serving, turns):  # connections are closed before anything that they use
                task.cancel()
                await asyncio.wait({task})
            await self._standby.close()
        for task in (serving, turns):
            if not task.cancelled():
                task.result()

    async def _take_turns(self) -> None:
        while not self._is_stopping:
            tenure = await self._take_lease()
            self._switch.target = TakeoverApp()
            try:
                await self._lead(tenure)
            except (LeaseLost, LeaseExpired) as error:
                logger.error("%s", error)
            except (OSError, *OUTAGE_ERRORS) as error:
                logger.error("this server cannot take over now (%s), and will try again unless another one does", error)
                await self._give_up()

    async def _give_up(self) -> None:
        self._switch.target = self._standby
        try:
            await self._lease.release_and_rest(_REST_SECONDS)
        except SQLAlchemyError as error:
            logger.error("the lease could not be released, and will expire by itself: %s", error)

    async def _take_lease(self) -> Tenure:
        taking, announced = asyncio.create_task(self._lease.acquire()), None
        try:
            while not taking.done():
                await asyncio.wait({taking}, timeout=_HOLDER_SECONDS)
                self._standby.drop(keeps_present=True)
                if self._lease.holder_url not in (None, announced):
                    announced, self._switch.target = self._lease.holder_url, self._standby
                    self._announce(f"standing by: {announced} holds the lease")
        finally:
            taking.cancel()
        return taking.result()

    async def _lead(self, tenure: Tenure) -> None:
        """Serves until another server holds the lease.

        Raises StartError, and OSError or a database outage if a later try may succeed.
        """
        say(f"taking over, with epoch {tenure.record.epoch}")
        keeping = asyncio.create_task(tenure.keep_renewing())
        try:
            async with leading(self._config, await self._live_state(tenure)) as app:
                self._services = app.state.services
                self._switch.target = LeaseGuard(app, tenure)
                self._announce(self._greet())
                await asyncio.shield(keeping)
                self._switch.target, self._services = self._standby, None
                app.state.services.futures.long_polls.stop()
                app.state.services.sampling.stop_sample_now()
        finally:
            self._services = None
            keeping.cancel()

    async def _live_state(self, tenure: Tenure) -> LiveState:
        try:
            directory = await asyncio.to_thread(tenure.take_live_state, self._config.store.state_dir)
        except ValueError as error:
            raise StartError(str(error)) from None
        return LiveState(directory, tenure.check, tenure.record, lambda: tenure.renewal_error)
