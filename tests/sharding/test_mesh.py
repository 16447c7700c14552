"""A mesh numbers its ranks as it says, and a mesh that cannot be is an error that says why."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import meshes

from megalith.sharding.mesh import Link, Mesh, MeshError


@given(meshes())
def test_rank_and_coordinates_are_inverse_and_the_last_axis_varies_fastest(mesh):
    coordinates = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [mesh.rank(c) for c in coordinates] == list(range(mesh.size))
    assert coordinates == sorted(coordinates, key=lambda c: [c[axis] for axis in mesh.axes])
    assert len({tuple(c.values()) for c in coordinates}) == mesh.size


@given(meshes(), st.data())
def test_peers_are_the_ranks_that_differ_along_the_axes_only(mesh, data):
    rank = data.draw(st.integers(0, mesh.size - 1))
    axes = tuple(data.draw(st.permutations(mesh.axes))[: data.draw(st.integers(0, len(mesh.axes)))])
    peers = mesh.peers(rank, axes)
    fixed = [axis for axis in mesh.axes if axis not in axes]

    def at(r, names):
        return [mesh.coordinates(r)[name] for name in names]

    assert sorted(peers) == [r for r in range(mesh.size) if at(r, fixed) == at(rank, fixed)]
    assert [at(r, axes) for r in peers] == sorted(at(r, axes) for r in peers)


def test_a_composite_axis_stands_for_its_parts():
    mesh = Mesh("dp=2 tp=(kv=2 rep=3)")
    assert mesh.axes == ("dp", "kv", "rep") and mesh.size == 12
    assert mesh.expand("tp") == ("kv", "rep") and mesh.axis_size("tp") == 6
    assert "tp" in mesh and "kv" in mesh and "pp" not in mesh


def test_spacing_does_not_tell_meshes_apart():
    assert Mesh(" dp = 2  tp=( kv=2  rep=3 ) ") == Mesh("dp=2 tp=(kv=2 rep=3)")
    assert hash(Mesh("dp = 2")) == hash(Mesh("dp=2"))
    assert Mesh("dp = 2 tp=(kv=2 rep=3)").pattern == "dp=2 tp=(kv=2 rep=3)"
    assert Mesh("dp=2 tp=3") != Mesh("tp=3 dp=2")


def test_the_empty_mesh_is_one_rank():
    assert Mesh("").size == 1 and Mesh("").coordinates(0) == {} and Mesh("").peers(0, ()) == (0,)


def test_pickling_keeps_links():
    mesh = Mesh("dp=2 tp=(a=2 b=2)", {"tp": Link(1e9, 1e-5)})
    again = pickle.loads(pickle.dumps(mesh))
    assert again == mesh and again.link("a") == Link(1e9, 1e-5) and again.link("dp") == Link()


@pytest.mark.parametrize(
    "pattern, says",
    [
        ("dp=2 tp", "does not parse at 'tp'"),
        ("dp:2", "write axes as 'name=size'"),
        ("dp=2 dp=3", "names axis 'dp' twice"),
        ("tp=(dp=2) dp=3", "names axis 'dp' twice"),
        ("tp=(tp=2 x=2)", "names axis 'tp' twice"),
        ("tp=(a=2) tp=(b=2)", "names axis 'tp' twice"),
        ("dp=0", "axis 'dp' has size 0; the least is 1"),
        ("tp=()", "is to be made of plain axes"),
    ],
)
def test_a_mesh_that_cannot_be_is_an_error(pattern, says):
    with pytest.raises(MeshError) as error:
        Mesh(pattern)
    assert says in str(error.value) and f"Mesh({pattern!r})" in str(error.value)


def test_names_and_ranks_outside_the_mesh_are_errors():
    mesh = Mesh("data=2 tp=2")
    with pytest.raises(MeshError, match="did you mean 'data'"):
        mesh.expand("dta")
    with pytest.raises(MeshError, match="its axes are data, tp"):
        mesh.axis_size("x")
    with pytest.raises(MeshError, match="ranks 0 to 3"):
        mesh.coordinates(4)
    with pytest.raises(MeshError, match="'pp' is not an axis"):
        Mesh("dp=2", {"pp": Link()})
