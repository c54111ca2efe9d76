"""Who holds a ``--model_dir``: one job at a time, and never two in silence."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import unreadable

from tfps.cluster.spec import Cluster
from tfps.errors import PeerLostError, StorageError
from tfps.runtime.checkpoint import lock_holder, owner_lock, ownership
from tfps.runtime.checkpoint.lock_holder import Holder, look, this_process
from tfps.runtime.checkpoint.ownership import HeldError, Ownership, check
from tfps.runtime.process import process_identity

ONE, OTHER = Cluster(("a:1",), ("b:1",)), Cluster(("a:2",), ("b:2",))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "_RENEW_SECS", 0.1)
    monkeypatch.setattr(ownership, "_QUIET_SECS", 0.5)
    monkeypatch.setattr(lock_holder, "_DEAD_AFTER_SECS", 1.0)
    monkeypatch.setattr(lock_holder, "_LOOK_AGAIN_SECS", 0.3)


def wait_for_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a living holder as long for its next renewal as a slow machine may need."""
    monkeypatch.setattr(ownership, "_QUIET_SECS", 60.0)
    monkeypatch.setattr(lock_holder, "_DEAD_AFTER_SECS", 60.0)
    monkeypatch.setattr(lock_holder, "_LOOK_AGAIN_SECS", 60.0)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Ownership]:
    """A directory that a job holds."""
    owner = Ownership(str(tmp_path), ONE)
    owner.claim()
    yield owner
    owner.release()


def leave(model_dir: Path, **changes: Any) -> Holder:
    """Leave the file of a holder that is not there any more."""
    left = replace(this_process(Holder(id="left", job="left", hosts=("c:1", "d:1"))), **changes)
    (model_dir / ".chief").write_text(json.dumps(asdict(left)))
    return left


def wait_for_error(owner: Ownership, secs: float = 60) -> Any:
    """Return why a chief has to end, which its thread finds."""
    deadline = time.monotonic() + secs
    while owner.error is None:
        assert time.monotonic() < deadline, "it has not noticed"
        time.sleep(0.02)
    return owner.error


def test_another_job_is_refused_and_reported_who_holds_the_directory(tmp_path: Path, held: Ownership) -> None:
    """The error names the host, the process, the addresses and since when; nothing in the directory is changed."""
    for refused in (lambda: check(str(tmp_path), OTHER), Ownership(str(tmp_path), OTHER).claim):
        with pytest.raises(HeldError) as caught:
            refused()
        reported = str(caught.value)
        assert f"process id {os.getpid()} on host {os.uname().nodename}, of the job at a:1, b:1, since 2" in reported
        assert "--force" in reported
    assert [path.name for path in tmp_path.iterdir()] == [".chief"]
    held.check()


def test_a_copy_of_a_directory_is_free(tmp_path: Path, held: Ownership) -> None:
    """Whoever copies a live job's directory, to go on from there, holds the copy; the job trains on."""
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(tmp_path / ".chief", copy)
    with pytest.raises(HeldError):
        check(str(tmp_path), OTHER)
    check(str(copy), OTHER)
    other = Ownership(str(copy), OTHER)
    other.claim()
    other.check()
    held.check()
    other.release()


def test_a_clock_that_is_set_changes_no_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine, what is past is told by a clock that nobody sets; of another one's clock, nothing is known."""
    began, now = process_identity.moment(), time.time
    monkeypatch.setattr(time, "time", lambda: now() + 1000)
    assert 0 <= process_identity.secs_since(began) < 100
    assert process_identity.secs_since({**began, "machine": "another"}) == math.inf
    monkeypatch.setattr(process_identity, "machine", lambda: "")
    assert 1000 <= process_identity.secs_since({**began, "machine": ""}) < 1100


def test_a_directory_is_free_when_its_job_has_ended(tmp_path: Path) -> None:
    """Who ends leaves nothing behind, and the next job need not wait."""
    owner = Ownership(str(tmp_path), ONE)
    owner.claim()
    owner.release()
    assert list(tmp_path.iterdir()) == []
    check(str(tmp_path), OTHER)


@pytest.mark.parametrize("force", [False, True])
def test_of_many_at_the_same_moment_one_has_it(tmp_path: Path, force: bool) -> None:
    """Of twelve that claim a dead holder's directory at once, exactly one goes on; the others read of another."""
    leave(tmp_path, pid=2**22 + 1)
    owners = [Ownership(str(tmp_path), Cluster((f"a:{n}",), (f"b:{n}",)), force) for n in range(12)]
    ready, refused = threading.Barrier(len(owners)), []

    def claim(owner: Ownership) -> None:
        ready.wait()
        try:
            owner.claim()
        except HeldError:
            refused.append(owner)

    threads = [threading.Thread(target=claim, args=(owner,)) for owner in owners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)

    def going_on() -> list[Ownership]:
        return [owner for owner in owners if owner not in refused and owner.error is None]

    time.sleep(0.5)
    deadline = time.monotonic() + 100
    while len(going_on()) > 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    held_by = look(str(tmp_path))
    assert held_by is not None
    assert [owner.this_chief.id for owner in going_on()] == [held_by.holder.id]
    assert force or len(refused) == 11
    for owner in owners:
        owner.release()


def test_force_ends_the_first_at_once(tmp_path: Path, held: Ownership) -> None:
    """The first learns within moments, without a save, who has taken its directory."""
    taker = Ownership(str(tmp_path), OTHER, force=True)
    taker.claim()
    error = wait_for_error(held)
    assert isinstance(error, HeldError)
    assert f"was taken over by the chief with process id {os.getpid()}" in str(error)
    assert "of the job at a:2, b:2" in str(error)
    held.release()
    taker.check()  # the loser has not deleted what is another's
    taker.release()


def test_the_dead_are_known_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is gone, or whose id is another's now, holds nothing; that is known at once."""
    monkeypatch.setattr(lock_holder, "_DEAD_AFTER_SECS", 60.0)
    began = time.monotonic()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for changes in ({"pid": gone.pid}, {"started": "1"}):
        leave(tmp_path, **changes)
        check(str(tmp_path), ONE)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("machine", ["another boot pid:[1]", "", None])
def test_the_dead_are_known_on_another_machine(
    tmp_path: Path, machine: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was renewed a moment ago is waited for, and is dead if that was the last time; its process id says nothing.

    That is so in a container, too, which has the same name and process ids as the one before it.
    """
    other = machine if machine is not None else f"{this_process(Holder()).machine.split()[0]} pid:[4026599999]"
    leave(tmp_path, machine=other)
    began = time.monotonic()
    check(str(tmp_path), ONE)
    assert time.monotonic() - began > 0.8
    monkeypatch.setattr(lock_holder, "_DEAD_AFTER_SECS", 60.0)
    os.utime(tmp_path / ".chief", (1, time.time() - 60))
    again = time.monotonic()
    check(str(tmp_path), ONE)  # now it is long ago
    assert 0.2 < time.monotonic() - again < 30


@pytest.mark.parametrize("silent_secs", [0.8, 100])
def test_the_living_are_known_on_another_machine(
    tmp_path: Path, held: Ownership, monkeypatch: pytest.MonkeyPatch, silent_secs: float
) -> None:
    """A holder elsewhere that renews its hold is no dead one, whatever the clock of the host that asks.

    Its machine may have been suspended until now, so one look is not enough.
    """
    wait_for_renewals(monkeypatch)
    elsewhere = replace(held.this_chief, machine="another boot pid:[1]")
    (tmp_path / ".chief").write_text(json.dumps(asdict(elsewhere)))
    os.utime(tmp_path / ".chief", (1, time.time() - silent_secs))
    with pytest.raises(HeldError):
        check(str(tmp_path), OTHER)


def test_a_renewal_that_was_under_way_claims_nothing_after_a_release(tmp_path: Path) -> None:
    """It finds the claim gone, as after a loss of the directory, but the next job may have it."""
    owner = Ownership(str(tmp_path), ONE)
    owner.claim()
    owner.release()
    owner._renew(str(tmp_path))
    assert look(str(tmp_path)) is None
    successor = Ownership(str(tmp_path), OTHER)
    successor.claim()
    successor.release()


def test_a_time_namespace_makes_another_machine() -> None:
    """There, clocks and the start times of processes are shifted, so the same process seems to be another one."""
    for kind in ("pid", "time"):
        assert os.readlink(f"/proc/self/ns/{kind}") in process_identity.machine()


def test_who_goes_on_with_a_run_takes_over_at_once(
    tmp_path: Path, held: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chief of the same run need not wait, and the one before it ends as one that was replaced, for no failure."""
    monkeypatch.setattr(ownership, "_QUIET_SECS", 60.0)
    again = Ownership(str(tmp_path), ONE)
    began = time.monotonic()
    again.claim(held.this_chief.job)
    assert time.monotonic() - began < 30
    assert isinstance(wait_for_error(held), PeerLostError)
    again.release()


def test_a_job_of_the_same_addresses_is_another_while_its_chief_lives(
    tmp_path: Path, held: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names like ps-0:2222 are in many clusters: only who does not renew its hold any more is the same job's."""
    elsewhere = replace(held.this_chief, machine="another boot pid:[1]")
    held.this_chief = elsewhere
    (tmp_path / ".chief").write_text(json.dumps(asdict(elsewhere)))
    with monkeypatch.context() as patient:
        wait_for_renewals(patient)
        with pytest.raises(HeldError):
            Ownership(str(tmp_path), ONE).claim()
    held.release()
    leave(tmp_path, machine="another boot pid:[1]", hosts=("a:1", "b:1"))
    Ownership(str(tmp_path), ONE).claim()


@pytest.mark.parametrize("text", ["0f2d5c5d1c5f4d6f8a7b6c5d4e3f2a1b", "", "[]", "\x00\xff", "[" * 100_000])
def test_what_another_release_has_left_is_old_or_waited_for(tmp_path: Path, text: str) -> None:
    """A file that says nothing of its holder is that of a dead one when it was not written just now."""
    (tmp_path / ".chief").write_text(text)
    began = time.monotonic()
    check(str(tmp_path), ONE)
    assert time.monotonic() - began > 0.5
    owner = Ownership(str(tmp_path), ONE)
    owner.claim()
    assert look(str(tmp_path)).holder == owner.this_chief  # type: ignore[union-attr]
    owner.release()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("pid", value) for value in (None, "1", [1], 1.5, -1, 1 << 31, 1 << 70)],
        *[("hosts", value) for value in (None, "a:1", [1], 7)],
        *[("since", value) for value in (None, "now", math.nan, math.inf, 10**400, -1)],
        *[(name, value) for name in ("id", "job", "host", "machine", "started") for value in (None, 7, ["x"])],
        ("ancestors", ["x"]),
        ("inode", 1 << 64),
    ],
)
def test_a_holder_with_an_odd_entry_is_damage(name: str, value: Any) -> None:
    """It is one of which nothing is known, and stops no job with a traceback: its text is its id."""
    whole = asdict(this_process(Holder(id="left", job="left", hosts=("c:1", "d:1"))))
    text = json.dumps(whole | {name: value})
    assert lock_holder.parsed(text.encode()) == Holder(id=text)
    assert asdict(lock_holder.parsed(json.dumps(whole).encode())) == whole


@pytest.mark.parametrize("link", [False, True])
def test_a_lock_that_was_left_does_not_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: bool) -> None:
    """Who was killed while it wrote its claim is in nobody's way for long; nor is a link that leads nowhere."""
    monkeypatch.setattr(owner_lock, "_ABANDONED_SECS", 0.3)
    lock = tmp_path / ".chief.lock"
    lock.symlink_to("nowhere") if link else lock.touch()
    owner = Ownership(str(tmp_path), ONE)
    owner.claim()
    owner.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays in the lock's place, here a directory, ends the chief soon: the error says what to delete."""
    monkeypatch.setattr(owner_lock, "_ABANDONED_SECS", 0.3)
    (tmp_path / ".chief.lock").mkdir()
    with pytest.raises(
        StorageError, match=r"\.chief\.lock is abandoned, but this job cannot delete it.*\. Delete it\.$"
    ):
        Ownership(str(tmp_path), ONE).claim()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A FIFO, which nobody writes to, or a directory in place of the holder's file is an error that names it."""
    make(tmp_path / ".chief")
    for ask in (lambda: check(str(tmp_path), ONE), Ownership(str(tmp_path), ONE).claim):
        with pytest.raises(StorageError, match=r"/\.chief cannot be read: it is not a regular file\. Delete it\.$"):
            ask()


def test_a_fifo_that_comes_later_holds_no_save_up(tmp_path: Path, held: Ownership) -> None:
    """A chief whose own file has become a FIFO does not wait for what it says, and renews its hold when it is gone."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "fifo").rename(tmp_path / ".chief")
    try:
        held.check()
    finally:
        (tmp_path / ".chief").unlink()
    held.check()
    assert look(str(tmp_path)).holder == held.this_chief  # type: ignore[union-attr]


def test_where_nothing_can_be_written_the_chief_says_so(tmp_path: Path) -> None:
    """A directory that cannot be made is an error that names the flag; who goes on with a run tries again."""
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / "m"
    with pytest.raises(StorageError, match=r"cannot be made \(Not a directory\)"):
        Ownership(str(inside), ONE).claim()
    owner = Ownership(str(inside), ONE)
    with pytest.raises(StorageError):
        owner.claim("a run")
    (tmp_path / "file").unlink()
    deadline = time.monotonic() + 100
    while look(str(inside)) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert look(str(inside)).holder == owner.this_chief  # type: ignore[union-attr]
    owner.release()


@pytest.mark.parametrize("how", ["removed", "renamed", "made anew"])
def test_a_directory_that_is_gone_is_made_again(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within moments the chief says so, holds the directory again, and is asked to save."""
    caplog.set_level("INFO", logger="tfps")
    saves: list[bool] = []
    owner = Ownership(str(tmp_path / "m"), ONE, on_loss=lambda: saves.append(True))
    owner.claim()
    if how == "renamed":
        (tmp_path / "m").rename(tmp_path / "away")
    else:
        shutil.rmtree(tmp_path / "m")
    if how == "made anew":
        (tmp_path / "m").mkdir()
    deadline = time.monotonic() + 100
    while not saves and time.monotonic() < deadline:
        time.sleep(0.02)
    owner.check()
    assert saves == [True]
    assert look(str(tmp_path / "m")).holder == owner.this_chief  # type: ignore[union-attr]
    assert f"--model_dir={tmp_path / 'm'}, or its content, is gone." in caplog.text
    owner.release()


@pytest.mark.parametrize("status", ["done", "stopped"])
def test_a_directory_whose_run_another_chief_has_ended_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: str
) -> None:
    """A chief that stood still while it was replaced finds its file gone: it ends, and makes nothing again."""
    caplog.set_level("INFO", logger="tfps")
    monkeypatch.setattr(Ownership, "_keep", lambda _: None)
    saves: list[bool] = []
    frozen, again = Ownership(str(tmp_path), ONE, on_loss=lambda: saves.append(True)), Ownership(str(tmp_path), ONE)
    frozen.claim()
    again.claim(frozen.this_chief.job)
    (tmp_path / "summary.json").write_text(json.dumps({"status": status}))
    again.release()
    with pytest.raises(PeerLostError, match=r"restarted there, and that run has ended\. This process exits\.$"):
        frozen.check()
    frozen.release()
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert (saves, caplog.messages) == ([], [])


def test_the_summary_of_an_earlier_run_is_no_end_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chief whose file alone was deleted, before it has deleted that summary, holds the directory again."""
    monkeypatch.setattr(Ownership, "_keep", lambda _: None)
    (tmp_path / "summary.json").write_text("{}")
    owner = Ownership(str(tmp_path), ONE)
    owner.claim()
    (tmp_path / ".chief").unlink()
    owner.check()
    assert look(str(tmp_path)).holder == owner.this_chief  # type: ignore[union-attr]
    owner.release()


def test_a_copy_in_the_place_of_the_directory_is_held(tmp_path: Path) -> None:
    """A live job's directory, renamed and copied back, is that job's within moments, whoever asks."""
    model_dir = tmp_path / "m"
    owner = Ownership(str(model_dir), ONE, others=lambda: [str(model_dir / "model.ckpt-600")])
    owner.claim()
    model_dir.rename(tmp_path / "old")
    shutil.copytree(tmp_path / "old", model_dir)
    deadline = time.monotonic() + 100
    while look(str(model_dir)).holder.inode != model_dir.stat().st_ino:  # type: ignore[union-attr]
        assert time.monotonic() < deadline, "it has not noticed"
        time.sleep(0.02)
    with pytest.raises(HeldError):
        check(str(model_dir), OTHER)
    owner.check()
    owner.release()
    assert list(model_dir.iterdir()) == []


def test_another_directory_with_checkpoints_is_not_saved_to(tmp_path: Path) -> None:
    """A link that leads elsewhere now, or a volume that was changed: what is there is of another run."""
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "m").symlink_to("one")
    owner = Ownership(str(tmp_path / "m"), ONE, others=lambda: [str(tmp_path / "m" / "model.ckpt-600")])
    owner.claim()
    (tmp_path / "one" / ".chief").unlink()  # that alone is no other directory
    deadline = time.monotonic() + 100
    while look(str(tmp_path / "m")) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    owner.check()
    (tmp_path / "m").unlink()
    (tmp_path / "m").symlink_to("other")
    error = wait_for_error(owner)
    assert isinstance(error, HeldError)
    assert "is not the directory in which this job started, and holds model.ckpt-600 of another run" in str(error)
    assert list((tmp_path / "other").iterdir()) == []
    owner.release()


def test_a_holder_that_is_hidden_is_not_taken_for_dead(
    tmp_path: Path, held: Ownership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ``/proc`` shows no processes of other users, or is that of another place, only silence tells."""
    wait_for_renewals(monkeypatch)
    for started, machine in (("", held.this_chief.machine), ("7", "")):
        monkeypatch.setattr(process_identity, "started", lambda _pid, reported=started: reported)
        monkeypatch.setattr(lock_holder, "machine", lambda reported=machine: reported)
        with pytest.raises(HeldError):
            check(str(tmp_path), OTHER)


def test_a_process_is_known_by_its_own_proc_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another user is there, though not to be looked at; where ids count otherwise, nothing is known of any."""
    here = process_identity.started(os.getpid())
    assert process_identity.lives(os.getpid(), str(here)) is True
    assert process_identity.lives(os.getpid(), "1") is False
    assert process_identity.lives(os.getpid(), "") is None
    monkeypatch.setattr(process_identity, "Path", lambda _path: Path("/nowhere"))
    assert process_identity.started(os.getpid()) == ""
    assert process_identity.lives(os.getpid(), str(here)) is None
    assert process_identity.started(2**22 + 1) is None  # more than there can be
    monkeypatch.undo()
    assert process_identity.machine()
    monkeypatch.setattr(os, "getpid", lambda: 1 << 30)
    assert process_identity.machine() == ""


@pytest.mark.parametrize(
    ("record", "file", "has_record", "refused"),
    [
        ('{"launch": "mine"}', "", True, False),
        ('{"launch": "other"}', "", True, True),
        ('{"launch": "other"}', "model.ckpt-1.index", False, False),
    ],
)
def test_a_chief_that_is_started_again_resumes_only_the_run_of_its_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str, file: str, has_record: bool, refused: bool
) -> None:
    """A first process may resume any run, and so may one whose predecessors have recorded none."""
    monkeypatch.setenv("TFPS_LAUNCH", "mine")
    if has_record:
        monkeypatch.setenv("TFPS_HAS_RECORD", "1")
    for name, text in (("job.json", record), (file, "an index")):
        if name and text:
            (tmp_path / name).write_text(text)
    with pytest.raises(HeldError, match="holds another run") if refused else contextlib.nullcontext():
        ownership.check_launch(str(tmp_path))


def test_a_record_that_cannot_be_read_for_a_moment_is_not_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chief that is started again reads it again, and goes on where nothing is known of it."""
    monkeypatch.setenv("TFPS_LAUNCH", "mine")
    monkeypatch.setenv("TFPS_HAS_RECORD", "1")
    (tmp_path / "model.ckpt-1.index").write_text("an index")
    for launch, times, refused in (("mine", 2, False), ("other", 2, True), ("mine", 99, False)):
        (tmp_path / "job.json").write_text(json.dumps({"launch": launch}))
        with (
            unreadable(tmp_path / "job.json", times),
            pytest.raises(HeldError, match="holds another run") if refused else contextlib.nullcontext(),
        ):
            ownership.check_launch(str(tmp_path))


def test_a_directory_whose_record_cannot_be_read_is_not_claimed(tmp_path: Path) -> None:
    """A chief that continues a run claims it only when it can see whose run is there."""
    (tmp_path / "job.json").write_text('{"run": "other"}')
    owner = Ownership(str(tmp_path), ONE)
    with unreadable(tmp_path / "job.json"), pytest.raises(StorageError, match="cannot be read"):
        owner.claim("a job", "mine")
    assert look(str(tmp_path)) is None
    assert "holds another run" in str(wait_for_error(owner))
    owner.release()


@pytest.mark.parametrize(
    ("record", "is_other"),
    [('{"run": "mine"}', False), ("", False), ("{", False), ('{"run": "other"}', True)],
)
def test_a_directory_that_comes_late_is_claimed_only_for_its_own_run(
    tmp_path: Path, record: str, is_other: bool
) -> None:
    """A chief that was started again while nothing was there does not save to another run that appears there."""
    (tmp_path / "file").touch()
    (tmp_path / "m").symlink_to("file")
    owner = Ownership(str(tmp_path / "m"), ONE)
    with pytest.raises(StorageError):
        owner.claim("a job", "mine")
    (tmp_path / "other").mkdir()
    if record:
        (tmp_path / "other" / "job.json").write_text(record)
    (tmp_path / "new").symlink_to("other")
    (tmp_path / "new").rename(tmp_path / "m")
    with unreadable(tmp_path / "m" / "job.json", times=7):
        if is_other:
            assert "holds another run" in str(wait_for_error(owner))
            assert look(str(tmp_path / "m")) is None
        else:
            deadline = time.monotonic() + 100
            while look(str(tmp_path / "m")) is None:
                assert time.monotonic() < deadline, "it has not claimed it"
                time.sleep(0.02)
            owner.check()
    owner.release()
