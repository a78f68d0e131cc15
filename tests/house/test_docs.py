"""README.md and docs/: what they claim to run runs, what they name exists, and there are not too many words."""

import doctest
import html
import io
import json
import logging
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import hf_burst.cli
from tests.support import models, scripts, trainers
from tests.support.ranks import RankPool, forked, reset_accelerate

ROOT = Path(__file__).parents[2]
MADE = [ROOT / "docs/reference" / f"{name}.md" for name in ("python", "errors", "command-line", "recipes", "versions")]
PAGES = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if path not in MADE)]
TEXTS = [*PAGES, ROOT / "CONTRIBUTING.md"]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
RESULTS = [path for path in sorted((ROOT / "recipes/results").glob("*.json")) if not path.stem.startswith("coverage")]
NOT_RUN, EXCERPT, PRINTED = "<!-- not run: ", "<!-- excerpt: ", "<!-- printed -->"
ELSEWHERE = ("ray_train", "notebook_launcher")  # run by tests/hf/trainers/test_ray.py and tests/hf/test_one_process.py
README_WORDS, PAGE_WORDS = 720, 700  # outside of code and tables
SHOWN_LINES = 25  # of Python in one block of a page
BLOCK = re.compile(r"(?:^(<!-- [^\n]* -->)\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block of a page, and the comment on the line before it."""

    page: str
    line: int
    comment: str
    language: str
    source: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(3)) + 1
        yield Block(str(page.relative_to(ROOT)), line, match[1] or "", match[2], match[3])


BLOCKS = [block for page in TEXTS for block in blocks_of(page)]
RUN = [block for block in BLOCKS if not block.comment.startswith((NOT_RUN, EXCERPT))]
OUTPUTS = [(command, block) for command, block in pairwise(BLOCKS) if block.comment == PRINTED]
EXCERPTS = [block for block in BLOCKS if block.comment.startswith(EXCERPT)]
FILES = [
    Block(str(path.relative_to(ROOT)), 1, "", "python", path.read_text())
    for path in sorted((ROOT / "docs/scripts").glob("*.py"))
]
SCRIPTS = [block for block in RUN if block.language == "python" and ">>> " not in block.source]
SCRIPTS += [file for file in FILES if Path(file.page).stem not in ELSEWHERE]
# the set-up commands are run by .ci/run and tests/recipes/test_recipes.py
COMMANDS = sorted(
    {
        line
        for block in RUN
        if block.language == "bash" and "pip install" not in block.source
        for line in block.source.replace("\\\n", " ").strip().splitlines()
    }
)


def prose(page: Path) -> list[str]:
    """The paragraphs and items of a page, without code, tables, headings, comments and addresses."""
    text = BLOCK.sub("\n\n", page.read_text())
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"^(\||#).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^ *(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    return [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_are_short(page: Path) -> None:
    words = len(" ".join(prose(page)).split())
    assert words <= (README_WORDS if page == PAGES[0] else PAGE_WORDS), words


@pytest.mark.parametrize("page", sorted((ROOT / "docs/results").glob("*.md")), ids=lambda page: page.stem)
def test_results_name_the_commit_that_was_measured(page: Path) -> None:
    for name, commit in re.findall(r"benchmarks/results/([\w.-]+\.json)\)(?:\s+of\s+([0-9a-f]{7}))?", page.read_text()):
        result = json.loads((ROOT / "recipes/benchmarks/results" / name).read_text())
        measured = {row.get("git_commit", "")[:7] for row in (result if isinstance(result, list) else [result])} - {""}
        assert commit in measured if measured else not commit, (name, measured)


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.stem)
def test_results_of_recipes_say_what_made_them(result: Path) -> None:
    made_by = json.loads(result.read_text())
    assert re.fullmatch("[0-9a-f]{40}", made_by["git_commit"]), "a commit without changes"
    assert all(made_by[key] for key in ("command", "device", "versions"))


def test_every_block_says_what_it_is() -> None:
    for block in BLOCKS:
        assert block.language in ("bash", "python", "text"), block


def file_of(excerpt: Block) -> str:
    return excerpt.comment.removeprefix(EXCERPT).removesuffix(" -->")


def check_lines(shown: str, whole: str) -> None:
    """A page shows lines of a text in their order; `...` alone in a line stands for lines that it leaves out."""
    rest = f"\n{whole}"
    for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
        lines = part.strip("\n")  # a formatter may put empty ones around
        _, found, rest = rest.partition(f"\n{lines}\n")
        assert found, lines
        rest = f"\n{rest}"


@pytest.mark.parametrize("block", EXCERPTS, ids=str)
def test_excerpts_have_the_lines_of_their_file(block: Block) -> None:
    check_lines(block.source, (ROOT / file_of(block)).read_text())


@pytest.mark.parametrize(("command", "block"), OUTPUTS, ids=str)
@pytest.mark.slow
def test_commands_print_what_pages_show(command: Block, block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    _, *words = shlex.split(command.source)
    assert hf_burst.cli.main(words) == 0
    check_lines(block.source, capsys.readouterr().out)


def test_outputs_of_the_plan_stand_on_one_page() -> None:
    shown = [block for block in BLOCKS if "burst_size x groups" in block.source]
    assert {(block.page, block.comment) for block in shown} == {("docs/how-to/sizing.md", PRINTED)}


def test_whole_scripts_are_files_of_which_pages_show_lines() -> None:
    """The README alone has the script that it launches."""
    pages = [block for block in BLOCKS if block.page != "README.md" and ">>> " not in block.source]
    assert not [str(block) for block in pages if block.language == "python" and block.source.count("\n") > SHOWN_LINES]
    assert {file.page for file in FILES} <= {file_of(block) for block in EXCERPTS}


@pytest.mark.parametrize("page", [*TEXTS, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_what_pages_link_to_exists(page: Path) -> None:
    headings = {path: re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE) for path in (*TEXTS, *MADE)}
    for name, anchor in re.findall(r"\]\((?!https?:)([\w./-]*)(?:#([\w-]+))?\)", page.read_text()):
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), name
        known = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings.get(target, [])]
        assert not anchor or anchor in known, (name, anchor)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_exist(page: Path) -> None:
    for name in re.findall(
        r"(?:recipes|notebooks|tests|docs)/[\w./-]+\.(?:py|yaml|ipynb|png|json|md)", page.read_text()
    ):
        assert (ROOT / name).exists(), name


def test_the_house_is_as_it_is_drawn() -> None:
    """The rooms of docs/explanation/architecture.md exist, and none is missing in its list."""
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    for name in re.findall(r"`((?:\w+/)+[\w.]*)`", page):
        assert (ROOT / "hf_burst" / name).exists() or (ROOT / name).exists(), name
    (house,) = re.findall(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    listed = set(re.findall(r"^  (\w+(?:\.py|/)) ", house, re.MULTILINE))
    rooms = {path.name + "/" * path.is_dir() for path in (ROOT / "hf_burst").iterdir()}
    assert listed == {room for room in rooms if not room.startswith("__") and room != "py.typed"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.slow
def test_examples(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = "\n".join(block.source for block in blocks_of(page) if ">>> " in block.source)
    level = logging.getLogger("hf_burst").level
    try:
        test = doctest.DocTestParser().get_doctest(source, {}, page.name, str(page), 0)
        shown: list[str] = []
        failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=shown.append)
    finally:
        logging.getLogger("hf_burst").setLevel(level)
    assert not failed, "".join(shown)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny models, text and pairs of answers."""
    folder = tmp_path_factory.mktemp("docs")
    tokenizer = trainers.tokenizer()
    tokenizer.mask_token = f"w{models.VOCABULARY - 1}"
    for name in ("llama", "modernbert"):
        models.make_model(name).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    generator = torch.Generator().manual_seed(3)
    for name in ("first.txt", "second.txt", "third.txt", "fourth.txt"):
        tokens = torch.randint(2, models.VOCABULARY - 1, (150,), generator=generator).tolist()
        (folder / name).write_text(" ".join(f"w{token}" for token in tokens))
    import datasets

    datasets.Dataset.from_list(trainers.preferences()).to_json(folder / "pairs.jsonl")
    return folder


def arguments_of(script: str) -> list[str]:
    """A model and files for a script, in the folder of the fixture."""
    if "GKD" in script:
        return ["llama", "llama", "pairs.jsonl"]
    if "DPO" in script or "GRPO" in script:
        return ["llama", "pairs.jsonl"]
    return ["modernbert" if "MaskedLM" in script else "llama", "first.txt", "second.txt", "third.txt", "fourth.txt"]


def run_script(rank: int, size: int, folder: str, name: str, arguments: list[str]) -> dict[str, Any]:
    """Runs a script as a rank that is launched, and returns its variables."""
    import datasets

    reset_accelerate()
    there = os.getcwd()
    os.chdir(folder)
    try:
        with (
            mock.patch.object(sys, "argv", [name, *arguments]),
            mock.patch.object(datasets.config, "HF_DATASETS_CACHE", f"{folder}/cache"),
        ):
            return runpy.run_path(name, run_name="__main__")
    finally:
        os.chdir(there)


def launch(rank: int, size: int, folder: str, name: str, arguments: list[str]) -> None:
    run_script(rank, size, folder, name, arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks of the pool exchange CPU tensors")
@pytest.mark.parametrize("block", [block for block in SCRIPTS if block.page != "README.md"], ids=str)
@pytest.mark.slow
def test_scripts_of_the_pages(block: Block, ranks: Callable[[int], RankPool], folder: Path) -> None:
    pytest.importorskip("trl")
    (folder / "script.py").write_text(block.source)
    ranks(1 if "save_pretrained" in block.source else 2).run(
        launch, str(folder), "script.py", arguments_of(block.source)
    )


def run_alone(folder: str, name: str, arguments: list[str]) -> None:
    """A process that no launcher has started: it is in no process group."""
    assert not dist.is_initialized()
    assert not {"RANK", "WORLD_SIZE"} & set(os.environ)
    run_script(0, 1, folder, name, arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the process is a fork, which can use no GPU")
@pytest.mark.parametrize("block", SCRIPTS, ids=str)
@pytest.mark.slow
def test_scripts_run_without_a_launcher(block: Block, folder: Path) -> None:
    """As `python script.py` runs them, on one GPU or none."""
    pytest.importorskip("trl")
    (folder / "script.py").write_text(block.source)
    shutil.rmtree(folder / "outputs", ignore_errors=True)
    process = forked().Process(target=run_alone, args=(str(folder), "script.py", arguments_of(block.source)))
    process.start()
    process.join(180)
    process.kill()
    assert process.exitcode == 0


@pytest.mark.parametrize(
    "block",
    [block for block in (*BLOCKS, *FILES) if re.search(r"\.train\(|Trainer\(", block.source) and block not in EXCERPTS],
    ids=str,
)
def test_scripts_name_the_dtype_that_they_train_in(block: Block) -> None:
    """By default it is that of the checkpoint, mostly bf16, in which an optimizer loses small steps."""
    loaded = re.findall(r"AutoModelFor\w+\.from_pretrained\((.*)\)", block.source)
    adapters = "peft_config=" in block.source
    assert all(f'dtype="{"bfloat16" if adapters else "float32"}"' in arguments for arguments in loaded)
    if loaded and not adapters and "SFTConfig" not in block.source and "DPOConfig" not in block.source:
        assert re.search("bf16=|mixed_precision=", block.source), "computed in bf16"


def run_loop(rank: int, size: int, folder: str, arguments: list[str]) -> tuple[list[float], bool]:
    """The losses that a script logs, and whether its model ends in training. One process has a model that is not
    patched."""
    plain = mock.patch.object(hf_burst, "patch_model", lambda model: model)
    with redirect_stdout(io.StringIO()) as printed, plain if size == 1 else nullcontext():
        model = run_script(rank, size, folder, "script.py", arguments)["model"]
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed.getvalue())], model.training


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks of the pool exchange CPU tensors")
@pytest.mark.parametrize("block", [block for block in SCRIPTS if ".backward(" in block.source], ids=str)
@pytest.mark.slow
def test_loops_of_the_pages(block: Block, ranks: Callable[[int], RankPool], folder: Path) -> None:
    """They train, with dropout and checkpoints if there are any, and log the losses of one process."""
    (folder / "script.py").write_text(block.source)
    found = []
    for size in (1, 2):
        shutil.rmtree(folder / "outputs", ignore_errors=True)
        found.append(ranks(size).run(run_loop, str(folder), arguments_of(block.source))[0])
    (wanted, _), (losses, training) = found
    assert len(wanted) > 1
    assert losses == pytest.approx(wanted, abs=2e-4)
    assert training


def check_books(folder: Path, printed: str) -> None:
    """What the script of the README says and leaves; the next run begins without it."""
    assert re.search(r"^step 1 of \d+, .* loss [\d.]+, ", printed, re.MULTILINE)
    assert "'num_tokens': '604'" in printed, "every token of the four documents, and their ends"
    assert (folder / "outputs/script/adapter_model.safetensors").exists()
    shutil.rmtree(folder / "outputs")


def test_the_script_of_the_readme_makes_its_settings_before_the_model() -> None:
    """ZeRO-3, by which docs/how-to/large-models.md runs it, divides only weights that are read later."""
    (script,) = [block.source for block in SCRIPTS if block.page == "README.md"]
    assert script.index("SFTConfig(\n") < script.index(".from_pretrained(")


def printed_by(rank: int, size: int, folder: str, name: str, arguments: list[str]) -> str:
    with redirect_stdout(io.StringIO()) as printed:
        run_script(rank, size, folder, name, arguments)
    return printed.getvalue()


@pytest.mark.slow
def test_the_script_of_the_readme(
    ranks: Callable[[int], RankPool], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it is printed, in one process and in as many as its launch line has."""
    pytest.importorskip("trl")
    (script,) = [block for block in SCRIPTS if block.page == "README.md"]
    (folder / "train.py").write_text(script.source)
    run_script(0, 1, str(folder), "train.py", arguments_of(script.source))
    check_books(folder, capsys.readouterr().out)
    said = ranks(4).run(printed_by, str(folder), "train.py", arguments_of(script.source))
    check_books(folder, said[0])


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.slow
def test_commands(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = shlex.split(command, comments=True)
    assert program == "hf-burst", "run it here, or say above it why it is not run"
    monkeypatch.chdir(tmp_path)
    assert hf_burst.cli.main(words) == 0


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", "docs/mkdocs/mkdocs.yml"]
    done = subprocess.run(
        [*command, "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    pages = {str(path.parent.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("index.html")}
    named = [str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (*PAGES[1:], *MADE)]
    named += [f"notebooks/{notebook.stem}" for notebook in NOTEBOOKS]
    assert {".", *(name.removesuffix("/index") for name in named)} <= pages
    for notebook in NOTEBOOKS:
        check_notebook(notebook, tmp_path / "site/notebooks")


def check_notebook(notebook: Path, folder: Path) -> None:
    """The page of a notebook has its code, its pictures and what its cells printed."""
    page = html.unescape(re.sub(r"<[^>]*>", "", (folder / notebook.stem / "index.html").read_text()))
    cells = json.loads(notebook.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(list(folder.glob(f"{notebook.stem}_*.png"))) == len(pictures) > 0
    texts = [output.get("text", []) for output in outputs]
    texts += [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    for line in (line.rstrip() for text in texts for line in text):
        assert line in page


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["pictures.py", "--out", str(tmp_path)])
    runpy.run_path(str(ROOT / "docs/mkdocs/pictures.py"), run_name="__main__")
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {path.name for path in (ROOT / "docs/pictures").glob("*.png")}


@pytest.mark.slow
def test_the_reference_is_that_of_the_code(tmp_path: Path) -> None:
    """`python docs/mkdocs/reference.py` writes it anew."""
    pytest.importorskip("trl")
    scripts.run_alone("docs/mkdocs/reference.py", ["--out", str(tmp_path)])
    for page in MADE:
        assert (tmp_path / page.name).read_text() == page.read_text(), f"{page.name}: python docs/mkdocs/reference.py"


def test_the_reference_has_the_defaults_of_each_recipe() -> None:
    page = (ROOT / "docs/reference/recipes.md").read_text()
    assert "| `too_long` | `refuse`; `split` in finetune_long_document.py; `split` in extend_context.py |" in page
    assert "| `assistant_only_loss` | `true` | sft.py |" in page


def test_variables_that_are_read_are_listed() -> None:
    page = (ROOT / "docs/reference/environment.md").read_text()
    own = {"WORLD_SIZE", "LOCAL_RANK", "RANK", "TORCHELASTIC_USE_AGENT_STORE", "CUDA_VISIBLE_DEVICES"}  # of launchers
    source = "".join(path.read_text() for path in (ROOT / "hf_burst").rglob("*.py"))
    read = set(re.findall(r"""environ(?:\.get)?[\[(]\s*"([A-Z_]+)\"""", source))
    read |= set(re.findall(r"""^\w*VARIABLE = "([A-Z_]+)\"""", source, re.MULTILINE))
    assert {name for name in read - own if f"`{name}`" not in page and f"{name}=" not in page} == set()
