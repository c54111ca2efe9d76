"""The result of one of doctor's checks."""

from dataclasses import dataclass

OK, NOT_YET, WARNING, WRONG = "ok", "-", "warning", "wrong"


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        state: OK, NOT_YET, WARNING or WRONG.
        what: The subject of the check.
        finding: The finding, and the fix.
        code: The exit code of doctor if the state is WRONG.
    """

    state: str
    what: str
    finding: str
    code: int = 0
