"""A worker's connection to its own server: the session that trains, and further ones on the same graph."""

from tfps.runtime.process import session as sessions
from tfps.tf_types import Graph, Session


class Connection:
    """Open sessions on the training graph.

    Attributes:
        session: The session that trains; ``None`` before the first. A restart of all workers replaces it.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._target = ""
        self._config: object = None
        self.session: Session = None

    def set_target(self, target: str, config: object) -> None:
        """Set the address of this worker's server, and the ``tf.compat.v1.ConfigProto`` of its sessions."""
        self._target = target
        self._config = config

    def open(self) -> Session:
        """Open the session that trains, in place of an earlier one."""
        self.session = self.new_session()
        return self.session

    def new_session(self, graph: Graph | None = None) -> Session:
        """Return a further session, on the training graph or another one."""
        return sessions.Session(self._target, graph=graph or self._graph, config=self._config)
