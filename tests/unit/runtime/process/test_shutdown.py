"""A task that is asked to end: its work, blocked or not, and what is called in its place."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from support.processes import environment

from tfps.errors import PeerLostError, StoppedError, TfpsError
from tfps.runtime.process import shutdown as stopping
from tfps.runtime.process.shutdown import StopRequest, run_supervised

STOPPED = StoppedError("stopped by SIGTERM")

# A task whose work never ends: blocked, as a session.run is. It says when it is ready, when it has
# seen that it is asked to end, and what becomes of it.
BLOCKED = """
import sys, threading
from tfps.runtime.process import shutdown
from tfps.errors import TfpsError

grace_secs, shutdown.SECOND_THOUGHT_SECS = map(float, sys.argv[1:])
said = []
asked = shutdown.StopRequest()
asked.on_signals()
blocked = threading.Event()
def work():
    print("ready", flush=True)
    blocked.wait()
def grace():
    if not said:
        said.append(print("asked", flush=True))
    return grace_secs
try:
    shutdown.run_supervised(work, asked, lambda: None, lambda: print("last will", flush=True), grace)
except TfpsError as error:
    print(error, flush=True)
    sys.exit(error.exit_code)
"""

# A task whose model has a process of its own, which it ends as a pool does.
FORKING = """
import multiprocessing, time
from tfps.runtime.process import shutdown

def sleep(ready):
    ready.set()
    time.sleep(60)

asked = shutdown.StopRequest()
asked.on_signals()
context = multiprocessing.get_context("fork")
ready = context.Event()
child = context.Process(target=sleep, args=(ready,), daemon=True)
child.start()
ready.wait()
child.terminate()
child.join(20)
print(child.exitcode, asked.error)
"""


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Return what blocked work waits for; it is looked after often."""
    monkeypatch.setattr(stopping, "_LOOK_SECS", 0.1)
    event = threading.Event()
    yield event
    event.set()


def _wait(event: threading.Event) -> None:
    event.wait()


def never() -> None:
    """Fail: this must not be called."""
    raise AssertionError("called")


def test_what_ends_a_process_that_a_model_forked_is_not_taken_by_its_stop() -> None:
    """SIGTERM ends it, as ``Pool.terminate`` waits for; the task itself goes on."""
    command = [sys.executable, "-c", FORKING]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.split() == [str(-signal.SIGTERM), "None"]


def test_work_that_ends_just_ends() -> None:
    """Work is done once, off the main thread, and its end is the task's."""
    done: list[bool] = []
    run_supervised(
        lambda: done.append(threading.current_thread() is threading.main_thread()), StopRequest(), lambda: None, never
    )
    assert done == [False]


@pytest.mark.parametrize("error", [PeerLostError("lost ps/0"), ValueError("a bug"), SystemExit(3)])
def test_what_work_raises_is_raised(error: BaseException) -> None:
    """Whatever the work raises is raised in the main thread, and nothing is saved in its place."""

    def work() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        run_supervised(work, StopRequest(), lambda: None, never)
    assert caught.value is error


def test_work_that_looks_ends_itself_after_a_signal() -> None:
    """SIGTERM is seen by work that looks at ``stop`` between its steps; the last will is not needed."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    stop = StopRequest()

    def work() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while stop.error is None:
            time.sleep(0.01)
        raise stop.error

    try:
        stop.on_signals()
        with pytest.raises(StoppedError, match=r"^stopped by SIGTERM$"):
            run_supervised(work, stop, lambda: None, never)
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), before, strict=True):
            signal.signal(number, handler)


def test_work_may_end_well_in_spite_of_a_request() -> None:
    """Work that is through when it is asked to end is through, not stopped."""
    stop = StopRequest()
    run_supervised(lambda: stop.request(STOPPED), stop, lambda: None, never)
    assert stop.error is STOPPED


def test_blocked_work_is_left_after_its_time(blocked: threading.Event) -> None:
    """Work that does not come back has its time, then the last will is called once and the reason is raised."""
    calls: list[bool] = []
    times = [1000.0, 1000.0, 0.2]  # how long it may take, asked again as the steps' length becomes known
    stop = StopRequest()
    stop.request(STOPPED)
    with pytest.raises(StoppedError) as caught:
        run_supervised(
            lambda: _wait(blocked),
            stop,
            watch=never,
            emergency_save=lambda: calls.append(stop.waited_secs >= 0.2),
            grace_secs=lambda: times.pop(0) if len(times) > 1 else times[0],
        )
    assert caught.value is STOPPED
    assert calls == [True]
    assert times == [0.2]


def test_what_the_watch_finds_ends_blocked_work(blocked: threading.Event) -> None:
    """The watch is called again and again while work is blocked; the first error that it returns ends the task."""
    lost = PeerLostError("lost ps/0")
    found: list[TfpsError | None] = [None, None, lost]
    with pytest.raises(PeerLostError) as caught:
        run_supervised(lambda: _wait(blocked), StopRequest(), lambda: found.pop(0), grace_secs=lambda: 0.2)
    assert caught.value is lost
    assert found == []


def test_the_first_reason_counts() -> None:
    """A later request does not replace the reason, nor give more time; without one no time passes."""
    stop = StopRequest()
    assert (stop.error, stop.waited_secs) == (None, 0.0)
    stop.request(STOPPED)
    time.sleep(0.05)
    stop.request(PeerLostError("lost ps/0"))
    assert stop.error is STOPPED
    assert stop.waited_secs >= 0.05


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_blocked_task_with_143(number: signal.Signals) -> None:
    """A real process, blocked: one signal, and after its time it says its last will and ends with 143."""
    code, said = _end("0.3", number)
    assert (code, said) == (143, ["ready", "asked", "last will", f"stopped by {number.name}"])


def test_an_interrupt_ends_a_task_that_is_ending_at_once() -> None:
    """A real process with all the time of the world: Ctrl-C 2 s after it was asked to end ends it with 143 at once."""
    code, said = _end("1000", signal.SIGTERM, signal.SIGINT, pause_secs=2.1)
    assert (code, said) == (143, ["ready", "asked"])


def test_two_interrupts_at_once_are_one() -> None:
    """A real process: Ctrl-C twice within 0.1 s does not keep a task from its last will."""
    code, said = _end("0.5", signal.SIGINT, signal.SIGINT, pause_secs=0.05, second_thought_secs=1000.0)
    assert (code, said) == (143, ["ready", "asked", "last will", "stopped by SIGINT"])


def test_a_second_sigterm_takes_no_time_away() -> None:
    """A platform that sends SIGTERM again does not keep a task from its last will."""
    code, said = _end("0.5", signal.SIGTERM, signal.SIGTERM, signal.SIGTERM)
    assert (code, said) == (143, ["ready", "asked", "last will", "stopped by SIGTERM"])


def _end(
    grace_secs: str,
    *numbers: signal.Signals,
    pause_secs: float = 0.1,
    second_thought_secs: float = stopping.SECOND_THOUGHT_SECS,
) -> tuple[int, list[str]]:
    """Start a blocked task, send it signals, return its exit code and its lines.

    The pause after the first signal begins when the task has seen it.
    """
    command = [sys.executable, "-c", BLOCKED, grace_secs, str(second_thought_secs)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline()]
        for number in numbers:
            process.send_signal(number)
            if len(said) == 1:
                said.append(process.stdout.readline())
            time.sleep(pause_secs)  # of two that come at once, Python sees the lower number first
        try:
            said += process.communicate(timeout=100)[0].splitlines()
        finally:
            process.kill()
    return process.returncode, [line.strip() for line in said]
