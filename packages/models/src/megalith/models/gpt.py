"""What does a GPT-2 look like as a plain single-device program?

Letters in comments: b batch, s sequence, p positions, e embedding, h heads, d head, f feed-forward, v vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    vocab: int = 2048
    positions: int = 256
    dim: int = 256
    n_layers: int = 4
    n_heads: int = 8
    norm_eps: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.dim % self.n_heads:
            raise ValueError(f"n_heads must divide dim; got dim={self.dim}, n_heads={self.n_heads}")


class Attention(nn.Module):
    """Causal attention with one fused projection to queries, keys and values."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_heads = config.n_heads
        self.qkv_proj = nn.Linear(config.dim, 3 * config.dim)  # (3 h d) e
        self.o_proj = nn.Linear(config.dim, config.dim)  # e (h d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv_proj(x), "b s (three h d) -> three b h s d", three=3, h=self.n_heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(rearrange(y, "b h s d -> b s (h d)"))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.up_proj = nn.Linear(config.dim, 4 * config.dim)  # f e
        self.down_proj = nn.Linear(4 * config.dim, config.dim)  # e f

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Logits [b, s, v] of token ids [b, s]; s is at most `config.positions`.

    Example:
        >>> model = GPT(GPTConfig(vocab=64, positions=16, dim=32, n_layers=1))
        >>> model(torch.zeros(2, 8, dtype=torch.long)).shape
        torch.Size([2, 8, 64])
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        embed_tokens = nn.Embedding(config.vocab, config.dim)  # v e
        self.model = nn.ModuleDict(
            dict(
                embed_tokens=embed_tokens,
                embed_positions=nn.Embedding(config.positions, config.dim),  # p e
                layers=nn.ModuleList(Block(config) for _ in range(config.n_layers)),
                norm=nn.LayerNorm(config.dim, config.norm_eps),
            )
        )
        self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)  # v e
        self.lm_head.weight = embed_tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=config.init_std)
            elif name.endswith("_proj.bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor) -> Tensor:
        if input_ids.shape[1] > self.config.positions:
            raise ValueError(f"input_ids {tuple(input_ids.shape)} is longer than positions={self.config.positions}")
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.model.embed_tokens(input_ids) + self.model.embed_positions(positions)  # b s -> b s e
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))  # b s e -> b s v
