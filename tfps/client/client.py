"""A client of a parameter service: pull parameters, push gradients. Needs NumPy, and nothing else.

Example::

    import tfps

    with tfps.connect("h0:2222,h1:2222") as ps:
        ps.init({"w": w, "b": b})
        for batch in batches:
            weights = ps.pull()
            step = ps.push(gradients(weights, batch))
"""

import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from tfps.client.adapters import adapter_of
from tfps.client.arrays import Rows, as_array, as_ids, check_mapping
from tfps.client.background import Background
from tfps.client.message import Array, TensorSpec
from tfps.client.progress import Seen
from tfps.client.servers import BUFFER, DENSE, IDS, ROWS, Servers
from tfps.errors import ServiceError
from tfps.text import show

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tfps.client.push_future import PushFuture

_WAIT_SECS = 30.0


class Client:
    """A client of a service. Threads may share it: one push follows the other.

    Args:
        servers: The servers.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._order = Background(1, "tfps-order")
        self._pushing, self._pushes = threading.Lock(), 0
        self._background: list[PushFuture] = []

    def init(self, values: Mapping[str, Any], buffers: Mapping[str, Any] | None = None) -> None:
        """Give the parameters their first values, unless another client has done so, or a checkpoint.

        Args:
            values: Arrays by name.
            buffers: More arrays by name, which no optimizer changes, such as the averages of batch norm: pushes may
                give them other values.

        Raises:
            ServiceError: If there are parameters of other names, dtypes or shapes.
        """
        check_mapping("init", values)
        check_mapping("init: buffers", buffers or {})
        if both := sorted(values.keys() & (buffers or {}).keys()):
            raise ServiceError(f"init: {show(both[0])} is given as a parameter and as a buffer.")
        arrays = {DENSE + name: as_array(name, value) for name, value in values.items()}
        self._servers.init(arrays | {BUFFER + name: as_array(name, one) for name, one in (buffers or {}).items()})

    def pull(self, names: Sequence[str] | None = None) -> dict[str, Array]:
        """Return parameters by name, all of one step; all of them if no names are given.

        Raises:
            ServiceError: If a name is not known, or there are no parameters yet.
        """
        if isinstance(names, str) or not (names is None or isinstance(names, Sequence)):
            raise ServiceError(f"pull: expected a list of names, given {show(repr(names))}.")
        return self._servers.pull(list(self._servers.specs) if names is None else list(names))

    def push(self, gradients: Mapping[str, Any], buffers: Mapping[str, Any] | None = None) -> int:
        """Push gradients, and return the number of updates when they are applied, or have come too late.

        Args:
            gradients: Arrays by name; some of the parameters are enough.
            buffers: Values of buffers by name, which they get in the same update; in sync the mean of the workers.

        Raises:
            ServiceError: If one does not fit its parameter, or is not finite; nothing is applied then.
            PeerLostError: If the servers are lost; it is not known then whether the gradients were applied.
        """
        arrays = self._named(gradients, buffers)
        self._check_background()
        return self._push(arrays, self._servers.progress.seen)

    def push_async(self, gradients: Mapping[str, Any], buffers: Mapping[str, Any] | None = None) -> "Future[int]":
        """Push gradients in the background, in the order of the calls; return the future of what ``push`` returns.

        If the push fails, and nobody asks the future, the next push or ``close`` raises the error.
        """
        from tfps.client.push_future import PushFuture  # noqa: PLC0415  slow to import

        copies = {name: array.copy() for name, array in self._named(gradients, buffers).items()}
        self._check_background()
        self._background.append(future := PushFuture())
        future.follow(self._order.submit(future.run, self._push, copies, self._servers.progress.seen))
        return future

    def push_pull(self, gradients: Mapping[str, Any], buffers: Mapping[str, Any] | None = None) -> dict[str, Array]:
        """Push gradients, and return all parameters as they are then."""
        return self._push_pull(self._named(gradients, buffers))

    def _push_pull(self, arrays: Mapping[str, Array], into: Mapping[str, Array] | None = None) -> dict[str, Array]:
        self._check_background()
        with self._pushing:
            self._pushes += 1
            return self._servers.push_pull(arrays, self._pushes, into)

    def pull_rows(self, name: str, ids: Any) -> Array:
        """Return rows of a parameter: [n, ...] for ids [n], which may repeat.

        Raises:
            ServiceError: If the name is not known, or an id is no row.
        """
        return self._servers.pull_rows(name, as_ids(name, ids))

    def push_rows(self, name: str, ids: Any, gradients: Any) -> int:
        """Push the gradients of some rows of a parameter; ids that repeat add up. Returns what ``push`` returns."""
        rows = self._rows(name, ids, gradients)
        self._check_background()
        return self._push(rows, self._servers.progress.seen)

    def init_module(self, model: Any, buffers: bool = False) -> Any:
        """Give the parameters the values of a model, unless they have some, and the model theirs; return the model.

        Args:
            model: A PyTorch module, a Keras 3 model or layer, or a pytree of JAX. Of PyTorch, parameters that require
                no gradient stay the module's own.
            buffers: Whether the service has its buffers, too, such as the averages of batch norm. If not, they stay
                the model's own.
        """
        adapter = adapter_of(model)
        self.init(adapter.values(), adapter.buffers() if buffers else None)
        return self.pull_into(model)

    def pull_into(self, model: Any) -> Any:
        """Give a model the present values of parameters, and of the buffers that the service has.

        Those of a PyTorch module on the CPU arrive in its own memory: a call that raises an error may leave values of
        two steps there.

        From now on, this process keeps the memory that it frees: each step of training takes as much. glibc's
        ``MALLOC_TRIM_THRESHOLD_`` or another of its variables in the environment prevents that.

        Returns:
            The model, or a new tree in the case of JAX.
        """
        from tfps import malloc  # noqa: PLC0415  slow to import

        malloc.keep_freed()
        adapter = adapter_of(model)
        specs = self._servers.specs
        return adapter.assign(self._servers.pull(list(specs), adapter.memory(specs)))

    def push_grads(self, model: Any, gradients: Any = None, buffers: bool = False) -> int:
        """Push the gradients of a model; return what ``push`` returns.

        Args:
            model: The model.
            gradients: In the case of Keras, one for each trainable variable; in that of JAX, a tree of the same form;
                in that of PyTorch nothing: the gradients are those that ``backward`` has left in the parameters.
            buffers: Whether to push the values of its buffers, too; ``init_module`` has to have given them.
        """
        adapter = adapter_of(model)
        return self.push(adapter.gradients(gradients), adapter.buffers() if buffers else None)

    def push_pull_into(self, model: Any, gradients: Any = None, buffers: bool = False) -> Any:
        """Push the gradients of a model, then give it the parameters' values; one round trip if there is one server.

        Takes what ``push_grads`` takes, and returns what ``pull_into`` returns.
        """
        adapter = adapter_of(model)
        values = (
            {name: one.copy() for name, one in adapter.buffers().items()} if buffers else None
        )  # the answer overwrites theirs
        arrays = self._named(adapter.gradients(gradients), values)
        return adapter.assign(self._push_pull(arrays, adapter.memory(self._servers.specs)))

    def wait(self, step: int, timeout_secs: float = 3600.0) -> bool:
        """Wait until so many updates are made; return whether they are, and not the time is over."""
        if isinstance(step, bool) or not isinstance(step, int):
            raise ServiceError(f"wait: expected a number of updates, given {show(repr(step))}.")
        own = self._servers.first.another()  # so that other threads can push
        left, deadline = timeout_secs, time.monotonic() + timeout_secs
        try:
            while True:  # in short waits: one is repeated if its connection is lost
                secs = str(max(0.0, min(left, _WAIT_SECS)))
                answer = self._servers.until_ready(partial(own.request, "wait", step=str(step), secs=secs))
                left = deadline - time.monotonic()
                if int(answer.metadata["step"]) >= step or not left > 0:
                    return int(answer.metadata["step"]) >= step
        finally:
            own.close()

    @property
    def dropped(self) -> int:
        """How many pushes of this client have come too late, and are in no update."""
        return self._servers.progress.dropped

    @property
    def pulled_step(self) -> int:
        """The number of updates that were made when this client last pulled; asks nobody."""
        return int(self._servers.progress.seen["step"])

    @property
    def step(self) -> int:
        """The number of updates that are made, as the first server says now; waits while the service begins again."""
        return self._servers.step()

    def close(self) -> None:
        """Close the connections, after what was pushed in the background.

        Raises:
            TfpsError: If such a push has failed, and nobody has asked its future.
        """
        self._close()
        self._check_background()

    def _close(self) -> None:
        if self._servers.is_own:
            self._order.shutdown()
            self._servers.close()

    def _check_background(self) -> None:
        """Raise the error of a push in the background that has failed, and that nobody has asked for."""
        done = [future for future in self._background if future.done()]
        self._background = [future for future in self._background if future not in done]
        for future in done:
            future.check()

    def __reduce__(self) -> NoReturn:
        """Refuse to be sent to another process.

        Raises:
            ServiceError: Always.
        """
        raise ServiceError("a client cannot be sent to another process: call tfps.connect there.")

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error and self._servers.is_own:  # what was pushed in the background may wait for other workers
            self._order.shutdown(wait=False, cancel_futures=True)
            self._servers.abort()
        if error:  # which says more than that of a push before
            self._close()
        else:
            self.close()

    def _named(self, gradients: Mapping[str, Any], buffers: Mapping[str, Any] | None) -> dict[str, Array]:
        """Return gradients, of which some may be ``Rows``, and buffers by the names of their arrays in a message."""
        self._servers.check_process()
        check_mapping("push", gradients)
        check_mapping("push: buffers", buffers or {})
        found: dict[str, Array] = {}
        for name, value in gradients.items():
            if isinstance(value, Rows):
                found |= self._rows(name, value.ids, value.values)
            else:
                found[DENSE + name] = self._converted(name, value)
        return found | {BUFFER + name: self._converted(name, one, True) for name, one in (buffers or {}).items()}

    def _rows(self, name: str, ids: Any, gradients: Any) -> dict[str, Array]:
        spec, rows = self._servers.spec(name), as_ids(name, ids)
        values = as_array(name, gradients, spec.dtype)
        if values.dtype != spec.dtype:
            raise ServiceError(f"{show(name)}: expected {spec.dtype.name}, given {values.dtype.name}.")
        return {IDS + name: rows, ROWS + name: values}

    def _converted(self, name: str, value: Any, is_buffer: bool = False) -> Array:
        """Return a gradient, or a buffer, as an array; one of Python's numbers gets the parameter's dtype.

        Raises:
            ServiceError: If it does not fit the parameter.
        """
        spec = self._servers.spec(name)
        array = as_array(name, value, spec.dtype)
        if not spec.fits(array, is_buffer):
            raise ServiceError(f"{show(name)}: expected {spec}, given {TensorSpec.of(array, is_buffer)}.")
        return array

    def _push(self, arrays: Mapping[str, Array], seen: Seen) -> int:
        with self._pushing:
            self._pushes += 1
            return self._servers.push(arrays, self._pushes, seen)
