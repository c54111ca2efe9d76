"""PyTorch modules as parameters, trained through a service like in one process. It needs PyTorch: .ci/run runs it."""

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.cutting_proxy import CuttingProxy
from support.service import Wire, service, together
from torch import nn
from torch.nn import functional

from tfps.client import receive
from tfps.client.adapters import adapter_of
from tfps.client.adapters.torch_module import TorchModule
from tfps.client.arrays import Rows
from tfps.client.connect import connect
from tfps.errors import PeerLostError, ServiceError
from tfps.runtime.service.pushes import Rules

FIRST = "first.weight", "first.bias", "last.bias"


class Net(nn.Module):
    """Two layers with the same weights, one with frozen ones, batch norm, and a layer that nothing uses."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.norm, self.unused = nn.BatchNorm1d(4), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return outputs [batch, 4] of inputs [batch, 4]."""
        return self.last(self.frozen(torch.tanh(self.norm(self.first(x)))))


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return eight inputs and what they should give."""
    made = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=made), torch.randn(8, 4, generator=made)


def backward(model: nn.Module, seed: int) -> None:
    """Compute the gradients of a batch."""
    x, y = batch(seed)
    model.zero_grad()
    functional.mse_loss(model(x), y).backward()


def arrays(model: nn.Module) -> dict[str, np.ndarray]:
    """Return copies of the parameters."""
    return {name: one.detach().numpy().copy() for name, one in model.named_parameters()}


def test_names_are_those_of_named_parameters() -> None:
    """Of the parameters that are trained; one that is used twice has its first name. Memory is the model's."""
    model = Net()
    assert isinstance(adapter_of(model), TorchModule)
    found = TorchModule(model).values()
    assert list(found) == [*FIRST, "norm.weight", "norm.bias", "unused.weight", "unused.bias"]
    assert all(np.shares_memory(found[name], model.get_parameter(name).detach().numpy()) for name in found)
    backward(model, 0)
    pushed = TorchModule(model).gradients(None)
    assert list(pushed) == [*FIRST, "norm.weight", "norm.bias"]
    assert all(np.shares_memory(pushed[name], model.get_parameter(name).grad.numpy()) for name in pushed)


def test_values_are_copied_into_the_tensors_that_there_are() -> None:
    """Also those that others share; averages and frozen parameters stay the module's own."""
    with service(2) as running, running.client() as ps:
        first, other = Net(0), Net(1)
        assert ps.init_module(first) is first
        before, place = arrays(other), other.first.weight.data_ptr()
        other.norm.running_mean.fill_(5)
        ps.init_module(other)
        assert other.first.weight.data_ptr() == place
        assert other.last.weight is other.first.weight
        for name, value in arrays(other).items():
            np.testing.assert_array_equal(value, (before if "frozen" in name else arrays(first))[name])
        assert other.norm.running_mean.tolist() == [5] * 4
        x, _ = batch(0)
        other.first.requires_grad_(False)  # it stays a parameter of the service, and is not pushed
        other(x).sum().backward()
        assert "first.weight" not in TorchModule(other).gradients(None)
        with torch.no_grad():
            other.first.weight.zero_()
        ps.pull_into(other)
        np.testing.assert_array_equal(other.first.weight.numpy(), arrays(first)["first.weight"])


@pytest.mark.parametrize("num_ps", [1, 2])
def test_sync_training_equals_the_same_arithmetic_in_one_process(num_ps: int) -> None:
    """Three workers, ten updates: SGD of the mean of their gradients, with tied, frozen and unused parameters."""
    workers, updates = 3, 10
    alone = Net()
    optimizer = torch.optim.SGD([one for one in alone.parameters() if one.requires_grad], lr=0.1)
    for step in range(updates):
        optimizer.zero_grad()
        for worker in range(workers):  # batch norm normalizes each worker's batch by itself
            x, y = batch(workers * step + worker)
            (functional.mse_loss(alone(x), y) / workers).backward()
        optimizer.step()

    models = [Net(), Net(), Net()]

    def work(worker: int) -> None:
        model = models[worker]
        with running.client(worker) as ps:
            ps.init_module(model)
            for step in range(updates):
                backward(model, workers * step + worker)
                if step % 2:
                    assert ps.push_pull_into(model) is model
                else:
                    assert ps.push_grads(model) == step + 1
                    ps.pull_into(model)
                assert ps.pulled_step == step + 1
            assert ps.dropped == 0

    with service(num_ps, Rules("sync", num_workers=workers), learning_rate=0.1) as running:
        together(*(lambda index=worker: work(index) for worker in range(workers)))
    assert not np.allclose(arrays(models[0])["first.weight"], arrays(Net())["first.weight"], atol=1e-3)  # it did move
    for model in models:
        for name, value in arrays(alone).items():
            np.testing.assert_allclose(arrays(model)[name], value, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("num_ps", [1, 2])
def test_buffers_are_shared_if_asked_for(num_ps: int) -> None:
    """In sync all workers get the mean of their averages, and the parameters that they would get without."""
    models, plain = [Net(), Net()], [Net(), Net()]

    def work(running: Any, worker: int, model: nn.Module, buffers: bool) -> None:
        with running.client(worker) as ps:
            ps.init_module(model, buffers=buffers)
            for step in range(3):
                backward(model, 2 * step + worker)
                if step == 1:
                    ps.push_pull_into(model, buffers=buffers)
                else:
                    ps.push_grads(model, buffers=buffers)
                    ps.pull_into(model)

    for own, buffers in (models, True), (plain, False):
        with service(num_ps, Rules("sync", num_workers=2), learning_rate=0.1) as running:
            together(*(lambda w=worker, o=own, b=buffers, r=running: work(r, w, o[w], b) for worker in range(2)))
    mean = (plain[0].norm.running_mean + plain[1].norm.running_mean) / 2
    for model, other in zip(models, plain, strict=True):
        torch.testing.assert_close(model.norm.running_mean, mean)  # an average of averages: batch norm is linear in it
        assert model.norm.num_batches_tracked == 3
        for name, value in arrays(other).items():
            np.testing.assert_array_equal(arrays(model)[name], value, name)
    assert not torch.equal(plain[0].norm.running_mean, plain[1].norm.running_mean)


@pytest.mark.parametrize("num_ps", [1, 2])
@pytest.mark.parametrize("seed", [1, 2])
def test_connections_that_are_cut_leave_no_mixture(num_ps: int, seed: int) -> None:
    """Answers arrive in the module's own memory: after each call it has what the service has, with its buffers."""
    proxies: list[CuttingProxy] = []
    direct: list[str] = []

    def via(address: str) -> str:
        direct.append(address)
        proxies.append(CuttingProxy(int(address.rpartition(":")[2]), seed + len(proxies)))
        return f"127.0.0.1:{proxies[-1].port}"

    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    with service(num_ps, learning_rate=0.01, wire=Wire(via=via, retry_secs=60.0)) as running:
        with running.client(retry_secs=60) as ps, connect(",".join(direct)) as other:
            ps.init_module(model, buffers=True)
            for step in range(60):
                model.zero_grad()
                (model(torch.randn(8, 4)) ** 2).mean().backward()
                average = model[1].running_mean.clone()
                assert ps.push_pull_into(model, buffers=True) is model
                assert ps.pulled_step == step + 1
                torch.testing.assert_close(model[1].running_mean, average, rtol=0, atol=0)
                values = other.pull()
                assert values.keys() == {name for name, _ in model.state_dict().items()}
                for name, one in model.state_dict().items():
                    np.testing.assert_array_equal(one.numpy(), values[name], name)
        for proxy in proxies:
            proxy.is_cutting = False
            proxy.close()
    assert sum(proxy.cuts for proxy in proxies) > 10


def test_backward_tells_of_values_that_have_arrived_since() -> None:
    """As after any other change of a tensor that a gradient needs: the gradient would be that of neither."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with service() as running, running.client() as ps:
        ps.init_module(model)
        loss = model(torch.ones(2, 4)).sum()
        ps.pull_into(model)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("num_ps", [1, 2])
def test_a_module_that_lacks_the_values_is_not_changed(num_ps: int) -> None:
    """Whichever of its tensors does not fit: values arrive in its memory only if all do."""
    with service(num_ps) as running, running.client() as ps:
        ps.init_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        for other in (
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)),
            nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)),
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(2, 2)),
        ):
            before = arrays(other)
            with pytest.raises(ServiceError):
                ps.pull_into(other)
            for name, value in arrays(other).items():
                np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize("device", ["cpu:0", "meta"])
def test_the_default_device_is_that_of_new_tensors_only(device: str) -> None:
    """What arrives, and what is pushed, is the module's."""
    model = nn.Linear(3, 2)
    with service() as running, running.client() as ps:
        ps.init_module(model)
        before = arrays(model)
        model(torch.ones(1, 3)).sum().backward()
        with torch.device(device):
            ps.push_pull_into(model)
            ps.push_grads(model)
            ps.pull_into(model)
        assert arrays(model)["bias"].tolist() == (before["bias"] - 1 - 1).tolist()


@pytest.mark.parametrize("num_ps", [1, 2])
def test_memory_of_two_parameters_has_the_value_of_one(num_ps: int) -> None:
    """Of the last one, however the servers answer."""
    first, last = (nn.Linear(300, 300, bias=False) for _ in range(2))
    last.weight.data = first.weight.data
    model = nn.ModuleList([first, last])
    with service(num_ps) as running, running.client() as ps:
        ps.init_module(model)
        start = first.weight.detach().numpy().copy()
        ps.push({"0.weight": np.ones_like(start), "1.weight": np.full_like(start, 2)})
        for _ in range(5):
            ps.pull_into(model)
            np.testing.assert_array_equal(first.weight.detach().numpy(), start - 2)


def test_backward_tells_of_values_of_which_a_part_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service is lost after the first array: the module has values of two steps, and a gradient is refused."""
    model, filled = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), receive._filled
    arrived: list[np.ndarray] = []

    def cut(source: Any, array: np.ndarray) -> np.ndarray:
        if arrived:
            raise ConnectionResetError("the connection is cut")
        arrived.append(array)
        return filled(source, array)

    with service() as running, running.client(retry_secs=0.2) as ps:
        ps.init_module(model)
        before = arrays(model)
        loss = model(torch.ones(2, 4)).square().sum()
        ps.push({name: np.ones_like(value) for name, value in before.items()})
        monkeypatch.setattr(receive, "_filled", cut)
        with pytest.raises(PeerLostError):
            ps.pull_into(model)
    changed = [name for name, value in arrays(model).items() if not np.array_equal(value, before[name])]
    assert len(changed) == len(arrived) == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_float8_is_rounded_from_what_the_service_has() -> None:
    """NumPy lacks it, so it cannot be sent."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2).requires_grad_(False).to(torch.float8_e4m3fn)
    with service() as running, running.client() as ps:
        ps.init_module(model)
        ps.pull_into(other)
        assert torch.equal(other.weight.float(), model.weight.detach().to(torch.float8_e4m3fn).float())


def test_tensors_that_cannot_be_changed_are_refused() -> None:
    """Before any other one is changed."""
    expanded = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    expanded[1].weight.data = torch.zeros(1).expand(2, 2)
    with torch.inference_mode():
        of_inference = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sparse = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sparse[1].weight = nn.Parameter(torch.eye(2).to_sparse_csr())
    with service() as running, running.client() as ps:
        ps.init_module(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        for model in expanded, of_inference, sparse:
            before = model[0].weight.detach().numpy().copy()
            with pytest.raises(ServiceError, match="cannot be changed"):
                ps.pull_into(model)
            np.testing.assert_array_equal(model[0].weight.detach().numpy(), before)


def test_buffers_are_those_of_the_state() -> None:
    """Not those that ``state_dict`` leaves out; a compiled module has the names of the one inside."""
    model = nn.Module()
    model.register_buffer("kept", torch.ones(2, dtype=torch.bfloat16))
    model.register_buffer("left", torch.ones(2), persistent=False)
    assert {name: one.dtype for name, one in TorchModule(model).buffers().items()} == {"kept": np.float32}
    assert set(TorchModule(torch.compile(Net())).buffers()) == {name for name, _ in Net().named_buffers()}
    with service() as running, running.client() as ps:
        ps.init_module(Net())
        with pytest.raises(ServiceError, match="is no parameter"):
            ps.push({}, TorchModule(Net()).buffers())


class Table(nn.Module):
    """A table with sparse gradients, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.dense = nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [n, 1] of ids [n]."""
        return self.dense(self.table(ids))


@pytest.mark.parametrize("num_ps", [1, 2])
def test_sparse_gradients_are_pushed_as_rows_in_the_same_update(num_ps: int) -> None:
    """Rows that occur twice are added up and sent once; the dense gradients go with them."""
    model = Table()
    with service(num_ps) as running, running.client() as ps:
        ps.init_module(model)
        before = arrays(model)
        model(torch.tensor([4, 1, 4])).sum().backward()
        rows = TorchModule(model).gradients(None)["table.weight"]
        assert isinstance(rows, Rows)
        assert rows.ids.tolist() == [1, 4]
        expected = np.zeros_like(before["table.weight"])
        expected[[1, 4]] = before["dense.weight"][0] * [[1], [2]]
        dense = before["table.weight"][[4, 1, 4]].sum(axis=0)
        assert ps.push_grads(model) == 1
        ps.pull_into(model)
        np.testing.assert_allclose(arrays(model)["table.weight"], before["table.weight"] - expected, rtol=1e-6)
        np.testing.assert_allclose(arrays(model)["dense.weight"][0], before["dense.weight"][0] - dense, rtol=1e-5)
        model.zero_grad()
        model(torch.zeros([0], dtype=torch.int64)).sum().backward()  # no row at all
        assert ps.push_grads(model) == 2


def test_sparse_gradients_of_another_layout_are_made_dense() -> None:
    """Such as one of an index for each number."""
    model = nn.Linear(2, 2, bias=False)
    found = TorchModule(model).gradients({"weight": torch.tensor([[0.0, 2], [3, 0]]).to_sparse()})
    assert found["weight"].tolist() == [[0, 2], [3, 0]]


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, torch.compile, lambda model: torch.compile(nn.DataParallel(model))],
    ids=["DataParallel", "compile", "both"],
)
def test_names_are_those_of_the_module_inside(wrap: Callable[[nn.Module], Any]) -> None:
    """A module that is wrapped or compiled, and one of which a part is, has the same parameters."""
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    expected = ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(TorchModule(wrap(inner)).values()) == expected
    partly = nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2))
    assert list(TorchModule(partly).values()) == expected
    changed = {name: np.full_like(value, 7) for name, value in TorchModule(inner).values().items()}
    TorchModule(wrap(inner)).assign(changed)
    assert inner[1].bias.tolist() == [7, 7]


def test_bfloat16_is_float32_at_the_service() -> None:
    """So small gradients are not lost: each is less than half of the distance of two numbers of bfloat16."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    with service() as running, running.client() as ps:
        ps.init_module(model)
        for _ in range(8):
            model.weight.grad = torch.full_like(model.weight, 2.0**-9)
            ps.push_grads(model)
            ps.pull_into(model)
        assert ps.pull()["weight"] == np.float32(1 - 8 * 2.0**-9)
        assert model.weight.item() == 1 - 8 * 2.0**-9
        assert model.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_stay(dtype: torch.dtype) -> None:
    """A tensor that is not contiguous, too, is sent in the order of its indices."""
    model = nn.Linear(3, 2, bias=False).to(dtype)
    model.weight = nn.Parameter(torch.arange(6, dtype=dtype).reshape(3, 2).t())
    assert not model.weight.is_contiguous()
    other = nn.Linear(3, 2, bias=False).to(dtype)
    with service() as running, running.client() as ps:
        ps.init_module(model)
        ps.pull_into(other)
        assert other.weight.tolist() == model.weight.tolist() == [[0, 2, 4], [1, 3, 5]]
        model.weight.grad = torch.arange(6, dtype=dtype).reshape(3, 2).t()
        ps.push_grads(model)
        ps.pull_into(model)
        assert model.weight.tolist() == [[0, 0, 0], [0, 0, 0]]
        assert model.weight.dtype == dtype


def test_gradients_can_be_given() -> None:
    """Those of ``torch.autograd.grad``, in order; those of ``torch.func.grad``, by name."""
    model = Net()
    x, y = batch(0)
    names = list(TorchModule(model).values())
    given = torch.autograd.grad(
        functional.mse_loss(model(x), y), [model.get_parameter(name) for name in names], allow_unused=True
    )
    found = TorchModule(model).gradients(given)
    assert list(found) == [*FIRST, "norm.weight", "norm.bias"]
    np.testing.assert_array_equal(found["first.weight"], given[0].numpy())
    assert list(TorchModule(model).gradients({"norm.bias": given[4]})) == ["norm.bias"]


@pytest.mark.parametrize(
    ("model", "gradients", "problem"),
    [
        (Net(), None, "no parameter has a gradient: call backward before"),
        (Net(), [torch.zeros(2)], "gradients: expected 7, one for each parameter that is trained, given 1"),
        (nn.Linear(1, 1), {"weight": "text"}, "weight: cannot be sent"),
        (nn.Linear(1, 1), {"weight": torch.zeros(1, dtype=torch.float8_e4m3fn)}, "weight: cannot be sent"),
    ],
)
def test_what_cannot_be_pushed_is_named(model: nn.Module, gradients: Any, problem: str) -> None:
    """And nothing is sent."""
    with pytest.raises(ServiceError, match=problem):
        TorchModule(model).gradients(gradients)


@pytest.mark.parametrize("model", [nn.LazyLinear(2), nn.Linear(2, 2, device="meta")])
def test_what_has_no_values_is_named(model: nn.Module) -> None:
    """A lazy module before its first batch, and one that has shapes only."""
    with pytest.raises(ServiceError, match="weight: cannot be sent"):
        TorchModule(model).values()


def test_a_model_that_is_another_one_is_not_changed() -> None:
    """A parameter that the service lacks, or of another shape, though it could be repeated."""
    with service() as running, running.client() as ps:
        ps.init_module(nn.Linear(3, 1))
        for other, problem in (
            (nn.Linear(3, 4), r"weight: the service has \[1, 3\], the module \[4, 3\]"),
            (nn.Sequential(nn.Linear(3, 1)), "0.weight is no parameter of the service"),
        ):
            before = copy.deepcopy(arrays(other))
            with pytest.raises(ServiceError, match=problem):
                ps.pull_into(other)
            assert all((value == before[name]).all() for name, value in arrays(other).items())
        with pytest.raises(ServiceError, match=r"expected float32\[1, 3\], given float64"):
            ps.init_module(nn.Linear(3, 1).double())
        wrong = nn.Linear(3, 1)
        wrong(torch.full([1, 3], torch.nan)).sum().backward()
        with pytest.raises(ServiceError, match="weight: the gradient has NaN"):
            ps.push_grads(wrong)
        assert ps.step == 0


def test_a_client_imports_no_pytorch() -> None:
    """Only a program that has a module imports it."""
    code = """
import sys
from tfps.client.adapters import adapter_of
try:
    adapter_of(3)
except Exception as error:
    print(type(error).__name__, "torch" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "ServiceError False\n"


def test_what_has_no_values_yet_or_another_dtype_gets_none() -> None:
    """Each by its name, and nothing of the module is changed; only floating-point numbers are rounded."""
    with service() as running, running.client() as ps:
        ps.init({"weight": np.ones([2, 2], np.float32), "bias": np.ones(2, np.float32)}, {"ids": np.int64([2**40, -5])})
        for other in (nn.LazyLinear(2), nn.Linear(2, 2, device="meta")):
            with pytest.raises(ServiceError, match="weight: the module has no values yet"):
                ps.pull_into(other)
        model = nn.Linear(2, 2)
        before = model.weight.detach().clone()
        model.register_buffer("ids", torch.zeros(2, dtype=torch.int32))
        with pytest.raises(ServiceError, match=r"ids: the service has int64, the module torch\.int32"):
            ps.pull_into(model)
        assert torch.equal(model.weight, before)
        assert (ps.pull_into(nn.Linear(2, 2).half()).weight == 1).all()
