"""Reusable threads for calls that run sessions.

TensorFlow keeps some 200 bytes for each thread that has ever run a session. With a new thread for each run, a worker
with 60 runs a second grew by most of a megabyte a minute.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

_T = TypeVar("_T")


def at_once(act: Callable[[], _T]) -> "Future[_T]":
    """Run a call in this thread; the returned future has its result or its exception."""
    future: Future[_T] = Future()
    try:
        future.set_result(act())
    except BaseException as error:
        future.set_exception(error)
    return future


class ThreadPool(Generic[_T]):
    """Runs each call immediately, in an idle thread or a new one.

    Unlike those of ``concurrent.futures``, its threads do not keep the process from ending, whatever they wait for.

    Args:
        name: The name of its threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[], _T], Future[_T]]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def submit(self, act: Callable[[], _T]) -> "Future[_T]":
        """Run a call in a thread; the returned future gets its result or its exception."""
        future: Future[_T] = Future()
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, daemon=True, name=self._name).start()
        self._calls.put((act, future))
        return future

    def _work(self) -> None:
        while True:
            act, future = self._calls.get()
            outcome = at_once(act)
            self._idle.release()  # before the result is set, so that its receiver finds this thread idle
            if error := outcome.exception():
                future.set_exception(error)
            else:
                future.set_result(outcome.result())
            del act, future, outcome, error  # free their objects before waiting for the next call
