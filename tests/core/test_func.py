"""The user's own `torch.func` transforms, inside a sharded function, are exact."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalith.core.shard import shard
from megalith.models.llama import Llama, LlamaConfig
from megalith.sharding import Mesh

MESHES = ["tp=2", "dp=2 tp=2", "dp=4"]
SPECS = {
    "w1": "i (tp f)",
    "b1": "(tp f)",
    "w2": "(tp f) o",
    "x": "(dp b) i",
    "y": "(dp b) o",
    "*.[qkv]_proj.weight": "(tp o) i",
    "*.o_proj.weight": "o (tp i)",
    "*.gate_proj.weight": "(tp o) i",
    "*.up_proj.weight": "(tp o) i",
    "*.down_proj.weight": "o (tp i)",
    "*embed_tokens.weight": "(tp v) e",
    "*lm_head.weight": "(tp v) e",
    "ids": "(dp b) s",
}


def normal(*shape):
    return torch.randn(shape, dtype=torch.float64)


@pytest.fixture
def mlp():
    return {"w1": normal(6, 8), "b1": normal(8), "w2": normal(8, 4)}, normal(8, 6), normal(8, 4)


def forward(params, x):
    return torch.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]


def loss(params, x, y):
    return ((forward(params, x) - y) ** 2).mean()


def exact(fn, mesh, specs, *args):
    """The sharded function agrees with the function itself, leaf by leaf."""
    names = {axis.split("=")[0] for axis in mesh.split()}
    used = {k: v for k, v in specs.items() if all(a not in v or a in names for a in ("dp", "tp"))}
    mine = shard(fn, Mesh(mesh), used, backend="virtual").whole(*args)
    with sdpa_kernel(SDPBackend.MATH):  # torch's other attention kernels have no second derivative
        theirs = fn(*args)
    left, right = torch.utils._pytree.tree_leaves(mine), torch.utils._pytree.tree_leaves(theirs)
    assert len(left) == len(right) > 0
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def matching(params, **more):
    """The specs that match something of these arguments."""
    return {k: v for k, v in SPECS.items() if k in params or k in more}


def programs():
    def per_sample(params, x, y):
        return vmap(grad(lambda p, a, b: loss(p, a[None], b[None])), (None, 0, 0))(params, x, y)

    def hvp(params, x, y):
        return jvp(lambda p: grad(loss)(p, x, y), (params,), (params,))

    def reverse_hvp(params, x, y):
        def slope(p):
            gradient = grad(loss)(p, x, y)
            return sum((g * v).sum() for g, v in zip(gradient.values(), params.values(), strict=True))

        return grad(slope)(params)

    def pullback(params, x, y):
        out, back = vjp(lambda p: forward(p, x), params)
        return out, back(y)

    return {
        "grad": lambda params, x, y: grad(loss)(params, x, y),
        "grad and value": lambda params, x, y: grad_and_value(loss)(params, x, y),
        "of the input": lambda params, x, y: grad(loss, argnums=1)(params, x, y),
        "vjp": pullback,
        "jvp": lambda params, x, y: jvp(lambda p: loss(p, x, y), (params,), (params,)),
        "vmap": lambda params, x, y: vmap(lambda a, b: loss(params, a[None], b[None]))(x, y),
        "gradients per sample": per_sample,
        "Hessian-vector, forward over reverse": hvp,
        "Hessian-vector, reverse over reverse": reverse_hvp,
        "Jacobian, reverse": lambda params, x, y: jacrev(lambda b: forward({**params, "b1": b}, x).sum(0))(
            params["b1"]
        ),
        "Jacobian, forward": lambda params, x, y: jacfwd(lambda b: forward({**params, "b1": b}, x).sum(0))(
            params["b1"]
        ),
        "Hessian": lambda params, x, y: hessian(lambda b: loss({**params, "b1": b}, x, y))(params["b1"]),
    }


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", programs())
def test_a_transform_is_exact(name, mesh, mlp):
    params, x, y = mlp
    exact(programs()[name], mesh, matching(params, x=x, y=y), params, x, y)


@pytest.fixture
def llama():
    model = Llama(LlamaConfig(vocab=32, dim=16, hidden=24, n_layers=2, n_heads=4, n_kv_heads=4)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    params = {name: p.detach() for name, p in model.named_parameters()}
    return model, params, torch.randint(32, (4, 9))


def language_loss(model):
    def of(params, ids):
        logits = functional_call(model, params, (ids[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return of


LLAMA_SPECS = {k: v for k, v in SPECS.items() if "*" in k or k == "ids"}


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_of_a_llama_are_exact(mesh, llama):
    model, params, ids = llama
    of = language_loss(model)
    exact(lambda params, ids: grad_and_value(of)(params, ids), mesh, LLAMA_SPECS, params, ids)


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_gradients_per_sample_of_a_llama_are_exact(mesh, llama):
    model, params, ids = llama
    of = language_loss(model)

    def per_sample(params, ids):
        return vmap(grad(lambda p, row: of(p, row[None])), (None, 0))(params, ids)

    exact(per_sample, mesh, LLAMA_SPECS, params, ids)


def test_a_hessian_vector_product_of_a_llama_is_exact(llama):
    model, params, ids = llama
    of = language_loss(model)

    def product(params, ids):
        return jvp(lambda p: grad(of)(p, ids), (params,), (params,))[1]

    exact(product, "dp=2 tp=2", LLAMA_SPECS, params, ids)
