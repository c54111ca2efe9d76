"""A worker's connection to its own server: the session that trains, and further ones on the same graph."""

import threading

from tfps.errors import StoppedError, TfpsError
from tfps.runtime.process import session as sessions
from tfps.runtime.process.shutdown import StopRequest
from tfps.runtime.training.parameter_server import StateOfChief
from tfps.tf_types import Graph, Session, Variable
from tfps.timeouts import PS_GRACE_SECS


class Connection:
    """Open sessions on the training graph.

    Attributes:
        session: The session that trains; ``None`` before the first. A restart of all workers replaces it.
        held: The job's state, if this worker holds it on its server, because there is no PS.
        spare: In that case, a session for an early end. A new one does not open while another worker is lost.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._target = ""
        self._config: object = None
        self._training: object = None
        self.session: Session = None
        self.held: StateOfChief | None = None
        self.spare: Session = None

    def set_target(self, target: str, config: object, training: object = None) -> None:
        """Set the address of this worker's server, and the ``tf.compat.v1.ConfigProto`` of its sessions.

        ``training`` is that of the sessions on the training graph, if it is another one.
        """
        self._target = target
        self._config, self._training = config, config if training is None else training

    def open(self) -> Session:
        """Open the session that trains, in place of an earlier one."""
        self.session = self.new_session()
        return self.session

    def keep_spare(self, fetch: Variable) -> None:
        """Open ``spare`` while no other worker is lost, if this worker holds the state."""
        if self.held and self.spare is None:
            self.spare = self.new_session()
            self.spare.run(fetch)  # only this opens it

    def reopen(self) -> None:
        """Open the session that trains once more, for an early end."""
        self.session = self.spare or self.new_session()

    def new_session(self, graph: Graph | None = None) -> Session:
        """Return a further session, on the training graph or another one."""
        config = self._training if graph is None else self._config
        return sessions.Session(self._target, graph=graph or self._graph, config=config)

    @property
    def error(self) -> TfpsError | None:
        """Why the job cannot continue, if this worker holds its state; else the PS would end."""
        return self.held.error if self.held else None

    def serve_others(self) -> None:
        """Serve until the other workers need this one's server no more."""
        if self.held:
            self.held.serve_others()

    def end_in_time(self, stop: StopRequest) -> None:
        """Do so when this worker is asked to stop: the others may have been, too. Take no longer than a PS."""
        if isinstance(stop.error, StoppedError):
            thread = threading.Thread(target=self.serve_others, daemon=True)
            thread.start()
            thread.join(max(0.0, PS_GRACE_SECS - stop.waited_secs))
