"""What is shipped: the files of the wheel and of the source distribution, an installed wheel, and the extras."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import hf_burst

ROOT = Path(__file__).parents[2]
FOR_USERS = {"recipes", "trl", "qlora", "fast", "gguf", "eval", "docs", "all"}
AS_TESTED = "recipes"  # as far as the tests went, and no further
PINNED = {"test", "oldest"}
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
JUNK = (
    *("outputs/model.safetensors", ".carry/note.txt", ".venv/lib/thing.py", ".pytest_cache/README.md", "dist/old.whl"),
    *("hf_burst/__pycache__/config.cpython-311.pyc", "hf_burst/.DS_Store", "hf_burst/hf/notes.txt", "wandb/run.log"),
    *("notebooks/.ipynb_checkpoints/a.ipynb", "recipes/outputs/log.json", "tests/__pycache__/a.pyc", "train.py"),
)
USE = """
import hf_burst, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
assert hf_burst.__file__.startswith(sys.prefix), hf_burst.__file__
sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=61, **sizes))
ids = torch.arange(40)[None]
before = model(ids, labels=ids).loss
after = hf_burst.patch_model(model)(ids, labels=ids).loss
torch.testing.assert_close(after, before)
print("served by", hf_burst.__version__)
"""


def package_files() -> set[str]:
    """What belongs into a wheel: the modules, and the data beside them."""
    data = {"hf_burst/py.typed", "hf_burst/hf/admission.toml"}
    return data | {str(path.relative_to(ROOT)) for path in (ROOT / "hf_burst").rglob("*.py")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel and a source distribution of a working tree in which much else lies; the wheel is built of the latter."""
    folder = tmp_path_factory.mktemp("dist")
    source, kinds = folder / "source", {}
    ignored = shutil.ignore_patterns(".git", "__pycache__", ".venv", "outputs", "build", "*.egg-info", ".*_cache")
    shutil.copytree(ROOT, source, ignore=ignored)
    for name in JUNK:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("not to be shipped")
    for kind in ("sdist", "wheel"):
        command = [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)]
        done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        kinds[kind] = folder / done.stdout.splitlines()[-1]
        if kind == "sdist":
            with tarfile.open(kinds[kind]) as archive:
                archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
            source = folder / kinds[kind].name.removesuffix(".tar.gz")
    return kinds


def environment(folder: Path) -> Path:
    """An environment in which only torch and its like are those of this one; where its packages lie."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(str(Path(importlib.metadata.distribution("torch").locate_file(""))))
    return packages


@pytest.mark.slow
def test_the_source_distribution_holds_the_package_and_how_to_build_it(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if not archive.getmember(name).isdir()}
    about = {name for name in names if not name.startswith(("hf_burst/", "hf_burst.egg-info/"))}
    settings = {"pyproject.toml", "setup.cfg", "MANIFEST.in", "PKG-INFO"}
    assert about == {*settings, "README.md", "LICENSE", "CHANGELOG.md"}
    assert {name for name in names if name.startswith("hf_burst/")} == package_files()


@pytest.mark.slow
def test_the_wheel_holds_the_package_alone(built: dict[str, Path]) -> None:
    assert built["wheel"].name == f"hf_burst-{hf_burst.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(built["wheel"]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (license_file,) = (name for name in archive.namelist() if name.endswith("LICENSE"))
        assert "Apache License" in archive.read(license_file).decode()
    assert names == package_files()


@pytest.mark.slow
def test_an_installed_wheel_works(built: dict[str, Path], tmp_path: Path) -> None:
    packages = environment(tmp_path / "env")
    programs = tmp_path / "env/bin"
    install = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "--no-deps", "--no-index"]
    subprocess.run([*install, "--ignore-installed", "--quiet", str(built["wheel"])], check=True, timeout=300)
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    commands = ([programs / "python", "-c", USE], [programs / "hf-burst", "layout", "--ranks", "2", "--length", "64"])
    for command in commands:
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.strip()
    metadata = importlib.metadata.Distribution.at(next(packages.glob("hf_burst-*.dist-info"))).metadata
    assert set(metadata.get_all("Provides-Extra")) == FOR_USERS | PINNED
    assert metadata["Version"] == hf_burst.__version__ == "0.2.0"


@pytest.mark.slow
def test_a_script_beside_an_editable_clone_finds_the_package(tmp_path: Path) -> None:
    """The clone's folder has the package's name: for Python a package without modules, unless a real one is found."""
    packages = environment(tmp_path / "env")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "outputs", "build", "*.egg-info", "notebooks", "docs")
    shutil.copytree(ROOT, tmp_path / "hf_burst", ignore=ignored)
    build = "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]))"
    command = [sys.executable, "-c", build, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path / "hf_burst", capture_output=True, text=True, timeout=300, check=True)
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as archive:
        archive.extractall(packages)
    (tmp_path / "train.py").write_text("import hf_burst\nprint(hf_burst.__version__)\n")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(tmp_path / "env/bin/python"), "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == hf_burst.__version__, done.stderr[-3000:]


def extras() -> dict[str, list[Requirement]]:
    """The requirements of each extra, and of none (`""`)."""
    parser = ConfigParser()
    parser.read(ROOT / "setup.cfg")
    texts = {"": parser["options"]["install_requires"], **parser["options.extras_require"]}
    lines = {extra: [line for line in text.splitlines() if line and line[0] != "#"] for extra, text in texts.items()}
    return {extra: list(map(Requirement, requirements)) for extra, requirements in lines.items()}


def test_extras_for_users_are_open_and_those_for_developers_fit_into_them() -> None:
    requirements = extras()
    assert set(requirements) == {"", *FOR_USERS, *PINNED}
    open_ones = ("", *(FOR_USERS - {AS_TESTED}))
    ranges = {item.name: item.specifier for extra in open_ones for item in requirements[extra]}
    for extra in ("", *FOR_USERS):
        for item in requirements[extra]:
            assert not any(part.operator == "==" for part in item.specifier), f"{extra}: {item} is pinned"
            if extra in open_ones:
                assert item.specifier == ranges[item.name], f"{item} differs from another extra's"
    for item in (item for extra in PINNED for item in requirements[extra]):
        version = re.fullmatch(r"==(.*)", str(item.specifier))
        if version and item.name in ranges:
            assert ranges[item.name].contains(version[1]), f"the tests' {item} is not allowed to users"


def test_all_extras_are_those_for_running() -> None:
    (everything,) = extras()["all"]
    assert everything.name == "hf_burst"
    assert everything.extras == FOR_USERS - {"all", "docs", "fast"}


def test_the_page_names_every_extra() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (ROOT / "docs/start/install.md").read_text(), re.MULTILINE)
    assert {name.strip("`") for row in rows for name in row.split(", ")} == FOR_USERS | PINNED
