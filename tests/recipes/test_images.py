"""Recipes on chats about images: labels, lengths, packing, evaluation, and the drawings for CPUs."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaProcessor, ProcessorMixin

from tests.support import conversations, scripts
from tests.support.ranks import RankPool, reset_accelerate

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))  # where the recipes find their modules
import chats  # noqa: E402
import data  # noqa: E402
import evaluate  # noqa: E402
import images  # noqa: E402
import models as recipe_models  # noqa: E402
import rows as recipe_rows  # noqa: E402
import sft  # noqa: E402
import shapes  # noqa: E402
from datasets import Dataset, Features, List, Value  # noqa: E402
from datasets import Image as ImageFeature  # noqa: E402
from settings import ModelSettings  # noqa: E402
from trl import chat_template_utils  # noqa: E402
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling  # noqa: E402

from tests.support import shipped_inputs  # noqa: E402

QWEN = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You help.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' or 'image' in part %}\
<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKED_QWEN = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You help.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'][0]['text'] }}<|im_end|>{% endgeneration %}\
{{ '\\n' }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}\
<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
GEMMA = """{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'][0]['text'] + '\n\n' %}\
{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}\
{% for message in rest %}<start_of_turn>{{ 'model' if message['role'] == 'assistant' else message['role'] }}
{{ first if loop.first else '' }}{% for part in message['content'] %}{% if part['type'] == 'image' %}<start_of_image>\
{% else %}{{ part['text'] | trim }}{% endif %}{% endfor %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
LLAVA = """{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': ' }}\
{% endif %}{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>
{% endfor %}{% if message['role'] != 'assistant' %}{% for part in message['content'] | selectattr('type', 'equalto', \
'text') %}{{ part['text'] + ' ' }}{% endfor %}{% else %}{% for part in message['content'] | selectattr('type', \
'equalto', 'text') %}{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}\
{% if add_generation_prompt %}ASSISTANT: {% endif %}"""

# what stands there for each form, and whether it is the assistant's; an image is its number of tokens
GRID = ["<|vision_start|>", 4, "<|vision_end|>"]
IN_QWEN = [
    ("<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n", *GRID, "What is it?<|im_end|>\n"),
    ("<|im_start|>assistant\n",),
    True,
    ("a red fox<|im_end|>",),
    False,
    ("\n<|im_start|>user\nAnd this, ", *GRID, " beside it?<|im_end|>\n<|im_start|>assistant\n"),
    True,
    ("a crow<|im_end|>",),
    False,
    ("\n",),
]
SOFT = ["\n\n<start_of_image>", 4, "<end_of_image>\n\n"]
IN_GEMMA = [
    ("<start_of_turn>user\n", *SOFT, "What is it?<end_of_turn>\n<start_of_turn>model\n"),
    True,
    ("a red fox<end_of_turn>\n",),
    False,
    ("<start_of_turn>user\nAnd this,", *SOFT, "beside it?<end_of_turn>\n<start_of_turn>model\n"),
    True,
    ("a crow<end_of_turn>\n",),
]
IN_LLAVA = [
    ("USER: ", 17, "\nWhat is it? ASSISTANT: "),
    True,
    ("a red fox ",),
    False,
    ("USER: ", 17, "\nAnd this,   beside it? ASSISTANT: "),
    True,
    ("a crow ",),
]
FORMS = {
    "qwen": ("qwen3_5", QWEN, IN_QWEN, "<|image_pad|>"),
    "qwen, marked": ("qwen3_5", MARKED_QWEN, IN_QWEN, "<|image_pad|>"),
    "gemma": ("gemma3", GEMMA, IN_GEMMA, "<image_soft_token>"),
    "llava": ("llava", LLAVA, IN_LLAVA, "<image>"),
}
PLACED = [
    {"type": "text", "text": "And this, "},
    {"type": "image", "text": None},  # as Arrow has it
    {"type": "text", "text": " beside it?"},
]


def turns(*said: Any) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[at % 2], "content": words} for at, words in enumerate(said)]


def picture(side: int = 64) -> Image.Image:
    return Image.effect_noise((side, side), 60).convert("RGB")


def with_place(text: str) -> list[dict[str, str]]:
    return [{"type": "image"}, {"type": "text", "text": text}]


CHAT = turns(with_place("What is it?"), "a red fox", PLACED, "a crow")


def processor_of(form: str) -> Any:
    """A processor whose tokens are bytes, with the template of a form; an image of 64 x 64 is 4 tokens, of Llava 17."""
    kind, template, _, _ = FORMS[form]
    if kind == "llava":
        processor: Any = shapes.processor()
    else:
        processor = shipped_inputs.processor(kind)
    processor.chat_template = processor.tokenizer.chat_template = template
    return processor


def by_hand(form: str, processor: Any) -> tuple[list[int], list[int]]:
    _, _, pieces, place = FORMS[form]
    ids, labels, own = list[int](), list[int](), False
    for piece in pieces:
        if isinstance(piece, bool):
            own = piece
            continue
        for part in piece:
            text = place * part if isinstance(part, int) else part
            found = processor.tokenizer(text, add_special_tokens=False)["input_ids"]
            ids += found
            labels += found if own else [-100] * len(found)
    return ids, labels


@pytest.mark.parametrize("form", FORMS)
def test_labels_are_those_made_by_hand(form: str) -> None:
    processor = processor_of(form)
    made = chats.chat_reader(processor, True)(CHAT, images=[picture(), picture()])
    ids, labels = by_hand(form, processor)
    assert processor.tokenizer.decode(made["input_ids"]) == processor.tokenizer.decode(ids)
    assert made["input_ids"] == ids
    assert made["labels"] == labels
    assert made["attention_mask"].shape == (1, len(ids))
    assert made["pixel_values"].shape[0] == (32 if "qwen" in form else 2)


def test_chats_without_images_stand_among_others(drawn: Path, tmp_path: Path) -> None:
    """Packed with others, they bring tokens and no pixels."""
    rows = [json.loads(line) for line in (drawn / "chats.jsonl").read_text().splitlines()[:2]]
    rows.append({"messages": turns("Who?", "a fox"), "images": []})
    path = conversations.write(drawn / "mixed.jsonl", rows)
    trainer = made_by_recipe(words_of(drawn, tmp_path, dataset=path))
    batch = trainer.data_collator([trainer.train_dataset[0]])
    assert len(batch["cu_seq_lens_q"]) == 4
    assert len(batch["pixel_values"]) == 2
    assert "a fox<|im_end|>" in trainer.processing_class.decode(batch["labels"][0][batch["labels"][0] != -100])


@pytest.mark.parametrize(
    ("form", "known"),
    [("qwen, marked", ""), ("llava", ""), ("qwen", "qwen2_5_vl"), ("qwen", "qwen3_vl"), ("gemma", "gemma3")],
)
def test_labels_are_those_of_trl(form: str, known: str) -> None:
    """TRL's collator takes templates with marks, or those of models that it knows."""
    shown, messages = [picture(), picture()], json.loads(json.dumps(CHAT))
    messages[2]["content"][1].pop("text")
    processor, template = processor_of(form), None
    if known:
        template = (Path(chat_template_utils.__file__).parent / f"chat_templates/{known}.jinja").read_text()
        processor.chat_template = processor.tokenizer.chat_template = template
        template = chat_template_utils.get_training_chat_template(processor)
    collator = DataCollatorForVisionLanguageModeling(processor, assistant_only_loss=True, chat_template=template)
    wanted = collator([{"messages": messages, "images": shown}])
    made = images.as_batch(chats.chat_reader(processor, True)(CHAT, images=shown))
    assert made.keys() == {*wanted}
    assert all(torch.equal(made[name], wanted[name]) for name in made)


def test_whole_chats_are_labelled_as_by_trl() -> None:
    processor, chat = processor_of("gemma"), turns("What is it?", "a fox")  # no place: it stands before the words
    wanted = DataCollatorForVisionLanguageModeling(processor)([{"messages": chat, "images": [picture()]}])
    made = chats.chat_reader(processor, False)(chat, images=[picture()])
    assert [made["labels"]] == wanted["labels"].tolist() == wanted["input_ids"].tolist()


def test_prompts_have_no_labels_where_completions_have() -> None:
    processor = processor_of("gemma")
    made = chats.chat_reader(processor, True)(CHAT, prompt=3, images=[picture(), picture()])
    labels = by_hand("gemma", processor)[1]
    first = len(labels) - len("a crow<end_of_turn>\n")
    assert made["labels"] == [-100] * first + labels[first:]


def test_what_is_not_certain_is_refused() -> None:
    reader = chats.chat_reader(processor_of("qwen"), True)
    with pytest.raises(ValueError, match="Number of images provided \\(1\\) does not match"):
        reader(CHAT, images=[picture()])
    with pytest.raises(ValueError, match="message 1 has a part 'image'"):
        reader(turns([{"type": "image", "image": "fox.png"}], "a fox"), images=[])
    with pytest.raises(ValueError, match="should be the same as the number of images passed"):
        reader(turns("<|image_pad|> What is it?", "a fox"), images=[picture()])
    forgets = processor_of("qwen")
    silent = mock.patch.object(type(forgets), "get_text_with_replacements", lambda self, text, *_: (text, [[]]))
    with silent, pytest.raises(ValueError, match="tells the places of 0 of 1 images"):
        chats.chat_reader(forgets, True)(turns("What is it?", "a fox"), images=[picture()])


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What shapes.py makes, and fewer of the chats."""
    folder = tmp_path_factory.mktemp("shapes")
    shapes.write(folder, {"chats": 24, "others": 7})
    return folder


def words_of(drawn: Path, output: Path, **more: Any) -> list[str]:
    given = {"config": ROOT / "recipes/configs/sft_images_cpu.yaml", "dataset": drawn / "chats.jsonl"}
    given |= {"model_name_or_path": drawn, "output_dir": output, "disable_tqdm": "true", **more}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def made_by_recipe(words: list[str]) -> Any:
    reset_accelerate()
    return sft.make_trainer(words)[0]


def test_lengths_count_tokens_of_images(drawn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Chats of some 65 tokens, of which 17 are an image's, are packed to at most 200, each once and whole."""
    trainer = made_by_recipe(words_of(drawn, tmp_path, max_length=200, eval_dataset=drawn / "others.jsonl"))
    said = capsys.readouterr().out
    processor = AutoProcessor.from_pretrained(drawn)
    whole = [
        processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}, row[1]],
            tokenize=False,
        )
        for row in (json.loads(line)["messages"] for line in (drawn / "chats.jsonl").read_text().splitlines())
    ]
    sizes = [len(processor.tokenizer(text)["input_ids"]) + 16 for text in whole]  # 17 tokens instead of one
    assert f"documents: 24, tokens: {sum(sizes):,}" in said
    assert re.search(rf"the loss counts \d+ of these {sum(sizes):,} tokens", said)
    batches = [trainer.data_collator([sequence]) for sequence in trainer.train_dataset]
    lengths = [batch["input_ids"].shape[1] for batch in batches]
    assert max(lengths) <= 200
    assert sum(lengths) == sum(sizes)
    assert len(lengths) < 24 == sum(batch["pixel_values"].shape[0] for batch in batches)
    for batch in batches:
        assert (batch["input_ids"] == processor.image_token_id).sum() == 17 * len(batch["pixel_values"])
    found = sorted(
        processor.tokenizer.decode(piece)
        for batch in batches
        for piece in batch["input_ids"][0].tensor_split(batch.get("cu_seq_lens_q", torch.tensor([0, 1])).long()[1:-1])
    )
    assert found == sorted(text.replace("<image>", "<image>" * 17) for text in whole)
    assert len(trainer.eval_dataset) == 3
    assert trainer.args.max_length == 200
    alone = made_by_recipe(words_of(drawn, tmp_path, packing="false"))
    assert len(alone.train_dataset) == 24
    assert "cu_seq_lens_q" not in alone.data_collator([alone.train_dataset[0]])


def test_chats_that_are_too_long(drawn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = json.loads((drawn / "chats.jsonl").read_text().splitlines()[0])
    long["messages"][0]["content"] = "What is it? " * 20
    rows = [long, json.loads((drawn / "chats.jsonl").read_text().splitlines()[1])]
    path = conversations.write(drawn / "long.jsonl", rows)
    with pytest.raises(
        SystemExit, match=r"1 of 2 rows have more than max_length \(100\) tokens, .* to split rows without images"
    ):
        made_by_recipe(words_of(drawn, tmp_path, dataset=path, max_length=100))
    with pytest.raises(SystemExit, match="a piece of a chat could begin inside an image; set refuse or drop"):
        made_by_recipe(words_of(drawn, tmp_path, dataset=path, max_length=100, too_long="split"))
    kept = made_by_recipe(words_of(drawn, tmp_path, dataset=path, max_length=100, too_long="drop"))
    assert len(kept.train_dataset) == 1
    assert "1 rows longer than max_length are dropped" in capsys.readouterr().out


def test_images_that_are_missing_are_named(drawn: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (drawn / "chats.jsonl").read_text().splitlines()[:4]]
    rows[2]["images"] = ["images/nothing.png"]
    path = conversations.write(drawn / "missing.jsonl", rows)
    with pytest.raises(SystemExit, match=r"missing.jsonl:3: its image /.*/images/nothing.png is no file") as end:
        made_by_recipe(words_of(drawn, tmp_path, dataset=path))
    assert end.value.code not in (0, None)
    (drawn / "images/nothing.png").write_text("no picture")
    with pytest.raises(SystemExit, match=r"missing.jsonl:3: cannot identify image file .*nothing.png"):
        made_by_recipe(words_of(drawn, tmp_path, dataset=path))
    path = conversations.write(drawn / "single.jsonl", [{**row, "images": row["images"][0]} for row in rows])
    with pytest.raises(SystemExit, match=r"single.jsonl:1: images is 'images/chats_0.png'; it must be a list of files"):
        made_by_recipe(words_of(drawn, tmp_path, dataset=path))
    text = conversations.write(drawn / "text.jsonl", [{"text": "<image> a fox", "images": rows[0]["images"]}])
    with pytest.raises(SystemExit, match="rows about images have images, and messages, or prompt and completion"):
        made_by_recipe(words_of(drawn, tmp_path, dataset=text))


COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255)}


@pytest.fixture
def two_folders(tmp_path: Path) -> Path:
    """Two folders with pictures of the same name, in the colour that the chats tell."""
    for colour, count in (("red", 3), ("blue", 5)):
        (tmp_path / colour / "images").mkdir(parents=True)
        Image.new("RGB", (32, 32), colour).save(tmp_path / colour / "images/0.png")
        row = {"messages": turns("Which colour?", colour), "images": ["images/0.png"]}
        conversations.write(tmp_path / colour / "chats.jsonl", [row] * count)
    return tmp_path


@pytest.mark.parametrize(
    ("names", "split", "wanted"),
    [
        (["red/chats.jsonl", "blue/chats.jsonl"], "train", ["red"] * 3 + ["blue"] * 5),
        (["blue/chats.jsonl", "red/chats.jsonl"], "train", ["blue"] * 5 + ["red"] * 3),
        (["blue/chats.jsonl", "red/chats.jsonl"], "train[4:7]", ["blue"] + ["red"] * 2),
        (["red/chats.jsonl", "blue/chats.jsonl"], "train[6:]+train[:1]", ["blue"] * 2 + ["red"]),
        (["red", "blue"], "train", ["red"] * 3 + ["blue"] * 5),
        (["."], "train", ["blue"] * 5 + ["red"] * 3),
        (["*/chats.jsonl"], "train", ["blue"] * 5 + ["red"] * 3),
    ],
)
def test_images_count_from_the_folder_of_their_file(
    two_folders: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], split: str, wanted: list[str]
) -> None:
    monkeypatch.chdir(two_folders)
    opened = images.opened(data.load_rows(names, split), names)
    assert [row["messages"][1]["content"] for row in opened] == wanted
    assert [recipe_rows.pictures_of(row)[0].getpixel((0, 0)) for row in opened] == [COLOURS[name] for name in wanted]


def test_rows_of_several_folders_are_trained_on_with_their_images(drawn: Path, two_folders: Path) -> None:
    red, blue = (str(two_folders / colour / "chats.jsonl") for colour in COLOURS)
    words = words_of(drawn, two_folders / "out", packing="false")
    words += ["--dataset", red, blue]

    def check(part: Any, count: int) -> None:
        batches = [trainer.data_collator([sequence]) for sequence in part]
        assert len(batches) == count
        for batch in batches:
            said = trainer.processing_class.decode(batch["labels"][0][batch["labels"][0] != -100])
            assert batch["pixel_values"].mean((0, 2, 3)).argmax() == (2 if "blue" in said else 0)

    trainer = made_by_recipe([*words, "--eval_dataset", blue, red])
    check(trainer.train_dataset, 8)
    check(trainer.eval_dataset, 8)
    trainer = made_by_recipe([*words, "--eval_share", "0.5"])  # which draws rows
    check(trainer.train_dataset, 4)
    check(trainer.eval_dataset, 4)


def test_folders_that_are_not_known_are_refused(two_folders: Path) -> None:
    names = [str(two_folders / colour / "chats.jsonl") for colour in COLOURS]
    read = data.load_rows(names, "train")
    fewer = mock.patch.object(recipe_rows, "placed_rows", return_value=[("here", {})])
    with fewer, pytest.raises(ValueError, match="2 rows are found in its files, and 8 are read, so it is not certain"):
        recipe_rows.folders_of(read, names, "train")
    columns = {"messages": [turns("Which colour?", "red")] * 3, "images": [["images/0.png"]] * 3}
    rows = Dataset.from_dict(columns)
    with pytest.raises(SystemExit, match=r"its image images/0.png counts from the folder of a file, and the row is of"):
        images.opened(rows, ["someone/chats"])
    rows.save_to_disk(two_folders / "red/saved")
    names = [str(two_folders / "red/saved")]
    with pytest.raises(SystemExit, match=r"its image /.*/red/saved/images/0.png is no file"):
        images.opened(data.load_rows(names, "train"), names)
    (two_folders / "red/images").rename(two_folders / "red/saved/images")
    opened = images.opened(data.load_rows(names, "train"), names)
    assert recipe_rows.pictures_of(opened[2])[0].getpixel((0, 0)) == COLOURS["red"]


def cut(path: Path) -> Path:
    """A file that lacks its second half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


@pytest.mark.parametrize("processes", [1, 2])
def test_truncated_images_are_named(drawn: Path, tmp_path: Path, processes: int) -> None:
    rows = [json.loads(line) for line in (drawn / "chats.jsonl").read_text().splitlines()[:4]]
    picture().save(drawn / "images/cut.png")
    cut(drawn / "images/cut.png")
    rows[2]["images"] = ["images/cut.png"]
    path = conversations.write(drawn / "cut.jsonl", rows)
    said = r"cut.jsonl:3: its image /.*/images/cut.png cannot be read: image file is truncated"
    with pytest.raises(SystemExit, match=f"^dataset .* cannot be used: /.*/{said}"):
        made_by_recipe(words_of(drawn, tmp_path, dataset=path, dataset_num_proc=processes))
    reset_accelerate()
    words = ["--model_name_or_path", str(drawn), "--output_dir", str(tmp_path), "--tasks", "none", "--lengths", "256"]
    with pytest.raises(SystemExit, match=f"^documents .* cannot be used: /.*/{said}"):
        evaluate.evaluate([*words, "--documents", str(path)])


def test_truncated_images_of_other_folders_and_kinds_are_named(drawn: Path, two_folders: Path) -> None:
    words = words_of(drawn, two_folders / "out")
    for colour in COLOURS:  # rows alike but for their folders
        alike = conversations.write(
            two_folders / colour / "alike.jsonl", [{"messages": turns("What?", "it"), "images": ["images/0.png"]}]
        )
    cut(alike.parent / "images/0.png")
    with pytest.raises(SystemExit, match=r"/blue/alike.jsonl:1: its image /.*/blue/images/0.png cannot be read"):
        made_by_recipe([*words, "--dataset", str(two_folders / "red/alike.jsonl"), str(alike)])
    message = List({"role": Value("string"), "content": Value("string")})
    held = [
        {"bytes": (two_folders / colour / "images/0.png").read_bytes(), "path": f"{colour}.png"} for colour in COLOURS
    ]
    rows = {"messages": [turns("What?", "it")] * 2, "images": [[image] for image in held]}
    features = Features({"messages": message, "images": List(ImageFeature())})
    both = Dataset.from_dict(rows, features=features)
    paths = [str(two_folders / colour / "held.parquet") for colour in COLOURS]
    for number, path in enumerate(paths):
        both.select([0, number]).to_parquet(path)
    with pytest.raises(
        SystemExit, match=r"/blue/held.parquet, row 2: its image blue.png cannot be read: image file is"
    ):
        made_by_recipe([*words, "--dataset", *paths])


def test_wrong_chats_about_images_are_named_by_their_lines(drawn: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (drawn / "chats.jsonl").read_text().splitlines()[:3]]
    rows[1]["messages"][0]["role"] = "robot"
    path = conversations.write(drawn / "robot.jsonl", rows)
    with pytest.raises(SystemExit, match=r"/robot.jsonl:2: message 1 has the role 'robot'"):
        made_by_recipe(words_of(drawn, tmp_path, dataset=path))


def test_rows_to_evaluate_on_may_have_no_images(drawn: Path, tmp_path: Path) -> None:
    path = conversations.write(tmp_path / "text.jsonl", [{"messages": turns("Who?", "a fox")}] * 2)
    trainer = made_by_recipe(words_of(drawn, tmp_path, eval_dataset=path, packing="false"))
    batch = trainer.data_collator([trainer.eval_dataset[1]])
    assert len(trainer.eval_dataset) == 2
    assert "pixel_values" not in batch
    assert trainer.processing_class.decode(batch["labels"][0][batch["labels"][0] != -100]).startswith("a fox")
    assert trainer.evaluate()["eval_loss"] > 0
    (tmp_path / "fox.txt").write_text("a fox")
    with pytest.raises(
        SystemExit, match=r"^eval_dataset \['.*fox.txt'\] has the columns \['text'\]; rows about images"
    ):
        made_by_recipe(words_of(drawn, tmp_path, eval_dataset=tmp_path / "fox.txt"))


def test_what_a_processor_needs_is_said(drawn: Path) -> None:
    missing = ImportError(
        "\nQwen2VLVideoProcessor requires the Torchvision library but it was not found in your\nplace."
    )
    fails = mock.patch.object(AutoProcessor, "from_pretrained", side_effect=missing)
    with fails, pytest.raises(SystemExit, match="requires the Torchvision library; install it as you"):
        images.load_processor(ModelSettings(model_name_or_path=str(drawn)), mock.Mock())


def test_a_template_of_a_file_counts(drawn: Path, tmp_path: Path) -> None:
    (tmp_path / "other.jinja").write_text(LLAVA)
    trainer = made_by_recipe(words_of(drawn, tmp_path, chat_template_path=tmp_path / "other.jinja", packing="false"))
    batch = trainer.data_collator([trainer.train_dataset[0]])
    assert trainer.processing_class.decode(batch["input_ids"][0]).startswith("USER: <image>")


def losses_by_recipe(rank: int, size: int, words: list[str]) -> list[float]:
    trainer = made_by_recipe([*words, "--output_dir", f"{words[words.index('--output_dir') + 1]}_{size}"])
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]


def stock_loss(folder: Path, rows: Path) -> tuple[float, int]:
    """The loss of the assistant's words, by Transformers alone."""
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor: ProcessorMixin = AutoProcessor.from_pretrained(folder)
    total, count = 0.0, 0
    for row in map(json.loads, rows.read_text().splitlines()):
        shown = [{"type": "image", "image": Image.open(rows.parent / name)} for name in row["images"]]
        asked = [{"role": "user", "content": [*shown, {"type": "text", "text": row["messages"][0]["content"]}]}]
        answered = [*asked, row["messages"][1]]
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        batch = processor.apply_chat_template(answered, **options)
        before = processor.apply_chat_template(asked, add_generation_prompt=True, **options)["input_ids"].shape[1]
        labels = batch["input_ids"].clone()
        labels[:, :before] = labels[:, -1] = -100  # the last token is a line feed behind the turn
        tokens = int((labels != -100).sum())
        with torch.no_grad():
            total += float(model(**batch, labels=labels).loss) * tokens
        count += tokens
    return total / count, count


def evaluated(rank: int, size: int, words: list[str]) -> None:
    reset_accelerate()
    evaluate.evaluate(words)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_chats_are_evaluated_as_by_transformers(
    ranks: Callable[[int], RankPool], drawn: Path, tmp_path: Path, size: int
) -> None:
    words = ["--model_name_or_path", str(drawn), "--output_dir", str(tmp_path), "--tasks", "none"]
    words += ["--documents", str(drawn / "others.jsonl"), "--lengths", "256"]
    ranks(size).run(evaluated, words)
    found = json.loads((tmp_path / "results.json").read_text())["answers"]
    loss, tokens = stock_loss(drawn, drawn / "others.jsonl")
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert (found["tokens"], found["rows"]) == (tokens, 7)


def test_packed_chats_train_as_alone(ranks: Callable[[int], RankPool], drawn: Path, tmp_path: Path) -> None:
    """Over ranks as in one process; the first loss is that of the assistant's words by Transformers."""
    options = {"max_steps": 2, "logging_steps": 1, "lr_scheduler_type": "constant", "warmup_steps": 0}
    words = words_of(drawn, tmp_path / "out", max_length=2048, **options)
    wanted = losses_by_recipe(0, 1, words)
    for losses in ranks(2).run(losses_by_recipe, words):
        assert losses == pytest.approx(wanted, rel=1e-5)
    assert wanted[0] == pytest.approx(stock_loss(drawn, drawn / "chats.jsonl")[0], rel=1e-5)


def test_adapters_are_merged_with_the_processor(drawn: Path, tmp_path: Path) -> None:
    trainer = made_by_recipe(words_of(drawn, tmp_path / "adapter", use_peft="true", max_steps=1))
    trainer.train()
    trainer.save_model()
    recipe_models.merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert isinstance(AutoProcessor.from_pretrained(tmp_path / "merged"), LlavaProcessor)
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").config.model_type == "llava"


@pytest.mark.slow
def test_the_config_for_cpus(tmp_path: Path) -> None:
    """By the scripts of its file: the loss falls, and the folder can be evaluated."""
    scripts.run_alone("recipes/shapes.py", [str(tmp_path / "outputs/shapes")])
    words = ["--config", str(ROOT / "recipes/configs/sft_images_cpu.yaml"), "--num_train_epochs", "1"]
    words += ["--dataset", "outputs/shapes/chats.jsonl"]
    said = scripts.run_by_ranks(2, "recipes/sft.py", words, tmp_path)
    assert "load it: AutoModelForImageTextToText.from_pretrained('outputs/sft_images'), and its AutoProcessor;" in said
    losses = [
        step["loss"] for step in json.loads((tmp_path / "outputs/sft_images/training_log.json").read_text())["steps"]
    ]
    assert losses[0] > 2
    assert losses[-1] < 0.7
