"""A model of which no table knows a name."""

import torch
import torch.nn.functional as F


class Unseen(torch.nn.Module):
    """A language model in somebody's own words."""

    def __init__(self, vocab=48, width=16, layers=2):
        super().__init__()
        self.tok_emb, self.pos_emb = torch.nn.Embedding(vocab, width), torch.nn.Embedding(16, width)
        self.stack = torch.nn.ModuleList()
        for _ in range(layers):
            mix = torch.nn.ModuleDict({name: torch.nn.Linear(width, width) for name in ("ask", "tell", "say", "mix")})
            feed = torch.nn.Sequential(torch.nn.Linear(width, 40), torch.nn.GELU(), torch.nn.Linear(40, width))
            self.stack.append(torch.nn.ModuleDict({"n1": torch.nn.LayerNorm(width), "mixer": mix, "feed": feed}))
        self.output = torch.nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.tok_emb(ids) + self.pos_emb(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.stack:
            y, mix = layer["n1"](x), layer["mixer"]
            q, k, v = (mix[name](y).unflatten(-1, (4, -1)).transpose(1, 2) for name in ("ask", "tell", "say"))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + mix["mix"](y)
            x = x + layer["feed"](x)
        return self.output(x)
