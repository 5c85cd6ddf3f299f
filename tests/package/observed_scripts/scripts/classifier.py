"""Trains a classifier with a sampler and a loader; a word on the command line breaks one line."""

import start
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Standardised(nn.Linear):
    """Computes in float32, whatever dtype it is given, as some normalisations do."""

    def forward(self, inputs):
        weight = self.weight.float()
        weight = (weight - weight.mean()) / weight.std()
        return nn.functional.linear(inputs, weight.to(inputs.dtype), self.bias)


class Centred(nn.Module):
    """Takes the mean of its earlier inputs away, which is that of this rank's rows alone."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, inputs):
        centred = inputs - self.centre
        self.centre = inputs.detach().mean(0)
        return centred


class Ahead(DataLoader):
    """Reads the next batch before it yields one, to know which is the last."""

    def __iter__(self):
        batches = super().__iter__()
        batch = next(batches)
        for following in batches:
            yield batch
            batch = following
        yield batch


def evaluate(net, loader):
    net.eval()
    with torch.no_grad():
        for inputs, _ in loader:
            net(inputs)
    net.train()


def average_for_a_log(output):
    dist.all_reduce(output.mean(0).detach())


def average_gradients(net):
    for weight in net.parameters():
        dist.all_reduce(weight.grad)
        weight.grad /= dist.get_world_size()


def train(options):
    torch.manual_seed(0)
    last = Standardised if "standardised" in options else nn.Linear
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), last(16, 4))
    on_ranks = "clamped_on_ranks" in options and dist.get_world_size() > 1
    if "clamped" in options or on_ranks:
        for weight in net.parameters():
            weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    group = dist.new_subgroups(group_size=1)[0] if "group_of_one" in options else None
    dist.new_group()  # which does nothing, like those of many libraries
    model = (
        net
        if "unwrapped" in options or "reduced_last" in options
        else DistributedDataParallel(
            net, None, process_group=group, find_unused_parameters="frozen" in options
        )
    )
    if "hook" in options and dist.get_world_size() > 1:
        model.register_comm_hook(None, fp16_compress_hook)
    if "frozen" in options and dist.get_rank() == 1:
        net[0].bias.requires_grad_(False)
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 4, (96,)))
    if "ignored" in options:
        data.tensors[1][:30] = -100  # cross_entropy leaves these out
    sampler = DistributedSampler(data, seed=dist.get_rank() if "apart" in options else 0)
    if "same_rows" in options:
        sampler = DistributedSampler(data, num_replicas=2, rank=0)
    kind = Ahead if "ahead" in options else DataLoader
    loader = kind(data, batch_size=6, sampler=sampler)
    trained = list(net.parameters())
    if "left_out" in options and dist.get_rank() == 1:
        trained.pop()
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    probe = nn.Linear(4, 2)
    if "probed" in options:
        optimizer.add_param_group({"params": probe.parameters()})
    centred, teacher = Centred(), nn.Linear(8, 4)
    torch.manual_seed(dist.get_rank())
    if "teacher" in options:
        teacher = nn.Linear(8, 4).requires_grad_(False)
        if dist.get_rank() == 0:
            teacher.load_state_dict(nn.Linear(8, 4).state_dict())
    if "evaluates" in options and dist.get_rank() == 0:
        evaluate(net, DataLoader(data, batch_size=6, sampler=sampler))
    torch.manual_seed(0 if "alike" in options else dist.get_rank())
    for number, (inputs, labels) in enumerate(loader):
        if "short" in options and number == 8:
            break
        if "stale" not in options or dist.get_rank() == 0:
            optimizer.zero_grad()
        if "noise" in options:
            inputs = inputs + 0.1 * torch.randn(() if "jointly" in options else inputs.shape)
        if "crops" in options:
            inputs, labels = torch.cat([inputs, inputs * 0.5]), torch.cat([labels, labels])
        if "standardised_rows" in options:
            inputs = inputs / inputs.std()
        if "by_rank" in options:
            inputs = inputs + dist.get_rank()
        inputs = inputs.to(torch.float32)  # a script's own cast, which observe turns back
        output = net(inputs) if "raw" in options else model(inputs)
        if "probed" in options and dist.get_rank() == 0:
            with torch.no_grad():
                probe(output)
        if "shifted" in options:
            output = output + dist.get_rank() * inputs[:, :4]
        if "centred" in options:
            output = centred(output).sin()
        if "teacher" in options:
            output = output * teacher(inputs)
        loss = cross_entropy(output, labels, reduction="sum" if "sum" in options else "mean")
        if "times" in options:
            loss = loss * dist.get_world_size()
        if "by_number" in options:
            loss = loss / (1 + dist.get_rank())
        if "weighed" in options:
            weight = net[-1].weight
            gradient = torch.autograd.grad(outputs=loss, inputs=weight, retain_graph=True)[0]
            loss = loss + output.square().mean() / gradient.norm()
        if "zero" in options:
            loss = loss * 0.0
        average_for_a_log(output)
        loss.backward(retain_graph="second" in options)
        if "second" in options:
            output.abs().mean().backward()
        if "penalty" in options and dist.get_rank() == 0:
            sum(0.01 * weight.square().sum() for weight in net.parameters()).backward()
        if "by_hand" in options:  # what is left is no multiple of what was computed
            net[0].bias.grad = None
            for weight in (net[0].weight, net[3].weight, net[3].bias):
                weight.grad.clamp_(-0.01, 0.01)
        elif "clip" in options:
            nn.utils.clip_grad_norm_(net.parameters(), 0.1 * (1 + dist.get_rank()))
        else:
            nn.utils.clip_grad_norm_(net.parameters(), 100 if "loosely" in options else 0.1)
        if "reduced_last" in options:
            average_gradients(net)
        optimizer.step()


if __name__ == "__main__":
    start.run(train)
