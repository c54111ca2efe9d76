"""Words for people: counts, ordinals, durations, times, quoted values, one-line errors. Does not import TensorFlow."""

import math
import re
import time
from collections.abc import Iterable, Sequence

from tfps.errors import without_colors

# In an error, the calls that created an operation, before the reason: once, or for each of several operations.
_MADE_AT = re.compile(r"^Detected at node .*\n?(?:[ \t].*\n?)*|^Node: '.*'$", re.MULTILINE)

_PUBLIC = {  # the classes that TensorFlow returns, by their names inside: what its users call them
    **{"DatasetV2": "tf.data.Dataset", "Tensor": "tensor", "Operation": "tf.Operation", "IteratorBase": "iterator"},
    **{"BaseResourceVariable": "tf.Variable", "Iterator": "iterator"},
}

_OTHER_NAMES = {  # of flags, platforms and modes, in other programs and in papers
    **{"lr": "learning_rate", "ps": "num_ps", "num_epochs": "epochs", "train_steps": "max_steps"},
    **{"clients": "num_workers", "num_clients": "num_workers"},
    **{"k8s": "kubernetes", "sbatch": "slurm", "docker": "compose", "ssh": "hosts"},
    **{"asp": "async", "hogwild": "async", "bsp": "sync"},
    **dict.fromkeys(("fedavg", "fedopt", "localsgd", "local_sgd", "diloco"), "local"),
    **dict.fromkeys(("all_reduce", "horovod", "ring"), "allreduce"),
    **dict.fromkeys(("d_psgd", "decentralized", "dpsgd"), "gossip"),
}

_INSTEAD = {  # of what has no single name here: the flag or command that there must be, and what to do with it
    "serve": ("launch", "Give tfps launch --serve, or tfps run --serve for one server."),
    **dict.fromkeys(
        ("num_rounds", "rounds"),
        ("sync_every", "The rounds follow from --max_steps and --sync_every or --local_epochs."),
    ),
}


def number(value: float) -> str:
    """Return a number in readable form: four digits, or a whole number from 9,999.5 up."""
    return f"{value:.0f}" if abs(value) >= 9999.5 and math.isfinite(value) else f"{value:.4g}"


def count(number: float) -> str:
    """Return a count in readable form: ``12,345``."""
    return f"{number:,.0f}"


def plural(number: int, noun: str, nouns: str = "") -> str:
    """Return a number with its noun: ``1 worker``, ``2 workers``; ``nouns`` if the plural is not formed with ``s``."""
    return f"{count(number)} {noun if number == 1 else nouns or f'{noun}s'}"


def enumerated(names: Sequence[str], conjunction: str) -> str:
    """Return names as a list in a sentence: ``a``, ``a or b``, ``a, b or c``."""
    *first, last = names
    return f"{', '.join(first)} {conjunction} {last}" if first else last


def ordinal(number: int) -> str:
    """Return the place of a number in an order: ``1st``, ``2nd``, ``3rd``, ``4th``, ``11th``, ``21st``."""
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{count(number)}{'th' if number % 100 in (11, 12, 13) else suffix}"


def duration(secs: float) -> str:
    """Return a duration in readable form: ``0.8 s``, ``42 s``, ``3 min 05 s``, ``2 h 04 min``."""
    if secs < 10:
        return f"{secs:.1f} s"
    if secs < 120:
        return f"{secs:.0f} s"
    minutes, rest = divmod(round(secs), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def utc(secs: float) -> str:
    """Return a time, in seconds since 1970, as ``2026-11-23T17:04:36Z``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(secs))


def brief(error: BaseException) -> str:
    """Return the gist of an error on one line, without TensorFlow's additions."""
    text = _MADE_AT.sub("", without_colors(str(getattr(error, "message", error))))
    lines = [line.strip() for line in text.splitlines()]
    informative = [line for line in lines if line.strip("=") and line != "Graph execution error:"]
    return " ".join(informative[:2]) or type(error).__name__


def one_line(text: str) -> str:
    """Return a text as one line, for places with room for only one."""
    return re.sub(r"\s+", " ", text).strip()


def show(value: str, limit: int = 100) -> str:
    """Quote a user's value for one plain line: escape control characters, cut it to ``limit`` characters."""
    shown = value if re.fullmatch(r"[\x21-\x7e]+", value) else repr(value)
    return shown if len(shown) <= limit else f"{shown[:limit]}... ({len(value)} characters)"


def kind_of(value: object) -> str:
    """Return what a user's value is, in the words of TensorFlow's API: ``a tf.data.Dataset``, ``a list``."""
    known = (_PUBLIC.get(base.__name__) for base in type(value).__mro__ if base.__module__.startswith("tensorflow."))
    kind = next(filter(None, known), type(value).__name__)
    return "None" if value is None else f"{'an' if kind[0] in 'AEIOaeio' else 'a'} {kind}"


def other_name(value: str) -> str | None:
    """Return the name that tfps has for what other programs and papers call ``value``, if there is one."""
    return _OTHER_NAMES.get(value.lower().replace("-", "_"))


def did_you_mean(value: str, known: Iterable[str], prefix: str = "") -> str:
    """Return `` Did you mean X?`` for a near miss of one of ``known``, or another name of it, else an empty string.

    Of several, the nearest is one with the same letters, if there is one: two letters change places easily.
    """
    import difflib  # noqa: PLC0415  which a client needs for an error only

    names, given = list(known), value.lower()[:80]
    needed, advice = _INSTEAD.get(given, ("", ""))
    if needed in names:
        return f" {advice}"
    other = other_name(given)
    close = [other] if other in names else difflib.get_close_matches(given, names, n=5, cutoff=0.6)
    nearest = min(close, key=lambda name: sorted(name) != sorted(given), default=None)
    return f" Did you mean {prefix}{nearest}?" if nearest else ""
