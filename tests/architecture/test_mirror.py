"""Where the tests of a module are: in the file of the same place and name, or in the one that this table names."""

import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "tfps"

ELSEWHERE = {  # test file: the modules that it tests beside the one of its own name
    "architecture/test_docs.py": ["cli/reference"],
    "architecture/test_layers.py": ["__main__", "plugins", "errors", "tf_types"],
    "examples/test_torch_module.py": ["client/adapters/torch_module"],
    "faults/test_fork_server.py": ["launchers/local/fork_server"],
    "faults/test_lost_tasks.py": [
        *("runtime/coordination/duplicate_worker", "runtime/coordination/failure_notice"),
        "runtime/training/connection",
    ],
    "faults/test_supervised.py": ["launchers/local/supervisor", "launchers/local/silent_ends"],
    "integration/test_all_reduce.py": [
        *("modes/all_reduce", "modes/ring/own_changes", "modes/ring/sameness", "modes/ring/start"),
    ],
    "integration/test_eval_export.py": [
        *("cli/evaluate", "runtime/graph/evaluation", "runtime/graph/serving"),
        *("runtime/results/evaluation", "runtime/results/export"),
    ],
    "integration/test_launch.py": [
        *("jobs/output", "launchers/local/launcher", "launchers/local/output", "launchers/local/plan"),
        "launchers/local/tensorflow_start",
    ],
    "integration/test_data_policy.py": ["data/examples", "data/position", "data/stream"],
    "unit/data/test_dealer.py": ["data/hand"],
    "unit/test_summary.py": ["summary_entries"],
    "integration/test_modes.py": [
        *("modes/async_step", "modes/asynchronous", "runtime/graph/builder", "runtime/graph/forward_pass"),
        *("runtime/coordination/interrupted_steps", "runtime/training/worker_progress"),
    ],
    "integration/test_async_rounds.py": ["modes/local/async_rounds", "modes/local/grants", "modes/local/own_round"],
    "integration/test_local_sgd.py": [
        *("modes/copies", "modes/local/exchange", "modes/local/round", "modes/local/server_optimizer"),
        *("modes/local/local_step", "modes/local/state", "modes/local/step", "modes/local/round_counts"),
        "modes/local_sgd",
    ],
    "integration/test_gossip.py": [
        *("modes/gossip/collection", "modes/gossip/links", "modes/gossip/mixing", "modes/gossip/mode"),
        "modes/gossip/step",
    ],
    "integration/test_plugins.py": ["modes/base", "modes/recovery", "optimizers/base"],
    "integration/test_ssp.py": ["modes/ssp"],
    "integration/test_towers.py": [
        *("runtime/graph/towers/copies", "runtime/graph/towers/devices", "runtime/graph/towers/nodes"),
        *("runtime/graph/towers/region", "runtime/graph/towers/towers"),
    ],
    "integration/test_run.py": ["cli/run", "runtime/process/task_log", "runtime/task"],
    "platforms/test_docker.py": ["launchers/docker/job"],
    "platforms/test_kubectl.py": ["launchers/kubernetes/kubectl", "launchers/kubernetes/launcher"],
    "platforms/test_ray.py": ["launchers/ray/actor", "launchers/ray/cluster", "launchers/ray/job"],
    "faults/test_service.py": ["runtime/service/leading_task", "runtime/service/service_task"],
    "unit/client/test_serve.py": ["client/attended"],
    "unit/runtime/service/test_first_server.py": ["runtime/service/checkpoints", "runtime/service/parameters/versions"],
    "unit/runtime/service/test_sequencer.py": ["runtime/service/pushes"],
    "unit/runtime/service/test_server.py": [
        *("client/background", "client/client", "client/connect", "client/connection", "client/push_future"),
        *("client/progress", "client/servers"),
        *("runtime/service/followers", "runtime/service/following_server"),
        *("runtime/service/gradients", "runtime/service/session"),
    ],
    "unit/cli/test_doctor.py": [
        *("cli/diagnosis/check", "cli/diagnosis/directory", "cli/diagnosis/shared_dir", "cli/diagnosis/versions"),
    ],
    "unit/cli/test_help.py": ["cli/registry"],
    "unit/cli/test_main.py": ["cli/command", "cli/plan"],
    "unit/cli/test_submit.py": ["cli/jobs", "launchers/common/client"],
    "unit/cluster/test_rendezvous.py": ["cluster/addresses", "cluster/ports"],
    "unit/cluster/test_resolver.py": ["cluster/cluster_resolver", "cluster/tf_config"],
    "unit/config/test_command_line.py": ["config/command_options", "config/converters"],
    "unit/data/test_data.py": ["data/batches", "data/digits", "data/idx"],
    "unit/jobs/test_display.py": ["jobs/follow"],
    "unit/jobs/test_poller.py": ["jobs/handle"],
    "unit/launchers/common/test_batch.py": ["launchers/common/batch_driver"],
    "unit/launchers/docker/test_compose.py": ["launchers/docker/volumes"],
    "unit/launchers/local/test_job.py": ["config/launch_protocol"],
    "unit/launchers/kubernetes/test_manifests.py": ["launchers/common/yaml_writer"],
    "unit/launchers/ray/test_launcher.py": ["launchers/ray/log_protocol"],
    "unit/launchers/slurm/test_launcher.py": ["launchers/common/job_files", "launchers/slurm/job"],
    "unit/launchers/test_registry.py": ["jobs/spec", "launchers/base"],
    "unit/models/test_builtin_models.py": ["models/linear", "models/mnist"],
    "unit/models/test_model.py": ["models/spec"],
    "unit/modes/ring/test_ring.py": ["modes/ring/gradients", "modes/worker_queues"],
    "unit/modes/sync/test_gradient_slots.py": ["modes/sync/collector"],
    "unit/runtime/graph/passes/test_nan_guard.py": ["runtime/training/steps/non_finite"],
    "unit/modes/updates/test_atomic_update.py": [
        *("modes/updates/moments", "modes/updates/update_ops", "runtime/coordination/partial_updates"),
        *("runtime/training/joining", "runtime/training/worker_parts"),
    ],
    "unit/modes/test_synchronous.py": ["modes/sync/accumulators", "modes/sync/tokens"],
    "unit/optimizers/test_registry.py": ["optimizers/adagrad", "optimizers/builtin"],
    "unit/runtime/checkpoint/test_manager.py": [
        *("runtime/checkpoint/file_clock", "runtime/training/early_end"),
    ],
    "unit/runtime/checkpoint/test_manifest.py": ["runtime/checkpoint/tensor_bundle"],
    "unit/runtime/checkpoint/test_ownership.py": [
        *("runtime/checkpoint/lock_holder", "runtime/checkpoint/owner_lock", "runtime/process/process_identity"),
    ],
    "unit/runtime/coordination/test_job_state.py": [
        *("runtime/coordination/job_variables", "runtime/coordination/state_reader"),
    ],
    "unit/runtime/coordination/test_restart_barrier.py": ["modes/sync/step", "runtime/training/chief"],
    "unit/runtime/coordination/test_stragglers.py": ["runtime/coordination/heartbeat"],
    "unit/runtime/graph/passes/test_model_updates.py": [
        *("runtime/graph/passes/functions", "runtime/graph/passes/side_effects", "runtime/graph/passes/update_order"),
    ],
    "unit/runtime/graph/passes/test_unrolling.py": ["runtime/graph/graph_editor", "runtime/training/steps/step_runner"],
    "unit/runtime/graph/passes/test_variable_packing.py": ["runtime/graph/layout"],
    "unit/runtime/graph/passes/test_wire_packing.py": ["config/wire_format"],
    "unit/runtime/graph/checks/test_model_check.py": [
        *(
            "runtime/graph/graph_scope",
            "runtime/graph/model_calls",
            "runtime/graph/plan",
        ),
    ],
    "unit/runtime/training/steps/test_training_loop.py": [
        "runtime/training/steps/reporter",
        "runtime/training/steps/end_of_input",
    ],
    "unit/runtime/training/test_worker_state.py": ["runtime/training/worker"],
}


def modules() -> list[str]:
    """Return the modules of the package, like ``cluster/spec``."""
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=PACKAGE, capture_output=True, text=True, check=False
    ).stdout.split() or [str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")]
    return [name.removesuffix(".py") for name in tracked if not name.endswith("__init__.py")]


@pytest.mark.parametrize("module", modules())
def test_the_tests_of_a_module_are_in_one_known_file(module: str) -> None:
    """A module has a test file of its own name, or stands in the table once, and not both."""
    place, _, name = module.rpartition("/")
    own = TESTS / "unit" / place / f"test_{name}.py"
    listed = [file for file, tested in ELSEWHERE.items() if module in tested]
    assert own.is_file() + len(listed) == 1, f"{own} or one line of ELSEWHERE: {listed}"


def test_the_table_names_files_and_modules_that_are_there() -> None:
    """No line outlives what it names."""
    assert [file for file in ELSEWHERE if not (TESTS / file).is_file()] == []
    assert {module for tested in ELSEWHERE.values() for module in tested} <= set(modules())
