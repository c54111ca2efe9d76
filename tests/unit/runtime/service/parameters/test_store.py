"""The parameters of a service: the arithmetic of updates, against NumPy and against TensorFlow's graphs."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from tfps.client.arrays import Rows
from tfps.client.message import Array, TensorSpec
from tfps.errors import ServiceError
from tfps.optimizers.registry import OPTIMIZERS, make_optimizer
from tfps.runtime.service.parameters import store as store_module
from tfps.runtime.service.parameters.aggregate import BufferValue
from tfps.runtime.service.parameters.store import Store

FIRST = {"a.weight": np.arange(6, dtype=np.float32).reshape(3, 2), "b": np.ones(2, np.float32), "c": np.float64([0.5])}


def created(optimizer: str = "sgd", rate: float = 1.0, aggregate: str = "mean") -> Store:
    """Return a store with the first values."""
    store = Store(optimizer, rate, aggregate)
    store.create(FIRST)
    return store


def gradients(seed: int, names: Sequence[str] = tuple(FIRST)) -> dict[str, Array]:
    """Return a gradient of some parameters."""
    random = np.random.default_rng(seed)
    return {name: random.normal(size=FIRST[name].shape).astype(FIRST[name].dtype) for name in names}


def equal(found: Mapping[str, Array], expected: Mapping[str, Any]) -> None:
    """Fail unless all values have the same bits."""
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)


def test_parameters_are_what_they_were_given() -> None:
    """With their dtypes and shapes."""
    store = created()
    equal(store.read(), FIRST)
    equal(store.read(["b"]), {"b": FIRST["b"]})
    assert store.specs["a.weight"] == TensorSpec(np.dtype(np.float32), (3, 2))
    assert store.specs["c"].dtype == np.float64


def test_a_read_is_of_one_moment() -> None:
    """An update that is made later does not change what was read."""
    store = created()
    before = store.read()
    copied = {name: value.copy() for name, value in before.items()}
    store.update([gradients(1)])
    store.update([{"a.weight": Rows(np.array([1]), np.ones([1, 2], np.float32))}])
    equal(before, copied)
    assert (store.read()["b"] != copied["b"]).all()


def test_reads_of_the_same_moment_are_one() -> None:
    """Until the parameters change: by an update, an assigned buffer, other first values, or a checkpoint."""
    store = Store("sgd", 1.0)
    changes = [
        lambda: store.create({"w": np.zeros(2), "m": np.zeros(2)}, ["m"]),
        lambda: store.update([{"w": np.ones(2)}]),
        lambda: store.update([{"m": BufferValue(np.full(2, 7.0))}]),
        lambda: store.restore(store.specs, {"w": np.full(2, 3.0), "m": np.full(2, 4.0)}),
    ]
    expected = [([0, 0], [0, 0]), ([-1, -1], [0, 0]), ([-1, -1], [7, 7]), ([3, 3], [4, 4])]
    for change, (w, m) in zip(changes, expected, strict=True):
        change()
        for names in (None, ["w", "m"], ["m"], ["w"]):
            found = store.read(names)
            equal(found, {name: value for name, value in (("w", w), ("m", m)) if names is None or name in names})
            assert all(store.read(names)[name] is value for name, value in found.items())


def test_a_read_after_an_update_that_came_again_takes_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update has read what it has made; what it has left alone was read before."""
    store, reads = created(), mock.Mock(side_effect=store_module.read_value)
    monkeypatch.setattr(store_module, "read_value", reads)
    for seed in range(3):
        store.update([gradients(seed, ["a.weight", "b"])])
        store.read()
    assert reads.call_count == len(FIRST), "those of the first update, whose function is not made yet"


def test_what_a_read_has_to_copy_lasts_no_longer_than_its_reader() -> None:
    """After an update of rows, TensorFlow copies the whole table at each read."""
    store = Store("sgd", 1.0)
    store.create({"w": np.zeros(2)})
    own = weakref.ref(store.read()["w"])
    assert own() is not None
    store.update([{"w": Rows(np.array([1]), np.ones(1))}])
    assert own() is None
    found = store.read()["w"]
    np.testing.assert_array_equal(found, [0, -1])
    copied = weakref.ref(found)
    del found
    assert copied() is None
    store.update([{"w": np.ones(2)}])
    np.testing.assert_array_equal(store.read()["w"], [-1, -2])
    store.create({"w": np.zeros(2)})  # another table, of which no rows were updated
    assert store.read()["w"] is store.read()["w"]


def test_reads_are_of_all_updates_before() -> None:
    """Of some parameters, of all, of rows and of buffers, as often as makes functions of them: exact, and as NumPy."""
    random = np.random.default_rng(2)
    own = {name: np.zeros([3, 2], np.float32) for name in "abcd"} | {"m": np.zeros(2, np.float32)}
    store = Store("sgd", 1.0)
    store.create(own, ["m"])
    for turn in range(300):
        push: dict[str, Any] = {}
        for name in random.permutation(list("abcd"))[: random.integers(5)]:
            values = random.integers(-9, 9, [3, 2]).astype(np.float32)
            push[name] = Rows(np.array([0, 2, 0]), values) if turn > 100 and name == "d" else values
        if random.integers(4) == 0:
            push["m"] = BufferValue(random.integers(9, size=2).astype(np.float32))
        store.update([push])
        for name, change in push.items():
            if isinstance(change, Rows):
                np.subtract.at(own[name], change.ids, change.values)
            else:
                own[name] = change.value if isinstance(change, BufferValue) else own[name] - change
        wanted = None if random.integers(2) else [*random.permutation(list(own))[:2]]
        found = store.read(wanted)
        assert set(found) == set(wanted or own)
        assert all(np.array_equal(value, own[name]) for name, value in found.items()), turn


def test_the_sum_of_rows_has_the_bits_of_the_order_of_the_workers() -> None:
    """Each row is added up in float32, one push after the other, and then divided, as a dense gradient is."""
    random = np.random.default_rng(0)
    pushes = [Rows(random.integers(0, 3, 5), random.normal(size=[5, 2]).astype(np.float32)) for _ in range(3)]
    total = np.zeros([3, 2], np.float32)
    for push in pushes:
        for row, value in zip(push.ids, push.values, strict=True):
            total[row] += value
    store = created()
    store.update([{"a.weight": push} for push in pushes])
    expected = FIRST["a.weight"].copy()
    touched = sorted({int(row) for push in pushes for row in push.ids})
    expected[touched] -= (total / np.float32(3))[touched]
    np.testing.assert_array_equal(store.read()["a.weight"], expected)


def test_a_sum_of_rows_that_is_too_large_has_a_mean() -> None:
    """In float16, where 60,000 is a number and three times as much is none."""
    store = Store("sgd", 1.0)
    store.create({"w": np.zeros([2, 1], np.float16)})
    store.update([{"w": Rows(np.array([1]), np.float16([[60_000]]))}] * 3)
    np.testing.assert_array_equal(store.read()["w"], np.float16([[0], [-60_000]]))


def test_what_nobody_reads_any_more_is_updated_in_place() -> None:
    """A read that is over keeps no memory from being used another time."""
    store = Store("sgd", 1.0)
    store.create({"w": np.zeros(1000)})
    store.update([{"w": np.ones(1000)}])
    store.update([{"w": np.ones(1000)}])
    before = store.read()["w"].ctypes.data
    store.update([{"w": np.ones(1000)}])
    assert store.read()["w"].ctypes.data == before


@pytest.mark.parametrize("aggregate", ["mean", "sum"])
def test_the_sum_has_the_bits_of_the_order_of_the_workers(aggregate: str) -> None:
    """One after the other in float32, and then divided."""
    store, pushes = created(aggregate=aggregate), [gradients(seed) for seed in range(5)]
    store.update(pushes)
    for name, first in FIRST.items():
        total = pushes[0][name].copy()
        for push in pushes[1:]:
            total = total + push[name]
        total = total / total.dtype.type(5) if aggregate == "mean" else total
        np.testing.assert_array_equal(store.read()[name], first - total)


@pytest.mark.parametrize(("aggregate", "combine"), [("median", np.median), ("trimmed_mean", None)])
def test_robust_combinations(aggregate: str, combine: Any) -> None:
    """One of five gradients is wrong by a factor of -1,000."""
    store, pushes = created(aggregate=aggregate), [gradients(seed, ["b"]) for seed in range(5)]
    pushes[2]["b"] *= -1000
    store.update(pushes)
    stack = np.stack([push["b"] for push in pushes])
    combined = combine(stack, axis=0) if combine else np.sort(stack, axis=0)[1:-1].mean(axis=0)
    np.testing.assert_allclose(store.read()["b"], FIRST["b"] - combined, rtol=1e-5)


def test_a_parameter_that_a_push_lacks_counts_as_zero() -> None:
    """So the mean is over all pushes of the update."""
    store, one = created(), gradients(1)
    store.update([one, {"b": one["b"]}])
    np.testing.assert_allclose(store.read()["a.weight"], FIRST["a.weight"] - one["a.weight"] / 2, rtol=1e-6)
    np.testing.assert_allclose(store.read()["b"], FIRST["b"] - one["b"], rtol=1e-6)
    np.testing.assert_array_equal(store.read()["c"], FIRST["c"] - one["c"] / 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_does_what_it_does_in_a_graph(name: str) -> None:
    """Dense gradients, rows that repeat, and pushes of some parameters, as in a session of TensorFlow 1.x.

    Each comes three times: the first time eagerly, then by a function that is made of it, then by that of before.
    """
    steps: list[dict[str, Any]] = [gradients(1), gradients(2, ["b"]), gradients(3, ["a.weight", "c"])]
    steps += [{"a.weight": Rows(np.array([2, 0, 2]), np.ones([3, 2], np.float32)), "b": gradients(4)["b"]}]
    steps *= 3
    store = created(name, 0.1)
    for step in steps:
        store.update([step])
    with tf.Graph().as_default(), tf.Session() as session:
        optimizer = make_optimizer({"optimizer": name, "learning_rate": 0.1}, "sgd", 0.1)
        variables = {key: tf.Variable(value, use_resource=True) for key, value in FIRST.items()}
        updates = [optimizer.apply_gradients([(_given(g), variables[k]) for k, g in step.items()]) for step in steps]
        session.run(tf.global_variables_initializer())
        for update in updates:
            session.run(update)
        expected = session.run(variables)
    for key, value in expected.items():
        np.testing.assert_allclose(store.read()[key], value, rtol=1e-5, err_msg=key)


def _given(gradient: Any) -> Any:
    if not isinstance(gradient, Rows):
        return tf.constant(gradient)
    return tf.IndexedSlices(tf.constant(gradient.values), tf.constant(gradient.ids), tf.constant([3, 2], tf.int64))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_store_that_is_restored_goes_on_as_the_first(name: str) -> None:
    """The slots are part of the state, with the names of a TensorFlow job."""
    store = created(name, 0.1)
    store.update([gradients(1)])
    state = {key: value.copy() for key, value in store.state().items()}
    again = Store(name, 0.1)
    again.restore(store.specs, state)
    for each in (store, again):
        each.update([gradients(2, ["a.weight", "b"])])
    equal(again.state(), store.state())
    if name == "adam":
        slots = {f"{key}/{slot}" for key in FIRST for slot in ("Adam", "Adam_1")}
        assert set(state) == {*FIRST, *slots, "beta1_power", "beta2_power"}


def test_another_optimizer_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    """Which is said, with the name of a value that the checkpoint lacks."""
    state = created("sgd").state()
    again = Store("adam", 0.1)
    again.restore(created("sgd").specs, state)
    assert "a.weight/Adam and 7 more: not in the checkpoint. The optimizer's state begins again." in caplog.text
    caplog.clear()
    Store("sgd", 0.1).restore(again.specs, again.state())
    again.restore(again.specs, again.state())
    assert not caplog.text


def test_rows() -> None:
    """Ids may repeat in a read and in a gradient, in which they add up."""
    store = created()
    np.testing.assert_array_equal(store.read_rows("a.weight", np.array([2, 0, 2])), [[4, 5], [0, 1], [4, 5]])
    values = np.array([[1, 1], [2, 2], [4, 4]], np.float32)
    store.update([{"a.weight": Rows(np.array([2, 0, 2]), values)}])
    np.testing.assert_array_equal(store.read()["a.weight"], [[-2, -1], [2, 3], [-1, 0]])


@pytest.mark.parametrize("aggregate", ["mean", "sum"])
def test_rows_of_several_pushes_add_up(aggregate: str) -> None:
    """With dense gradients of the same parameter, too."""
    store = created(aggregate=aggregate)
    rows = Rows(np.array([1]), np.array([[8, 8]], np.float32))
    store.update([{"a.weight": rows}, {"a.weight": rows}])
    store.update([{"a.weight": rows}, {"a.weight": np.ones([3, 2], np.float32)}])
    divisor = 2 if aggregate == "mean" else 1
    expected = FIRST["a.weight"] - np.array([[1, 1], [25, 25], [1, 1]], np.float32) / divisor
    np.testing.assert_array_equal(store.read()["a.weight"], expected)


@pytest.mark.parametrize(
    ("gradient", "problem"),
    [
        ({"a.wieght": FIRST["b"]}, "a.wieght is no parameter. Did you mean a.weight?"),
        ({"b": np.ones(3, np.float32)}, r"b: expected float32\[2\], given float32\[3\]"),
        ({"b": np.ones(2)}, r"b: expected float32\[2\], given float64\[2\]"),
        ({"b": np.array([1, np.nan], np.float32)}, "b: the gradient has NaN; it is not applied"),
        ({"b": np.array([1, -np.inf], np.float32)}, "b: the gradient has Inf; it is not applied"),
        ({"a.weight": Rows(np.array([0, 3]), np.ones([2, 2], np.float32))}, "id 3 is no row: there are rows 0 to 2"),
        ({"a.weight": Rows(np.array([-1]), np.ones([1, 2], np.float32))}, "id -1 is no row"),
        ({"a.weight": Rows(np.array([0]), np.ones([2, 2], np.float32))}, r"expected float32\[1, 2\], given float32\[2"),
        ({"a.weight": Rows(np.array([0.5]), np.ones([1, 2], np.float32))}, r"expected ids as int64 \[n\], given float"),
    ],
)
def test_what_does_not_fit_is_refused(gradient: dict[str, Any], problem: str) -> None:
    """The error has the name, what is expected and what is given."""
    with pytest.raises(ServiceError, match=problem):
        created().check(gradient)


def test_what_is_announced_is_checked_before_it_arrives() -> None:
    """As 10 GB for a parameter of 8 bytes."""
    store = created()
    store.check_announced({"b": TensorSpec(np.dtype(np.float32), (2,))})
    with pytest.raises(ServiceError, match=r"b: expected float32\[2\], given float32\[2500000000\]"):
        store.check_announced({"b": TensorSpec(np.dtype(np.float32), (2_500_000_000,))})


def test_an_update_without_gradients_here_moves_the_optimizer_on() -> None:
    """A server whose parameters are in no push has the same powers of Adam as the others."""
    one, other = created("adam", 0.1), created("adam", 0.1)
    for store in (one, other):
        store.update([gradients(1)])
    one.update([{}])
    other.update([gradients(2)])
    assert one.state()["beta1_power"] == other.state()["beta1_power"] < 0.9 * 0.9 * 0.9 + 1e-6


@pytest.mark.parametrize("size", [1000, 3_000_000], ids=["small", "large"])  # which are looked at in different ways
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_what_is_not_finite_is_found(bad: float, dtype: Any, size: int) -> None:
    """Also beside its opposite; numbers whose sum alone is too large are none."""
    store, most = Store(), np.finfo(dtype).max
    store.create({"w": np.zeros(size, dtype)})
    store.check({"w": np.full(size, most)})
    store.check({"w": np.full(size, -most)})
    for place in (0, size // 2, size - 1):
        gradient = np.full(size, most)
        gradient[place] = bad
        with pytest.raises(ServiceError, match="the gradient has"):
            store.check({"w": gradient})
    with pytest.raises(ServiceError, match="the gradient has Inf"):
        store.check({"w": np.array([np.inf, -np.inf] * (size // 2), dtype)})


@pytest.mark.parametrize(("dtype", "large"), [(np.float16, 40000), (np.float32, 3e38)])
def test_a_sum_that_is_too_large_still_has_a_mean(dtype: Any, large: float) -> None:
    """It is that of the numbers themselves."""
    store = Store("sgd", 1e-3)
    store.create({"w": np.zeros(2, dtype)})
    store.update([{"w": np.full(2, large, dtype)}] * 3)
    np.testing.assert_allclose(store.read()["w"].astype(np.float64), -1e-3 * large, rtol=1e-2)
