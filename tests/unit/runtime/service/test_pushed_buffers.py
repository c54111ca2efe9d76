"""Buffers of a service: values that pushes assign, in the same update in which gradients are applied."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.service import FIRST, ONES, service, together

from tfps.errors import ServiceError
from tfps.runtime.service.checkpoints import SavedService, ServiceSaver
from tfps.runtime.service.pushes import Rules

BUFFERS = {"mean": np.zeros(5, np.float32), "count": np.zeros([], np.int64), "mask": np.zeros(2, bool)}
SESSION: Any = None


def of(number: int) -> dict[str, Any]:
    """Return buffers that have one number everywhere."""
    return {"mean": np.full(5, number, np.float32), "count": number, "mask": np.full(2, bool(number))}


def check(found: dict[str, Any], mean: float, count: int) -> None:
    """Fail unless the buffers have these values."""
    np.testing.assert_array_equal(found["mean"], np.full(5, mean, np.float32))
    assert found["count"] == count
    assert found["count"].dtype == np.int64
    assert found["mask"].tolist() == [bool(count)] * 2


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "ftrl", "adagrad"])
@pytest.mark.parametrize("num_ps", [1, 3])
def test_a_push_assigns_them(num_ps: int, optimizer: str) -> None:
    """No optimizer has a part in it; a push may have gradients alone, buffers alone, or both."""
    with service(num_ps, optimizer=optimizer) as running, running.client() as ps:
        ps.init(FIRST, BUFFERS)
        check(ps.pull(), 0, 0)
        assert ps.push(ONES, of(3)) == 1
        check(ps.pull(), 3, 3)
        assert ps.push(ONES) == 2
        check(ps.pull(), 3, 3)
        before = ps.pull(list(FIRST))
        assert ps.push_async({}, of(5)).result(60) == 3
        check(ps.push_pull({"b": ONES["b"]}, {"mean": of(6)["mean"]}), 6, 5)
        if optimizer == "sgd":
            np.testing.assert_array_equal(ps.pull()["w"], before["w"])
        names = {name for each in (running.first, *running.followers) for name in each._store.state()}
        assert not [name for name in names if name.startswith(("mean/", "count/", "mask/"))]


@pytest.mark.parametrize("num_ps", [1, 2])
def test_sync_takes_the_mean(num_ps: int) -> None:
    """Of the workers that give one, in the update of their gradients; whole numbers are those of the first of them."""
    with service(num_ps, Rules("sync", 3)) as running:
        clients = [running.client(worker) for worker in range(3)]
        clients[0].init(FIRST, BUFFERS)
        pushes = [(ONES, None), (ONES, of(2)), (ONES, of(4))]
        steps = together(*(lambda c=c, p=p: c.push(*p) for c, p in zip(clients, pushes, strict=True)))
        assert steps == [1, 1, 1]
        found = clients[0].pull()
        check(found, 3, 2)
        np.testing.assert_array_equal(found["w"], -ONES["w"])
        for client in clients:
            client.close()


def test_they_change_with_the_parameters() -> None:
    """No read has one of another update than the other."""
    with service(2) as running, running.client() as ps, running.client() as reader:
        ps.init(FIRST, BUFFERS)
        over = threading.Event()

        def read() -> int:
            reads = 0
            while not over.is_set():
                found, reads = reader.pull(), reads + 1
                assert found["b"][0] == -found["mean"][0] == -int(found["count"])
            return reads

        def push() -> None:
            for number in range(1, 201):
                ps.push(ONES, {"mean": of(number)["mean"], "count": number})
            over.set()

        reads, _ = together(read, push)
        assert reads > 10


def test_a_checkpoint_has_them(tmp_path: Path) -> None:
    """And which they are: after it, they can still be pushed, and nothing else can."""
    path = str(tmp_path / "model.ckpt")
    with service(2, optimizer="adam") as running, running.client() as ps:
        ps.init(FIRST, BUFFERS)
        ps.push(ONES, of(3))
        ServiceSaver(running.first).save(SESSION, path)
        saved = ps.pull()
    with service(2, optimizer="adam") as running, running.client() as ps:
        running.first.restart(SavedService(path))
        for name, value in ps.pull().items():
            np.testing.assert_array_equal(value, saved[name])
        ps.init(FIRST, BUFFERS)
        assert ps.push(ONES, of(7)) == 2
        check(ps.pull(), 7, 7)
        with pytest.raises(ServiceError, match="of a buffer, given float32"):
            ps.push({"mean": of(1)["mean"]})


@pytest.mark.parametrize(
    ("gradients", "buffers", "problem"),
    [
        ({"mean": np.zeros(5, np.float32)}, {}, r"mean: expected float32\[5\] of a buffer, given float32\[5\]\."),
        ({}, {"b": np.zeros(3, np.float32)}, r"b: expected float32\[3\], given float32\[3\] of a buffer\."),
        ({}, {"mean": np.zeros(4, np.float32)}, r"mean: expected float32\[5\] of a buffer, given float32\[4\]"),
        ({}, {"count": np.zeros([], np.int32)}, r"count: expected int64\[\] of a buffer, given int32"),
        ({}, {"mean": np.full(5, np.nan, np.float32)}, "mean: the value has NaN; it is not applied"),
        ({}, {"meen": np.zeros(5, np.float32)}, "meen is no parameter. Did you mean mean?"),
        ({}, [1], "push: buffers: expected arrays by name"),
        *(
            ({}, {"count": wrong}, "count: this is no array: a number is none of int64")
            for wrong in (1.7, np.inf, 2**63)
        ),
        ({}, {"mask": [5, 0]}, "mask: this is no array: a number is none of bool"),
    ],
)
def test_what_cannot_be_pushed(gradients: Any, buffers: Any, problem: str) -> None:
    """Nothing of it is applied."""
    with service(2) as running, running.client() as ps:
        ps.init(FIRST, BUFFERS)
        with pytest.raises(ServiceError, match=problem):
            ps.push(ONES | gradients, buffers)
        with pytest.raises(ServiceError, match=r"mean: expected float32\[.*\] of a buffer"):
            ps.push_rows("mean", [1], [1.0])
        assert ps.step == 0
        np.testing.assert_array_equal(ps.pull()["w"], FIRST["w"])
        check(ps.pull(), 0, 0)


def test_what_cannot_be_given() -> None:
    """Another kind than that of the first client, a name in both, NaN."""
    with service(2) as running, running.client() as ps, running.client() as other:
        with pytest.raises(ServiceError, match="b is given as a parameter and as a buffer"):
            ps.init(FIRST, {"b": np.zeros(3, np.float32)})
        with pytest.raises(ServiceError, match="x: the first value has NaN"):
            ps.init(FIRST, {"x": np.float32([np.nan])})
        ps.init(FIRST, BUFFERS)
        with pytest.raises(ServiceError, match=r"mean: expected float32\[5\] of a buffer, given float32\[5\]\."):
            other.init({**FIRST, "mean": BUFFERS["mean"]}, {name: BUFFERS[name] for name in ("count", "mask")})
        with pytest.raises(ServiceError, match=r"is missing: the service has 6 parameters"):
            other.init(FIRST)
