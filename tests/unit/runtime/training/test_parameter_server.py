"""What a parameter server does when another one is started again."""

import pytest

from tfps.cluster import probe
from tfps.cluster.spec import Cluster, Task
from tfps.errors import PeerLostError
from tfps.runtime.training import parameter_server


def test_only_who_was_there_when_a_worker_joined_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A PS that left before, as the job begins anew, takes no other along, which would send the workers away again."""
    other, born = Task("ps", 1), [b"1"]
    monkeypatch.setattr(parameter_server, "_PROBE_EVERY_SECS", 0.0)
    monkeypatch.setattr(parameter_server, "_PROBE_SECS_EACH", 0.0)
    monkeypatch.setattr(probe, "probe_all", lambda *_: {other: probe.ProbeResult(other, born=born[0])})
    servers = parameter_server._OtherServers(Cluster(("a:1", "b:1"), ("c:1",)), Task("ps", 0))
    servers.check(joined=False)
    born[0] = b"2"
    for _ in range(3):
        servers.check(joined=True)
    born[0] = b"3"
    with pytest.raises(PeerLostError, match="ps/1 restarted"):
        servers.check(joined=True)
