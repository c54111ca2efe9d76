"""Tasks and clusters as values."""

import pytest

from tfps.cluster.spec import Cluster, Task, hosts_flags
from tfps.errors import ConfigError

MEMBERS = Cluster(("p0:2222",), ("w0:2222", "w1:2222"))


def test_a_task_has_tensorflows_names() -> None:
    """A task prints as ``worker/0``, knows its device, and worker 0 alone is chief."""
    tasks = [Task("worker", 0), Task("worker", 1), Task("ps", 0), Task("evaluator", 0)]
    assert [str(t) for t in tasks] == ["worker/0", "worker/1", "ps/0", "evaluator/0"]
    assert [t.is_chief for t in tasks] == [True, False, False, False]
    assert tasks[2].device == "/job:ps/task:0"


def test_a_task_is_read_back() -> None:
    """``Task.parse`` reads what ``str`` writes, and the form with a colon."""
    assert Task.parse("worker/12") == Task.parse("worker:12") == Task("worker", 12)


@pytest.mark.parametrize(
    "text", ["", "worker", "worker:", "worker:-1", "worker:01", "chief:0", "Worker:0", "ps:0\n", "ps:٣"]
)
def test_what_is_no_task_is_refused(text: str) -> None:
    """Anything else is an error that shows the form."""
    with pytest.raises(ConfigError, match="like worker:0"):
        Task.parse(text)


def test_a_cluster_lists_its_tasks_ps_first() -> None:
    """Tasks, addresses and TensorFlow's spec agree."""
    assert MEMBERS.tasks() == (Task("ps", 0), Task("worker", 0), Task("worker", 1))
    assert [MEMBERS.address(t) for t in MEMBERS.tasks()] == ["p0:2222", "w0:2222", "w1:2222"]
    assert MEMBERS.spec() == {"ps": ["p0:2222"], "worker": ["w0:2222", "w1:2222"]}
    assert (MEMBERS.num_ps, MEMBERS.num_workers) == (1, 2)


def test_the_chief_holds_the_state_where_there_is_no_ps() -> None:
    """With PS, they hold it, on their own devices; without, the chief does, and TensorFlow gets no job of PS."""
    both = Cluster(("p:1", "p:2"), ("w:1", "w:2"))
    assert both.state_tasks == (Task("ps", 0), Task("ps", 1))
    assert both.state_devices == ("/job:ps/task:0", "/job:ps/task:1")
    alone = Cluster((), ("w:1", "w:2"))
    assert alone.state_tasks == (Task("worker", 0),)
    assert alone.state_devices == ("/job:worker/replica:0/task:0/device:CPU:0",)
    assert alone.spec() == {"worker": ["w:1", "w:2"]}
    assert alone.tasks() == (Task("worker", 0), Task("worker", 1))
    assert hosts_flags(alone) == ("--worker_hosts=w:1,w:2",)
