"""Words for people."""

from collections.abc import Callable
from typing import Any

import pytest

from tfps.cli.registry import COMMANDS
from tfps.config.command_line import FLAGS
from tfps.modes.registry import MODES
from tfps.runtime.process import tensorflow_import
from tfps.text import brief, count, did_you_mean, duration, enumerated, kind_of, one_line, ordinal, show, utc

tensorflow_import.load_v1()

import tensorflow.compat.v1 as tf  # noqa: E402

MADE_AT = """Detected at node 'save/SaveV2' defined at (most recent call last):
    File "/usr/lib/python3.11/threading.py", line 1002, in _bootstrap
    File "/tfps/runtime/graph/passes/snapshot.py", line 173, in save_op
"""


@pytest.mark.parametrize(
    ("secs", "text"),
    [
        (0, "0.0 s"),
        (0.84, "0.8 s"),
        (9.94, "9.9 s"),
        (42.4, "42 s"),
        (119, "119 s"),
        (185, "3 min 05 s"),
        (3599.9, "60 min 00 s"),
        (7440, "2 h 04 min"),
        (90000, "25 h 00 min"),
    ],
)
def test_a_duration_for_people(secs: float, text: str) -> None:
    """Times are shown in the unit that people would use."""
    assert duration(secs) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0"), (999.6, "1,000"), (1234567, "1,234,567"), (0.4, "0")])
def test_a_count_for_people(number: float, text: str) -> None:
    """Counts have thousands' separators and no fraction."""
    assert count(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1, "1st"),
        (2, "2nd"),
        (3, "3rd"),
        (4, "4th"),
        (10, "10th"),
        (11, "11th"),
        (12, "12th"),
        (13, "13th"),
        (21, "21st"),
        (22, "22nd"),
        (111, "111th"),
        (1001, "1,001st"),
    ],
)
def test_an_ordinal_for_people(number: int, text: str) -> None:
    """A place in an order has its English suffix, which the teens do not take from their last digit."""
    assert ordinal(number) == text


@pytest.mark.parametrize(
    ("message", "gist"),
    [
        ("a plain one", "a plain one"),
        ("", "ValueError"),
        ("Graph execution error:\n\n  first\n===\nsecond\nthird", "first second"),
        (f"Graph execution error:\n\n{MADE_AT}Node: 'save/SaveV2'\n/m/x; File too large", "/m/x; File too large"),
        (f"Graph execution error:\n\n{MADE_AT}/m/x; File too large", "/m/x; File too large"),
        (f"{MADE_AT}Node: 'save/SaveV2'\n{MADE_AT}Node: 'save/SaveV2'\n/m/x; File too large", "/m/x; File too large"),
        (f"{MADE_AT}\n{MADE_AT}=====\nOUT_OF_RANGE: /m/x; File too large\n", "OUT_OF_RANGE: /m/x; File too large"),
    ],
)
def test_the_gist_of_an_error(message: str, gist: str) -> None:
    """Of a long error the telling lines are kept, at most two, on one line; of an empty one its kind."""
    assert brief(ValueError(message)) == gist


def test_one_line_of_many() -> None:
    """A text of many lines becomes one."""
    assert one_line("  a\n\tb   c\n") == "a b c"


def test_times_are_utc() -> None:
    """They are as ISO 8601 has them, to the second, wherever the machine is."""
    assert utc(0.0) == "1970-01-01T00:00:00Z"
    assert utc(1795474890.9) == "2026-11-23T23:01:30Z"


def test_names_are_a_list_in_a_sentence() -> None:
    """One, two or more."""
    assert [enumerated("abc"[:n], "or") for n in (1, 2, 3)] == ["a", "a or b", "a, b or c"]


def test_show_makes_one_short_plain_line_of_anything() -> None:
    """A value is shown as it is where that is plain; else quoted, escaped and cut."""
    assert show("a.b/c=$(x)") == "a.b/c=$(x)"
    assert show("a b") == "'a b'"
    for text in ("\n", "\x00", "\x1b[31m", "\udcff", "é\u202e", "x" * 70_000):
        assert show(text).isprintable()
        assert len(show(text)) < 130


def test_a_near_miss_gets_a_hint() -> None:
    """A value close to a known one gets that one as a hint; any other gets none."""
    assert did_you_mean("Wroker", ("ps", "worker")) == " Did you mean worker?"
    assert did_you_mean("max_step", ("max_steps",), "--") == " Did you mean --max_steps?"
    assert did_you_mean("modle", ("mode", "model", "model_dir"), "--") == " Did you mean --model?"
    assert did_you_mean("moed", ("model_dir", "model", "mode"), "--") == " Did you mean --mode?"
    assert did_you_mean("modl", ("mode", "model", "model_dir"), "--") == " Did you mean --model?"
    assert did_you_mean("x" * 6000, ("ps", "worker")) == ""
    assert did_you_mean("lr", ("learning_rate", "max_steps"), "--") == " Did you mean --learning_rate?"
    assert did_you_mean("k8s", ("slurm", "kubernetes")) == " Did you mean kubernetes?"
    assert did_you_mean("k8s", ("slurm", "ray")) == ""


@pytest.mark.parametrize(
    ("value", "mode"),
    [
        *((name, "local") for name in ("fedavg", "FedAvg", "fedopt", "localsgd", "local-sgd", "diloco")),
        *((name, "allreduce") for name in ("ring", "horovod", "all_reduce", "all-reduce")),
        *((name, "gossip") for name in ("dpsgd", "d-psgd", "decentralized")),
        *(("bsp", "sync"), ("hogwild", "async"), ("asp", "async")),
    ],
)
def test_a_mode_is_found_by_its_name_in_papers(value: str, mode: str) -> None:
    """Whoever knows a method by another name learns what ``--mode`` calls it."""
    assert did_you_mean(value, MODES) == f" Did you mean {mode}?"


def test_rounds_are_not_counted_by_a_flag() -> None:
    """``--rounds`` is not answered with ``--async_rounds``, which is a boolean; clients are workers."""
    advice = " The rounds follow from --max_steps and --sync_every or --local_epochs."
    assert [did_you_mean(name, FLAGS, "--") for name in ("rounds", "num_rounds")] == [advice] * 2
    assert did_you_mean("rounds", COMMANDS["eval"].flags, "--") == ""
    assert did_you_mean("clients", FLAGS, "--") == " Did you mean --num_workers?"
    assert did_you_mean("num_clients", FLAGS, "--") == " Did you mean --num_workers?"


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: None, "None"),
        (lambda: [1], "a list"),
        (OSError, "an OSError"),
        (type("DatasetV2", (), {}), "a DatasetV2"),
        (lambda: tf.data.Dataset.range(3), "a tf.data.Dataset"),
        (lambda: tf.data.Dataset.range(3).batch(2).prefetch(1), "a tf.data.Dataset"),
        (lambda: tf.compat.v2.data.Dataset.range(3), "a tf.data.Dataset"),
        (lambda: tf.constant(1.0), "a tensor"),
        (tf.no_op, "a tf.Operation"),
        (lambda: tf.get_variable("v", []), "a tf.Variable"),
        (lambda: tf.data.make_one_shot_iterator(tf.data.Dataset.range(3)), "an iterator"),
        (lambda: tf.train.GradientDescentOptimizer(0.1), "a GradientDescentOptimizer"),
    ],
)
def test_a_value_is_called_what_its_user_calls_it(make: Callable[[], Any], kind: str) -> None:
    """TensorFlow's own classes have other names inside, such as DatasetV1Adapter."""
    with tf.Graph().as_default():
        assert kind_of(make()) == kind
