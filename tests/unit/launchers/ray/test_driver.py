"""The driver's decisions about tasks that end; the ray package is replaced by names without function."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tfps.cluster.spec import Task
from tfps.jobs.handle import CANCELLED, FAILED, RUNNING, SUCCEEDED

PS, CHIEF, WORKER = Task("ps", 0), Task("worker", 0), Task("worker", 1)
_NAMES = {
    "ray": (),
    "ray.exceptions": ("RayActorError", "RayError", "RayTaskError"),
    "ray.util": (),
    "ray.util.placement_group": ("PlacementGroup", "placement_group", "remove_placement_group"),
    "ray.util.scheduling_strategies": ("PlacementGroupSchedulingStrategy",),
}
_USERS = ("tfps.launchers.ray.actor", "tfps.launchers.ray.driver")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a driver of one PS and two workers, all of which run."""
    for name, members in _NAMES.items():
        module = ModuleType(name)
        for member in members:
            setattr(module, member, type(member, (Exception,), {}))
        monkeypatch.setitem(sys.modules, name, module)
    for name in _USERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("tfps.launchers.ray.driver")
    made = module.Driver({"roles": [{"name": "ps", "replicas": 1}, {"name": "worker", "replicas": 2}]})
    monkeypatch.setattr(made, "_start", lambda tasks: [made._set(task, state=RUNNING) for task in tasks])
    made._start([PS, CHIEF, WORKER])
    yield made
    for name in _USERS:
        sys.modules.pop(name, None)


def _end(driver: Any, *ends: tuple[Task, int]) -> dict[Task, tuple[str, int | None]]:
    """Report ends of tasks to the driver; return how each task has ended for it."""
    for task, code in ends:
        driver._handle_exit(task, code)
    return {task: (known.state, known.exit_code) for task, known in driver._tasks.items()}


@pytest.mark.parametrize("code", [1, 77, 170])
def test_the_worker_that_a_ps_names_is_the_cause(driver: Any, code: int) -> None:
    """Not one that was killed before, started again, and is done; the job never ends with 0."""
    driver._errors[PS] = f"worker/0 has failed with exit code {code}."
    ends = _end(driver, (WORKER, 137), (WORKER, 0), (PS, 67), (CHIEF, code))
    assert ends == {PS: (CANCELLED, 67), CHIEF: (FAILED, code), WORKER: (SUCCEEDED, 0)}
    assert driver._code == code


def test_a_worker_that_was_started_once_more_is_the_cause(driver: Any) -> None:
    """Its supervisor was killed after it had told the PS: it stays failed, whatever its last process ends with."""
    driver._errors[PS] = "worker/1 has failed with exit code 137."
    ends = _end(driver, (WORKER, 137), (PS, 67), (WORKER, 143), (CHIEF, 143))
    assert ends == {PS: (CANCELLED, 67), CHIEF: (CANCELLED, 143), WORKER: (FAILED, 137)}
    assert driver._tasks[WORKER].restarts == 1
    assert driver._code == 137


@pytest.mark.parametrize("error", ["", "worker/1 has failed."])
def test_a_ps_that_names_nobody_fails_the_job_itself(driver: Any, error: str) -> None:
    """A failure never ends as a success, and no task is blamed that was only killed before."""
    driver._errors[PS] = error
    ends = _end(driver, (WORKER, 137), (WORKER, 0), (PS, 67), (CHIEF, 0))
    assert ends == {PS: (FAILED, 67), CHIEF: (SUCCEEDED, 0), WORKER: (SUCCEEDED, 0)}
    assert driver._code == 67
