"""The checkpoints of a parameter service: those of a TensorFlow job, and one string beside the values.

Parameters and slots have plain names, like ``w`` and ``w/Adam``, so ``tfps eval``, a training job and TensorFlow's own
tools can read them. The string ``tfps/service`` is JSON: the parameters, which of them are buffers, the identity of the
run, and which pushes are in the values. So a push that is sent again after a loss counts once.
"""

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow.compat.v1 as tf

from tfps.client.message import Array, TensorSpec
from tfps.errors import CheckpointError, NotReadyError
from tfps.runtime.checkpoint.restore import message_of
from tfps.runtime.checkpoint.sharded_saver import SaveResult
from tfps.runtime.service.first_server import ABOUT, STEP, FirstServer
from tfps.runtime.service.parameters.versions import Snapshot
from tfps.runtime.service.pushes import Outcome, State
from tfps.text import show
from tfps.tf_types import Session

log = logging.getLogger(__name__)


class SavedService:
    """A checkpoint, to begin from.

    Args:
        path: The checkpoint, without a suffix.

    Attributes:
        run: The identity of the run.
        state: The number of the last update, and which pushes are in it.
        specs: The parameters by name.

    Raises:
        CheckpointError: If no service has saved it.
        tf.errors.OpError: If it cannot be read.
    """

    def __init__(self, path: str) -> None:
        self._reader = tf.train.load_checkpoint(path)
        self._shapes = self._reader.get_variable_to_shape_map()
        if ABOUT not in self._shapes:
            raise CheckpointError(
                f"checkpoint {show(path, 200)} is not one of a parameter service, but of a training job: give another "
                "--model_dir."
            )
        about = json.loads(self._reader.get_tensor(ABOUT))
        decided = {client: (number, Outcome(*outcome)) for client, (number, outcome) in about["decided"].items()}
        self.run, self.state = about["run"], State(int(self._reader.get_tensor(STEP)), decided)
        types = self._reader.get_variable_to_dtype_map()
        self.specs: Mapping[str, TensorSpec] = {
            name: TensorSpec(
                np.dtype(types[name].as_numpy_dtype), tuple(self._shapes[name]), name in about.get("buffers", ())
            )
            for name in about["parameters"]
        }

    def check(self) -> None:
        """Read all values once: what is damaged is found before any server begins with it.

        Raises:
            tf.errors.OpError: If something is.
        """
        for name in self._shapes:
            self._reader.get_tensor(name)

    def read(self, names: Sequence[str]) -> Mapping[str, Array]:
        """Return the values of some parameters and of their slots, and the optimizer's own, by their names."""
        wanted = set(names)
        return {name: np.asarray(self._reader.get_tensor(name)) for name in self._shapes if self._is_of(name, wanted)}

    def _is_of(self, name: str, wanted: set[str]) -> bool:
        if name in self.specs or name in (ABOUT, STEP):
            return name in wanted
        owner = name.rpartition("/")[0]
        return owner in wanted or owner not in self.specs


class ServiceSaver:
    """Writes and reads the values of all servers of a service, for ``CheckpointManager``. It needs no session.

    Args:
        server: The first server.

    Attributes:
        found: The checkpoint that was read last.
    """

    def __init__(self, server: FirstServer) -> None:
        self._server = server
        self.found: SavedService | None = None

    def look(self, session: Session) -> SaveResult:
        """Check nothing: there is nowhere to save."""
        del session
        return SaveResult(self._server.now.step, [], 0)

    def save(self, session: Session, path: str) -> SaveResult:
        """Write a checkpoint of one moment on all servers, one server after the other.

        Raises:
            tf.errors.OpError: If that fails.
            NotReadyError: If a server was started again meanwhile.
            PeerLostError: If a server is lost.
        """
        del session
        broken, known, parts = [], set[str](), Path(f"{path}_temp")
        with self._server.snapshot() as snapshot:
            try:
                parts.mkdir()
                names = []
                for index, part in enumerate(snapshot.parts):
                    values = {name: value for name, value in part().items() if name not in known}
                    broken += [name for name, value in values.items() if not np.isfinite(value).all()]
                    known |= set(values)
                    written = {**values, **(_about(snapshot) if index == 0 else {})}
                    if written:  # a server may have no parameters
                        names.append(str(parts / f"part-{index}"))
                        _write(names[-1], written)
                if missing := set(snapshot.specs) - known:
                    raise NotReadyError(f"{len(missing)} parameters are not there.")
                tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=names, destination_prefix=path, delete_old_dirs=True)
            finally:
                shutil.rmtree(parts, ignore_errors=True)
            return SaveResult(snapshot.state.step, sorted(broken), 0)

    def restored(self, session: Session, path: str) -> str | None:
        """Read a checkpoint into ``found``; return why that is impossible if it is damaged.

        Raises:
            CheckpointError: If no service has saved it.
        """
        del session
        try:
            found = SavedService(path)
            found.check()
            self.found = found
        except (tf.errors.OpError, ValueError, LookupError, TypeError, OSError) as error:
            return message_of(error)
        return None


def _about(snapshot: Snapshot) -> Mapping[str, Array]:
    decided = {
        client: [number, [outcome.step, outcome.is_applied]]
        for client, (number, outcome) in snapshot.state.decided.items()
    }
    buffers = [name for name, spec in snapshot.specs.items() if spec.is_buffer]
    about = {"run": snapshot.run, "parameters": list(snapshot.specs), "buffers": buffers, "decided": decided}
    text = json.dumps(about)
    return {STEP: np.asarray(snapshot.state.step, np.int64), ABOUT: np.asarray(text.encode(), object)}


def _write(path: str, values: Mapping[str, Array]) -> None:
    tensors = [tf.constant(value) for value in values.values()]
    tf.raw_ops.SaveV2(prefix=path, tensor_names=list(values), shape_and_slices=[""] * len(values), tensors=tensors)
