"""Memory for arrays that arrive: used again only when nobody has it."""

import threading

import numpy as np

from tfps.client.buffers import Buffers

SIZE = 1 << 20


def address(memory: np.ndarray) -> int:  # type: ignore[type-arg]
    """Return where an array begins."""
    return memory.__array_interface__["data"][0]


def test_memory_is_used_again_when_nobody_has_it() -> None:
    """Not while an array that is a part of it lives, whatever it is seen as."""
    buffers = Buffers()
    first = buffers.take(SIZE)
    part = first.view(np.float32).reshape(256, -1)[3:5]
    where = address(first)
    del first
    second = buffers.take(SIZE)
    assert address(second) != where
    del part
    third = buffers.take(SIZE)
    assert address(third) == where
    assert address(third) % 64 == address(second) % 64 == 0
    assert third.nbytes == SIZE


def test_other_sizes_are_other_memory() -> None:
    """So an array is never a part of a larger one."""
    buffers = Buffers()
    sizes = [SIZE, SIZE + 4, 100, 0]
    taken = [buffers.take(size) for size in sizes]
    assert [memory.nbytes for memory in taken] == sizes
    assert len({address(memory) for memory in taken[:3]}) == 3


def test_no_more_is_kept_than_a_limit() -> None:
    """What is free of other sizes makes room; what is used is not touched."""
    buffers = Buffers()
    held = [buffers.take(60 << 20) for _ in range(3)]
    for value, memory in enumerate(held):
        memory[:10] = value
    for size in (70, 80, 90):
        buffers.take(size << 20)
    assert sum(memory.nbytes for memory in buffers._kept) <= 256 << 20
    assert [int(memory[9]) for memory in held] == [0, 1, 2]


def test_threads_never_share_memory() -> None:
    """Each finds in its arrays what it has written there."""
    buffers, wrong = Buffers(), list[int]()

    def write(value: int) -> None:
        for _ in range(300):
            memory = buffers.take(SIZE)
            memory[::4096] = value
            wrong.extend(memory[::4096][memory[::4096] != value].tolist())

    threads = [threading.Thread(target=write, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(buffers._kept) <= 8
