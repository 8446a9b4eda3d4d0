"""Connections to a dashboard that nobody uses do not keep others out: a request that is begun is finished soon, and an answer is
taken, or the connection is closed; of more connections than there may be, those go that have kept us waiting the longest."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 10.0  # seconds from the first byte, or from the connection, to the end of a request's head
TAKEN = 30.0  # seconds in which some of an answer is taken, or the rest is not sent
MOST = 256  # connections at a time: files that are open, of which a process may have 1,024


class Patient(H11Protocol):
    """uvicorn's connection, with limits of time for the other side and a limit of number for connections. uvicorn itself has a
    limit of time between requests (``timeout_keep_alive``), and refuses everybody where there are too many
    (``limit_concurrency``)."""

    waiting: asyncio.TimerHandle | None = None  # for the other side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()
        others = [c for c in self.connections if isinstance(c, Patient) and not c.answering]
        for connection in sorted(others, key=lambda c: c.since)[:max(0, len(self.connections) - MOST)]:
            connection.transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._done()
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._done()
        super().connection_lost(exc)

    @property
    def answering(self) -> bool:
        """Is it our turn? It is not while there is no whole request, nor while an answer waits to be taken."""
        return self.cycle is not None and not self.cycle.response_complete and not self.flow.write_paused

    def _look(self) -> None:
        """Wait from now on where it is the turn of the other side, and no longer where it is ours."""
        if self.answering:
            self._done()
        elif self.waiting is None and self.timeout_keep_alive_task is None:
            self.since = self.loop.time()
            self.waiting = self.loop.call_later(TAKEN if self.flow.write_paused else PATIENCE, self.transport.abort)

    def _done(self) -> None:
        if self.waiting is not None:
            self.waiting.cancel()
            self.waiting = None
