"""A command line as it is read: every field is a flag, comes back from its own command line, and has its bounds."""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from tfps.config import command_line
from tfps.config.command_line import FLAGS, Parsed, parse
from tfps.config.command_options import LogsOptions, ResultOptions, SubmitOptions
from tfps.config.job_config import OPTIONS, JobConfig
from tfps.text import show

ODD = ["a b", "'", '"', "a\nb\n", "\\", "$(x)", ";", "`x`", "-1", "--model=x", "--", "=", "a=b", "é", "%s", "{0}"]
ODD_PATHS = [*ODD, "~/x", "/a//b/", ".", "C:\\x", "x" * 5000]
INTEGERS = ["batch_size", "max_steps", "steps_to_validate", "seed", "num_ps", "num_workers", "task_index", "sync_every"]
NUMBERS = ["learning_rate", "save_checkpoint_secs", "min_slice_mb", "start_timeout_secs", "stall_timeout_secs"]
NUMBERS += ["worker_timeout_secs", "ps_cpu", "worker_cpu", "delay_compensation", "server_learning_rate"]
INTEGERS += ["epochs", "collect_every", "local_epochs"]
GOOD: Mapping[str, list[Any]] = {
    **{name: [True] for name in ("dry_run", "wait", "ssh", "follow", "force", "serve")},
    **{name: [2**20, 10**9, 2**50] for name in ("ps_memory", "worker_memory")},
    "network_policy": [False],
    "staleness_lr": [True, False],
    "async_rounds": [True, False],
    "topology": ["ring", "complete", "exponential"],
    "server_momentum": [0.0, 0.5],
    "worker_fraction": [1e-9, 0.5, 1.0],
    "worker_gpu": [1, 64],
    "devices_per_worker": ["8", "cpu:4"],
    "port_base": [1024, 8888],
    "steps_per_run": [1, 7, 64],
    "runs_in_flight": [1, 8],
    "backup_workers": [0, 4095],
    "staleness": [0, 7, 2**31 - 1],
    "max_restarts": [0, 1000],
    "name": ["a", "a-1", "x" * 40],
    "namespace": ["1", "a-1", "x" * 63],
    "token_secret": ["1", "a-1", "x" * 63],
}
NOT_INTEGERS = ["", " ", "x", "1.5", "1e3", "1_000", "0x10", "٣", "1 ", " 1", "--1", "nan", "9" * 5000, str(2**63)]
NOT_NUMBERS = [
    "",
    "nan",
    "NaN",
    "inf",
    "-inf",
    "1e400",
    "1e-400",
    "0",
    "-0.0",
    "-0.1",
    "1_0",
    " 1",
    "١",
    "0x1p3",
    "1,5",
]


def read(*argv: str, names: Any = tuple(FLAGS)) -> Parsed:
    """Read a command line of a command that has these flags, by default all."""
    return parse(argv, names)


def changed(parsed: Parsed) -> dict[str, Any]:
    """Return the fields that a good command line has set."""
    assert parsed.problems == {}
    kinds = (JobConfig, SubmitOptions, ResultOptions, LogsOptions)
    values = {name: value for kind in kinds for name, value in dataclasses.asdict(parsed.options(kind)).items()}
    values |= parsed.config.to_dict()
    return {name: value for name, value in values.items() if value != FLAGS[name].default}


def refusal(*argv: str, names: Any = tuple(FLAGS)) -> str:
    """Return the one problem of a command line, a line that can be printed; its flag is left unset."""
    parsed = read(*argv, names=names)
    [(name, problem)] = parsed.problems.items()
    assert problem.isprintable()
    assert len(problem) < 300
    assert name not in parsed.given
    return problem


def values_of(name: str) -> list[Any]:
    """Return good values of a field."""
    if name in GOOD:
        return GOOD[name]
    if allowed := FLAGS[name].allowed_values():
        return list(allowed)
    if name in INTEGERS:
        return [1, 2, 4096] if name.startswith("num_") else [1, 7, 2**31 - 1]
    if name in NUMBERS:
        return [0.1, 1e-300, 1 / 3, 5e-324, 1.7976931348623157e308, 1e16]
    return ["", *ODD] if FLAGS[name].group in ("cluster", "task") else ODD_PATHS


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "issync"])
def test_every_field_comes_back_from_its_own_command_line(name: str) -> None:
    """``to_argv`` of any config, with whatever text in it, is read back as that very config."""
    for value in values_of(name):
        job = JobConfig(**{name: value})
        parsed = read(*job.to_argv())
        assert parsed.problems == {}
        assert parsed.config == job
        assert type(getattr(parsed.config, name)) is type(value)


@pytest.mark.parametrize("name", [name for name in FLAGS if name not in OPTIONS])
def test_an_option_of_a_command_is_read(name: str) -> None:
    """Any text of an option that is no part of the job is read as given, and the job stays as it was."""
    for value in values_of(name):
        parsed = read(f"--{name}={int(value) if isinstance(value, bool) else value}")
        assert parsed.problems == {}
        assert parsed.given == {name: value}
        assert parsed.config == JobConfig()


def test_a_config_of_all_flags_comes_back() -> None:
    """All flags together come back too, and the command line has each once; a default has none."""
    names = [name for name in OPTIONS if name != "issync"]
    for turn in range(12):
        job = JobConfig(**{name: values_of(name)[turn % len(values_of(name))] for name in names})
        assert read(*job.to_argv()).config == job
        given = [arg.partition("=")[0] for arg in job.to_argv()]
        assert len(given) == len(set(given))
    assert JobConfig().to_argv() == []


@pytest.mark.parametrize(
    "argv",
    [
        ["--max_steps=7"],
        ["--max-steps=7"],
        ["-max_steps=7"],
        ["--max_steps", "7"],
        ["--max-steps", "7"],
        ["--max_steps=+7"],
        ["--max_steps=007"],
    ],
)
def test_spellings(argv: list[str]) -> None:
    """Dashes or underscores, ``=`` or a blank, one dash or two: the same."""
    assert changed(read(*argv)) == {"max_steps": 7}


@pytest.mark.parametrize(
    "argv",
    [["--max_steps=6", "--max-steps=7"], ["--max_steps=7", "--max_steps=7"], ["--max_steps=0", "--max_steps", "7"]],
)
def test_a_flag_given_twice_is_refused(argv: list[str]) -> None:
    """Two values of one flag are a mistake: neither is taken in silence."""
    assert refusal(*argv).startswith(f"--max_steps is given twice, {argv[0]} and --max")


def test_a_value_may_look_like_anything_after_an_equals_sign() -> None:
    """After ``=`` anything is the value; as an argument of its own only what does not look like a flag."""
    assert changed(read("--model_dir=--max_steps=5")) == {"model_dir": "--max_steps=5"}
    assert changed(read("--ps_hosts", "a:1,b:2", "--worker-hosts", "-1")) == {
        "ps_hosts": "a:1,b:2",
        "worker_hosts": "-1",
    }
    assert refusal("--learning_rate", "-0.1").startswith("--learning_rate=-0.1 must be")


@pytest.mark.parametrize(
    ("text", "mode"), [("1", "sync"), ("true", "sync"), ("YES", "sync"), ("0", "async"), ("False", "async")]
)
def test_issync_is_a_mode(text: str, mode: str) -> None:
    """``--issync`` sets the mode, however it is written, and is not a second truth beside it."""
    for argv in ([f"--issync={text}"], ["--issync", text]):
        parsed = read(*argv)
        assert parsed.problems == {}
        assert (parsed.config.mode, parsed.config.issync) == (mode, None)


def test_a_bare_boolean_is_true() -> None:
    """``--issync`` alone, or before another flag, is ``--issync=1``."""
    assert changed(read("--issync")) == {"mode": "sync"}
    assert changed(read("--issync", "--max_steps=5")) == {"mode": "sync", "max_steps": 5}


@pytest.mark.parametrize("text", ["", "2", "-1", "maybe", "on", "1.0", "truee", " 1"])
def test_what_is_no_boolean_is_refused(text: str) -> None:
    """A boolean is 1 or 0, true or false, yes or no, and nothing else."""
    assert refusal(f"--issync={text}") == f"--issync={show(text)} must be 1 or 0."


def test_issync_and_mode_may_agree_but_not_contradict() -> None:
    """``--issync`` and ``--mode`` together are fine when they say the same; else both are named, and the fix."""
    assert changed(read("--issync=1", "--mode=sync")) == {"mode": "sync"}
    assert changed(read("--mode=async", "--issync=0")) == {}
    says = "--issync=1 means --mode=sync, but --mode=async is given: drop one of them."
    assert read("--mode=async", "--issync=1").problems == {"issync": says}
    says = "--issync=0 means --mode=async, but --mode=sync is given: drop one of them."
    assert read("--mode=sync", "--issync=0").problems == {"issync": says}
    assert list(read("--mode=sinc", "--issync=1").problems) == ["mode"]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("text", NOT_INTEGERS)
def test_what_is_no_whole_number_is_refused(name: str, text: str) -> None:
    """A whole number is decimal digits that fit; what else Python would read is refused, and the range is said."""
    problem = refusal(f"--{name}={text}")
    assert problem.startswith(f"--{name}={show(text)} must be a whole number from ")


@pytest.mark.parametrize("name", [name for name in INTEGERS if name not in ("task_index", "seed", "num_ps")])
@pytest.mark.parametrize("text", ["0", "-0", "-1", "-9223372036854775808"])
def test_a_count_is_at_least_one(name: str, text: str) -> None:
    """Batch, steps, intervals and sizes are at least 1."""
    assert refusal(f"--{name}={text}").startswith(f"--{name}={text} must be a whole number from 1 to ")


def test_the_largest_whole_numbers() -> None:
    """The bounds themselves are good, one more is not; the text says the bound as people write it."""
    assert changed(read(f"--max_steps={2**63 - 1}")) == {"max_steps": 2**63 - 1}
    assert refusal(f"--max_steps={2**63}").endswith("must be a whole number from 1 to 2^63 - 1.")
    assert changed(read(f"--batch_size={2**31 - 1}")) == {"batch_size": 2**31 - 1}
    assert refusal(f"--batch_size={2**31}").endswith("must be a whole number from 1 to 2^31 - 1.")
    assert refusal("--num_workers=4097").endswith("must be a whole number from 1 to 4096.")
    assert refusal("--num_ps=4097").endswith("must be a whole number from 0 to 4096.")
    assert changed(read("--seed=0")) == {"seed": 0}
    assert refusal("--seed=-1").endswith("must be a whole number from 0 to 2^31 - 1.")


def test_a_task_index_is_checked_against_the_cluster_elsewhere() -> None:
    """A negative index is read, as only the cluster can say the range; what does not fit 64 bits is not."""
    assert changed(read("--task_index=-1")) == {"task_index": -1}
    assert "must be a whole number from 0 to 2^63 - 1." in refusal(f"--task_index={2**63}")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("text", NOT_NUMBERS)
def test_what_is_no_finite_number_above_zero_is_refused(name: str, text: str) -> None:
    """Rates and intervals are finite numbers above 0, of ASCII digits."""
    assert refusal(f"--{name}={text}") == f"--{name}={show(text)} must be a finite number greater than 0."


@pytest.mark.parametrize("text", ["", "nan", "-0.1", "inf", "x"])
def test_a_momentum_may_be_zero_but_not_less(text: str) -> None:
    """Without momentum, the server optimizer is the one without it."""
    assert changed(read("--server_momentum=0")) == {"server_momentum": 0.0}
    assert (
        refusal(f"--server_momentum={text}") == f"--server_momentum={show(text)} must be a finite number, 0 or greater."
    )


@pytest.mark.parametrize("text", [*NOT_NUMBERS, "1.000001", "2", "1e300"])
def test_a_part_is_above_0_and_at_most_1(text: str) -> None:
    """The message names both bounds, whichever one is broken."""
    shown = show(text)
    assert refusal(f"--worker_fraction={text}") == f"--worker_fraction={shown} must be above 0 and at most 1."


@pytest.mark.parametrize(("text", "value"), [("5", 5.0), (".5", 0.5), ("5.", 5.0), ("1e-3", 0.001), ("+2.5E2", 250.0)])
def test_spellings_of_a_number(text: str, value: float) -> None:
    """A number may be written as people write it."""
    assert changed(read(f"--learning_rate={text}")) == {"learning_rate": value}


def test_a_text_is_not_empty() -> None:
    """A text flag has a value or is left out: an empty one is mostly an unset shell variable."""
    for name, text in itertools.product(("model", "model_dir", "data_dir", "export_dir"), ("", "  ", "\n")):
        problem = refusal(f"--{name}={text}")
        assert problem == f"--{name}={show(text)} is empty: give a value or leave the flag out."


def test_a_choice_is_one_of_its_table() -> None:
    """A value that is not in its table is answered with the whole table, and a near miss with a hint."""
    assert (
        refusal("--mode=sinc")
        == "--mode=sinc is not one of async, sync, ssp, local, allreduce, gossip. Did you mean sync?"
    )
    assert (
        refusal("--mode=ASYNC")
        == "--mode=ASYNC is not one of async, sync, ssp, local, allreduce, gossip. Did you mean async?"
    )
    assert refusal("--optimizer=lion") == "--optimizer=lion is not one of sgd, momentum, adam, adagrad, ftrl, rmsprop."
    assert "(6000 characters)" in refusal("--mode=" + "x" * 6000)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--max_step=5"], "--max_step is not a known flag. Did you mean --max_steps? See tfps COMMAND --help."),
        (["--Max-Steps", "5"], "--Max_Steps is not a known flag. Did you mean --max_steps? See tfps COMMAND --help."),
        (["--noissync"], "--noissync is not a known flag. Did you mean --issync? See tfps COMMAND --help."),
        (["--zzz"], "--zzz is not a known flag. See tfps COMMAND --help."),
        (["--zzz", "value"], "--zzz is not a known flag. See tfps COMMAND --help."),
        (["-x"], "--x is not a known flag. See tfps COMMAND --help."),
        (["--flagfile=/no/such"], "--flagfile is not a known flag. See tfps COMMAND --help."),
        (["--undefok=zzz"], "--undefok is not a known flag. See tfps COMMAND --help."),
        (["train.py"], "train.py is not a flag: write --flag=value."),
        (["a\nb"], r"'a\nb' is not a flag: write --flag=value."),
        ([""], "'' is not a flag: write --flag=value."),
        (["-"], "- is not a flag: write --flag=value."),
        (["--"], "-- is not a flag: write --flag=value."),
        (["--=5"], "--=5 is not a flag: write --flag=value."),
        (["---seed=5"], "---seed=5 is not a flag: write --flag=value."),
        (["--é=5"], "'--é=5' is not a flag: write --flag=value."),
        (["--model_dir"], "--model_dir has no value: write --model_dir=VALUE."),
        (["--model-dir", "--seed=2"], "--model_dir has no value: write --model_dir=VALUE."),
    ],
)
def test_what_is_no_flag_is_refused(argv: list[str], says: str) -> None:
    """Nothing on a command line is ignored: each argument that cannot be used is named, with the fix."""
    assert refusal(*argv) == says


@pytest.mark.parametrize("argv", [["--export_dir=x"], ["--export-dir", "x"], ["--export_dir"]])
def test_a_flag_of_another_command_is_told_apart(argv: list[str]) -> None:
    """A flag that exists, but not here, is not called unknown."""
    assert refusal(*argv, names=("model",)) == "--export_dir is not a flag of tfps COMMAND: leave it out."


def test_all_problems_are_reported_at_once() -> None:
    """One look at a bad command line finds everything, wherever it stands; what is good in it is kept."""
    parsed = read("x", "--batch_size=0", "--zzz", "--mode=sinc", "--seed=3", "--learning_rate=nan", "--model_dir")
    assert set(parsed.problems) == {"x", "--zzz", "model_dir", "batch_size", "learning_rate", "mode"}
    assert parsed.config == JobConfig(seed=3)


def test_what_is_not_given_is_the_defaults() -> None:
    """Flags change the defaults they are given: a stored job's, for ``tfps eval``."""
    stored = JobConfig(model="mnist", batch_size=7, mode="sync")
    parsed = parse(["--batch_size=9"], ("batch_size", "model"), stored)
    assert parsed.config == stored.replace(batch_size=9)
    assert parse(["--batch_size=0"], ("batch_size",), stored).config == stored


@pytest.mark.parametrize(("name", "is_listed"), [("wire", False), ("on_nan", False), ("ps_strategy", True)])
def test_help_lists_the_values_of_a_flag_once(name: str, is_listed: bool) -> None:
    """A text that explains each value is not followed by a list of the same values; any other text is."""
    listed = f": {', '.join(FLAGS[name].allowed_values() or ())}"
    assert (listed in command_line.describe([name], width=1000)) is is_listed


def test_help_tells_every_flag_once_within_the_width() -> None:
    """The help of a command has each of its flags at the start of a line, with choices and defaults, and fits."""
    reported = command_line.describe(FLAGS, {"model": ("linear", "mnist")}, 72)
    assert all(len(line) <= 72 for line in reported.splitlines())
    flags = [line.split()[0] for line in reported.splitlines() if line.startswith("  --")]
    assert flags == [f"--{name}" for name in FLAGS]
    joined = " ".join(reported.split())
    assert "how gradients become updates: async, sync, ssp, local, allreduce, gossip (default async)" in joined
    assert "a built-in model: linear, mnist (default linear)" in joined
    assert "seconds between checkpoints (default 60)" in joined


@pytest.mark.parametrize(
    ("value", "size"),
    [("8Gi", 8 * 2**30), ("500M", 500_000_000), ("1.5GiB", 3 * 2**29), ("2TB", 2 * 10**12), ("1048576", 2**20)],
)
def test_memory_has_units(value: str, size: int) -> None:
    """Memory is read as bytes: ``i`` makes a unit a power of 1024, as in Kubernetes; a B after it changes nothing."""
    assert read(f"--ps_memory={value}").given == {"ps_memory": size}


@pytest.mark.parametrize(
    "value", ["", "8", "500m", "8g", "8 Gi", "-8Gi", "Gi", "1e9", "0Gi", "9999Ti", "8Gib", "8Ei", "nan"]
)
def test_memory_that_could_be_misread_is_refused(value: str) -> None:
    """No unit, a unit in small letters (500m is half a byte to Kubernetes), an absurd amount: refused with the form."""
    assert "must be a number and a unit, like 8Gi or 500M, from 1Mi to 1024Ti." in refusal(f"--worker_memory={value}")


@pytest.mark.parametrize("value", ["", "Job", "1job", "job-", "-job", "a_b", "a.b", "a b", "é", "x" * 41, "a\n"])
def test_a_name_that_a_platform_would_refuse(value: str) -> None:
    """A job's name has to do on every platform."""
    assert "must be at most 40 characters of a-z, 0-9 and -, start with a letter and not end with -." in refusal(
        f"--name={value}"
    )


@pytest.mark.parametrize("value", ["", "Team", "team_1", "-a", "a-", "a/b", "x" * 64])
def test_a_namespace_that_kubernetes_would_refuse(value: str) -> None:
    """A namespace is a DNS label."""
    assert "must be a DNS label" in refusal(f"--namespace={value}")


@pytest.mark.parametrize("flag", ["model_dir", "checkpoint_path", "export_dir"])
def test_a_url_is_no_directory(flag: str) -> None:
    """A URL is refused: as a path it would be a directory named ``gs:`` in the working directory."""
    reported = read(f"--{flag}=gs://bucket/run")
    assert reported.problems == {
        flag: f"--{flag}=gs://bucket/run is a URL: give the directory where the bucket is mounted."
    }
    assert read("--data_dir=gs://bucket/run").problems == {}
