"""A thread that ends the collective in which rank 0 waits in vain, when rank 0 is this process.

A thread that waits in a collective cannot run any Python code, so neither Ctrl-C nor a timeout
reaches it. What ends the wait is the end of the other ranks: the backend then loses its connections
and raises an error.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

INTERRUPTING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM)
"""The signals whose handlers usually raise an exception. Timeouts use SIGALRM."""

POLL_INTERVAL = 0.1
"""Seconds between two looks at what rank 0 does."""

INTERRUPT_TIMEOUT = 0.3
"""If rank 0 has not moved for so many seconds after a signal, its handler cannot run."""


CPU_SECONDS = 0.01
"""A thread that computes for less than this, between two looks, is taken to wait."""


class Rank0Guard:
    """Watches the thread that makes it, until ``stop`` is called.

    ``break_collective`` is called, once, if that thread waits inside torch and a signal cannot
    reach it, or if it has waited for ``longest`` seconds after the ``others_finished``. It is not
    called while the thread runs other code, such as a debugger. ``broken``: it was called.
    """

    def __init__(
        self,
        break_collective: Callable[[], None],
        others_finished: Callable[[], bool],
        longest: float,
    ) -> None:
        self._break_collective = break_collective
        self._others_finished = others_finished
        self._longest = longest
        self._watched = threading.get_ident()
        self._stopping = False
        self._place: tuple[int, int] | None = None
        self._computed = 0
        self._since = 0.0
        self._interrupted = False
        self.broken = False
        self._ours, self._signals = socket.socketpair()
        self._ours.settimeout(POLL_INTERVAL)
        self._signals.setblocking(False)
        self._former: int | None = None
        if threading.current_thread() is threading.main_thread():
            # Python's handler in C, which always runs, writes the number of each signal to it.
            descriptor = self._signals.fileno()
            self._former = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="rank 0 guard", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. The thread that is watched must call it, and may call it again."""
        former, self._former = self._former, None
        if former is not None:
            signal.set_wakeup_fd(former)
        self._stopping = True
        self._thread.join()
        self._ours.close()
        self._signals.close()

    def _watch(self) -> None:
        while not self._stopping:
            with suppress(TimeoutError):
                self._note_signals(self._ours.recv(4096))
            if self._waits_in_vain():
                self.broken = True
                self._break_collective()
                return

    def _note_signals(self, numbers: bytes) -> None:
        former = self._former
        if former is not None and former >= 0:  # somebody else wants to know of signals too
            with suppress(OSError):
                os.write(former, numbers)
        if any(number in INTERRUPTING for number in numbers):
            self._interrupted = True
            self._place, self._since = self._place_in_torch(), time.monotonic()

    def _waits_in_vain(self) -> bool:
        place, computed = self._place_in_torch(), self._cpu_time()
        if place is None or place != self._place:
            self._interrupted = False  # it has run Python code, and with it the signal's handler
        if place is None or (place, computed) != (self._place, self._computed):
            self._place, self._computed, self._since = place, computed, time.monotonic()
            return False
        seconds = time.monotonic() - self._since
        if self._interrupted and seconds > INTERRUPT_TIMEOUT:
            return True
        return seconds > self._longest and self._others_finished()

    def _place_in_torch(self) -> tuple[int, int] | None:
        """Where in torch's Python code the thread is; None if it is somewhere else."""
        frame = sys._current_frames().get(self._watched)
        if frame is None or f"{os.sep}torch{os.sep}" not in frame.f_code.co_filename:
            return None
        return id(frame), frame.f_lasti

    def _cpu_time(self) -> int:
        """How long the thread has computed. It does not grow while the thread waits."""
        if not hasattr(time, "pthread_getcpuclockid"):  # macOS
            return 0
        computed = time.clock_gettime(time.pthread_getcpuclockid(self._watched))
        return int(computed / CPU_SECONDS)
