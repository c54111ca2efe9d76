"""One run of one fault, in figures; and the file that holds all of them."""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OK, HANG, FAILED, NOT_RUN = "ok", "hang", "failed", "not run"
TFPS, CLASSIC = "tfps", "classic"
NEVER_BACK = "never came back; the others went on"


@dataclass
class Result:
    """What a run of a fault gave.

    Attributes:
        fault: Its name.
        mode: The job's.
        program: ``tfps`` or ``classic``.
        under: Who started lost tasks again: ``launch``, ``platform`` or, where nobody did, ``hand``.
        repeat: From 1.
        outcome: ``ok``: all was as it should be; else ``hang``, ``failed``, or ``not run``: the fault did not happen.
        problem: Why, if not ok.
        detect_secs: From the fault to the first line that names it, or the end of another task.
        settle_secs: From the fault, or its cure, to when the job had gone on, or had ended if it had to.
        lost: Steps that the job went back.
        lost_secs: How much of its time that is.
        lost_saved: Those of them that a checkpoint held that was called saved before the fault.
        off: By how many updates some weight of some checkpoint differs from its ``global_step``, at most.
        pause_secs: The longest time without a step of anybody, from the fault until it had settled.
        code: The job's exit code.
        left: Processes that were left 10 s after the job's end.
        note: What else was measured.
        secs: How long the run took.
    """

    fault: str
    mode: str
    program: str
    under: str
    repeat: int
    outcome: str = OK
    problem: str = ""
    detect_secs: float | None = None
    settle_secs: float | None = None
    lost: int | None = None
    off: int | None = None
    lost_secs: float = 0.0
    lost_saved: int = 0
    pause_secs: float | None = None
    code: int | None = None
    left: int | None = None
    note: str = ""
    secs: float = 0.0

    def line(self) -> str:
        """Return it as one line for people."""
        head = f"{self.repeat:>3} {self.fault:<24} {self.mode:<6} {self.program:<8} {self.under:<9} {self.outcome:<7}"
        named = (
            ("detected", _secs(self.detect_secs)),
            ("settled", _secs(self.settle_secs)),
            ("lost", "-" if self.lost is None else str(self.lost)),
            ("off", "-" if self.off is None else str(self.off)),
            ("pause", _secs(self.pause_secs)),
            ("exit", "-" if self.code is None else str(self.code)),
            ("left", "-" if self.left is None else str(self.left)),
        )
        reported = "  ".join(f"{name} {value}" for name, value in named)
        rest = "; ".join(text for text in (self.note, self.problem) if text)
        return f"{head} {reported}  ({self.secs:.1f} s){'  ' if rest else ''}{rest}"


def _secs(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


@dataclass
class Soak:
    """What a soak gave: how long, which faults, the worst of them, and the loss beside that of undisturbed runs."""

    mode: str
    seed: int
    minutes: float
    outcome: str = OK
    problem: str = ""
    faults: dict[str, int] = field(default_factory=dict)
    worst_settle_secs: float = 0.0
    worst_lost: int = 0
    off: int | None = None
    loss: float | None = None
    undisturbed: list[float] = field(default_factory=list)
    steps: int = 0
    code: int | None = None
    left: int | None = None


def load(path: Path) -> tuple[list[Result], list[Soak]]:
    """Return what a file of results holds; nothing if there is none."""
    reported: Mapping[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return [Result(**of) for of in reported.get("runs", [])], [Soak(**of) for of in reported.get("soaks", [])]


def store(path: Path, results: Sequence[Result], soaks: Sequence[Soak]) -> None:
    """Write a file of results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    reported = {"runs": [asdict(result) for result in results], "soaks": [asdict(soak) for soak in soaks]}
    replace(path, json.dumps(reported, indent=1) + "\n")


def replace(path: Path, text: str) -> None:
    """Write a file that another process may read or write just now."""
    written = path.with_name(f".{path.name}-{uuid.uuid4()}")
    written.write_text(text)
    written.replace(path)
