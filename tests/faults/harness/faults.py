"""The faults, one table: what each does, what has to come of it, and within which limits.

To add one is to add a line here, and a function that does it where its like are.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from signal import SIGINT
from typing import Any

import endings
import forming
import kills
import network
import storage
from kills import Act, killed, killed_in_save
from modes import MODES
from result import CLASSIC, Result

BOTH = ("async", "sync")
WITH_PS = tuple(name for name, mode in MODES.items() if mode.size.num_ps)
WITHOUT_PS = tuple(name for name, mode in MODES.items() if not mode.size.num_ps)
EVERY, SAVED = "no step lost", "no saved step lost"


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        title: What happens.
        expected: What has to come of it, in words.
        act: Does it, and measures.
        codes: The exit codes that the job may have.
        detect_within: Seconds.
        settle_within: Seconds, until the job has gone on, or ended if it has to.
        keeps: Which steps may not be lost, ``EVERY`` one or those ``SAVED`` before; ``None`` if that is not asked.
        async_pause: In async, how long nobody may take a step, in seconds.
        peer: Whether the classic script can have it, too.
        deadline_secs: When a run that is not over is called a hang.
        modes: The modes whose jobs it happens to.
    """

    title: str
    expected: str
    act: Act
    codes: Sequence[int] = (0,)
    detect_within: float | None = None
    settle_within: float = 60.0
    keeps: str | None = None
    async_pause: float | None = None
    peer: bool = False
    deadline_secs: float = 60.0
    modes: Sequence[str] = BOTH

    def problem(self, result: Result, time_scale: float = 1.0) -> str:
        """Return how a run was not as it should be, or nothing; ``time_scale`` is a factor of the time limits."""
        wrong = [] if result.code in self.codes else [f"exit code {result.code}"]
        if result.program == CLASSIC:
            return "".join(wrong)
        late = math.inf if result.detect_secs is None else result.detect_secs
        if self.detect_within and late > self.detect_within * time_scale:
            wrong.append(f"not named within {self.detect_within:g} s")
        if (result.settle_secs or 0) > self.settle_within * time_scale:
            wrong.append(f"settled after {result.settle_secs:.1f} s, not {self.settle_within:g}")
        if self.keeps == EVERY and (result.lost or 0) > MODES[result.mode].round_steps:
            wrong.append(f"{result.lost} steps lost, {result.lost_secs:.1f} s of work")
        if self.keeps and result.lost_saved:
            wrong.append(f"{result.lost_saved} steps lost that had been saved")
        pause = result.pause_secs or 0 if result.mode == "async" else 0
        if self.async_pause and pause > self.async_pause * time_scale:
            wrong.append(f"no step of anybody for {result.pause_secs:.1f} s")
        if result.left:
            wrong.append(f"{result.left} processes left")
        return "; ".join(wrong)


def _kill(title: str, act: Act, **more: Any) -> Fault:
    return Fault(title, act=act, **{"expected": "goes on; no step lost", "keeps": EVERY, "peer": True, **more})


def _ps(title: str, act: Act, **more: Any) -> Fault:
    return Fault(title, "goes on from the last checkpoint", act, **{"keeps": SAVED, "peer": True, **more})


def _cut(kind: str, secs: float) -> Fault:
    # One that is reset in the middle of an update leaves the variables of two steps: back to the checkpoint.
    make, title = (_kill if secs < 10 and kind != "reset" else _ps), f"a PS is cut off for {secs:g} s: packets {kind}"
    return make(title, network.cut(kind, secs), deadline_secs=60.0 + secs)


def _without_ps(title: str, act: Act, **more: Any) -> Fault:
    return _kill(title, act, **{"peer": False, "modes": WITHOUT_PS, **more})


def _damage(title: str, damage: storage.Damage, expected: str = "falls back to the one before, saying so") -> Fault:
    return Fault(title, expected, storage.damaged(damage), peer=True)


def _refused(title: str, act: Act, codes: Sequence[int], **more: Any) -> Fault:
    return Fault(title, "refused, naming it", act, codes, **more)


def _stop(title: str, victim: str, within: float = 12.0, **more: Any) -> Fault:
    return Fault(title, "ends; state saved", endings.asked_to_stop(victim, **more), codes=(143,), settle_within=within)


def _disk(title: str, act: Act, **more: Any) -> Fault:
    return Fault(title, "trains on; saves when mended", act, **{"settle_within": 15, "detect_within": 15, **more})


def _bad_disk(title: str, act: Act) -> Fault:
    return Fault(title, "trains on; fails in the end", act, (74,), detect_within=15)


def _end(title: str, act: Act, **more: Any) -> Fault:
    return Fault(title, "all end with 0 in 10 s", act, settle_within=10, **more)


_PROCESSES = {
    "worker_killed": _kill("a worker is killed", killed("worker/1"), async_pause=5),
    "worker_killed_forming": _kill("a worker is killed as the job forms", killed("worker/1", when=kills.forming)),
    "workers_killed": _kill("all workers are killed at once", killed("worker/0", "worker/1", when=kills.saved)),
    "worker_gone": Fault(
        "a worker is killed, with no restart left", "ends, naming it", kills.gone("worker/1"), (170,), settle_within=30
    ),
    "chief_killed": _kill("the chief is killed", killed("worker/0", when=kills.saved)),
    "chief_killed_unsaved": _kill(
        "the chief is killed before the first save", killed("worker/0", save_checkpoint_secs=600)
    ),
    "chief_killed_saving": _kill("the chief is killed in a save", killed_in_save("worker/0")),
    "chief_killed_often": _kill(
        "the chief is killed 5 times in a row", killed("worker/0", times=5), deadline_secs=150.0
    ),
    "ps_killed": _ps("one of two PS is killed", killed("ps/1", when=kills.saved)),
    "ps_killed_saving": _ps("one of two PS is killed in a save", killed_in_save("ps/1")),
    "ps_all_killed": _ps("both PS are killed", killed("ps/0", "ps/1", when=kills.saved)),
    "ps_and_worker_killed": _ps("a PS and a worker are killed", killed("ps/1", "worker/1", when=kills.saved)),
    "ps_killed_in_turn": _ps("a PS is killed as the other recovers", kills.killed_in_turn("ps/1", "ps/0")),
    "fast_ps_killed": _ps("a PS of a fast job is killed", kills.fast("ps/1"), peer=False, deadline_secs=120.0),
    "worker_killed_pushing": _kill(
        "a worker of a fast job is killed in its pushes",
        kills.fast("worker/1", times=2),
        peer=False,
        deadline_secs=120.0,
    ),
    "exit_zero": _kill("a worker ends with 0 too early", kills.exits(1), peer=False, detect_within=15),
    "exit_zero_gone": Fault(
        "the same, with no restart left", "ends, naming it", kills.exits(1, restarts=0), (170,), settle_within=30
    ),
    "crash_loop": Fault("a worker that always crashes", "ends at the budget", kills.crash_loop, (170,)),
    "worker_loop": Fault(
        "a worker is killed 50 times",
        "goes on; PS memory bounded",
        kills.worker_loop(50),
        deadline_secs=900,
    ),
    "worker_frozen_5s": _kill("a worker is frozen for 5 s", kills.frozen("worker/1", 5), async_pause=5),
    "chief_frozen_5s": _kill("the chief is frozen for 5 s", kills.frozen("worker/0", 5)),
    "ps_frozen_5s": _kill("a PS is frozen for 5 s", kills.frozen("ps/1", 5)),
    "worker_frozen": _kill("a worker is frozen", kills.frozen("worker/1"), detect_within=20, deadline_secs=90.0),
    "chief_frozen": _kill("the chief is frozen", kills.frozen("worker/0"), detect_within=20, deadline_secs=90.0),
    "ps_frozen": _ps("a PS is frozen", kills.frozen("ps/1"), detect_within=20, deadline_secs=90.0),
    "worker_stalled_back": Fault(
        "a worker comes back when it was replaced", "ends alone", kills.stalled_back, keeps=EVERY, deadline_secs=150.0
    ),
    "straggler": Fault("a worker gets a quarter of the time", "async unhurt; is named", kills.straggler, keeps=EVERY),
}

_WITHOUT_PS = {  # the chief holds what they hold
    "no_ps_worker_killed": _without_ps("a worker is killed", killed("worker/1")),
    "no_ps_chief_killed": _without_ps(
        "the chief is killed",
        killed("worker/0", when=kills.saved),
        keeps=SAVED,
        expected="goes on from the last checkpoint",
    ),
    "no_ps_worker_frozen_5s": _without_ps("a worker is frozen for 5 s", kills.frozen("worker/1", 5)),
    "no_ps_chief_frozen_5s": _without_ps("the chief is frozen for 5 s", kills.frozen("worker/0", 5)),
    "no_ps_worker_frozen": _without_ps(
        "a worker is frozen", kills.frozen("worker/1"), detect_within=20, deadline_secs=90.0
    ),
    "no_ps_cut_dropped_5s": _without_ps(
        "a worker is cut off for 5 s: packets dropped", network.cut("dropped", 5, "worker/1"), deadline_secs=65.0
    ),
    "no_ps_cut_reset_5s": _without_ps(  # one that is reset in the middle of the chief's update: back to the checkpoint
        "a worker is cut off for 5 s: packets reset",
        network.cut("reset", 5, "worker/1"),
        keeps=SAVED,
        deadline_secs=65.0,
        expected="goes on from the last checkpoint, or loses no step",
    ),
    "no_ps_cut_dropped_30s": _without_ps(
        "a worker is cut off for 30 s: packets dropped",
        network.cut("dropped", 30, "worker/1"),
        keeps=SAVED,
        deadline_secs=90.0,
        expected="goes on from the last checkpoint, or loses no step",
    ),
}

_NETWORK = {
    "cut_dropped_5s": _cut("dropped", 5),
    "cut_one_way_5s": _cut("dropped one way", 5),
    "cut_reset_5s": _cut("reset", 5),
    "cut_dropped_30s": _cut("dropped", 30),
    "cut_one_way_30s": _cut("dropped one way", 30),
    "cut_reset_30s": _cut("reset", 30),
}

_FORMING = {
    "task_missing": Fault("a worker never comes", "ends, naming it", forming.task_missing, (171,), peer=True),
    "swapped_ps": _refused("a worker has the PS swapped", forming.disagreeing(forming.swapped_ps), (2,)),
    "missing_ps": _refused("a worker knows one PS only", forming.disagreeing(forming.missing_ps), (2,)),
    "other_mode": _refused("a worker has another --mode", forming.disagreeing(forming.other_mode), (2,)),
    "old_ps": _refused("workers meet the PS of an old job", forming.old_ps, (2,), settle_within=20),
    "taken_port": _refused("the PS's port is taken", forming.taken_port, (2,), settle_within=5),
    "unknown_host": _refused("the PS's host is unknown", forming.unknown_host, (2, 171), settle_within=10),
}

_STORAGE = {
    "disk_full": _disk("the disk is full", storage.broken(storage.full)),
    "disk_full_on": _bad_disk("the disk is full until the end", storage.broken(storage.full, for_ever=True)),
    "disk_read_only": _disk("the disk is read-only", storage.broken(storage.read_only)),
    "disk_read_only_on": _bad_disk("the same until the end", storage.broken(storage.read_only, for_ever=True)),
    "dir_vanished": _disk("the model directory is away", storage.broken(storage.vanished), detect_within=None),
    "dir_vanished_on": Fault(
        "the same until the end", "made anew, or fails in the end", storage.broken(storage.vanished, True), (0, 74)
    ),
    "model_dir_removed": Fault(
        "the model directory is removed, then a PS is lost", "goes on; said", storage.removed, deadline_secs=90.0
    ),
    "second_job": Fault(
        "another job in its model directory", "refused, naming it; the first goes on", storage.second_job, keeps=EVERY
    ),
    "save_killed": Fault(
        "chief and PS are killed in a save", "goes on from the last one", killed_in_save("worker/0", "ps/0", "ps/1")
    ),
    "ckpt_truncated": _damage("the newest checkpoint is cut short", storage.truncated),
    "ckpt_flipped": _damage("a bit of the newest checkpoint is flipped", storage.flipped),
    "ckpt_no_shard": _damage("a shard of the newest checkpoint is gone", storage.without_shard),
    "ckpt_no_index": _damage("the newest checkpoint's index is empty", storage.without_index),
    "state_garbled": _damage("the state file is garbled", storage.garbled_state, "goes on from the newest"),
    "state_empty": _damage("the state file is empty", storage.empty_state, "goes on from the newest"),
    "ckpt_all_truncated": _refused("every checkpoint is cut short", storage.unusable(storage.all_truncated), (65,)),
    "ckpt_other_shapes": _refused("the checkpoints are another model's", storage.unusable(storage.other_shapes), (65,)),
}

_ENDS = {
    "sigterm": _stop("SIGTERM to the launcher", "launcher"),
    "sigint": _stop("SIGINT to the launcher", "launcher", number=SIGINT),
    "sigterm_twice": _stop("SIGTERM twice to the launcher, in a step without end", "launcher", 5.0, twice=True),
    "two_signals": Fault(
        "SIGTERM twice to the launcher, at once",
        "ends; state saved, and said so",
        endings.two_signals,
        (143,),
        settle_within=12,
    ),
    "sigterm_worker": _stop("SIGTERM to a worker", "worker/1"),
    "sigterm_chief": _stop("SIGTERM to the chief", "worker/0"),
    "sigterm_ps": _stop("SIGTERM to a PS", "ps/1"),
    "sigint_twice_worker": _stop("SIGINT twice to a worker", "worker/1", 3.0, number=SIGINT, twice=True),
    "launcher_killed": Fault(
        "the launcher is killed", "no process after 10 s", endings.launcher_killed, (-9,), settle_within=10
    ),
    "no_fault": _end("nothing, to compare with", endings.undisturbed, peer=True),
    "one_step": _end("a job of one step", endings.normal_end(max_steps=1), peer=True),
    "uneven_data": _end("a worker's data ends early", endings.uneven_data),
    "late_worker": _end("a worker comes 5 s late", endings.late_worker, peer=True),
    "nan_worker": Fault("NaN from a worker", "ends; none is saved", endings.not_a_number(1), (66,), 10, 30),
    "nan_chief": Fault("NaN from the chief", "ends; none is saved", endings.not_a_number(0), (66,), 10, 30),
    "nan_skipped": Fault("NaN from a worker, --on_nan=skip", "left out, and reported", endings.skipped(1)),
}

_ANY = {"worker_gone", "exit_zero", "sigterm", "sigterm_chief", "no_fault"}  # in modes without PS, too
_WITH_PS = {
    *("worker_killed", "chief_killed", "chief_killed_saving", "ps_killed", "ps_killed_saving", "ps_and_worker_killed"),
    *("worker_frozen_5s", "worker_frozen", "chief_frozen", "ps_frozen", "worker_gone", "exit_zero"),
    *("cut_dropped_5s", "cut_reset_5s", "cut_dropped_30s", "save_killed", "sigterm", "uneven_data", "no_fault"),
}


def _modes(name: str) -> Sequence[str]:
    """Return the modes that a fault happens in."""
    if name in _WITHOUT_PS:
        return (*WITHOUT_PS,)
    return (*(WITH_PS if name in _WITH_PS else BOTH), *(WITHOUT_PS if name in _ANY else ()))


FAULTS: Mapping[str, Fault] = {
    name: replace(fault, modes=_modes(name))
    for name, fault in {**_PROCESSES, **_WITHOUT_PS, **_NETWORK, **_FORMING, **_STORAGE, **_ENDS}.items()
}
