"""The driver of a job on Ray, which the launcher submits: it places the tasks, and follows them to their end.

It runs on a node of the cluster, as ``python -m tfps.launchers.ray.driver SPEC``. The supervisor of a task restarts it
after a retryable failure (``supervisor``); the driver restarts a task that was killed with its supervisor, on the same
address. An actor that is lost with its node takes its address along: then the driver forms the whole cluster again, and
the job continues from the last checkpoint. The driver reports all events in the job's log: see ``log_protocol``.
"""

import dataclasses
import json
import logging
import signal
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from tfps.cluster.spec import Cluster, Task, hosts_flags
from tfps.errors import ConfigError, PeerLostError, StoppedError
from tfps.jobs.causes import may_name_cause, named_cause
from tfps.jobs.handle import CANCELLED, FAILED, PENDING, RUNNING, SUCCEEDED, TaskStatus
from tfps.jobs.spec import KILLED, MAX_RESTARTS
from tfps.launchers.ray.actor import RayTask
from tfps.launchers.ray.log_protocol import format_line, format_status
from tfps.text import one_line, ordinal
from tfps.timeouts import RAY_STOP_SECS

_LOOK_SECS = 1.0  # how soon the driver sees a request to stop
_READ_SECS = 10.0
_FORM_AGAIN_SECS = 5.0  # Ray takes a while to notice that a node is gone


class StopRequested(Exception):  # noqa: N818  not an error
    """The job is asked to stop while its tasks are being placed or started."""


class Driver:
    """The tasks of a job and their states.

    Attributes:
        stop_requested: Whether a signal has asked the job to stop.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.stop_requested = False
        self._spec = spec
        tasks = [Task(role["name"], index) for role in spec["roles"] for index in range(role["replicas"])]
        self._tasks = dict.fromkeys(tasks, TaskStatus(PENDING))
        self._groups: list[PlacementGroup] = []
        self._actors: dict[Task, Any] = {}
        self._argv: dict[Task, Sequence[str]] = {}
        self._errors: dict[Task, str] = {}  # the last error message of each task
        self._lost = 0  # how many times a node was lost
        self._code: int | None = None  # set once the job's end is decided

    def run(self) -> int:
        """Form the cluster, again after each loss of a node, and return the job's exit code."""
        while self._code is None:
            try:
                self._form()
                self._see_through()
            except RayActorError as error:
                self._handle_node_loss(error)
            except StopRequested:
                return StoppedError.exit_code
            finally:
                self._release()
        return self._code

    def fail(self, words: str, code: int = ConfigError.exit_code) -> int:
        """Report that the job fails without a task to blame; return its exit code."""
        print_line(format_line(next(iter(self._tasks)), f"error: {words}"))
        self._code = code
        for task in self._tasks:
            self._set(task, state=FAILED, exit_code=code, reason=words)
        return code

    def _set(self, task: Task, **changes: Any) -> None:
        status = dataclasses.replace(self._tasks[task], **changes)
        self._tasks[task] = status
        print_line(format_status(task, status))

    def _form(self) -> None:
        """Get a place for each task, start an actor there, and start the tasks once all addresses are known."""
        for role in self._spec["roles"]:
            self._groups.append(placement_group([role["bundle"]] * role["replicas"], strategy="SPREAD"))
        self._wait_for_room()
        for role, group in zip(self._spec["roles"], self._groups, strict=True):
            self._actors |= {Task(role["name"], index): _actor(role, group, index) for index in range(role["replicas"])}
        places = dict(zip(self._actors, self._get([a.place.remote() for a in self._actors.values()]), strict=True))
        hosts = {
            role["name"]: tuple(places[t][0] for t in places if t.job == role["name"]) for role in self._spec["roles"]
        }
        for task, (address, node) in places.items():
            me = (f"--job_name={task.job}", f"--task_index={task.index}")
            self._argv[task] = [
                *self._spec["command"],
                *hosts_flags(Cluster(hosts.get("ps", ()), hosts.get("worker", ()))),
                *me,
            ]
            self._set(task, where=f"{address} on node {node[:12]}", reason="")
        self._start(places)

    def _wait_for_room(self) -> None:
        for role, group in zip(self._spec["roles"], self._groups, strict=True):
            if group.wait(_LOOK_SECS):
                continue
            for task in (task for task in self._tasks if task.job == role["name"]):
                self._set(task, state=PENDING, reason=f"waiting for {role['replicas']} x {json.dumps(role['bundle'])}")
            while not group.wait(_LOOK_SECS):
                self._check()

    def _check(self) -> None:
        if self.stop_requested:
            raise StopRequested

    def _get(self, refs: list[Any]) -> list[Any]:
        """Return the values of object references; stop waiting if the job is asked to stop."""
        while len(ray.wait(refs, num_returns=len(refs), timeout=_LOOK_SECS)[0]) < len(refs):
            self._check()
        return list(ray.get(refs))

    def _start(self, tasks: Iterable[Task]) -> None:
        self._get([self._actors[task].start.remote(self._argv[task], self._spec["directory"]) for task in tasks])
        for task in tasks:
            self._set(task, state=RUNNING)

    def _see_through(self) -> None:
        """Pass on the tasks' lines until all have ended."""
        reading = {actor.read.remote(_READ_SECS): task for task, actor in self._actors.items()}
        while reading:
            if self.stop_requested and self._code is None:
                self._end(StoppedError.exit_code)
            for ref in ray.wait(list(reading), timeout=_LOOK_SECS)[0]:
                task = reading.pop(ref)
                if self._handle_output(task, ref):
                    reading[self._actors[task].read.remote(_READ_SECS)] = task
        self._code = self._code or 0

    def _handle_output(self, task: Task, ref: Any) -> bool:
        """Process a task's new lines and its end; return whether there is more to come."""
        lines, code = ray.get(ref)
        for line in lines:
            print_line(format_line(task, line))
            if line.startswith("error: "):
                self._errors[task] = line.removeprefix("error: ")
        return code is None or self._handle_exit(task, code)

    def _handle_exit(self, task: Task, code: int) -> bool:
        """Restart a task that was killed with its supervisor and return true; end the job if the task has failed."""
        restarts = self._tasks[task].restarts
        if code in KILLED and self._code is None and restarts < MAX_RESTARTS:
            self._set(task, exit_code=code, restarts=restarts + 1, reason=self._errors.get(task, ""))
            self._start([task])
            return True
        if self._tasks[task].state == FAILED:  # blamed already
            return False
        if may_name_cause(task, code) and self._code is None:
            self._blame_named(task)
        bad = FAILED if self._code is None else CANCELLED
        self._set(
            task, state=bad if code else SUCCEEDED, exit_code=code, reason=self._errors.get(task, "") if code else ""
        )
        if code and self._code is None:
            self._end(code)
        return False

    def _blame_named(self, ps: Task) -> None:
        """End the job for the worker that a PS's error names: it may not have ended yet, or was started once more."""
        if named := named_cause(ps, self._errors.get(ps, "")):
            worker, code = named
            self._set(worker, state=FAILED, exit_code=code, reason=self._errors.get(worker, ""))
            self._end(code)

    def _end(self, code: int) -> None:
        """Ask every task to save and end; the job ends with ``code``."""
        self._code = code
        for actor in self._actors.values():
            actor.stop.remote()

    def _handle_node_loss(self, error: RayActorError) -> None:
        """Prepare to form the cluster again, or give up."""
        words = _words(error)
        self._lost += 1
        self._release()  # before the new tasks read the checkpoint that the old ones save
        if error.actor_init_failed:
            self.fail(words)
        elif self._code is None and self._lost > MAX_RESTARTS:
            self.fail(f"a node was lost for the {ordinal(self._lost)} time: {words}", PeerLostError.exit_code)
        elif self._code is None:
            for task, status in self._tasks.items():
                self._set(task, state=PENDING, restarts=status.restarts + 1, reason=f"a node is lost: {words}")
            time.sleep(_FORM_AGAIN_SECS)

    def _release(self) -> None:
        """Stop the running tasks, with time to save, and give back the cluster's actors and places."""
        stopping = [actor.stop.remote() for actor in self._actors.values()]
        if stopping:
            ray.wait(stopping, num_returns=len(stopping), timeout=RAY_STOP_SECS)
        for actor in self._actors.values():
            ray.kill(actor)
        for group in self._groups:
            remove_placement_group(group)
        self._actors, self._groups = {}, []


def _actor(role: Mapping[str, Any], group: PlacementGroup, index: int) -> Any:
    """Return a new actor in its place of the group."""
    bundle = role["bundle"]
    return (
        ray.remote(RayTask)
        .options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            memory=bundle.get("memory"),
            max_concurrency=2,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )
        .remote()
    )


def _words(error: Exception, most: int = 500) -> str:
    """Return Ray's message in one line; for an error inside an actor, which has a traceback, the last line."""
    text = str(error).strip()
    inside = isinstance(error, RayTaskError) or (isinstance(error, RayActorError) and error.actor_init_failed)
    return one_line(text.splitlines()[-1] if inside else text)[:most]


def print_line(text: str) -> None:
    """Write a line of the log, in one piece and without delay."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    """Run a job; return its exit code."""
    driver = Driver(json.loads(argv[0]))

    def stop(number: int, frame: FrameType | None) -> None:
        del number, frame
        driver.stop_requested = True

    try:
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
        signal.signal(signal.SIGTERM, stop)  # replaces Ray's own handler, which ends the driver immediately
        return driver.run()
    except (RayError, RuntimeError, OSError, ValueError) as error:
        return driver.fail(_words(error))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
