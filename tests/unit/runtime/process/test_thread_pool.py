"""Threads that are used again."""

import threading

import pytest

from tfps.runtime.process.thread_pool import ThreadPool, at_once


def test_an_idle_thread_is_used_again() -> None:
    """A call that comes when another has ended takes its thread; those at the same time have one each."""
    pool: ThreadPool[str] = ThreadPool("mine")
    name = threading.get_ident
    [first] = {pool.submit(lambda: str(name())).result(10) for _ in range(1)}
    for _ in range(100):
        assert pool.submit(lambda: str(name())).result(10) == first
    both = threading.Barrier(2)
    calls = [pool.submit(lambda: f"{both.wait(100)} {name()}") for _ in range(2)]
    assert len({call.result(10).split()[1] for call in calls}) == 2
    mine = [thread for thread in threading.enumerate() if thread.name == "mine"]
    assert len(mine) == 2
    assert all(thread.daemon for thread in mine)


@pytest.mark.parametrize("submit", [ThreadPool("fails").submit, at_once])
def test_what_a_call_raises_is_raised_where_its_result_is_asked(submit: object) -> None:
    """The thread lives on."""
    assert callable(submit)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            submit(lambda: 1 // 0).result(10)
        assert submit(lambda: 7).result(10) == 7
