"""What the comment of a manifest says of a service; of jobs that train, the golden files tell."""

import pytest
from support.kubernetes_jobs import PLATFORMS, SERVICE, SMALL, changed, kind_of, plan_of

every_platform = pytest.mark.parametrize("platform", PLATFORMS)


def comment(platform: str, **flags: object) -> str:
    """Return the comment of a service in one line."""
    lines = str(plan_of(platform, changed(SERVICE, **flags))).splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("# "))


@every_platform
def test_it_says_how_a_service_ends_and_who_reaches_it(platform: str) -> None:
    """Not that of a job with workers; and the restarts are those of the platform."""
    said = comment(platform)
    assert said.startswith("service: 2 ps, a parameter service. kubectl create -f FILE starts it")
    assert "The service ends with 0 after --max_steps updates" in said
    assert "worker" not in said
    assert "starts again inside its pod" in said
    assert "The Secret team-token must exist" in said
    assert "Only pods of its namespace can reach its pods" in said


@every_platform
def test_it_warns_of_an_open_port(platform: str) -> None:
    """Without a secret, and without a policy."""
    assert "Whoever reaches its port 2222 can change the parameters: give --token_secret." in comment(
        platform, token_secret=None
    )
    assert "Whoever reaches the job's pods can change the parameters: no NetworkPolicy" in comment(
        platform, network_policy=False
    )


@every_platform
def test_the_policy_lets_clients_in(platform: str) -> None:
    """All pods of the namespace reach a service's port; only its own pods reach those of a job that trains."""
    [rule] = kind_of(platform, SERVICE, "NetworkPolicy")["spec"]["ingress"]
    assert rule == {"from": [{"podSelector": {}}], "ports": [{"protocol": "TCP", "port": 2222}]}
    [rule] = kind_of(platform, SMALL, "NetworkPolicy")["spec"]["ingress"]
    assert rule["from"][0]["podSelector"] != {}
