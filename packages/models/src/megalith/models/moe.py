"""What does a transformer with a mixture of experts look like as a plain single-device program?

Two ways to send tokens to experts: with a capacity (GShard, arXiv:2006.16668; Switch, arXiv:2101.03961), where an
expert takes so many tokens of a sequence and drops the others; and dropless (MegaBlocks, arXiv:2211.15841). Parameter
names are those of Hugging Face's `MixtralForCausalLM`, so its state dict loads as it is; `dropless` gives its models
our experts.

Letters in comments: g groups (sequences), s sequence, t tokens, e embedding, k choices, E experts, c capacity,
f feed-forward, b batch, v vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, einsum, nn

from megalith.core.experts import experts
from megalith.models.llama import Attention, LlamaConfig, rope


@dataclass(frozen=True)
class MoEConfig(LlamaConfig):
    """Of `hidden` features an expert; `capacity_factor=None` is dropless."""

    n_experts: int = 8
    top_k: int = 2
    capacity_factor: float | None = None
    balance_weight: float = 0.01
    z_weight: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"top_k is {self.top_k}; a token goes to 1 of the {self.n_experts} experts at least")

    def capacity(self, length: int) -> int:
        """Tokens that an expert takes of a sequence of this length, by the capacity factor."""
        return min(length, math.ceil((self.capacity_factor or 0.0) * length * self.top_k / self.n_experts))


# --- routing -----------------------------------------------------------------------------------------


def choose(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The weights `... k`, which sum to 1, and the numbers `... k` of the k best experts, of logits `... E`."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    weights, ids = logits.softmax(-1, dtype=dtype).topk(k)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), ids


def one_hot(ids: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Ones at the indices, `... n`; zeros for an index of n or more."""
    return (ids.unsqueeze(-1) == torch.arange(n, device=ids.device)).to(dtype)


def with_capacity(weights: Tensor, ids: Tensor, n_experts: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Which token takes which place of which expert: `dispatch` of zeros and ones and `combine`, both `g s E c`.

    First choices are served before second ones, and earlier tokens before later ones. What comes when an expert is full
    is dropped. The places of a group are its own, so the result does not depend on who computes which group.

    >>> ids = torch.tensor([[[0], [0], [1]]])                    # one group of three tokens, one choice each
    >>> dispatch, _ = with_capacity(torch.ones(1, 3, 1), ids, n_experts=2, capacity=1)
    >>> dispatch.sum((-1, -2))                                   # the second token finds its expert full
    tensor([[1., 0., 1.]])
    """
    chosen = one_hot(ids, n_experts, weights.dtype)  # g s k E
    by_choice = rearrange(chosen, "g s k E -> g (k s) E")
    before = by_choice.cumsum(1) - by_choice  # how many came to this expert earlier
    place = rearrange((before * by_choice).sum(-1), "g (k s) -> g s k", k=ids.shape[-1])
    places = one_hot(place, capacity, weights.dtype)  # g s k c
    dispatch = einsum("gskE,gskc->gsEc", chosen, places)
    combine = einsum("gskE,gskc->gsEc", chosen * weights.unsqueeze(-1), places)
    return dispatch, combine


def balance_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """1 for an even load, and more the more the experts of one group are favoured (Switch, eq. 4): logits `g s E`.

    The number of experts times, for each, the share of choices times the mean probability; the mean over groups.
    """
    load = one_hot(ids, logits.shape[-1], logits.dtype).mean((1, 2))  # g E
    return logits.shape[-1] * (load * logits.softmax(-1).mean(1)).sum(-1).mean()


def z_loss(logits: Tensor) -> Tensor:
    """The mean square of the log of the softmax's denominator: keeps logits small (ST-MoE, arXiv:2202.08906, eq. 5)."""
    return logits.logsumexp(-1).square().mean()


# --- the model -----------------------------------------------------------------------------------------


class Way(nn.Module):
    """Does nothing, but has names for specs: how a value lies `before` it travels and `after`."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.before(x))


class Experts(nn.Module):
    """The matrices of all experts of a layer, each a SwiGLU."""

    def __init__(self, config: MoEConfig):
        super().__init__()
        n, f, e = config.n_experts, config.hidden, config.dim
        self.gate_up_proj = nn.Parameter(torch.empty(n, 2 * f, e))  # E (2 f) e
        self.down_proj = nn.Parameter(torch.empty(n, e, f))  # E e f
        self.to_experts, self.from_experts = Way(), Way()  # g E c e

    def dropless(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """All choices of all tokens: x `g s e`, weights and ids `g s k`."""
        rows, choices = rearrange(x, "g s e -> (g s) e"), rearrange(ids, "g s k -> (g s) k")
        made = experts(rows, choices, self.gate_up_proj.chunk(2, dim=1), self.down_proj)  # t k e
        return einsum("gske,gsk->gse", made.view(*ids.shape, -1), weights)

    def with_capacity(self, x: Tensor, dispatch: Tensor, combine: Tensor) -> Tensor:
        """What dispatch `g s E c` lets through, put together by combine."""
        sent = self.to_experts(einsum("gsEc,gse->gEce", dispatch, x))
        gate, up = einsum("gEce,Efe->gEcf", sent, self.gate_up_proj).chunk(2, dim=-1)
        made = self.from_experts(einsum("gEcf,Eef->gEce", F.silu(gate) * up, self.down_proj))
        return einsum("gsEc,gEce->gse", combine, made)


class MoE(nn.Module):
    """A feed-forward layer of experts: `(y, loss)`, the loss being that of the routing."""

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.dim, config.n_experts, bias=False)  # E e
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        logits = self.gate(x)  # g s E
        weights, ids = choose(logits, c.top_k)
        loss = c.balance_weight * balance_loss(logits, ids) + c.z_weight * z_loss(logits)
        if c.capacity_factor is None:
            return self.experts.dropless(x, weights, ids), loss
        routed = with_capacity(weights, ids, c.n_experts, c.capacity(x.shape[1]))
        return self.experts.with_capacity(x, *routed), loss


class Block(nn.Module):
    def __init__(self, config: MoEConfig):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.mlp = MoE(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y, loss = self.mlp(self.post_attention_layernorm(x))
        return x + y, loss


class MoETransformer(nn.Module):
    """Logits `b s v` of token ids `b s`, and the sum of the layers' routing losses.

    >>> model = MoETransformer(MoEConfig(vocab=64, dim=32, hidden=16, n_layers=1))
    >>> [tuple(t.shape) for t in model(torch.zeros(2, 8, dtype=torch.long))]
    [(2, 8, 64), ()]
    """

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.config = config
        self.model = nn.ModuleDict(
            dict(
                embed_tokens=nn.Embedding(config.vocab, config.dim),  # v e
                layers=nn.ModuleList(Block(config) for _ in range(config.n_layers)),
                norm=nn.RMSNorm(config.dim, config.norm_eps),
            )
        )
        self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)  # v e
        for parameter in self.parameters():
            if parameter.ndim > 1:  # the norms' weights stay 1
                nn.init.normal_(parameter, std=config.init_std)

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.model.embed_tokens(input_ids)  # b s -> b s e
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        cos, sin = (t.to(x.dtype) for t in rope(positions, self.config.head_dim, self.config.rope_theta))
        losses = []
        for layer in self.model.layers:
            x, loss = layer(x, cos, sin)
            losses.append(loss)
        return self.lm_head(self.model.norm(x)), torch.stack(losses).sum()


def capacity_anchors(axis: str = "ep", data: str = "") -> dict[str, str]:
    """Specs of what experts with a capacity read and write: from groups split over an axis to experts, and back.

    Args:
        axis: the mesh axis of the experts; it splits the batch too.
        data: axes that split the batch only, with blanks between.

    >>> capacity_anchors("ep", "dp")["*.to_experts.before"], capacity_anchors("ep", "dp")["*.to_experts.after"]
    ('(dp ep g) E c e', '(dp g) (ep E) c e')
    """
    by_group = f"({data} {axis} g) E c e".replace("( ", "(")
    by_expert = f"({data} g) ({axis} E) c e" if data else f"g ({axis} E) c e"
    return {
        "*.to_experts.before": by_group,
        "*.to_experts.after": by_expert,
        "*.from_experts.before": by_expert,
        "*.from_experts.after": by_group,
    }


# --- Hugging Face's models -----------------------------------------------------------------------------


_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


def _huggingface_experts(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The forward of a layer of experts as transformers' registry calls it: x `t e`, ids and weights `t k`."""
    name = module.config.hidden_act
    plain = module.has_gate and module.is_concatenated and not module.has_bias and not module.has_post_expert_norm
    if name not in _ACTIVATIONS or not plain or module.is_transposed:
        raise NotImplementedError(
            f"{type(module).__name__} (activation {name!r}) is not a gated expert without biases, gate and up one "
            f"behind the other, with one of the activations {', '.join(_ACTIVATIONS)}; "
            "use experts_implementation='batched_mm'"
        )
    made = experts(x, ids, module.gate_up_proj.chunk(2, dim=1), module.down_proj, _ACTIVATIONS[name])
    return einsum("tke,tk->te", made, weights.to(made.dtype))


def dropless(model: nn.Module) -> nn.Module:
    """The same Hugging Face model with its experts computed by `experts`: no capacity, and rows that travel.

    Args:
        model: a model whose experts go through transformers' registry, such as Mixtral or Qwen3-MoE.

    Raises:
        TypeError: a model without such experts.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if not any(hasattr(module, "_is_expert_parallel") for module in model.modules()):  # set by the registry's decorator
        raise TypeError(
            f"{type(model).__name__} has no experts that go through transformers' registry; give a model with such "
            "experts, as MixtralForCausalLM"
        )
    ALL_EXPERTS_FUNCTIONS.register("megalith", _huggingface_experts)
    model.set_experts_implementation("megalith")
    return model
