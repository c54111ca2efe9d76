"""A worker in PyTorch of a parameter service of tfps. Model, batches and optimizer are those of ``torch_rpc``."""

from typing import Any

import numpy as np
import task
import torch
import torch_models

import tfps


def work(flags: Any) -> None:
    """Train, then let the first worker evaluate."""
    model, marks = torch_models.build(flags), task.Marks(flags.every, flags.steps)
    batches, (servers, _, _) = task.batches(flags), task.addresses(flags)
    with tfps.connect(",".join(servers), worker=flags.index) as ps:
        ps.init_module(model)
        while ps.pulled_step < flags.steps:
            model.zero_grad()
            loss = model.loss(*(torch.from_numpy(np.asarray(array)) for array in next(batches)))
            loss.backward()
            ps.push_pull_into(model)
            loss.item()
            marks.at(ps.pulled_step)
    if flags.index == 0:
        task.say("done", **torch_models.evaluate(model, flags))


if __name__ == "__main__":
    work(task.flags())
