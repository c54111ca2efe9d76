"""A field declares everything about its flag."""

import dataclasses

import pytest

from tfps.config.command_options import SubmitOptions
from tfps.config.converters import text
from tfps.config.options import option, options_of
from tfps.launchers.registry import LAUNCHERS


@dataclasses.dataclass(frozen=True)
class _Menu:
    drink: str = option("tea", "drinks", text, "what to drink", choices=("tea", "coffee"), must_agree=True)
    page: str = option("", "pages", text, "what to read", choices="no_such_module:PAGES")
    dish: str | None = option(None, "dishes", text, "what to eat")


DRINK, PAGE, DISH = options_of(_Menu).values()


def test_a_field_is_its_flags_declaration() -> None:
    """A field has its default, and its flag's group, converter, help and choices."""
    assert _Menu() == _Menu("tea", "", None)
    assert list(options_of(_Menu)) == ["drink", "page", "dish"]
    assert (DRINK.default, DRINK.group, DRINK.convert, DRINK.help) == ("tea", "drinks", text, "what to drink")
    assert (DRINK.must_agree, DISH.must_agree) == (True, False)
    assert (DRINK.allowed_values(), DISH.allowed_values()) == (("tea", "coffee"), None)


def test_a_table_of_choices_is_imported_when_it_is_needed() -> None:
    """A declaration does not import the table that it names, which need not even exist; ``allowed_values`` does."""
    assert PAGE.choices == "no_such_module:PAGES"
    with pytest.raises(ModuleNotFoundError):
        PAGE.allowed_values()
    assert options_of(SubmitOptions)["to"].allowed_values() is LAUNCHERS
