"""The lines of a pod's log, by their time stamps."""

import queue
import shlex

from tfps.cluster.spec import Task
from tfps.jobs.events import LogLine
from tfps.launchers.kubernetes.logs import _Reader, _Stamp

POD = {"metadata": {"uid": "1", "name": "w-0"}, "status": {}}
STAMPED = [
    ("2026-11-25T04:00:01Z", "on the second"),
    ("2026-11-25T04:00:01.000000001Z", "a nanosecond later"),
    ("2026-11-25T04:00:01.5Z", "half a second later"),
    ("2026-11-25T04:00:01.5Z", "half a second later, again"),
    ("2026-11-25T04:00:02Z", "the next second"),
]


def test_a_line_on_a_whole_second_hides_no_later_one() -> None:
    """A stamp without a fraction, which Kubernetes gives to whole seconds, is before every other one of its second."""
    text = "".join(f"{stamp} {line}\n" for stamp, line in STAMPED)
    found: queue.Queue[LogLine] = queue.Queue()
    reader = _Reader(Task("worker", 0), POD, ["sh", "-c", f"printf %s {shlex.quote(text)}"], _Stamp(), found)
    reader._thread.join(20)
    assert [found.get_nowait().text for _ in range(found.qsize())] == [
        "on the second",
        "a nanosecond later",
        "half a second later",
        "the next second",
    ], "and what has the stamp of the line before it is that line, asked for once more"
