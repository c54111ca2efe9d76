"""Threads that are used again, for what runs sessions.

TensorFlow keeps some 200 bytes for each thread that has ever run a session: with a new one for each run, a worker of 60
runs a second grew by most of a megabyte a minute.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

_T = TypeVar("_T")


def at_once(act: Callable[[], _T]) -> "Future[_T]":
    """Run a call in this thread; its result, or what it raises, is that of the future."""
    future: Future[_T] = Future()
    try:
        future.set_result(act())
    except BaseException as error:
        future.set_exception(error)
    return future


class ThreadPool(Generic[_T]):
    """Runs each call at once, in a thread that is idle or a new one.

    Unlike those of ``concurrent.futures``, its threads do not keep the process from ending, whatever they wait for.

    Args:
        name: Of its threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[], _T], Future[_T]]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def submit(self, act: Callable[[], _T]) -> "Future[_T]":
        """Run a call; its result, or what it raises, is that of the future."""
        future: Future[_T] = Future()
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, daemon=True, name=self._name).start()
        self._calls.put((act, future))
        return future

    def _work(self) -> None:
        while True:
            act, future = self._calls.get()
            told = at_once(act)
            self._idle.release()
            if error := told.exception():
                future.set_exception(error)
            else:
                future.set_result(told.result())
            del act, future, told, error  # what they refer to is of no use until the next call
