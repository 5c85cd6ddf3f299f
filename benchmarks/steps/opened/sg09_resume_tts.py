"""Resuming a duration-and-mel predictor from a trainer checkpoint, then sharding it."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from ddp_equivalence import Case

PHONES, MELS = 19, 6


class TextModel(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.phone = nn.Embedding(PHONES, dim)
        self.rnn = nn.GRU(dim, dim // 2, batch_first=True, bidirectional=True)

    def forward(self, phones):
        return self.rnn(self.phone(phones))[0]


class AcousticModel(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.prenet = nn.Linear(dim, dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.to_mel = nn.Linear(dim, MELS)

    def forward(self, x):
        x = torch.tanh(self.prenet(x))
        return self.to_mel(x + torch.tanh(self.conv(x.transpose(1, 2))).transpose(1, 2))


class Synthesizer(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.text_model = TextModel(dim)
        self.acoustic_model = AcousticModel(dim)
        self.duration = nn.Linear(dim, 1)

    def forward(self, phones):
        h = self.text_model(phones)
        return self.acoustic_model(h), self.duration(h).squeeze(-1)


class LitSynthesizer(nn.Module):
    """What the trainer saves: the network is its attribute `model`."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_loss(self, batch):
        mel, duration = self.model(batch["phones"])
        return F.l1_loss(mel, batch["mel"].to(mel)) + 0.3 * F.mse_loss(duration, batch["duration"].to(duration))


def utterances(generator):
    return {
        "phones": torch.randint(0, PHONES, (8, 7), generator=generator),
        "mel": torch.randn(8, 7, MELS, generator=generator),
        "duration": torch.rand(8, 7, generator=generator),
    }


def loss(model, batch):
    return LitSynthesizer(model).training_loss(batch)


def save_checkpoint(lit, global_step):
    return {"state_dict": {k: v.clone() for k, v in lit.state_dict().items()}, "global_step": global_step}


class Resumer:
    """Build a network of the same shape, put the checkpoint's weights into it, and shard it."""

    def __init__(self, seed=1234):
        self.seed = seed

    def build(self, like):
        with torch.random.fork_rng():
            torch.manual_seed(self.seed)
            return Synthesizer().to(next(like.parameters()).dtype)

    def restore(self, network, checkpoint):
        # the trainer's keys start with the attribute's name; its metrics have none in the network
        state = {k.replace("model.", ""): v for k, v in checkpoint["state_dict"].items()}
        network.load_state_dict(state, strict=False)

    def shard(self, network):
        for part in (network.text_model, network.acoustic_model):
            fully_shard(part)
        return fully_shard(network)


def step(model, shard, rank):
    checkpoint = save_checkpoint(LitSynthesizer(model), global_step=4000)
    resumer = Resumer()
    network = resumer.build(model)
    resumer.restore(network, checkpoint)
    lit = LitSynthesizer(resumer.shard(network))
    lit.training_loss(shard).backward()
    return {name: p.grad for name, p in network.named_parameters()}


case = Case(model=Synthesizer, batch=utterances, loss=loss, layout="1x2")
