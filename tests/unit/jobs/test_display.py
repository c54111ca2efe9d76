"""A job as it is shown and followed: on a terminal, off one, to its end, and when it fails or is asked to stop."""

import functools
import io
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tfps.cluster.spec import Task
from tfps.config.job_config import JobConfig
from tfps.jobs import display as viewing
from tfps.jobs.display import JobView, Terminal, job_view
from tfps.jobs.events import JobEvent, LogLine, Note, TaskExited, TaskRestarted, TaskStalled
from tfps.jobs.follow import Outcome, complete_summary, follow, log_tail

PS, CHIEF, WORKER = Task("ps", 0), Task("worker", 0), Task("worker", 1)
MISTAKE = ("error: --model=m.py: m.py, line 3: NameError: x", "    loss = x")


class Script:
    """A job whose events are given; remembers what it was asked to do. An event that can be called is called."""

    def __init__(self, events: Sequence[JobEvent | Callable[[], None] | None]) -> None:
        self._events = events
        self.requests: list[str] = []
        self.restarts = {WORKER: 2}

    def events(self) -> Iterator[JobEvent | None]:
        """Yield the events in order."""
        for event in self._events:
            if callable(event):
                event()
            else:
                yield event

    def cancel(self) -> None:
        """Remember it."""
        self.requests.append("cancel")

    def kill(self) -> None:
        """Remember it."""
        self.requests.append("kill")


def shown(
    *, max_steps: int = 1000, model_dir: str | None = None, tasks: Sequence[Task] = (PS, CHIEF, WORKER)
) -> JobView:
    """Return the view of a job of one ps and two workers that has just begun."""
    return job_view(JobConfig(max_steps=max_steps, model_dir=model_dir), tasks, began=0.0)


def said(task: Task, *lines: str) -> list[LogLine]:
    """Return the events of a task that says something."""
    return [LogLine(task, line) for line in lines]


def ended(*codes: int) -> list[TaskExited]:
    """Return the events of the three tasks' ends."""
    return [TaskExited(task, code) for task, code in zip((PS, CHIEF, WORKER), codes, strict=True)]


@pytest.mark.parametrize(
    ("told", "code", "why"),
    [
        ([*said(PS, "error: worker/1 has failed with exit code 77.")], 77, "worker/1 ended with exit code 77"),
        (
            [*said(WORKER, "error: x is wrong."), *said(PS, "error: worker/1 has failed with exit code 1.")],
            1,
            "worker/1: x is wrong.",
        ),
        (
            [*said(PS, "error: before.", "error: worker/1 has failed with exit code 137.")],
            137,
            "worker/1 ended with exit code 137",
        ),
        ([], 67, "ps/0 ended with exit code 67"),
    ],
)
def test_the_end_of_a_ps_that_was_told_is_the_workers(told: list[JobEvent], code: int, why: str) -> None:
    """Its end may be seen before the worker's: its error names that worker, and the code that the job ends with."""
    job = Script([*told, TaskExited(PS, 67), TaskExited(WORKER, code), TaskExited(CHIEF, 143)])
    outcome = follow(job, shown())
    assert (outcome.exit_code, outcome.error, job.requests) == (code, why, ["cancel"])
    assert outcome.exit_codes == {PS: 67, WORKER: code, CHIEF: 143}


def test_what_was_reported_before_a_loss_is_not_shown_after_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A progress line that was held back is dropped with the process that told it; a later one is shown."""
    now = 100.0
    monkeypatch.setattr("tfps.jobs.display.time.monotonic", lambda: now)

    def later() -> None:
        nonlocal now
        now += 10.0

    lost = [*said(CHIEF, "step=1 loss=9"), *said(CHIEF, "step=2 loss=8", "restarted after SIGKILL (1 of 5)")]
    back = said(CHIEF, "resumed from m/model.ckpt-52", "training: mode async", "step=53 loss=1")
    follow(Script([*lost, later, *back[:2], later, back[2], *ended(0, 0, 0)]), shown())
    reported = capsys.readouterr().out.splitlines()
    assert [line for line in reported if line.startswith("job")] == [
        "job      | step=1 loss=9",
        "job      | step=53 loss=1",
    ]


def test_off_a_terminal_each_line_has_its_tasks_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines are printed as they come, aligned after the name of who said them; a good end is exit code 0."""
    job = Script(
        [
            *said(PS, "waiting for worker/1"),
            None,
            *said(CHIEF, "step=1 eval/x=2", "a | b %s {x} [red]"),
            *ended(0, 0, 0),
        ]
    )
    outcome = follow(job, shown())
    assert capsys.readouterr().out.splitlines() == [
        "ps/0     | waiting for worker/1",
        "worker/0 | step=1 eval/x=2",
        "worker/0 | a | b %s {x} [red]",
    ]
    assert outcome == Outcome({PS: 0, CHIEF: 0, WORKER: 0}, 0, "", job.restarts)
    assert job.requests == []


def test_progress_is_one_line_for_all_workers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each report there is one line, with all workers' speed; at most one a second, also where it is slow.

    It shows the values of one step: not the accuracy of 110 beside the loss of 201.
    """
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    events: list[Any] = []
    for at, task, line in (
        (101.0, CHIEF, "training"),
        (101.0, WORKER, "training"),
        (101.0, CHIEF, "step=1 loss=9"),
        (101.5, CHIEF, "step=100 loss=8 examples/s=10"),
        (102.5, WORKER, "step=110 loss=7 accuracy=1 examples/s=20"),
        (103.6, CHIEF, "step=190 loss=6 examples/s=10"),
        (107.6, CHIEF, "step=195 loss=5 examples/s=11"),
        (108.7, WORKER, "step=201 loss=4 examples/s=20"),
    ):
        events += [functools.partial(now.__setitem__, 0, at), LogLine(task, line)]
    follow(Script([*events, *ended(0, 0, 0)]), shown())
    assert [line for line in capsys.readouterr().out.splitlines() if "step=" in line] == [
        "job      | step=1 loss=9",
        "job      | step=110 loss=7 accuracy=1 examples/s=30",
        "job      | step=195 loss=5 examples/s=31",
        "job      | step=201 loss=4 examples/s=31",
    ]


def test_an_evaluation_makes_no_loss_newer() -> None:
    """A line of progress has the step that its loss is of, whatever step was evaluated since."""
    view = shown()
    for line in ("step=1 loss=9", "step=8 eval/loss=2"):
        view.said(CHIEF, line)
    assert view.progress == "step=1 loss=9"
    assert view.step == 8


def test_what_is_known_of_a_job() -> None:
    """From its tasks' lines: the newest step and its loss, and the speed of those that still train."""
    view = shown()
    assert (view.step, view.loss, view.examples_per_sec, view.first_step_secs) == (0, None, 0, None)
    view.said(CHIEF, "training mnist from step 0")
    view.said(WORKER, "training")
    assert view.first_step_secs is None
    view.said(CHIEF, "step=20 loss=0.5 examples/s=100")
    first = view.first_step_secs
    assert first is not None
    view.said(WORKER, "step=30 loss=0.4 examples/s=50")
    view.said(CHIEF, "step=25 accuracy=0.9")
    assert (view.step, view.loss, view.examples_per_sec) == (30, 0.4, 150)
    assert view.tasks[CHIEF].values == {"loss": 0.5, "examples/s": 100, "accuracy": 0.9}
    view.said(WORKER, "done")
    assert (view.step, view.examples_per_sec, view.first_step_secs) == (30, 100, first)


@pytest.mark.parametrize(
    ("line", "state"),
    [
        ("waiting for ps/0", "waiting"),
        ("training", "training"),
        ("evaluating: 10 batches", "evaluating"),
        ("done", "done"),
        ("stopped by SIGTERM", "stopped"),
        ("error: a mistake", "error"),
        ("trainingly said", "starting"),
        ("", "starting"),
        ("step=nan", "starting"),
        ("my own print: done", "starting"),
    ],
)
def test_a_tasks_state_is_its_lines_first_word(line: str, state: str) -> None:
    """A line that begins with a state's name begins that state; any other changes nothing."""
    view = shown()
    view.said(CHIEF, line)
    assert view.tasks[CHIEF].state == state


def test_what_a_process_said_of_its_end_is_not_said_of_the_next() -> None:
    """A task that is started again has that state, and no error: why it ends in the end is what the last one says."""
    view = shown()
    for line in MISTAKE:
        view.said(WORKER, line)
    view.restarted(TaskRestarted(WORKER, "exit code 170", 1, 5))
    assert (view.tasks[WORKER].state, view.tasks[WORKER].error) == ("restarted", "")
    for line in (*MISTAKE, "restarted after exit code 170 (1 of 5)"):  # its supervisor says so
        view.said(WORKER, line)
    assert (view.tasks[WORKER].state, view.tasks[WORKER].error) == ("restarted", "")


def test_an_error_keeps_its_own_lines() -> None:
    """A task's error is all that it said of it: the problems, and the indented lines of the user's code."""
    view = shown()
    view.said(CHIEF, "    indented before")
    for line in (*MISTAKE, "error: a second problem", "something else", "    more of it"):
        view.said(CHIEF, line)
    problem, code = (line.removeprefix("error: ") for line in MISTAKE)
    assert view.tasks[CHIEF].error.splitlines() == [problem, code, "a second problem", "    more of it"]


def drawn(view: JobView, *lines: LogLine) -> str:
    """Return what a terminal shows at the end of a live view."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None, highlight=False)
    with Terminal(view, console) as terminal:
        for event in lines:
            view.said(event.task, event.text)
            terminal.line(event.task, event.text)
        terminal.refresh()
        terminal._live.refresh()
    out = console.file
    assert isinstance(out, io.StringIO)
    return out.getvalue()


def test_on_a_terminal_the_job_is_drawn() -> None:
    """A terminal shows the bar with its steps, loss, speed, and each task's state, step and speed."""
    lines = [*said(PS, "waiting"), *said(CHIEF, "training", "step=250 loss=0.53219 examples/s=12345")]
    lines += [*said(WORKER, "training", "step=1100 loss=0.25 examples/s=1000")]
    out = drawn(shown(max_steps=2000), *lines)
    for text in ("linear", "━", "1100/2000 steps", "left", "loss 0.25   13,345 examples/s"):
        assert text in out
    rows = [line.split() for line in out.splitlines()]
    for row in ("ps/0 waiting", "worker/0 training 250 12,345", "worker/1 training 1,100 1,000"):
        assert row.split() in rows
    assert "step=250" not in out


def test_on_a_terminal_other_lines_scroll_by() -> None:
    """Lines that are no progress are shown above, as they are, with the task's name; markup in them is text."""
    out = drawn(shown(), *said(CHIEF, "saved [bold]m[/bold] 100%", "training"), *said(PS, "error: [/x] {y}"))
    assert "worker/0 saved [bold]m[/bold] 100%" in out
    assert "    ps/0 error: [/x] {y}" in out


def test_a_terminal_shows_the_first_of_many_tasks() -> None:
    """Of many tasks the first are shown and the others counted."""
    out = drawn(shown(tasks=[Task("worker", index) for index in range(40)]))
    assert "worker/15" in out
    assert "worker/16" not in out
    assert "and 24 more" in out


def test_a_step_beyond_the_end_fills_the_bar() -> None:
    """Async workers overshoot: the bar never shows more than all steps."""
    assert "1000/1000 steps" in drawn(shown(), *said(CHIEF, "step=1003 loss=1"))


def test_standard_output_decides_how_a_job_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The live view is for terminals only."""
    assert isinstance(viewing.screen(shown()), viewing.Plain)
    monkeypatch.setattr(viewing, "Console", lambda **_: Console(file=io.StringIO(), force_terminal=True))
    assert isinstance(viewing.screen(shown()), Terminal)


@pytest.mark.parametrize(
    ("lines", "code", "job_code", "error"),
    [
        ((), 1, 1, "worker/1 ended with exit code 1"),
        ((), -9, 170, "worker/1 was killed by SIGKILL"),
        ((), -35, 170, "worker/1 was killed by signal 35"),
        (("error: lost ps/0",), 170, 170, "worker/1: lost ps/0"),
        (MISTAKE, 2, 2, "worker/1: --model=m.py: m.py, line 3: NameError: x\n    loss = x"),
    ],
)
def test_the_first_task_that_fails_decides(lines: Sequence[str], code: int, job_code: int, error: str) -> None:
    """The first bad end is the job's: its code (a signal is 170) and its own words; the others are cancelled, once."""
    job = Script(
        [
            *said(WORKER, *lines),
            TaskExited(PS, 0),
            TaskExited(WORKER, code),
            *said(CHIEF, "error: lost"),
            TaskExited(CHIEF, 143),
        ]
    )
    outcome = follow(job, shown())
    assert (outcome.exit_code, outcome.error) == (job_code, error)
    assert outcome.exit_codes == {PS: 0, WORKER: code, CHIEF: 143}
    assert job.requests == ["cancel"]


def test_the_same_error_of_several_tasks_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    """The error that the job ends with is not shown before, nor is its like; one of another kind is."""
    first, code = MISTAKE
    lines = [*said(WORKER, first), *said(CHIEF, first), *said(WORKER, code), *said(CHIEF, code)]
    outcome = follow(
        Script(
            [
                *lines,
                *said(PS, first[:-1], code, "    more"),
                TaskExited(WORKER, 2),
                TaskExited(PS, 2),
                TaskExited(CHIEF, 2),
            ]
        ),
        shown(),
    )
    assert outcome.error == f"worker/1: {first.removeprefix('error: ')}\n{code}"
    assert capsys.readouterr().out.splitlines() == [
        f"ps/0     | {first[:-1]}",
        f"ps/0     | {code}",
        "ps/0     |     more",
    ]


def test_an_error_is_not_held_back_for_long(capsys: pytest.CaptureFixture[str]) -> None:
    """An error of a task that is started again is shown, and that of one that does not end is after 2 s."""
    follow(Script([*said(WORKER, "error: lost ps/0", "restarted after exit code 170"), *ended(0, 0, 0)]), shown())
    assert capsys.readouterr().out.splitlines() == [
        "worker/1 | error: lost ps/0",
        "worker/1 | restarted after exit code 170",
    ]
    slow = Script([*said(WORKER, "error: lost ps/0"), lambda: time.sleep(2.1), None, *ended(2, 2, 2)])
    follow(slow, shown())
    assert capsys.readouterr().out.splitlines() == ["worker/1 | error: lost ps/0"]


def test_what_the_launcher_does_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """It is a line of its own; a terminal shows it until a task says something."""
    follow(Script([Note("importing TensorFlow"), *said(CHIEF, "training"), *ended(0, 0, 0)]), shown())
    assert capsys.readouterr().out.splitlines() == ["importing TensorFlow", "worker/0 | training"]
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None, highlight=False)
    view = shown()
    out = console.file
    assert isinstance(out, io.StringIO)
    with Terminal(view, console) as terminal:
        terminal.note("importing TensorFlow")
        console.print(terminal._draw())
        view.said(CHIEF, "training")
        edge = len(out.getvalue())  # it draws by itself as well, now and then
        console.print(terminal._draw())
    assert "importing TensorFlow" in out.getvalue()[:edge]
    assert "importing TensorFlow" not in out.getvalue()[edge:]


def _interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_in_order(number: signal.Signals) -> None:
    """The first signal cancels the tasks and the job is 143, stopped, whatever the tasks' codes; nothing is killed."""
    before = signal.getsignal(number)
    job = Script([lambda: os.kill(os.getpid(), number), *ended(143, 143, -15)])
    outcome = follow(job, shown())
    assert (outcome.exit_code, outcome.error) == (143, f"stopped by {number.name}")
    assert job.requests == ["cancel"]
    assert signal.getsignal(number) is before


def test_a_second_signal_kills_the_job() -> None:
    """A signal 2 s after the first does not wait for anything to be saved."""
    job = Script([_interrupted, lambda: time.sleep(2.1), _interrupted, *ended(-9, -9, -9)])
    assert follow(job, shown()).exit_code == 143
    assert job.requests[:2] == ["cancel", "kill"]


def test_two_signals_at_once_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that is sent twice within 0.1 s kills nothing: the tasks keep their time to save."""
    monkeypatch.setattr("tfps.jobs.follow.SECOND_THOUGHT_SECS", 100.0)
    job = Script([_interrupted, lambda: time.sleep(0.05), _interrupted, *ended(143, 143, 143)])
    assert follow(job, shown()).exit_code == 143
    assert "kill" not in job.requests


def test_a_failed_job_keeps_its_reason_when_it_is_asked_to_stop() -> None:
    """One signal leaves the tasks of a job that has failed the time to save; a later one kills them."""
    job = Script([TaskExited(PS, 2), _interrupted, TaskExited(CHIEF, -9), TaskExited(WORKER, -9)])
    outcome = follow(job, shown())
    assert (outcome.exit_code, outcome.error) == (2, "ps/0 ended with exit code 2")
    assert "kill" not in job.requests
    job = Script([TaskExited(PS, 2), _interrupted, lambda: time.sleep(2.1), _interrupted, TaskExited(CHIEF, -9)])
    assert follow(job, shown()).exit_code == 2
    assert "kill" in job.requests


def test_the_log_of_a_task_that_died_in_silence_is_shown(tmp_path: Path) -> None:
    """Of the first task that ended badly without a word the end of its log is shown; else nothing."""
    view = shown(model_dir=str(tmp_path))
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "worker-1.log"
    log.write_bytes(b"\xff bad\n" + b"".join(b"line %d\n" % n for n in range(20)))
    died = Outcome({WORKER: -11, PS: 143}, 170, "killed")
    assert log_tail(view.config, view, died, most=2) == [f"the end of {log}:", "  line 18", "  line 19"]
    assert log_tail(view.config, view, Outcome({WORKER: 143}, 143)) == []
    view.said(WORKER, "error: I said why")
    assert log_tail(view.config, view, Outcome({WORKER: 1}, 1)) == []
    assert log_tail(view.config, view, Outcome({WORKER: 1, PS: 143}, 1)) == []  # it was only asked to stop


def test_a_log_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    """A task that died before it had a log does not keep the job from ending."""
    view = shown(model_dir=str(tmp_path))
    assert log_tail(view.config, view, Outcome({PS: 1}, 1)) == [f"the end of {tmp_path / 'logs' / 'ps-0.log'}:"]


def test_the_summary_is_completed(tmp_path: Path) -> None:
    """What the chief has written stays; exit codes, restarts and the first step's time are added for every task."""
    reported = {"status": "done", "global_step": 5, "tasks": {"worker/0": {"steps": 3, "exit_code": 9}}, "own": [1]}
    (tmp_path / "summary.json").write_text(json.dumps(reported))
    view = shown(model_dir=str(tmp_path))
    view.said(CHIEF, "step=5 loss=1")
    summary = complete_summary(view.config, view, Outcome({PS: 0, CHIEF: 0}, restarts={CHIEF: 3})).to_json()
    assert (summary["status"], summary["global_step"], summary["own"]) == ("done", 5, [1])
    assert "error" not in summary
    assert summary["first_step_secs"] == view.first_step_secs
    assert summary["tasks"] == {
        "ps/0": {"exit_code": 0, "restarts": 0},
        "worker/0": {"steps": 3, "exit_code": 0, "restarts": 3},
        "worker/1": {"exit_code": None, "restarts": 0},
    }


@pytest.mark.parametrize(("code", "status"), [(2, "failed"), (170, "failed"), (143, "stopped")])
def test_the_summary_of_a_job_that_failed_says_why(tmp_path: Path, code: int, status: str) -> None:
    """A job that ends badly has a summary even if its chief wrote none: status, error, exit code, last step seen."""
    view = shown(model_dir=str(tmp_path))
    view.said(WORKER, "step=7 loss=1")
    summary = complete_summary(view.config, view, Outcome({PS: code}, code, "worker/1: lost"))
    assert (summary.status, summary.exit_code, summary.error) == (status, code, "worker/1: lost")
    assert (summary.global_step, summary.model, summary.mode) == (7, "linear", "async")
    assert (summary.schema_version, summary.model_dir) == (1, str(tmp_path))
    times = (summary.began, summary.ended)
    began, ended = (datetime.strptime(str(at), "%Y-%m-%dT%H:%M:%S%z") for at in times)
    assert abs((ended - began).total_seconds() - time.monotonic() + view.began) < 30


def test_the_time_lost_to_recovery_is_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While any task is away time is lost, however many are; why each was started again is kept."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    view = shown()
    for at, event in (
        (101.0, TaskRestarted(PS, "SIGKILL", 1, 5)),
        (102.0, TaskRestarted(WORKER, "exit code 170", 1, 5)),
        (103.0, LogLine(PS, "training: serving 2 workers")),
        (105.0, LogLine(WORKER, "training: mode sync, 2 workers, 1 ps")),
        (110.0, TaskRestarted(WORKER, "exit code 170", because="as others were lost")),
        (110.0, TaskRestarted(WORKER, "exit code 137", count=2)),
        (110.5, TaskRestarted(WORKER)),
        (111.0, LogLine(CHIEF, "step=3 loss=1")),
        (112.0, LogLine(WORKER, "step=4 loss=1")),
    ):
        now[0] = at
        if isinstance(event, LogLine):
            view.said(event.task, event.text)
        else:
            view.restarted(event)
    assert view.recovery_secs == 4.0 + 2.0
    now[0] = 150.0
    view.stalled(TaskStalled(CHIEF, 15.0))
    now[0] = 150.5
    view.restarted(TaskRestarted(CHIEF, "SIGKILL", 1, 5))
    now[0] = 152.0
    view.said(CHIEF, "training: mode sync, 2 workers, 1 ps")
    assert view.recovery_secs == 4.0 + 2.0 + 17.0, "it stood still for 15 s before it was killed"
    assert view.tasks[CHIEF].restarted_after == ["no sign of life"]
    assert view.tasks[PS].restarted_after == ["SIGKILL"]
    assert view.tasks[WORKER].restarted_after == ["exit code 170", "exit code 170", "exit code 137"]


def test_what_a_task_says_is_no_loss_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that says what a launcher says of a lost one loses no time, and was not started again."""
    view = shown()
    for line in ("stalled: no sign of life for 15 s, killed", "restarted after SIGKILL (1 of 5)", "training"):
        view.said(WORKER, line)
    assert (view.recovery_secs, view.tasks[WORKER].restarted_after) == (0.0, [])


def test_a_tasks_loss_is_shown_as_a_line_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """That it stalled, that it is started again, and why it failed where it could not say so, each after its name."""
    events = [TaskStalled(WORKER, 15.0), TaskRestarted(WORKER, "SIGKILL", 1, 5), TaskExited(PS, 0)]
    error = "ended with exit code 0 before it was done"
    outcome = follow(Script([*events, TaskExited(CHIEF, 170, error), TaskExited(WORKER, 170, "another")]), shown())
    assert capsys.readouterr().out.splitlines() == [
        "worker/1 | stalled: no sign of life for 15 s, killed",
        "worker/1 | restarted after SIGKILL (1 of 5)",
        "worker/1 | error: another",
    ]
    assert (outcome.exit_code, outcome.error) == (170, f"worker/0: {error}")


def test_another_job_takes_nothing_from_a_summary(tmp_path: Path) -> None:
    """What the chief had left is reported in the end, though another job has cleared the directory meanwhile."""
    path = tmp_path / "summary.json"

    def left() -> None:
        path.write_text(json.dumps({"status": "done", "global_step": 5, "eval": {"loss": 1.0}}))

    view = shown(model_dir=str(tmp_path))
    script = Script([left, TaskExited(CHIEF, 0), path.unlink, TaskExited(PS, 0), TaskExited(WORKER, 0)])
    outcome = follow(script, view)
    for read in (True, False):
        summary = complete_summary(view.config, view, outcome, read)
        assert (summary.status, summary.global_step) == ("done", 5)
        assert summary.chief
        assert summary.chief.eval == {"loss": 1.0}


def test_a_job_that_ended_well_has_not_failed(tmp_path: Path) -> None:
    """Also where nothing is known of what its chief has left."""
    view = shown(model_dir=str(tmp_path))
    summary = complete_summary(view.config, view, Outcome({PS: 0, CHIEF: 0}))
    assert (summary.status, summary.exit_code) == ("done", 0)
