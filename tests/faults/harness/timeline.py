"""What the lines of a job tell of a fault: when it was noticed, when the job went on, and from which step.

A line is known with the time when it was read. Pure: no clock is looked at here.
"""

import itertools
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

_STEP = re.compile(r"step=(\d+)(?: \S+)* loss=")  # and not eval/loss
_SAVED = re.compile(r"saved \S*/(model\.ckpt-(\d+))$")
_RESUMED = re.compile(r"resumed from \S*/(model\.ckpt-(\d+))$")
_AT_ZERO = re.compile(r"no .*: training begins at step 0$")
_PACE = re.compile(r"pace: (\d+) steps? a run(?:, (\d+) runs in flight)?")
_COUNTED = re.compile(r"restarted .*\(\d+ of \d+\)$")  # and not with others that were lost
KILLED = "-- killed by the harness"
_FATE = re.compile(r"\b(restarted|stalled|killed|lost|replaced|ended with|no answer|no sign of life)\b")


@dataclass(frozen=True)
class Line:
    """A line that a task said, or the launcher (``task`` is empty), and when: monotonic time, in seconds."""

    at: float
    task: str
    text: str


@dataclass
class Mark:
    """The moment of a fault.

    Attributes:
        at: Monotonic time, in seconds.
        edge: How many lines were said before it, with those that were still on their way.
        victims: The tasks that it hit.
        says: A pattern of lines that name it otherwise than by a victim's name.
        others: The processes of the other tasks.
        other_ended: When the first of these ended.
        healed: When the cause was taken away, if it was.
    """

    at: float
    edge: int
    victims: Collection[str]
    says: str = ""
    others: Collection[int] = ()
    other_ended: float | None = None
    healed: float | None = None
    last: dict[str, int] = field(default_factory=dict)

    @property
    def since(self) -> float:
        """From when on the job can recover."""
        return self.healed or self.at


def step_of(text: str) -> int | None:
    """Return the step of a progress line, or ``None``."""
    match = _STEP.match(text)
    return int(match[1]) if match else None


def steps(lines: Sequence[Line]) -> list[tuple[Line, int]]:
    """Return the progress lines with their steps."""
    return [(line, step) for line in lines if (step := step_of(line.text)) is not None]


def newest(lines: Sequence[Line]) -> dict[str, int]:
    """Return the last step that each task has reported."""
    return {line.task: step for line, step in steps(lines)}


def detected(lines: Sequence[Line], mark: Mark) -> float | None:
    """Return after how many seconds a fault was named, or another task had ended."""
    named = [line.at for line in lines if line.at >= mark.at and _names(line, mark)]
    ended = [mark.other_ended] if mark.other_ended is not None else []
    return min((at - mark.at for at in [*named, *ended]), default=None)


def _names(line: Line, mark: Mark) -> bool:
    """Return whether a line names a victim: another's does by its name, the launcher's beside it by what it says."""
    if step_of(line.text) is not None:
        return False
    if mark.says and re.search(mark.says, line.text):
        return True
    for victim in mark.victims:
        if line.task == victim and _FATE.search(line.text):
            return True
        if line.task != victim and any(name in line.text for name in _names_of(victim)):
            return True
    return False


def _names_of(task: str) -> tuple[str, str]:
    """Return how tfps and TensorFlow call a task."""
    job, _, index = task.partition("/")
    return task, f"/job:{job}/replica:0/task:{index}"


def recovered(lines: Sequence[Line], mark: Mark, back: Collection[str]) -> float | None:
    """Return the time at which the job had gone on: beyond its last step, with some tasks back at work."""
    last, waited_for = max(mark.last.values(), default=0), set(back)
    beyond = False
    for line, step in steps(lines[mark.edge :]):
        if line.at < mark.since:
            continue
        beyond = beyond or step > last
        waited_for.discard(line.task)
        if beyond and not waited_for:
            return line.at
    return None


def lost(lines: Sequence[Line], mark: Mark, early: int = 0) -> tuple[int, float]:
    """Return how many steps a job has gone back, and how much of its time that is, in seconds.

    By task, for tasks of an async job report steps out of order among each other. ``early``: by how much a step may be
    told too low; the classic script reads it while it is being raised.
    """
    most, secs = 0, 0.0
    for task, last in mark.last.items():
        after = [step for line, step in steps(lines[mark.edge :]) if line.task == task]
        back = last - min(after, default=last + 1) + 1 - early
        if back > most:
            most = back
            secs = mark.at - _said_at(lines[: mark.edge], last - back + 1, mark.at)
    return most, secs


def reported_step(lines: Sequence[Line], mark: Mark) -> int | None:
    """Return the step that the job says it has gone back to after a fault, if it says so."""
    found = [int(match[2]) for line in lines[mark.edge :] if (match := _RESUMED.match(line.text))]
    found += [0 for line in lines[mark.edge :] if _AT_ZERO.match(line.text)]
    return min(found, default=None)


def lost_saved(lines: Sequence[Line], mark: Mark) -> int:
    """Return how many steps a job has gone back that a checkpoint held which was called saved before a fault."""
    said = [_SAVED.match(line.text) for line in lines[: mark.edge] if line.at < mark.at]
    whole = max((int(match[2]) for match in said if match), default=0)
    reported = reported_step(lines, mark)
    return 0 if reported is None else max(0, whole - reported)


def under_way(lines: Sequence[Line]) -> tuple[int, int]:
    """Return how many steps a run took, and how many runs of a worker were under way, at most, by what was said."""
    found = [(int(match[1]), int(match[2] or 1)) for line in lines if (match := _PACE.match(line.text))]
    return max((steps for steps, _ in found), default=1), max((runs for _, runs in found), default=1)


def lost_workers(lines: Sequence[Line]) -> dict[str, int]:
    """Return how many workers were lost while the PS lived, of whose steps a checkpoint may hold a part.

    By the checkpoint's name; under no name, in the end. What a job loses with its PS, it loses whole: all that it goes
    on with is of the checkpoint.
    """
    found: dict[str, int] = {}
    before = lost = 0
    own: list[str] = []
    killed: list[str] = []
    for line in lines:
        if _AT_ZERO.match(line.text):
            before, lost, own, killed = 0, 0, [], []
        elif match := _RESUMED.match(line.text):
            found |= dict.fromkeys(own, before + lost)
            before, lost, own, killed = found.get(match[1], 0), 0, [], []
        elif match := _SAVED.match(line.text):
            own.append(match[1])
        elif line.task.startswith("worker") and line.text == KILLED:
            lost, killed = lost + 1, [*killed, line.task]
        elif line.task.startswith("worker") and _COUNTED.match(line.text):
            lost += line.task not in killed
            killed = [task for task in killed if task != line.task]
    return found | dict.fromkeys([*own, ""], before + lost)


def _said_at(lines: Sequence[Line], step: int, otherwise: float) -> float:
    return next((line.at for line, reached in steps(lines) if reached >= step), otherwise)


def pause(lines: Sequence[Line], since: float, until: float) -> float:
    """Return the longest time without a step of anybody, in seconds."""
    times = [since, *(line.at for line, _ in steps(lines) if since <= line.at <= until), until]
    return max(after - before for before, after in itertools.pairwise(times))


def rate(lines: Sequence[Line], task: str, since: float, until: float) -> float:
    """Return how many steps a second a task has reported between two times."""
    reported = [line for line, _ in steps(lines) if line.task == task and since <= line.at <= until]
    return len(reported) / max(until - since, 1e-9)


def last_error(lines: Sequence[Line]) -> str:
    """Return the last line that begins with an error, and whose it is, or nothing."""
    errors = [f"{line.task} {line.text}".strip() for line in lines if re.match(r"error\b|.*Error: ", line.text)]
    return errors[-1][:160] if errors else ""


def transcript(lines: Sequence[Line]) -> str:
    """Return all that was said, with monotonic times, for whoever looks into it."""
    return "".join(f"{line.at:12.3f} {line.task:<9} {line.text}\n" for line in lines)
