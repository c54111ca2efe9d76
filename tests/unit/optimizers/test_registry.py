"""The table of optimizers, and what it creates."""

import pytest

from tfps.optimizers.registry import OPTIMIZERS, make_optimizer
from tfps.runtime.process import tensorflow_import

tensorflow_import.load_v1()


@pytest.mark.parametrize("name", OPTIMIZERS.builtin)
def test_each_name_is_its_factorys(name: str) -> None:
    """A factory has the name under which the table has it, and creates an optimizer with the learning rate."""
    factory = OPTIMIZERS.load(name)
    assert factory.name == name
    assert factory.create(0.25)._learning_rate == 0.25 if name != "adam" else factory.create(0.25)._lr == 0.25


def test_flags_come_before_the_models_own() -> None:
    """``--optimizer`` and ``--learning_rate`` replace what the model asks for."""
    made = make_optimizer({"optimizer": "momentum", "learning_rate": 0.5}, "sgd", 0.1)
    assert (type(made).__name__, made._learning_rate, made._momentum) == ("MomentumOptimizer", 0.5, 0.9)
    own = make_optimizer({"optimizer": None, "learning_rate": None}, "sgd", 0.1)
    assert (type(own).__name__, own._learning_rate) == ("GradientDescentOptimizer", 0.1)


def test_an_unknown_name_is_refused() -> None:
    """The message names all optimizers."""
    with pytest.raises(ValueError, match="unknown optimizer 'sgdd': give one of sgd, momentum, adam, "):
        make_optimizer({}, "sgdd", 0.1)
