"""Documents and chats as tokens: where a document ends, which tokens are the assistant's, what is packed."""

import glob
import json
import random
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet
import pytest
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlavaConfig, PreTrainedTokenizerFast

datasets = pytest.importorskip("datasets")
pytest.importorskip("trl")
pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))  # where the recipes find their modules
import chats  # noqa: E402
import data  # noqa: E402
import models  # noqa: E402
import numpy  # noqa: E402
import preferences  # noqa: E402
import prompts  # noqa: E402
import report  # noqa: E402
import rows as placed  # noqa: E402
from settings import DataSettings  # noqa: E402

from hf_burst.hf.models.positions import beyond_positions  # noqa: E402
from tests.support import conversations  # noqa: E402
from tests.support.ranks import reset_accelerate  # noqa: E402

TEXTS = ["A document. " * 40, "Another one,\n\nwhich is longer. " * 60, "x"]


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Settings of TRL's `SFTTrainer`."""
    from trl import SFTConfig

    reset_accelerate()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    yield SFTConfig(
        output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, assistant_only_loss=True, max_length=4096
    )
    reset_accelerate()


def tokens_of(path: Path, arguments: Any, **settings: Any) -> list[dict[str, list[int]]]:
    Path(arguments.output_dir).mkdir(exist_ok=True)
    return list(data.load_tokens(DataSettings(dataset=[str(path)], **settings), models.byte_tokenizer(), arguments)[0])


def test_every_source_gives_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # else it tries again for 20 seconds
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    files = [tmp_path / "text" / name for name in ("a.txt", "b.md", "deeper/c.txt")]
    for file, text in zip(files, TEXTS, strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "text" / ".hidden.txt").write_text("not this")
    (tmp_path / "text" / "picture.png").touch()
    table = datasets.Dataset.from_dict({"text": TEXTS})
    table.to_json(tmp_path / "documents.jsonl")
    table.to_parquet(tmp_path / "documents.parquet")
    table.save_to_disk(tmp_path / "saved")
    sources = [[tmp_path / "text"], files, [tmp_path / "documents.jsonl"], [tmp_path / "documents.parquet"]]
    for source in [*sources, [tmp_path / "saved"]]:
        assert list(data.load_rows([str(item) for item in source], "train")["text"]) == TEXTS, source
    part = data.load_rows([str(tmp_path / "documents.jsonl")], "train[:2]")
    assert list(part["text"]) == TEXTS[:2]
    for names in ([str(tmp_path / "saved")], ["python_topics"]):
        with pytest.raises(SystemExit, match="dataset_split is 'validation'"):
            data.load_rows(names, "validation")
    kinds = [str(tmp_path / "documents.jsonl"), str(tmp_path / "text"), str(tmp_path / "documents.parquet")]
    assert list(data.load_rows(kinds, "train")["text"]) == TEXTS * 3
    (tmp_path / "text" / "D.TXT").write_text("capital")
    assert "capital" in data.load_rows([str(tmp_path / "text")], "train")["text"]
    for names, split in ((kinds, "train[:2]"), ([str(tmp_path / "documents.jsonl"), "org/name"], "train")):
        with pytest.raises(SystemExit, match="mixes kinds of files and hub names"):
            data.load_rows(names, split)
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "README.md").write_text("about the data")
    (tmp_path / "mixed" / "titles.csv").write_text("title,year\nbook,1999\n")
    (tmp_path / "mixed" / "deep").mkdir()
    (tmp_path / "mixed" / "deep" / "NOTES.MD").write_text("more about the data")
    with pytest.raises(SystemExit) as refused:
        data.load_rows([str(tmp_path / "mixed")], "train")
    said, _, patterns = str(refused.value).partition(". Name the files: --dataset ")
    assert said.endswith("mixed' mixes kinds of files: .csv (1) and .md (2)")
    named = sorted(file for pattern in patterns.split() for file in glob.glob(pattern))
    assert named == sorted(str(path) for path in (tmp_path / "mixed").rglob("*.*"))
    more = datasets.Dataset.from_dict({"source": ["a", "b"], "text": TEXTS[:2]})
    more.to_json(tmp_path / "more.jsonl")
    both = data.load_rows([str(tmp_path / "text/a.txt"), str(tmp_path / "more.jsonl")], "train")
    assert both.to_dict() == {"text": [TEXTS[0], *TEXTS[:2]]}
    with pytest.raises(SystemExit, match="with other columns"):
        data.load_rows([str(tmp_path / "mixed/titles.csv"), str(tmp_path / "text/a.txt")], "train")
    with pytest.raises(SystemExit, match="on the Hub"):
        data.load_rows(["no/such"], "train")
    (tmp_path / "windows.txt").write_bytes("Größe\r\n".encode("utf-8-sig"))
    assert data.load_rows([str(tmp_path / "windows.txt")], "train")["text"] == ["Größe\n"]
    (tmp_path / "text" / "latin.txt").write_bytes("Stra\xdfe".encode("latin-1"))
    with pytest.raises(SystemExit, match=r"latin.txt:1 is not UTF-8"):
        data.load_rows([str(tmp_path / "text")], "train")


def test_a_text_ends_by_one_end_token(tmp_path: Path, arguments: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = conversations.write(tmp_path / "rows.jsonl", [{"text": text} for text in (*TEXTS, "", "done<|im_end|>")])
    rows = tokens_of(path, arguments)
    end = models.byte_tokenizer().eos_token_id
    assert len(rows) == 4  # the empty one is left out
    assert "1 of 5 rows hold nothing to train on and are left out" in capsys.readouterr().out
    for row in rows:
        assert row["labels"] == row["input_ids"]
        assert [token == end for token in row["input_ids"][-2:]] == [False, True]


def test_tokens_of_older_code_are_not_taken(tmp_path: Path, arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """datasets keeps what it made of a file; functions of the recipes are known to it by their names."""
    path = conversations.write(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    assert {data.__file__, chats.__file__, preferences.__file__, placed.__file__} == set(map(str, placed.SOURCES))
    older = tokens_of(path, arguments)
    assert older == tokens_of(path, arguments)
    changed = lambda ids, tokenizer: [*ids, 0]  # noqa: E731
    monkeypatch.setattr(data, "ended", changed)
    (tmp_path / "data.py").write_text(Path(data.__file__).read_text() + "# changed\n")
    monkeypatch.setattr(placed, "SOURCES", [tmp_path / "data.py"], raising=False)
    assert [row["labels"][-1] for row in tokens_of(path, arguments)] == [0] * 3


def test_a_pair_without_an_answer_is_named(tmp_path: Path) -> None:
    from trl import DPOConfig

    rows = [{"prompt": "a", "chosen": "b", "rejected": answer} for answer in ("c", None)]
    path = conversations.write(tmp_path / "pairs.jsonl", rows)
    training = DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(SystemExit, match=r"pairs\.jsonl:2: rejected is null; it must be text or messages"):
        preferences.load_pairs(DataSettings(dataset=[str(path)]), training)


def pairs_of(path: Path, rows: list[Any]) -> list[dict[str, Any]]:
    from trl import DPOConfig

    conversations.write(path / "pairs.jsonl", rows)
    training = DPOConfig(output_dir=str(path), use_cpu=True, bf16=False)
    return list(preferences.load_pairs(DataSettings(dataset=[str(path / "pairs.jsonl")]), training)[0])


def test_pairs_and_prompts_with_images_are_refused(tmp_path: Path) -> None:
    """Their readers would leave the images out, and the answers be to what the model has not seen."""
    from trl import GRPOConfig

    told = "it has the column images, which is not read here"
    row, images = {"prompt": TURN[:1], "chosen": TURN[1:], "rejected": TURN[1:]}, {"images": ["nowhere.png"]}
    with pytest.raises(SystemExit, match=told):
        pairs_of(tmp_path, [row | images])
    training = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, max_completion_length=8)
    training.max_length = 64
    path = conversations.write(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"], **images}])
    with pytest.raises(SystemExit, match=told):
        prompts.load_prompts(DataSettings(dataset=[str(path)]), models.byte_tokenizer(), training)


@pytest.mark.parametrize("columns", [{}, {"prompt": "Hi"}])
def test_a_prompt_that_the_answers_begin_with_is_taken_from_them(tmp_path: Path, columns: dict[str, str]) -> None:
    """Where it also stands beside them as text, as in ultrafeedback, too."""
    system = {"role": "system", "content": "Be kind."}
    chosen, rejected = ({"role": "assistant", "content": text} for text in "45")
    pair = {**columns, "chosen": [system, USER, chosen], "rejected": [system, USER, rejected]}
    assert pairs_of(tmp_path, [pair]) == [{"prompt": [system, USER], "chosen": [chosen], "rejected": [rejected]}]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"prompt": "Bye", "chosen": "messages", "rejected": "messages"}, "prompt is 'Bye'; it must be a list of mess"),
        ({"prompt": "messages", "chosen": "4", "rejected": "5"}, "prompt is [{'role': 'user', 'content': 'Hi'},"),
        ({"prompt": "Hi", "chosen": "4", "rejected": "messages"}, "rejected is [{'role': 'user', 'content': 'Hi'},"),
        ({"prompt": "Hi", "chosen": "messages", "rejected": "5"}, "rejected is '5'; it must be a list of messages: "),
    ],
)
def test_pairs_of_text_and_messages_are_named(tmp_path: Path, other: dict[str, str], told: str) -> None:
    row = {key: TURN if value == "messages" else value for key, value in other.items()}
    with pytest.raises(SystemExit, match=r"pairs\.jsonl:1: ") as end:
        pairs_of(tmp_path, [row])
    assert told in str(end.value)
    assert str(end.value).endswith("give prompt, chosen and rejected of all rows in one form")


def test_what_cannot_be_stored_ends_by_a_sentence(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"text": "a"}])
    features = datasets.Features({"text": datasets.Value("string")})
    with pytest.raises(ValueError, match="Couldn't cast array of type list"):
        placed.map_rows(rows, lambda row: {"text": [row]}, ["x"], features=features)


def test_pairs_of_the_same_answer_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for same, other in ("ab", [[{"role": "assistant", "content": text}] for text in "ab"]):
        prompt = "Hi" if same == "a" else [USER]
        rows = [{"prompt": prompt, "chosen": same, "rejected": answer} for answer in (same, other, same)]
        assert len(pairs_of(tmp_path, rows)) == 3
        assert "chosen equals rejected in 2 of 3 pairs; they teach nothing." in capsys.readouterr().out
    pairs_of(tmp_path, rows[1:2])
    told = capsys.readouterr().out
    assert "equals" not in told
    assert "is empty" not in told
    for empty in (" ", [{"role": "assistant", "content": ""}]):
        prompt = "Hi" if isinstance(empty, str) else [USER]
        pairs_of(tmp_path, [{"prompt": prompt, "chosen": empty, "rejected": TURN[1:] if prompt != "Hi" else "b"}])
        assert "chosen is empty in 1 of 1 pairs" in capsys.readouterr().out


def test_a_pair_of_messages_without_an_answer_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"pairs\.jsonl:1: chosen has no message of the role assistant"):
        pairs_of(tmp_path, [{"chosen": [USER], "rejected": TURN}])


@pytest.mark.parametrize("chosen", ["", "a"])
def test_an_empty_answer_without_a_prompt_is_named(tmp_path: Path, chosen: str) -> None:
    pair = {"chosen": chosen, "rejected": ""}
    with pytest.raises(SystemExit, match=r"pairs\.jsonl:2: there is no prompt, and an answer is empty"):
        pairs_of(tmp_path, [{"chosen": "Hi a", "rejected": "Hi b"}, pair])
    assert pairs_of(tmp_path, [{"prompt": "Hi", **pair}]) == [{"prompt": "Hi", **pair}]


def test_empty_answers_are_counted(tmp_path: Path, arguments: Any, capsys: pytest.CaptureFixture[str]) -> None:
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    silent = [{"role": "assistant", "content": " \n"}, {"role": "assistant", "name": "a"}]
    spoken = [{"role": "assistant", "content": "4"}, {"role": "assistant", "tool_calls": [call]}]
    for part in ({"type": "text", "text": ""}, {"type": "text", "text": None}, " "):
        assert chats.is_silent([{"role": "assistant", "content": [part]}])
        assert not chats.is_silent([{"role": "assistant", "content": [part, "4"]}])
    assert not chats.is_silent([{"role": "assistant", "content": [{"type": "image"}]}, USER | {"content": ""}])
    assert not chats.is_silent([{"role": "assistant", "content": "", "reasoning_content": "4?"}])
    talks = [{"messages": [USER, answer, *rest]} for answer in silent + spoken for rest in ([], [USER, spoken[0]])]
    completions = [{"prompt": "Hi", "completion": completion} for completion in ("", "a", "")]
    answers = [{"prompt": TURN, "completion": completion} for completion in ([], [spoken[0]], [silent[0]])]
    texts = [{"text": text} for text in ("a b", "")]
    arguments.completion_only_loss = False  # else a completion of no messages is refused
    for rows, told in (
        (talks, "in 4 of 8 rows"),
        (talks[4:], ""),
        (completions, "in 2 of 3 rows"),
        (answers, "in 2 of 3 rows"),
        (texts, ""),
    ):
        tokens_of(conversations.write(tmp_path / "rows.jsonl", rows), arguments)
        said = capsys.readouterr().out
        assert told in said
        assert ("an answer is empty" in said) == bool(told)


def test_the_loss_is_on_completions(tmp_path: Path, arguments: Any) -> None:
    rows = [{"prompt": "What is 2 + 2? ", "completion": "4."}]
    path = conversations.write(tmp_path / "rows.jsonl", rows)
    row = tokens_of(path, arguments)[0]
    tokenizer = models.byte_tokenizer()
    assert tokenizer.decode(row["input_ids"]) == "What is 2 + 2? 4.<|im_end|>"
    assert tokenizer.decode([label for label in row["labels"] if label != -100]) == "4.<|im_end|>"
    arguments.completion_only_loss = False
    assert (row := tokens_of(path, arguments)[0])["labels"] == row["input_ids"]
    arguments.completion_only_loss = None
    arguments.assistant_only_loss = True  # which is off once the labels are made
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]  # a part of the prompt
    messages = {"prompt": [*said, {"role": "user", "content": rows[0]["prompt"]}]}
    messages["completion"] = [{"role": "assistant", "content": rows[0]["completion"]}]
    row = tokens_of(conversations.write(tmp_path / "chat.jsonl", [messages]), arguments)[0]
    assert tokenizer.decode([label for label in row["labels"] if label != -100]) == "4.<|im_end|>"


def without_marks() -> Any:
    """The tokenizer, its chat template without marks of what the assistant writes."""
    tokenizer = models.byte_tokenizer()
    for mark in ("{%- generation %}", "{%- endgeneration %}"):
        assert mark in tokenizer.chat_template
        tokenizer.chat_template = tokenizer.chat_template.replace(mark, "")
    return tokenizer


def answers(row: dict[str, list[int]]) -> list[str]:
    """The runs of labelled tokens, as text."""
    runs: list[list[int]] = [[]]
    for label in row["labels"]:
        if label == -100:
            runs.append([])
        else:
            runs[-1].append(label)
    return [models.byte_tokenizer().decode(run) for run in runs if run]


@pytest.mark.parametrize("make", [conversations.chat, conversations.trajectory])
def test_marks_and_difference_find_the_same_answers(make: Any) -> None:
    row = make(conversations.facts(20), random.Random(0), turns=5)
    row["messages"][1]["content"] = "é — 🙂 " + str(row["messages"][1]["content"] or "")
    marked = chats.ChatTokenizer(models.byte_tokenizer())(row["messages"], row.get("tools"))
    told = chats.ChatTokenizer(without_marks())(row["messages"], row.get("tools"))
    assert told == marked
    expected = []
    for message in chats.clean(row["messages"]):
        if message["role"] == "assistant":
            calls = [json.dumps(call["function"]) for call in message.get("tool_calls", [])]
            written = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
            expected.append(f"{message['content']}{written}<|im_end|>")
    assert answers(marked) == expected
    everything = chats.ChatTokenizer(without_marks(), assistant_only=False)(row["messages"], row.get("tools"))
    assert everything["labels"] == everything["input_ids"] == marked["input_ids"]


def test_marks_that_end_in_white_space_that_is_no_token() -> None:
    """Transformers' own mask then holds the rest of the chat."""
    words = {"<unk>": 0, "user": 1, "assistant": 2, "Hello": 3, "Bye": 4, "<end>": 5}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", unk_token="<unk>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] + ' ' }}{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ message['content'] + ' <end> ' }}{% endgeneration %}"
        "{% else %}{{ message['content'] + ' <end> ' }}{% endif %}{% endfor %}"
    )
    chat = [{"role": role, "content": "Bye"} for role in ("user", "assistant", "user", "assistant")]
    assert chats.ChatTokenizer(tokenizer)(chat)["labels"] == [-100, -100, -100, -100, 4, 5] * 2


def test_templates_of_known_models_are_marked_by_trl() -> None:
    import trl

    tokenizer = models.byte_tokenizer()
    folder = Path(trl.__file__).parent / "chat_templates"
    for name in ("qwen3", "qwen2_5", "llama3", "gemma3"):
        tokenizer.chat_template = (folder / f"{name}.jinja").read_text()
        chat = chats.ChatTokenizer(tokenizer)
        assert chat.marked, name
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}] * 2
        told = [answer.strip() for answer in answers(chat(messages))]
        assert [answer.startswith(("Hello", "<think>")) for answer in told] == [True, True], name


def test_marks_that_leave_out_the_end_of_a_turn_are_warned_of() -> None:
    tokenizer = models.byte_tokenizer()
    assert chats.ChatTokenizer(tokenizer).warning is None
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    )
    assert "may not learn to stop" in str(chats.ChatTokenizer(tokenizer).warning)
    assert chats.ChatTokenizer(tokenizer, assistant_only=False).warning is None


FORGETS = """{% for m in messages %}{% if m.role == 'assistant' %}
A: {{ m.content if loop.last else '...' }}{% else %}
U: {{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}
A: {% endif %}"""
MERGES = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_without_a_token_that_ends_a_turn_its_white_space_does() -> None:
    tokenizer = models.byte_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role + ': ' + message.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}] * 2
    assert answers(chats.ChatTokenizer(tokenizer)(messages)) == ["Hello\n"] * 2


def test_answers_that_cannot_be_told_apart_are_an_error() -> None:
    tokenizer = models.byte_tokenizer()
    tokenizer.chat_template = FORGETS
    turn = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert answers(chats.ChatTokenizer(tokenizer)(turn)) == ["Hello"]
    with pytest.raises(ValueError, match="not certain which tokens are the assistant's"):
        chats.ChatTokenizer(tokenizer)(turn * 2)
    with pytest.raises(ValueError, match="no token is the assistant's"):
        chats.ChatTokenizer(tokenizer)(turn[:1])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="set chat_template_path"):
        chats.ChatTokenizer(tokenizer)


def test_a_token_that_is_partly_the_assistants_is_an_error() -> None:
    words = Tokenizer(WordLevel({"Hi": 0, "Hello": 1, "HiHello": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", chat_template=MERGES)
    turn = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    with pytest.raises(ValueError, match="token of 'HiHello' is partly the assistant's"):
        chats.ChatTokenizer(tokenizer)(turn)
    turn[0]["content"] = "Hi "
    assert chats.ChatTokenizer(tokenizer)(turn)["labels"] == [-100, 1]


def test_messages_of_every_kind_become_the_same() -> None:
    function = {"name": "look_up", "arguments": {"key": "K"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    chat = [{"role": "user", "content": "K?"}, call]
    as_text = {"function": {**function, "arguments": json.dumps(function["arguments"])}}
    api = [chat[0] | {"tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": [as_text]}]
    assert chats.clean(api) == chat
    shared = [{"from": "human", "value": "K?"}, {"from": "gpt", "value": "5"}]
    assert chats.clean(shared) == [{"role": "user", "content": "K?"}, {"role": "assistant", "content": "5"}]


USER = {"role": "user", "content": "Hi"}
PARTS = [{"type": "text", "text": "Hi"}]
SHOWN = [{"type": "image_url", "image_url": {"url": "nowhere.png"}}, {"type": "text", "text": "What is it?"}]
TURN = [USER, {"role": "assistant", "content": "5"}]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"text": 5}], "holds Value('int64'); it must hold text"),
        ([{"text": ["a"]}], "it must hold text"),
        ([{"words": "a"}], "it needs messages, or prompt and completion, or 'text'"),
        ([{"messages": [{"role": "user", "content": "Hi"}]}], "rows.jsonl:1: no token is the assistant's"),
        ([{"text": ""}], "holds nothing to train on"),
        ([{"messages": TURN}, {"messages": None}], "rows.jsonl:2: messages is None; it must be a list of messages"),
        ([{"messages": TURN}, {"messages": []}], "rows.jsonl:2: the messages are []; give mappings with role"),
        ([{"messages": TURN}, {"messages": [USER, {"rol": "user"}]}], "rows.jsonl:2: message 2 has the role None; it"),
        (
            [{"messages": [{**USER, "role": "usr"}]}],
            "has the role 'usr' (did you mean user?); it must be one of system",
        ),
        ([{"prompt": "a", "completion": "b"}, {"prompt": "a"}], "rows.jsonl:2: completion is null; it must be text"),
        ([{"messages": [{**USER, "content": [{"type": "file"}]}]}], "rows.jsonl:1: the chat template cannot write it"),
        ([{"messages": TURN, "videos": ["nowhere.mp4"]}], "it has the column videos, which is not read here: recipes"),
        ([{"prompt": "a", "completion": "b", "image": "nowhere.png"}], "it has the column image, which is not read"),
        (
            [{"messages": [{**USER, "content": SHOWN}, *TURN]}],
            "message 1 has a part 'image_url', which is not read: the file of an image belongs in the column images",
        ),
        (
            [{"messages": TURN}, {"messages": [USER, {"role": "assistant", "content": 5}]}],
            "rows.jsonl:2: message 2 has the content 5; it must be text",
        ),
    ],
)
def test_rows_that_cannot_be_used(tmp_path: Path, arguments: Any, rows: list[Any], told: str) -> None:
    with pytest.raises(SystemExit) as end:
        tokens_of(conversations.write(tmp_path / "rows.jsonl", rows), arguments)
    assert told in str(end.value)


def test_a_row_that_is_refused_is_named_as_it_stands_in_its_file(tmp_path: Path, arguments: Any) -> None:
    """Of several files, of which a part is read, in the order of a draw."""
    for name in "ab":
        conversations.chats(tmp_path / f"{name}.jsonl", conversations.facts(9), count=9, turns=2)
    bad = {"messages": [{**USER, "content": None}, {"role": "asistant", "content": "5"}]}
    path = tmp_path / "b.jsonl"
    path.write_text(path.read_text() + "\n" + json.dumps(bad) + "\n")
    with pytest.raises(
        SystemExit, match=r"b\.jsonl:11: message 2 has the role 'asistant' \(did you mean assistant\?\)"
    ):
        tokens_of(tmp_path, arguments, eval_share=0.4, dataset_split="train[1:]")


def test_several_wrong_rows_are_named_together(tmp_path: Path, arguments: Any) -> None:
    """In the order of their files, also where rows are drawn and two of them are the same."""
    bad: list[Any] = [{"messages": TURN} for _ in range(30)]
    for index in range(3, 27, 2):
        bad[index] = {"messages": [{**USER, "role": f"usr{min(index, 7)}"}]}
    path = conversations.write(tmp_path / "rows.jsonl", bad)
    for options in ({}, {"eval_share": 0.01}):
        arguments.dataset_num_proc = None if options else 2
        with pytest.raises(SystemExit) as end:
            tokens_of(path, arguments, **options)
        head, *lines, last = str(end.value).splitlines()
        assert head == f"dataset ['{path}'] cannot be used:"
        assert [line.split(": message 1 has the role ")[0] for line in lines] == [
            f"{path}:{number}" for number in range(4, 24, 2)
        ]
        assert "the role 'usr3' (did you mean user?)" in lines[0]
        assert "the role 'usr7'" in lines[-1]
        assert last == "and 2 more rows"


@pytest.mark.parametrize(("share", "whole"), [(0.1, False), (0.24, False), (0.25, True)])
def test_ends_of_few_texts_are_held_out(tmp_path: Path, share: float, whole: bool) -> None:
    """A long text among few is trained on."""
    texts = ["long " * 500, "short " * 20, None, "ab" * 50]
    datasets.Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "texts.parquet")
    rows = DataSettings(dataset=[str(tmp_path / "texts.parquet")], eval_share=share)
    train, held_out = data.load_splits(rows, seed=0, ends=True)
    assert held_out is not None
    assert len(data.load_splits(rows, seed=0)[0]) == 3, "where whole texts are wanted"
    if whole:
        assert (len(train), len(held_out)) == (3, 1)
        return
    ends = iter(held_out["text"])
    for text, begin in zip(texts, train["text"], strict=True):
        if text is None:
            assert begin is None
            continue
        end = next(ends)
        assert begin + end == text
        assert len(end) == round(len(text) * share)
    assert not [*ends]


def test_whole_texts_are_held_out_where_ends_would_be_empty(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["ab", "cd", "ef"]}).to_parquet(tmp_path / "texts.parquet")
    chosen = DataSettings(dataset=[str(tmp_path / "texts.parquet")], eval_share=0.1)
    train, held_out = data.load_splits(chosen, seed=0, ends=True)
    assert held_out is not None
    assert sorted([*train["text"], *held_out["text"]]) == ["ab", "cd", "ef"]


@pytest.mark.parametrize(
    ("row", "told"),
    [('{"text": 5}', "text is 5; it must be text"), ('{"text" 5}', "Expecting ':' delimiter (column 9)")],
)
def test_files_of_a_pattern_are_named(tmp_path: Path, arguments: Any, row: str, told: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.jsonl").write_text(f'{{"text": "b \\ud83d\\ude00"}}\n{row}\n')
    with pytest.raises(SystemExit) as end:
        tokens_of(tmp_path / "[ab]*.jsonl", arguments)
    assert str(end.value).endswith(f" cannot be used: {tmp_path / 'b.jsonl'}:2: {told}")


@pytest.mark.parametrize("files", [1, 2])
@pytest.mark.parametrize(
    "values",
    [
        ["a", 5],
        [5, "a"],
        ["a", None],
        [None, "a"],
        ["007", 8],
        [0.75, 1],
        [5, True],
        [[5], "a"],
        ["a", {"b": "c"}],
        [1 << 62, 1 << 63],
        [-(1 << 63), 0],
    ],
    ids=str,
)
def test_values_of_several_types_stay_as_they_are(tmp_path: Path, values: list[Any], files: int) -> None:
    """datasets reads pieces of 10 MiB and files by themselves: behind the first, `b` became `"b"` and 5 became "5"."""
    first, second = [{"text": values[0], "long": "a" * (11 << 20)}], [{"text": "b"}, {"text": values[1]}]
    first = first if files == 1 else [{"text": values[0]}]
    second = second if files == 1 else second[1:]
    parts = [[*first, *second]] if files == 1 else [first, second]
    names = [conversations.write(tmp_path / f"{number}.jsonl", part) for number, part in enumerate(parts)]
    found = data.load_rows(list(map(str, names)), "train")["text"]
    wanted = [row["text"] for row in (*first, *second)]
    assert [(type(value), value) for value in found] == [(type(value), value) for value in wanted]


def test_files_without_rows_stand_beside_others(tmp_path: Path) -> None:
    for name, text in (("a", ""), ("b", '{"text": "b"}\n'), ("c", "\n")):
        (tmp_path / f"{name}.jsonl").write_text(text)
    assert list(data.load_rows([str(tmp_path)], "train")) == [{"text": "b"}]


@pytest.mark.parametrize(
    "written",
    [
        '[{"text": "a"}, {"text": "b"}]',
        '[\n{"text": "a"},\n{"text": "b"}\n]',
        '\n{\n"text": "a"\n}\n{\n"text":\n"b"\n}',
        '\ufeff{"text": "a"}\n\n{"text": "b"}\n',
    ],
)
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_json_of_every_form_is_read_under_both_names(tmp_path: Path, written: str, suffix: str) -> None:
    (tmp_path / f"rows.{suffix}").write_text(written)
    assert data.load_rows([str(tmp_path / f"rows.{suffix}")], "train")["text"] == ["a", "b"]


def test_a_list_of_texts(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text('["a", "b"]')
    assert data.load_rows([str(tmp_path / "rows.json")], "train")["text"] == ["a", "b"]


def test_csv_of_spreadsheets(tmp_path: Path) -> None:
    """With a mark at its beginning, an index without a name, commas at the ends of lines, and lines of whitespace."""
    long = "x" * 200_000
    (tmp_path / "a.csv").write_text(f"\ufeff,text,other\r\n0,{long},,,\r\n   \r\n\r\n1,b,\r\n2\r\n", newline="")
    (tmp_path / "b.csv").write_text("column 1,text,other\n3,c,d\n")
    rows = data.load_rows([str(tmp_path / "*.csv")], "train")
    assert rows["text"] == [long, "b", None, "c"]
    assert rows["column 1"] == ["0", "1", "2", "3"]
    assert rows["other"] == [None, None, None, "d"]


def test_all_of_csv_is_text_as_it_is_written(tmp_path: Path) -> None:
    """pandas reads 10,000 rows at a time: of numbers alone it dropped zeros, and "NA" was no text."""
    texts = [*["a"] * 10_000, *["007"] * 10_000, "NA", "1,5", '"', "two\nlines", "true"]
    written = "\n".join('"' + text.replace('"', '""') + '",' for text in texts)
    (tmp_path / "rows.csv").write_text(f"text,other\n\n{written}\nlast")
    rows = data.load_rows([str(tmp_path / "rows.csv")], "train")
    assert rows["text"] == [*texts, "last"]
    assert set(rows["other"]) == {None}


def test_chats_beside_texts_stay_whole(tmp_path: Path) -> None:
    rows = [{"text": "a chat", "messages": TURN} for _ in range(4)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "chats.parquet")
    chosen = DataSettings(dataset=[str(tmp_path / "chats.parquet")], eval_share=0.1)
    for part in data.load_splits(chosen, seed=0, ends=True):
        assert part is not None
        assert part.column_names == ["text", "messages"]


@pytest.mark.parametrize("kind", ["parquet", "csv", "json", "jsonl"])
def test_a_row_is_named_as_it_stands_in_files_of_every_kind(tmp_path: Path, arguments: Any, kind: str) -> None:
    """Of two files, of which rows are drawn."""
    for name in ("a", "b"):
        rows = [{"prompt": f"{name}\n\n{number}", "completion": f"{name}{number}"} for number in range(9)]
        rows[4]["completion"] = rows[4]["completion"] if name == "a" else None  # type: ignore[assignment]
        table = datasets.Dataset.from_list(rows)
        if kind == "json":
            (tmp_path / f"{name}.json").write_text(json.dumps(rows, indent=1))
        else:
            getattr(table, f"to_{kind.removesuffix('l')}")(tmp_path / f"{name}.{kind}")
    place = {"parquet": ", row 5", "csv": ":14", "json": ":18", "jsonl": ":5"}[kind]
    with pytest.raises(SystemExit) as end:
        tokens_of(tmp_path, arguments, eval_share=0.4)
    assert str(end.value).endswith(
        f" cannot be used: {tmp_path / 'b'}.{kind}{place}: completion is null; it must be text"
    )


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("broken.jsonl", b'{"text": "a"}\n\n{"text" "b"}\n', "broken.jsonl:3: Expecting ':' delimiter (column 9)"),
        ("broken.jsonl", b'{"text": "a"}\n[1]\n', "broken.jsonl:2: it must be a mapping"),
        ("broken.jsonl", b'[1]\n{"text": "a"}\n{\n', "broken.jsonl:1: it must be a mapping, such as {...}\n"),
        (
            "latin.jsonl",
            b'{"text": "a"}\n{"text": "Stra\xdfe"}\n',
            r"""latin.jsonl:2 is not UTF-8: invalid continuation byte in b'{"text": "Stra\xdfe"}\n'; save the file""",
        ),
        ("broken.json", b'[{"text": "a"},\n {"text" "b"}]', "broken.json:2: Expecting ':' delimiter (column 10)"),
        ("lines.json", b'{"text": "a"}\n{"text" "b"}', "lines.json:2: Expecting ':' delimiter (column 9)"),
        ("other.json", b'[{"text": "a"},\n\n\n[1]]', "other.json:4: it must be a mapping, such as {...}"),
        ("types.jsonl", b'{"text": "a"}\n{"text": 5}', "types.jsonl:2: text is 5; it must be text"),
        ("null.jsonl", b'{"messages": []}\nnull', "null.jsonl:2: messages is None; it must be a list of messages"),
        (
            "more.csv",
            b"text,other\na,b\na,b,c\n",
            "more.csv:3: it holds 3 values, and the columns are ['text', 'other']",
        ),
        ("twice.csv", b"text,text\na,b\n", "twice.csv:1: the columns ['text'] are there more than once"),
        ("inside.csv", b'text,b\n"say \\"hi\\"",b\n', "inside.csv:2: a quote ends inside of a value"),
        ("quote.csv", b'text,other\na,b\na,"b\nc,d\n', "quote.csv:3: a quote has no end"),
        ("cut.parquet", b"PAR1 cut", "cut.parquet: Parquet magic bytes not found"),
        ("latin.csv", b"text\nStra\xdfe\n", "latin.csv:2 is not UTF-8"),
        ("latin.txt", b"\xff\xfe" * 9, "is not UTF-8: invalid start byte"),
        (
            "half.jsonl",
            b'{"text": "a"}\n{"text": "\\ud83d"}\n',
            "half.jsonl:2: '\\ud83d' is half of a character, whose",
        ),
        (
            "half.json",
            b'[{"messages": []},\n{"messages": ["\\uDe00"]}]',
            "half.json:2: '\\ude00' is half of a character",
        ),
        ("empty.jsonl", b"", "cannot be used: it holds no rows"),
        ("empty/", None, "is a folder that holds nothing"),
    ],
)
def test_documents_that_cannot_be_read(
    tmp_path: Path, arguments: Any, name: str, content: bytes | None, told: str
) -> None:
    path = tmp_path / name
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(SystemExit) as end:
        tokens_of(path, arguments)
    assert name.rstrip("/") in str(end.value)
    assert told in str(end.value)


def test_rows_of_a_damaged_parquet_file_are_named(tmp_path: Path, arguments: Any) -> None:
    path = tmp_path / "rows.parquet"
    rows = datasets.Dataset.from_list([{"text": f"{number} " * 40} for number in range(30)])
    rows.to_parquet(path, batch_size=10)
    groups = pyarrow.parquet.ParquetFile(path).metadata
    begins, content = groups.row_group(1).column(0).dictionary_page_offset, bytearray(path.read_bytes())
    content[begins + 30 : begins + 60] = b"x" * 30
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=r"behind .*rows\.parquet, row 10: "):
        tokens_of(path, arguments)


def test_rows_that_are_too_long(tmp_path: Path, arguments: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = conversations.chats(tmp_path / "chats.jsonl", conversations.facts(9), count=3, turns=6)
    whole = tokens_of(path, arguments)
    counted, every = (sum(len(row[key]) - row[key].count(-100) for row in whole) for key in ("labels", "input_ids"))
    assert f"the loss counts {counted:,} of these {every:,} tokens" in capsys.readouterr().out
    longest = max(len(row["input_ids"]) for row in whole)
    for arguments.max_length in (longest - 1, 50):
        arguments.assistant_only_loss = True
        with pytest.raises(SystemExit, match="3 of 3 rows have more than max_length"):
            tokens_of(path, arguments)
    arguments.max_length, arguments.assistant_only_loss = 50, True
    cut = tokens_of(path, arguments, too_long="split")
    assert max(len(row["input_ids"]) for row in cut) == 50
    labels = [[token for row in rows for token in row["labels"] if token != -100] for rows in (whole, cut)]
    assert labels[0] == labels[1]  # no answer is cut off; pieces without any may be left out


@pytest.mark.parametrize("too_long", ["refuse", "split"])
def test_packing_loses_nothing_and_keeps_documents_apart(tmp_path: Path, arguments: Any, too_long: str) -> None:
    """More documents than one batch of TRL's packing: every token is there once, and no document predicts the next."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTTrainer

    chance = random.Random(0)
    longest = 150 if too_long == "split" else 60
    texts = ["".join(chance.choices("abcdefgh", k=chance.randint(1, longest))) for _ in range(1700)]
    arguments.max_length, arguments.packing, arguments.report_to = 64, True, []
    path = conversations.write(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    Path(arguments.output_dir).mkdir()
    tokenizer = models.byte_tokenizer()
    rows, _ = data.load_tokens(DataSettings(dataset=[str(path)], too_long=too_long), tokenizer, arguments)
    single = sum((len(text) + 1) % 64 == 1 for text in texts)  # last tokens by themselves: nothing predicts them
    assert sum(map(len, rows["input_ids"])) == sum(len(text) + 1 for text in texts) - single
    assert (single > 0) == (too_long == "split")
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=260, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    packed = trainer.train_dataset
    assert Counter(chain.from_iterable(packed["input_ids"])) == Counter(chain.from_iterable(rows["input_ids"]))
    assert numpy.mean([len(row) for row in packed["input_ids"]]) > 60
    row = next(row for row in packed if len(row["seq_lengths"]) > 2)
    batch = trainer.data_collator([row])
    starts = batch["position_ids"][0] == 0
    assert starts.sum() == len(row["seq_lengths"])
    assert batch["cu_seq_lens_q"].tolist() == [*starts.nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
    assert (batch["labels"][0][starts] == -100).all()
    assert (batch["labels"][0][~starts] != -100).all()


def test_retention_counts_documents_and_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = numpy.array([10, 20, 30, 40])
    assert report.retention(sizes, 30) == (0.75, 0.6)
    assert report.retention(sizes, 9) == (0.0, 0.0)
    report.report_lengths(numpy.array([1000, 40_000, 100_000, 700_000]), 65536, str(tmp_path))
    said = capsys.readouterr().out
    assert "documents: 4, tokens: 841,000; median 70,000, longest 700,000" in said
    for label, documents in (("32K", "25.0%"), ("64K", "50.0%"), ("128K", "75.0%"), ("1M", "100.0%")):
        assert f"{label}: {documents} of documents" in said.replace("  ", " ")
    assert (tmp_path / "lengths.png").exists()
    assert [report.short(tokens) for tokens in (512, 2**15, 2**17, 2**20)] == ["512", "32K", "128K", "1M"]


@pytest.mark.parametrize(
    ("cpu", "processes", "launch"),
    [
        (True, 2, "python recipes/evaluate.py --config recipes/configs/evaluate_cpu.yaml"),
        (False, 1, "python recipes/evaluate.py --config recipes/configs/evaluate_1gpu.yaml"),
        (False, 3, "python recipes/evaluate.py --config recipes/configs/evaluate_1gpu.yaml"),
        (False, 4, "--multi_gpu --num_processes 4 recipes/evaluate.py --config recipes/configs/evaluate_4gpu.yaml"),
    ],
)
def test_what_comes_next_is_launched_as_the_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpu: bool, processes: int, launch: str
) -> None:
    arguments = SimpleNamespace(output_dir=str(tmp_path), use_cpu=cpu, world_size=processes)
    trainer: Any = SimpleNamespace(args=arguments, model=SimpleNamespace(config=LlamaConfig()))
    said = report.next_steps(trainer, str(tmp_path))
    assert said.startswith(f"next: load it: AutoModelForCausalLM.from_pretrained('{tmp_path}'); ")
    assert f"{launch} --model_name_or_path {tmp_path}" in said
    assert said.endswith(f"--output_dir {tmp_path}_evaluation --ruler none --tasks single --documents TEXTS/")
    monkeypatch.setattr(sys, "argv", ["recipes/sft.py"])
    said = report.next_steps(trainer, str(tmp_path))
    assert said.endswith("--ruler none --tasks none --documents CHATS.jsonl")
    monkeypatch.setattr(sys, "argv", ["recipes/dpo.py"])
    monkeypatch.setattr(report, "DPOTrainer", SimpleNamespace)
    assert report.next_steps(trainer, str(tmp_path)) == said
    trainer.model.config = LlavaConfig()
    assert report.next_steps(trainer, str(tmp_path)).startswith("next: load it: AutoModelForImageTextToText.from_")


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("scaled", [LLAMA3, {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16}, {}])
def test_what_the_warning_of_a_short_rope_says_makes_it_go_away(scaled: dict[str, Any]) -> None:
    original = {"original_max_position_embeddings": 8192} if scaled else {}
    rope = {"rope_theta": 5e5, **scaled, **original}
    config = LlamaConfig(max_position_embeddings=32768, rope_parameters=rope)
    warning = str(beyond_positions(config, 131072, "A row is long", "rope_scaling"))
    factor = float(warning.rsplit("factor: ")[1].rstrip("}."))
    assert factor == (16 if scaled else 4)
    assert factor == 131072 / models.pretrained_length(config)
    models.scale_rope(config, {"rope_type": "yarn", "factor": factor})
    assert config.max_position_embeddings == 131072
    assert beyond_positions(config, 131072, "A row is long", "rope_scaling") is None
    assert config.rope_parameters["rope_theta"] == 5e5
    assert not {"low_freq_factor", "high_freq_factor"} & set(config.rope_parameters)
    assert config.rope_parameters.get("beta_fast") == scaled.get("beta_fast")
    with pytest.raises(SystemExit, match="Set factor to 16 or more" if scaled else "Set factor to 4 or more"):
        models.scale_rope(config, {"rope_type": "yarn", "factor": 2.0})


def test_rope_parameters_by_the_type_of_layer_are_scaled() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"num_hidden_layers": 6, "head_dim": 16, "vocab_size": 50, "max_position_embeddings": 1024}
    config = Gemma3TextConfig(**sizes)
    models.scale_rope(config, {"rope_type": "yarn", "factor": 4.0})
    assert set(config.rope_parameters) == {"full_attention", "sliding_attention"}
    before, after = (Gemma3ForCausalLM(item).model.rotary_emb for item in (Gemma3TextConfig(**sizes), config))
    assert before.sliding_attention_inv_freq.equal(after.sliding_attention_inv_freq)
    assert not before.full_attention_inv_freq.equal(after.full_attention_inv_freq)
    assert config.max_position_embeddings == 4096
    with pytest.raises(SystemExit, match="by the type of layer"):
        models.scale_rope(config, {"full_attention": {"rope_type": "yarn", "factor": 4.0}})


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = {"role": "assistant", "content": "Let me see.", "tool_calls": [call("look", a=1), call("seek", b="2")]}
DROPS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ WRITES }}"
DROPS += "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
THINKS = {"role": "assistant", "content": "It is 5.", "reasoning_content": "2 + 3"}


@pytest.mark.parametrize(
    ("writes", "answer", "told"),
    [
        ("m.content", CALLS, "message 2: the chat template leaves out its tool call 'look'"),
        ("m.content ~ m.tool_calls[0].function.name", CALLS, "message 2: .* its tool call 'seek'"),
        ("m.tool_calls | tojson", CALLS, "message 2: .* its text 'Let me see.'"),
        ("m.content", THINKS, "message 2: .* its reasoning '2 . 3'"),
        ("m.content ~ (m.tool_calls | tojson)", CALLS, None),
        ("'<think>' ~ m.reasoning_content ~ '</think>' ~ m.content", THINKS, None),
        ("m.content.split('</think>')[-1] | trim", {"role": "assistant", "content": "<think>a</think>\n\n5 "}, None),
    ],
)
def test_a_template_that_drops_what_the_assistant_wrote(writes: str, answer: Any, told: str | None) -> None:
    tokenizer = models.byte_tokenizer()
    tokenizer.chat_template = DROPS.replace("WRITES", writes)
    chat = chats.ChatTokenizer(tokenizer)
    if told is None:
        assert len(answers(chat([USER, answer]))) == 1
        return
    with pytest.raises(ValueError, match=told):
        chat([USER, answer])
    later = {"role": "assistant", "content": "5", "tool_calls": [call("look"), call("seek")], "reasoning": "5"}
    if writes == "m.content":  # the messages of a prompt get no loss
        assert chat([USER, answer, USER, {"role": "assistant", "content": "5"}], prompt=3)
    with pytest.raises(ValueError, match="the chat template leaves out its"):
        chat([USER, answer, USER, later])


def test_function_calls_of_sharegpt_and_roles() -> None:
    shared = [{"from": "human", "value": "Hi"}, {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}]
    assert chats.clean(shared)[1] == {"role": "assistant", "content": "", "tool_calls": [call("f")]}
    assert '"name": "f"' in answers(chats.ChatTokenizer(models.byte_tokenizer())(shared))[0]
    with pytest.raises(ValueError, match="message 2 has the role 'bot'; it must be one of system"):
        chats.clean([USER, {"role": "bot", "content": "Hi"}])


def test_nulls_of_arrow_are_no_arguments(tmp_path: Path, arguments: Any) -> None:
    """Arrow gives each tool call and each tool the fields of all others."""
    from trl import DPOConfig

    tools = [
        [{**conversations.TOOL, "function": {"name": "f", "parameters": {name: {"type": "string"}}}}] for name in "xy"
    ]
    turns = [{**CALLS, "tool_calls": [call("look", a=1)]}, {**CALLS, "tool_calls": [call("seek", b="2")]}]
    rows = [{"messages": [USER, turn], "tools": tool} for turn, tool in zip(turns, tools, strict=True)]
    rows[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]["nested"] = {"c": 1}
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    for row in tokens_of(tmp_path / "rows.parquet", arguments):
        assert "null" not in models.byte_tokenizer().decode(row["input_ids"])
    pairs = [{"prompt": [USER], "chosen": [turn], "rejected": [turns[0]], "tools": tools[0]} for turn in turns]
    for keys in ({"prompt"}, set()):
        given = [{key: pair[key] if keys else [USER, *pair[key]] for key in ("chosen", "rejected")} for pair in pairs]
        given = [{**pair, **cut, "extra": 1} for pair, cut in zip(pairs, given, strict=True)]
        given = [pair if keys else {key: pair[key] for key in pair if key != "prompt"} for pair in given]
        path = tmp_path / f"pairs_{len(keys)}.parquet"
        datasets.Dataset.from_list(given).to_parquet(path)
        training = DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
        loaded = list(preferences.load_pairs(DataSettings(dataset=[str(path)]), training)[0])
        assert [pair["chosen"] for pair in loaded] == [[turn] for turn in turns]
        assert [pair["prompt"] for pair in loaded] == [[USER]] * 2
        assert json.loads(loaded[0]["tools"]) == tools[0]


def test_a_template_that_ignores_the_generation_prompt_is_refused() -> None:
    tokenizer = models.byte_tokenizer()
    turn = [USER, {"role": "assistant", "content": "Hello"}]
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(ValueError, match="ignores add_generation_prompt, so it is not certain where message 2 begins"):
        chats.ChatTokenizer(tokenizer)(turn)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    assert answers(chats.ChatTokenizer(tokenizer)(turn)) == ["Hello<|im_end|>"]


def test_pairs_that_are_dropped_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt_ids": [1], "chosen_ids": [2] * count, "rejected_ids": [3]} for count in (1, 2, 9)]
    pairs, training = datasets.Dataset.from_list(rows), SimpleNamespace(process_index=0, output_dir=str(tmp_path))
    trainer = SimpleNamespace(train_dataset=pairs, eval_dataset=None, args=training)
    preferences.fit_pairs(trainer, DataSettings(dataset=["x"], too_long="drop"), 4)
    assert len(trainer.train_dataset) == 2
    assert "train pairs: 1 of more than max_length tokens are dropped" in capsys.readouterr().out


def test_an_empty_held_out_set_is_grouped_too(arguments: Any) -> None:
    """Its rows are samples of several rows, as those that are trained on."""
    rows = datasets.Dataset.from_list([{"input_ids": [1, 2], "labels": [1, 2]}] * 3)
    settings = DataSettings(dataset=["python_topics"], group_rows=2)
    for held_out, samples in ((rows, 2), (rows.select([]), 0)):
        train, others = data.load_groups(settings, (rows, held_out), arguments)
        assert len(others) == samples
        assert others.features == train.features
    assert data.load_groups(settings, (rows, None), arguments)[1] is None


def said_in(content: Any) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": content}]


def called_with(**arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [call("f", **arguments)]}


DATED = {"type": "object", "properties": {"day": {"type": "string", "default": "2024-01-01"}}}
VALUES = (1, 2.5, "5", 1e-15, 0.1234567890123456, 2**60, 2**70, "null")
ODD = [{"messages": [USER, called_with(x=value)]} for value in VALUES]
AS_WRITTEN = {
    "dates": [{"prompt": [USER], "completion": [called_with(day=f"2024-05-0{day}")]} for day in (1, 2, 3)],
    "times": [{"prompt": [USER], "completion": [called_with(at="2024-05-01T10:00:00Z")]}] * 2,
    "order": [{"messages": [USER, called_with(**arguments)]} for arguments in ({"a": 1, "b": 2}, {"b": 3, "a": 4})],
    "numbers": ODD,
    "some floats": ODD[:2],
    "contents": [{"messages": said_in("2024-05-01")}, {"messages": said_in("2024-05-02")}],
    "texts": [{"prompt": "When?", "completion": "2024-05-01"}, {"prompt": "When?", "completion": "2024-05-02"}],
    "documents": [{"text": "2024-05-01"}, {"text": "2024-05-02"}],
    "tools": [{"messages": TURN, "tools": [{"type": "function", "function": {"name": "f", "parameters": DATED}}]}] * 2,
    "text beside parts": [{"messages": TURN}, {"messages": [{**USER, "content": PARTS}, *TURN[1:]]}],
    "missing": [{"messages": TURN}, {"messages": TURN, "chat_template_kwargs": {"day": "2024-05-01"}}],
}


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
@pytest.mark.parametrize("kind", AS_WRITTEN)
def test_rows_are_read_as_they_are_written(tmp_path: Path, kind: str, suffix: str) -> None:
    """Arrow would make times of dates, floats of numbers, and one order of keys."""
    written, path = AS_WRITTEN[kind], tmp_path / f"rows.{suffix}"
    for rows in (written, [*reversed(written)]):  # datasets keeps what it has read of a file
        path.write_text("\n".join(map(json.dumps, rows)) if suffix == "jsonl" else json.dumps(rows, indent=1))
        for split, part in (("train", rows), ("train[:50%]", rows[: round(len(rows) / 2)]), ("train[1:]", rows[1:])):
            read = [chats.without_nulls(row) for row in data.load_rows([str(path)], split)]
            assert list(map(json.dumps, read)) == list(map(json.dumps, part))  # the order of keys, too
    for split, told in (("train[5:5]", "[0-9] rows holds none|no data"), ("test", "Unknown split")):
        with pytest.raises(SystemExit, match=told):
            data.load_rows([str(path)], split)


@pytest.mark.parametrize(
    ("suffix", "written", "told"),
    [
        ("json", "[ROW]\n[ROW]", "rows.json:1: There is more behind the end of the list"),
        ("json", "[ROW] and more", "rows.json:1: There is more behind the end of the list"),
        ("json", "[ROW,\nROW", "rows.json:2: Expecting value"),
        ("jsonl", "ROW\nROW ] ROW", "rows.jsonl:2: Expecting value"),
        ("jsonl", "ROW\n]", "rows.jsonl:2: Expecting value"),
    ],
)
def test_rows_behind_broken_json_are_not_left_out(tmp_path: Path, suffix: str, written: str, told: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    path.write_text(written.replace("ROW", json.dumps(AS_WRITTEN["dates"][0])))
    with pytest.raises(SystemExit, match=told):
        data.load_rows([str(path)], "train")


def test_pairs_without_a_common_beginning_have_no_prompt(tmp_path: Path) -> None:
    pairs = [{"chosen": TURN[1:], "rejected": said_in("worse")[1:]}]
    assert pairs_of(tmp_path, pairs)[0]["prompt"] == []


def test_dates_are_trained_as_they_are_written(tmp_path: Path, arguments: Any) -> None:
    for kind in ("dates", "contents", "texts", "documents"):
        rows = tokens_of(conversations.write(tmp_path / f"{kind}.jsonl", AS_WRITTEN[kind]), arguments)
        assert "2024-05-02" in models.byte_tokenizer().decode(rows[1]["input_ids"])
        arguments.assistant_only_loss = True


def test_arguments_of_pairs_are_as_they_are_written(tmp_path: Path) -> None:
    given = [row["messages"][1] for row in ODD] + [row["completion"][0] for row in AS_WRITTEN["dates"]]
    pairs = [{"prompt": [USER], "chosen": [answer], "rejected": TURN[1:]} for answer in given]
    pairs = [{**pair, "tools": AS_WRITTEN["tools"][0]["tools"]} for pair in pairs]
    loaded = pairs_of(tmp_path, pairs)
    assert [pair["chosen"] for pair in loaded] == [pair["chosen"] for pair in pairs]
    assert json.loads(loaded[0]["tools"]) == pairs[0]["tools"]


def test_files_whose_pieces_differ_are_read(tmp_path: Path) -> None:
    """Arrow reads pieces of 10 MB, and knows of no key that begins behind the first. Files of other kinds stand beside
    them."""
    rows = [{"messages": said_in("long" * 300_000)} for _ in range(9)] + ODD[:1]
    path = conversations.write(tmp_path / "rows.jsonl", rows)
    assert [chats.without_nulls(row) for row in data.load_rows([str(path)], "train")] == rows
    datasets.Dataset.from_list([{"messages": TURN}]).to_parquet(tmp_path / "more.parquet")
    both = data.load_rows([str(path), str(tmp_path / "more.parquet")], "train")
    assert [chats.without_nulls(row) for row in both] == [*rows, {"messages": TURN}]


WEIGHED = [USER, {"role": "assistant", "content": "bad", "weight": 0}, USER, {"role": "assistant", "content": "good"}]


@pytest.mark.parametrize("tokenizer", [models.byte_tokenizer(), without_marks()])
def test_an_answer_of_the_weight_0_is_only_read(tokenizer: Any) -> None:
    chat = chats.ChatTokenizer(tokenizer)
    row = chat([*WEIGHED[:3], {**WEIGHED[3], "weight": 1}])
    assert answers(row) == ["good<|im_end|>"]
    assert "bad<|im_end|>" in tokenizer.decode(row["input_ids"])
    with pytest.raises(ValueError, match=r"no token is the assistant's: .* not all of the weight 0"):
        chat(WEIGHED[:2])
    with pytest.raises(ValueError, match=r"message 2 has the weight 0\.5; it must be 0 or 1"):
        chat([USER, {**WEIGHED[1], "weight": 0.5}])
    with pytest.raises(ValueError, match="weight 0, for which assistant_only_loss must be true"):
        chats.ChatTokenizer(tokenizer, assistant_only=False)(WEIGHED)


def test_marks_that_are_not_one_pair_for_each_answer_have_no_weights() -> None:
    tokenizer = models.byte_tokenizer()
    tokenizer.chat_template = DROPS.replace("{{ WRITES }}", "{% endgeneration %}{% generation %}{{ m.content }}")
    with pytest.raises(ValueError, match="marks are not one pair for each answer"):
        chats.ChatTokenizer(tokenizer)(WEIGHED)


@pytest.mark.parametrize("keys", [("conversations",), ("prompt", "completion")])
def test_a_system_message_beside_a_chat_is_its_first(tmp_path: Path, arguments: Any, keys: tuple[str, ...]) -> None:
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "5"}]
    row = {**dict(zip(keys, [shared] if len(keys) == 1 else [shared[:1], shared[1:]], strict=True)), "system": "Be X."}
    ids = tokens_of(conversations.write(tmp_path / "rows.jsonl", [row]), arguments)[0]
    said = models.byte_tokenizer().decode(ids["input_ids"])
    assert said.startswith("<|im_start|>system\nBe X.")
    assert answers(ids) == ["5<|im_end|>"]
    first = {"from": "system", "value": "Be X."}
    row[keys[0]] = [first, *row[keys[0]]]
    arguments.assistant_only_loss = True
    again = tokens_of(conversations.write(tmp_path / "same.jsonl", [row]), arguments)[0]
    assert again == ids
    first["value"] = "Be Y."
    with pytest.raises(SystemExit, match=r"other\.jsonl:1: its column system is 'Be X\.'; give text, and no other"):
        tokens_of(conversations.write(tmp_path / "other.jsonl", [row]), arguments)


def test_prompts_are_trained_on_as_they_are_counted(tmp_path: Path) -> None:
    """With the roles of ShareGPT and arguments in JSON, as chats are read; other columns stay."""
    from trl import GRPOConfig

    asked = [{"from": "human", "value": "Hi"}, {"role": "assistant", "tool_calls": [call("f")]}]
    asked[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 1}'
    path = conversations.write(tmp_path / "prompts.jsonl", [{"prompt": asked, "answer": "x"}])
    training: Any = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, max_completion_length=8)
    training.max_length = 512
    rows, _ = prompts.load_prompts(DataSettings(dataset=[str(path)]), models.byte_tokenizer(), training)
    assert rows[0]["prompt"] == chats.clean(asked)
    assert rows[0]["prompt"][0] == {"role": "user", "content": "Hi"}
    assert rows[0]["prompt"][1]["tool_calls"] == [call("f", a=1)]
    assert rows[0]["answer"] == "x"


def test_prompts_have_no_system_message_beside_them(tmp_path: Path) -> None:
    from trl import GRPOConfig

    path = conversations.write(tmp_path / "prompts.jsonl", [{"prompt": [USER]}, {"prompt": [USER], "system": "Be X."}])
    training: Any = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, max_completion_length=8)
    training.max_length = 512
    with pytest.raises(SystemExit, match=r"prompts\.jsonl:2: its column system would not be read; put a message"):
        prompts.load_prompts(DataSettings(dataset=[str(path)]), models.byte_tokenizer(), training)


def test_pairs_have_the_system_message_and_no_weights(tmp_path: Path) -> None:
    pair = {"prompt": [USER], "chosen": WEIGHED[3:], "rejected": TURN[1:], "system": "Be X."}
    assert pairs_of(tmp_path, [pair])[0]["prompt"] == [{"role": "system", "content": "Be X."}, USER]
    with pytest.raises(SystemExit, match=r"pairs\.jsonl:1: chosen has a message of the weight 0, which pairs cannot"):
        pairs_of(tmp_path, [{**pair, "chosen": WEIGHED[1:2]}])


def test_function_calls_of_openai_beside_text() -> None:
    older = {"role": "assistant", "content": "I look.", "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    said = chats.clean([USER, older, {"role": "function", "name": "f", "content": "r"}])
    assert said[1] == {"role": "assistant", "content": "I look.", "tool_calls": [call("f", a=1)]}
    assert said[2]["role"] == "tool"


def test_broken_json_inside_of_a_message_is_named() -> None:
    broken = {**CALLS, "tool_calls": [call("f") | {"function": {"name": "f", "arguments": '{"a": '}}]}
    with pytest.raises(ValueError, match="message 2: the arguments of a tool call are no JSON: Expecting value: line"):
        chats.clean([USER, broken])
    with pytest.raises(ValueError, match="message 1: its function call is no JSON: Expecting value: line"):
        chats.clean([{"from": "function_call", "value": "{"}, {"from": "function_call", "value": "f()"}][1:])
    with pytest.raises(ValueError, match="its tools are no JSON: Expecting"):
        chats.parse_tools("f()")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("llama", "norms and MLPs by Liger"),
        ("gemma4_unified", "the loss by Liger, which has no others for gemma4_unified"),
    ],
)
def test_the_report_says_what_liger_computes(monkeypatch: pytest.MonkeyPatch, kind: str, said: str) -> None:
    known = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": None})
    for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch"):
        monkeypatch.setitem(sys.modules, name, known)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    config = LlamaConfig(head_dim=64)
    config.model_type = kind
    args = SimpleNamespace(device=torch.device("cuda"), bf16=True, use_liger_kernel=True)
    line = report.kernels(SimpleNamespace(args=args, model=SimpleNamespace(config=config)))
    assert line.endswith(said)
