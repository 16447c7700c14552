"""Mesh, layout, transition, rules, partition and cost: what lives where, as pure data."""

from megalith.sharding import aten as aten
from megalith.sharding.layout import Layout, replicated
from megalith.sharding.mesh import Link, Mesh, MeshError
from megalith.sharding.rule import MissingRule, Rule, register_rule
from megalith.sharding.syntax import LayoutError

__version__ = "0.1.0"

__all__ = ["Layout", "LayoutError", "Link", "Mesh", "MeshError", "MissingRule", "Rule", "register_rule", "replicated"]
