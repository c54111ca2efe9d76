"""The first server and the others together: generations, and checkpoints of all of them."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from support.service import FIRST, ONES, service, together

from tfps.client.message import Message
from tfps.errors import CheckpointError, NotReadyError, PeerLostError, ServiceEndedError, ServiceError
from tfps.runtime.service.checkpoints import ABOUT, SavedService, ServiceSaver
from tfps.runtime.service.parameters.versions import Version
from tfps.runtime.service.pushes import Rules

SESSION: Any = None  # a service needs none


def test_a_checkpoint_has_plain_names(tmp_path: Path) -> None:
    """TensorFlow reads it: parameters, slots and the step, once each, from all servers."""
    with service(2, optimizer="adam", learning_rate=0.01) as running, running.client() as ps:
        ps.init(FIRST)
        ps.push(ONES)
        saved = ServiceSaver(running.first).save(SESSION, str(tmp_path / "model.ckpt"))
        assert saved.step == 1
        assert saved.broken == []
        names = dict(tf.train.list_variables(str(tmp_path / "model.ckpt")))
        slots = {f"{name}/{slot}": list(value.shape) for name, value in FIRST.items() for slot in ("Adam", "Adam_1")}
        own = {name: list(value.shape) for name, value in FIRST.items()}
        rest = {"global_step": [], ABOUT: [], "beta1_power": [], "beta2_power": []}
        assert names == {**own, **slots, **rest}
        for name, value in ps.pull().items():
            np.testing.assert_array_equal(tf.train.load_variable(str(tmp_path / "model.ckpt"), name), value)


@pytest.mark.parametrize("num_ps", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adagrad", "ftrl", "rmsprop"])
def test_a_service_goes_on_from_a_checkpoint(tmp_path: Path, num_ps: int, optimizer: str) -> None:
    """With another number of servers, and to the bit as if it had not stopped."""
    path = str(tmp_path / "model.ckpt")
    random_ = np.random.default_rng(3)
    given = [{n: random_.normal(size=v.shape).astype(v.dtype) for n, v in FIRST.items()} for _ in range(4)]
    options = {"optimizer": optimizer, "learning_rate": 0.1}
    with service(2, **options) as running, running.client() as ps:
        ps.init(FIRST)
        for gradient in given[:2]:
            ps.push(gradient)
        ServiceSaver(running.first).save(SESSION, path)
        for gradient in given[2:]:
            ps.push(gradient)
        expected = ps.pull()
    with service(num_ps, **options) as running, running.client() as ps:
        running.first.restart(SavedService(path))
        assert ps.step == 2
        ps.init({name: value + 5 for name, value in FIRST.items()})  # those of the checkpoint count
        for gradient in given[2:]:
            ps.push(gradient)
        found = ps.pull()
        assert ps.step == 4
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)


def test_what_is_in_the_checkpoint_counts_once(tmp_path: Path) -> None:
    """A push is sent again after the servers have begun again; whether it counts is up to the checkpoint."""
    path = str(tmp_path / "model.ckpt")
    with service(2) as running, running.client() as ps:
        ps.init(FIRST)
        ps.push(ONES)
        ServiceSaver(running.first).save(SESSION, path)
        ps.push(ONES)
        for number, expected in ((1, -1), (2, -2)):
            running.first.restart(SavedService(path))
            arrays = {f"d/{name}": value for name, value in ONES.items()}
            assert ps._servers.push(arrays, number, ps._servers.progress.seen) == number
            assert {float(one) for value in ps.pull().values() for one in value.flat} == {float(expected)}


@pytest.mark.parametrize("num_ps", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_servers_begin_again_while_clients_push(tmp_path: Path, num_ps: int, seed: int) -> None:
    """Each generation has as many updates in all parameters as its step says, and clients go on by themselves."""
    with service(num_ps) as running, running.client() as first:
        first.init(FIRST)
        saver, over = ServiceSaver(running.first), threading.Event()

        def write(worker: int) -> int:
            with running.client(worker) as ps:
                count = 0
                while not over.is_set():
                    ps.push(ONES)
                    count += 1
                    values = {float(number) for value in ps.pull().values() for number in value.flat}
                    assert len(values) == 1, values
                return count

        with ThreadPoolExecutor() as pool:
            writes = [pool.submit(write, worker) for worker in range(3)]
            for turn in range(4):
                time.sleep(0.1 + 0.01 * seed)
                path = str(tmp_path / f"model.ckpt-{turn}")
                saver.save(SESSION, path)
                time.sleep(0.05)
                running.first.restart(SavedService(path))
            time.sleep(0.1)
            over.set()
            assert all(future.result(60) > 5 for future in writes)
        found = first.pull()
        assert {float(number) for value in found.values() for number in value.flat} == {-float(first.step)}


def test_a_gradient_of_lost_parameters_is_dropped_in_sync(tmp_path: Path) -> None:
    """It was computed with parameters that no checkpoint has."""
    path = str(tmp_path / "model.ckpt")
    with service(2, Rules("sync", 2)) as running, running.client(0) as one, running.client(1) as other:
        one.init(FIRST)
        ServiceSaver(running.first).save(SESSION, path)
        one.pull()
        other.pull()
        together(lambda: one.push(ONES), lambda: other.push(ONES))
        running.first.restart(SavedService(path))
        assert one.push(ONES) == 0  # dropped: the service is at step 0 again
        assert running.first.dropped() == {0: 1, 1: 0}
        both = together(*(lambda c=client: (c.pull(), c.push(ONES))[1] for client in (one, other)))
        assert both == [1, 1]
        assert one.pull()["b"][0] == -1


def test_a_server_that_has_lost_its_parameters_is_noticed() -> None:
    """Its part of an update cannot be made: nothing is applied half, and the service begins again."""
    with service(2, retry_secs=1.0) as running, running.client(retry_secs=0.5) as ps:
        ps.init(FIRST)
        ps.push(ONES)
        watches = running.connections()
        assert running.first.is_whole(watches)
        running.followers[0]._versions.suspend()
        assert not running.first.is_whole(watches)
        with pytest.raises(PeerLostError, match=r"not ready for 0\.5 s: the service begins again"):
            ps.push(ONES)


def test_terms_have_to_agree() -> None:
    """A server that was started with another learning rate is refused, and named."""
    with (
        pytest.raises(ServiceError, match=r"ps/1 was started with other flags than ps/0: rate is 1 there, 2 here\."),
        service(2, terms=['{"rate": 1}', '{"rate": 2}']),
    ):
        pass


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_the_last_step_is_the_last(mode: str) -> None:
    """No push after it is applied, and parameters can be read."""
    with service(2, Rules(mode, 2, max_steps=3)) as running, contextlib.ExitStack() as stack:
        clients = [stack.enter_context(running.client(worker)) for worker in range(2)]
        clients[0].init(FIRST)

        def push(index: int) -> int:
            count = 0
            with contextlib.suppress(ServiceEndedError):
                while True:
                    clients[index].pull()
                    clients[index].push(ONES)
                    count += 1
            return count

        counts = together(lambda: push(0), lambda: push(1))
        assert sum(counts) == {"async": 3, "sync": 6}[mode]
        assert clients[0].pull()["b"][0] == -3


def test_a_checkpoint_of_a_training_job_is_refused(tmp_path: Path) -> None:
    """Its variables have no list of parameters."""
    with tf.Graph().as_default(), tf.Session() as session:
        variable = tf.Variable([1.0], name="w")
        session.run(variable.initializer)
        tf.train.Saver([variable]).save(session, str(tmp_path / "model.ckpt"))
    with pytest.raises(CheckpointError, match="is not one of a parameter service, but of a training job"):
        SavedService(str(tmp_path / "model.ckpt"))


def test_a_snapshot_while_the_servers_begin_again_is_refused() -> None:
    """Whoever saves tries again later."""
    with service(2) as running, running.client() as ps:
        ps.init(FIRST)
        running.first._versions.suspend()
        with pytest.raises(NotReadyError), running.first.snapshot():
            pass


def test_a_server_that_is_started_again_in_a_save_spoils_no_checkpoint(tmp_path: Path) -> None:
    """It has no snapshot any more: nothing is written that lacks its parameters."""
    with service(2) as running, running.client() as ps:
        ps.init(FIRST)
        ps.push(ONES)
        follower = running.followers[0]
        with running.first.snapshot() as taken:
            follower._snapshot = Version(), {}
            with pytest.raises(NotReadyError, match="the snapshot is lost"):
                taken.parts[1]()
        saver = ServiceSaver(running.first)
        with (
            mock.patch.dict(follower._methods_of_first, state=lambda *_: Message({})),
            pytest.raises(NotReadyError, match="parameters are not there"),
        ):
            saver.save(SESSION, str(tmp_path / "model.ckpt"))
        assert not list(tmp_path.iterdir())
        assert saver.save(SESSION, str(tmp_path / "model.ckpt")).step == 1
        assert follower._snapshot == (Version(), {})


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_servers_without_parameters(tmp_path: Path, optimizer: str) -> None:
    """More servers than parameters: all are saved, and the service goes on from there."""
    path = str(tmp_path / "model.ckpt")
    with service(3, optimizer=optimizer) as running, running.client() as ps:
        ps.init({"w": np.zeros(2, np.float32)})
        ps.push({"w": np.ones(2, np.float32)})
        assert ServiceSaver(running.first).save(SESSION, path).step == 1
        expected = ps.pull()["w"]
        running.first.restart(SavedService(path))
        np.testing.assert_array_equal(ps.pull()["w"], expected)
        assert ps.push({}) == 2
        assert ps.push({"w": np.ones(2, np.float32)}) == 3


@pytest.mark.parametrize("num_ps", [1, 2])
def test_a_checkpoint_with_a_wrong_bit_is_not_begun_with(tmp_path: Path, num_ps: int) -> None:
    """Wherever the bit is in the values: the manager gets the problem, and tries the one before."""
    path = str(tmp_path / "model.ckpt")
    with service(num_ps) as running, running.client() as ps:
        ps.init({name: np.full_like(value, 1.5) for name, value in FIRST.items()})
        saver = ServiceSaver(running.first)
        saver.save(SESSION, path)
        assert saver.restored(SESSION, path) is None
        assert saver.found
        [data] = tmp_path.glob("model.ckpt.data-*-of-00001") if num_ps == 1 else sorted(tmp_path.glob("*.data-*"))[:1]
        content = bytearray(data.read_bytes())
        content[content.index(np.float32(1.5).tobytes())] ^= 1
        data.write_bytes(bytes(content))
        saver.found = None
        assert "checksum" in str(saver.restored(SESSION, path)).lower()
        assert saver.found is None
