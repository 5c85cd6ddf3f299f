"""Trains a small language model; all ranks share the first GPU. A word breaks one line."""

import start
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WORDS, LENGTH, WIDTH, HEADS = 50, 16, 32, 4


class Block(nn.Module):
    """Attention and a feed-forward layer, both with dropout."""

    def __init__(self, drop):
        super().__init__()
        self.drop = drop
        self.normed, self.normed_again = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.projected, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.forward_layer = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(drop)
        )

    def forward(self, hidden):
        parts = self.projected(self.normed(hidden)).chunk(3, dim=-1)
        query, key, value = (
            one.reshape(*one.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2) for one in parts
        )
        mixed = scaled_dot_product_attention(query, key, value, dropout_p=self.drop, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(hidden.shape))
        return hidden + self.forward_layer(self.normed_again(hidden))


class Recurrent(nn.Module):
    """Two layers of an LSTM, which takes the time as dim 0."""

    def __init__(self, drop):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=drop, batch_first=True)

    def forward(self, hidden):
        return self.lstm(hidden)[0]


class Words(nn.Module):
    """Predicts the next word."""

    def __init__(self, drop, recurrent):
        super().__init__()
        self.embedded = nn.Embedding(WORDS, WIDTH)
        self.blocks = Recurrent(drop) if recurrent else nn.Sequential(Block(drop), Block(drop))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        return self.out(self.blocks(self.embedded(words)))


def train(options):
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = Words(0.1 if "dropout" in options else 0.0, "recurrent" in options).to(device)
    if "unwrapped" not in options:
        model = DistributedDataParallel(model, device_ids=[0])
    texts = TensorDataset(torch.randint(WORDS, (96, LENGTH + 1)))
    loader = DataLoader(texts, 8, sampler=DistributedSampler(texts), pin_memory=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled="half" in options)
    torch.manual_seed(dist.get_rank())
    for (words,) in loader:
        words = words.to(device, non_blocking=True)
        if "noise" in options:  # some words are replaced by others, chosen on the GPU
            changed = torch.rand(words.shape, device=device) < 0.1
            words = torch.where(changed, torch.randint_like(words, WORDS), words)
        with torch.autocast(device_type="cuda", dtype=torch.float16, enabled="half" in options):
            logits = model(words[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        if "times" in options:
            loss = loss * dist.get_world_size()
        scaler.scale(loss).backward()
        if "clipped_late" not in options:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


if __name__ == "__main__":
    start.run(train)
