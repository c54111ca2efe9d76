"""Signs of life: who is silent has stalled, unless it computes, or nobody has listened."""

import os

import pytest

from tfps.cluster.spec import Task
from tfps.config.launch_protocol import SIGNED_OFF
from tfps.launchers.local import life_signs
from tfps.launchers.local.life_signs import LifeSigns
from tfps.timeouts import STALLED_AFTER_SECS

PS, WORKER = Task("ps", 0), Task("worker", 0)
ALIVE = b"."


class Machine:
    """The clock, and the CPU time of every process."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.cpu_secs: dict[int | None, float] = {1: 5.0, 2: 5.0}

    def wait(self, secs: float, signs: LifeSigns) -> list[Task]:
        """Let time pass, with a check every second; return the tasks that have stalled."""
        found: list[Task] = []
        for _ in range(round(secs)):
            self.now += 1.0
            found += signs.stalled()
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine whose time passes only in ``wait``."""
    made = Machine()
    monkeypatch.setattr(life_signs.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(life_signs, "_cpu_secs", lambda pid: made.cpu_secs[pid])
    return made


@pytest.fixture
def signs(machine: Machine) -> LifeSigns:
    """The signs of a PS and a worker, which have given one each."""
    del machine
    made = LifeSigns()
    for pid, task in enumerate((PS, WORKER), 1):
        made.began(task, pid)
        made.take(task, ALIVE)
    return made


def test_a_silent_task_has_stalled(machine: Machine, signs: LifeSigns) -> None:
    """It is reported once, and only after the whole time; the one that gives signs is not."""
    assert machine.wait(STALLED_AFTER_SECS, signs) == []
    signs.take(PS, ALIVE)
    assert machine.wait(STALLED_AFTER_SECS, signs) == [WORKER]


def test_nothing_read_is_no_sign(machine: Machine, signs: LifeSigns) -> None:
    """An empty read, as at the end of a pipe, does not count."""
    machine.wait(STALLED_AFTER_SECS, signs)
    signs.take(PS, b"")
    assert machine.wait(1, signs) == [PS, WORKER]


def test_a_silent_task_that_computes_is_alive(machine: Machine, signs: LifeSigns) -> None:
    """A fifth of a core counts as a sign of life; when that ends, too, it has stalled."""
    machine.cpu_secs[2] += 0.3 * STALLED_AFTER_SECS
    assert machine.wait(STALLED_AFTER_SECS + 1, signs) == [PS]
    assert machine.wait(STALLED_AFTER_SECS, signs) == []
    assert machine.wait(1, signs) == [WORKER]


def test_when_nobody_has_listened_no_task_has_stalled(machine: Machine, signs: LifeSigns) -> None:
    """After this process itself was stopped for long, the time begins again for all tasks."""
    machine.now += 10 * STALLED_AFTER_SECS
    assert signs.stalled() == []
    assert machine.wait(STALLED_AFTER_SECS, signs) == []
    assert machine.wait(1, signs) == [PS, WORKER]


def test_a_task_without_a_first_sign_has_not_stalled(machine: Machine, signs: LifeSigns) -> None:
    """Neither one that has only begun, nor one that has ended, is waited for."""
    signs.ended(PS)
    signs.ended(WORKER)
    signs.began(WORKER, 2)
    assert machine.wait(2 * STALLED_AFTER_SECS, signs) == []


def test_a_task_signs_off_once_per_process(signs: LifeSigns) -> None:
    """A task that has signed off is done until it begins again."""
    signs.take(WORKER, ALIVE + SIGNED_OFF)
    assert signs.signed_off == {WORKER}
    signs.ended(WORKER)
    assert signs.signed_off == {WORKER}
    signs.began(WORKER, 2)
    assert signs.signed_off == set()


def test_cpu_time_is_the_systems() -> None:
    """This process's is what Python knows of it, to some hundredths of a second; that of no process is 0."""
    mine = os.times()
    assert life_signs._cpu_secs(os.getpid()) == pytest.approx(mine.user + mine.system, abs=0.1)
    assert life_signs._cpu_secs(None) == 0.0
