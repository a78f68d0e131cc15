"""Chats and agent trajectories as tokens, and the labels of what the assistant wrote.

The loss is on the assistant alone. Where its words begin and end comes from the `{% generation %}` marks of the chat
template; TRL has marked templates of many families. Any other template is rendered with one message more at a time, and
what it adds for an answer is the answer. This is exact only if the template writes earlier messages alike whatever
follows them; otherwise an error says so. Chats about images are rendered alike: a processor puts the tokens of an image
where the template has one, and says where.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from textwrap import shorten
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils.chat_template_utils import render_jinja_template
from trl.chat_template_utils import (
    get_training_chat_template,
    has_generation_markers,
    is_chat_template_stop_token_trained,
)
from trl.data_utils import common_prefix_length, prepare_multimodal_messages

Message = dict[str, Any]
SHAREGPT = {"human": "user", "gpt": "assistant", "observation": "tool", "function_response": "tool"}
SHAREGPT["function"] = "tool"  # of OpenAI, once
BESIDES_TEXT = ("images", "image", "videos", "video", "audios", "audio")  # columns beside chats, as TRL names them
ROLES = ("system", "developer", "user", "assistant", "tool")
IGNORED = -100


def without_nulls(value: Any) -> Any:
    """The value without fields that are `None`, at any depth: Arrow adds the fields that other rows have."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def clean(messages: list[Message], images: bool = False) -> list[Message]:
    """Messages as chat templates want them; with `images`, parts may be places of images.

    Fields that are `None` are left out, a missing content is empty, and arguments of tool calls that are JSON text, as
    in the API of OpenAI, become mappings. `from` and `value`, as in ShareGPT, become `role` and `content`.

    Raises:
        ValueError: If a role is none that chat templates know, or a content neither text nor a list, or one with parts
            that are not text.
    """
    cleaned = []
    if not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"the messages are {shorten(str(messages), 60)}; give mappings with role and content")
    for number, message in enumerate(without_nulls(messages), 1):
        if "from" in message:
            message["role"] = message.pop("from")
            message["content"] = message.pop("value", "")
        if message.get("role") == "function_call":  # of ShareGPT: JSON text
            calls = parse(str(message.get("content", "")), f"message {number}: its function call is")
            calls = [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]
            message |= {"role": "assistant", "content": "", "tool_calls": calls}
        message["role"] = role = SHAREGPT.get(message.get("role"), message.get("role"))
        if role not in ROLES:
            near = "".join(f" (did you mean {name}?)" for name in get_close_matches(str(role), ROLES, n=1))
            raise ValueError(f"message {number} has the role {role!r}{near}; it must be one of {', '.join(ROLES)}")
        if not isinstance(message.setdefault("content", ""), str | list):  # datasets reads text among lists as JSON
            said = f"message {number} has the content {message['content']!r}; it must be text or a list of parts"
            raise ValueError(f"{said}, of the same kind in all rows")
        for part in message["content"] if isinstance(message["content"], list) else ():
            place = images and part == {"type": "image"}  # of an image, where there are images
            kinds = (str(part.get("type")), *part) if isinstance(part, dict) and not place else ()
            if kind := next((kind for kind in kinds if re.search("image|video|audio", kind)), None):
                raise ValueError(
                    f"message {number} has a part {kind!r}, which is not read: the file of an image belongs in the "
                    'column images of the row, and {"type": "image"} may stay in its place. recipes/sft.py and '
                    "recipes/evaluate.py read this for models that see"
                )
        if "function_call" in message:  # of OpenAI, once
            function = {"type": "function", "function": message.pop("function_call")}
            message["tool_calls"] = [*message.get("tool_calls", []), function]
        if role == "assistant" and message.get("weight", 1) not in (0, 1):
            raise ValueError(f"message {number} has the weight {message['weight']!r}; it must be 0 or 1")
        if "tool_calls" in message:
            message["tool_calls"] = [parse_arguments(call, number) for call in message["tool_calls"]]
            if not message["tool_calls"]:
                del message["tool_calls"]
        cleaned.append(message)
    return cleaned


def refuse_besides_text(columns: Sequence[str], served: str | None = None) -> None:
    """Raises where chats, prompts or pairs have images, videos or sound beside them, which a reader of text would leave
    out; one column may be `served`."""
    if found := [name for name in BESIDES_TEXT if name in columns and name != served]:
        raise ValueError(
            f"it has the column {found[0]}, which is not read here: recipes/sft.py and recipes/evaluate.py read one, "
            "images, for models that see, and TRL's DPOTrainer and GRPOTrainer do in scripts of your own. Remove the "
            "column if text is enough"
        )


def is_silent(messages: list[Message]) -> bool:
    """Whether an assistant says nothing in one of the messages, as [`clean`] makes them."""
    return any(not has_words(message) for message in messages if message["role"] == "assistant")


def is_unlearned(message: Message) -> bool:
    """Whether an answer is only read, as OpenAI writes it."""
    return message["role"] == "assistant" and message.get("weight") == 0


def has_words(message: Message) -> bool:
    """Whether a message has text, parts that are not text, a tool call or thoughts."""
    content = message["content"]
    parts = [content] if isinstance(content, str) else content
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts]
    said = any(part.strip() if isinstance(part, str) else part for part in parts)
    return said or any(message.get(key) for key in ("tool_calls", "reasoning_content", "thinking"))


def with_system(messages: list[Message], system: Any) -> list[Message]:
    """Messages behind the system message that stands beside them, as in ShareGPT."""
    said = [message.get("content", message.get("value")) for message in messages if is_system(message)]
    if not system or said == [system]:
        return messages
    if said or not isinstance(system, str):
        raise ValueError(f"its column system is {shorten(repr(system), 60)}; give text, and no other system message")
    return [{"role": "system", "content": system}, *messages]


def is_system(message: Any) -> bool:
    return isinstance(message, dict) and "system" in (message.get("role"), message.get("from"))


def parse(text: str, said: str) -> Any:
    """What JSON text holds; else an error begins by what is `said`."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{said} no JSON: {error}") from None


def parse_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tools for a chat template, from a list or JSON text."""
    return (parse(tools, "its tools are") if isinstance(tools, str) else without_nulls(tools)) or None


def parse_arguments(call: Any, number: int) -> dict[str, Any]:
    """A tool call of a message whose arguments are a mapping."""
    function = call.get("function", call) if isinstance(call, dict) else call
    if not isinstance(function, dict):
        raise ValueError(f"message {number} has the tool call {call!r}; give a mapping of a name and arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = parse(arguments or "{}", f"message {number}: the arguments of a tool call are")
    function = {**function, "arguments": {} if arguments is None else arguments}
    return {**call, "function": function} if "function" in call else function


@dataclass
class ChatTokenizer:
    """Renders and tokenizes chats."""

    tokenizer: PreTrainedTokenizerBase  # a fast tokenizer with a chat template
    assistant_only: bool = True  # whether other tokens than the assistant's get the label -100

    @property
    def source(self) -> Any:
        """What applies the chat template."""
        return self.tokenizer

    def prepare(self, messages: list[Message], images: Sequence[Any]) -> list[Message]:
        """Messages as the chat template wants them."""
        return clean(messages)

    def encode(self, text: str, messages: list[Message]) -> tuple[dict[str, Any], list[tuple[int, int]]]:
        """What the model is given for a text that was made of messages, and where in the text each token stands."""
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=self.tokenizer.is_fast)
        return {"input_ids": encoding["input_ids"]}, encoding.get("offset_mapping", [])

    def __post_init__(self) -> None:
        if not self.tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template; set chat_template_path to a .jinja file")
        self.template: str | None = None
        self.marked = has_generation_markers(self.tokenizer.chat_template)
        if self.assistant_only and not self.tokenizer.is_fast:
            raise ValueError(
                "the tokenizer is a slow one, which does not tell where its tokens stand; take a fast one, or set "
                "assistant_only_loss to false"
            )
        if self.assistant_only and not self.marked:
            try:
                self.template, self.marked = get_training_chat_template(self.source), True
            except ValueError:  # not one of those that TRL has marked
                self.template = None

    def __call__(
        self, messages: list[Message], tools: Any = None, prompt: int = 0, images: Sequence[Any] = (), **options: Any
    ) -> dict[str, Any]:
        """
        Args:
            messages (`list[dict]`): The chat.
            tools (`list[dict]` or JSON text, *optional*): The tools that the chat template is given.
            prompt (`int`, *optional*): Number of first messages that get no loss at all.
            images (sequence, *optional*): Its images, in the order of their places.
            options: More arguments of the chat template.

        Returns:
            `input_ids` and `labels`, of equal length, and what else the model is given.

        Raises:
            ValueError: If nothing is labelled, if it is not certain which tokens are the assistant's, or if the chat
                template leaves out what the assistant wrote.
        """
        messages = self.prepare(messages, images)
        options |= {"tools": parse_tools(tools), "chat_template": self.template}
        try:
            given, mask, written = self.render(messages, options)
            ids = given["input_ids"]
            if prompt:
                shown = messages[:prompt]
                first = self.source.apply_chat_template(shown, tokenize=False, add_generation_prompt=True, **options)
                length = common_prefix_length(self.encode(first, shown)[0]["input_ids"], ids)
                mask = [0] * length + mask[length:]
        except (TemplateError, TypeError) as error:
            raise ValueError(f"the chat template cannot write it: {error}") from error
        if not any(mask):
            raise ValueError(
                "no token is the assistant's: give a message with the role assistant, not all of the weight 0, and "
                "check the chat template"
            )
        refuse_what_is_dropped(messages, prompt, written)
        return {**given, "labels": [token if on else IGNORED for token, on in zip(ids, mask, strict=True)]}

    def render(self, messages: list[Message], options: dict[str, Any]) -> tuple[dict[str, Any], list[int], str]:
        """What the model is given, which tokens are labelled, and the text of these."""
        if not self.assistant_only:
            if any(map(is_unlearned, messages)):
                raise ValueError("a message has the weight 0, for which assistant_only_loss must be true")
            written = self.source.apply_chat_template(messages, tokenize=False, **options)
            given, _ = self.encode(written, messages)
            return given, [1] * len(given["input_ids"]), written
        text, spans = self.by_marks(messages, options) if self.marked else self.by_difference(messages, options)
        if any(map(is_unlearned, messages)):
            answers = [message for message in messages if message["role"] == "assistant"]
            if len(answers) != len(spans):
                raise ValueError(
                    "a message has the weight 0, and the chat template's {% generation %} marks are not one pair for "
                    "each answer; give another template by chat_template_path, or take the row out"
                )
            spans = [span for span, answer in zip(spans, answers, strict=True) if not is_unlearned(answer)]
        given, offsets = self.encode(text, messages)
        counts = covered(offsets, spans)
        for (first, last), count in zip(offsets, counts, strict=True):
            if 0 < count < last - first and not self.marked:
                raise ValueError(
                    f"the token of {text[first:last]!r} is partly the assistant's; give a chat template with "
                    "{% generation %} marks, or set assistant_only_loss to false"
                )
        mask = [int(count > 0) for count in counts]
        return given, mask, "".join(text[start:end] for start, end in spans)

    @property
    def warning(self) -> str | None:
        """What a template of marks leaves out, if it leaves out the token by which the assistant ends a turn."""
        if not self.assistant_only or not self.marked:
            return None
        if is_chat_template_stop_token_trained(self.source, self.template):
            return None
        return (
            "The chat template's {% generation %} marks leave out the token that ends a turn: the model may not learn "
            "to stop. Put {% endgeneration %} after it."
        )

    def by_marks(self, messages: list[Message], options: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and what stands between the template's marks. A token there counts, if only in part.

        Transformers' own mask runs on to the end of the chat where a mark ends in white space that is no token.
        """
        variables = {**self.tokenizer.special_tokens_map, **options}
        variables["chat_template"] = self.tokenizer.get_chat_template(self.template, options["tools"])
        (text,), (spans,) = render_jinja_template([messages], return_assistant_tokens_mask=True, **variables)
        return text, spans

    def by_difference(self, messages: list[Message], options: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and what the template adds for messages of the assistant."""

        def render(count: int, **more: bool) -> str:
            return self.source.apply_chat_template(messages[:count], tokenize=False, **more, **options)

        text = render(len(messages))
        return text, assistant_spans(text, messages, render, tuple(self.tokenizer.all_special_tokens))


@dataclass
class ImageChats(ChatTokenizer):
    """Renders chats about images, and makes tokens and pixels of them.

    TRL's collator for images is not taken, since it needs marks in the template, and gives it no tools.
    """

    processor: ProcessorMixin | None = None  # whose tokenizer the other one is

    @property
    def source(self) -> Any:
        """What applies the chat template."""
        return self.processor

    def prepare(self, messages: list[Message], images: Sequence[Any]) -> list[Message]:
        """Messages with their images; those without places stand before the first words of the user."""
        return prepare_multimodal_messages(clean(messages, images=True), list(images))  # type: ignore[no-any-return]

    def encode(self, text: str, messages: list[Message]) -> tuple[dict[str, Any], list[tuple[int, int]]]:
        """What the model is given, and where in the text each token stands: those of an image nowhere."""
        shown = [part["image"] for message in messages for part in message["content"] if "image" in part]
        given = dict(
            self.source(
                text=[text],
                images=[shown] if shown else None,
                add_special_tokens=False,
                return_offsets_mapping=True,
                return_text_replacement_offsets=True,
                return_tensors="pt",
            )
        )
        given["input_ids"], offsets = given["input_ids"][0].tolist(), given.pop("offset_mapping")[0].tolist()
        replaced = (given.pop("text_replacement_offsets", None) or [[]])[0]
        if len(replaced) != len(shown) and self.assistant_only:
            raise ValueError(
                f"{type(self.processor).__name__} tells the places of {len(replaced)} of {len(shown)} images, so it is "
                "not certain which tokens are the assistant's; set assistant_only_loss to false"
            )
        return given, in_text(offsets, [(*each["span"], *each["new_span"]) for each in replaced])


def in_text(offsets: list[list[int]], replaced: list[tuple[int, int, int, int]]) -> list[tuple[int, int]]:
    """Where tokens stand in a text, of which pieces were replaced by others before it became tokens.

    Args:
        offsets (`list[list[int]]`): First character of each token, and the one after its last, after the replacement.
        replaced (`list[tuple]`): The same two numbers of each piece, before and after.
    """
    starts, found = [piece[2] for piece in replaced], []
    for first, last in offsets:
        start, end, _, new_end = replaced[at] if (at := bisect_right(starts, first) - 1) >= 0 else (0, 0, 0, 0)
        found.append((start, start) if first < new_end else (first - new_end + end, last - new_end + end))
    return found


def chat_reader(tokenizer: PreTrainedTokenizerBase | ProcessorMixin, assistant_only: bool) -> ChatTokenizer:
    """What renders chats: with a processor, chats about images."""
    if isinstance(tokenizer, ProcessorMixin):
        return ImageChats(tokenizer.tokenizer, assistant_only, tokenizer)
    return ChatTokenizer(tokenizer, assistant_only)


def texts(message: Message) -> list[str]:
    """What the message says, of several parts maybe."""
    content = message["content"]
    parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return [part.strip() for part in parts if part.strip()]


def refuse_what_is_dropped(messages: list[Message], prompt: int, written: str) -> None:
    """Refuses a chat of which the template leaves out in the labelled text what the assistant wrote, behind the first
    messages that are its prompt. White space is not compared.

    Many templates leave out the thoughts of earlier answers, as they do when the model is used. Thoughts are therefore
    looked for in the last answer alone.
    """
    rendered, position = "".join(written.split()), 0
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index >= prompt]
    for index in answers:
        if is_unlearned(messages[index]):
            continue
        message, ends = messages[index], [position]
        wanted = [("text", part.rpartition("</think>")[2]) for part in texts(message)]
        if index == answers[-1]:
            thoughts = [message.get(key) for key in ("reasoning_content", "reasoning", "thinking")]
            wanted += [("reasoning", thought) for thought in thoughts if isinstance(thought, str)]
        for kind, text in wanted:
            ends.append(
                end_of(text, rendered, position, f"message {index + 1}: the chat template leaves out its {kind}")
            )
        after = position
        for call in message.get("tool_calls", []):
            name = call.get("function", call)["name"]
            after = end_of(name, rendered, after, f"message {index + 1}: the chat template leaves out its tool call")
        position = max(*ends, after)


def end_of(text: str, rendered: str, position: int, complaint: str) -> int:
    """Where the text ends in what is rendered, from `position` on. Both are compared without white space."""
    searched = "".join(text.split())
    start = rendered.find(searched, position)
    if start < 0:
        raise ValueError(
            f"{complaint} {shorten(text, 60)!r}, or puts it outside of what is labelled; give another template by "
            "chat_template_path, or remove it from the data"
        )
    return start + len(searched)


def covered(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[int]:
    """How many characters of each token stand in one of the spans; both rise."""
    counts, index = [], 0
    for first, last in offsets:
        while index < len(spans) and spans[index][1] <= first:
            index += 1
        start, end = spans[index] if index < len(spans) else (last, last)
        counts.append(max(0, min(last, end) - max(first, start)))
    return counts


def assistant_spans(
    text: str, messages: list[Message], render: Callable[..., str], special: tuple[str, ...]
) -> list[tuple[int, int]]:
    """Where in the rendered chat the assistant's messages stand: first character, and the one after the last.

    White space after the token that ends a turn is the template's, not the assistant's.
    """
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            before, after = render(index, add_generation_prompt=True), render(index + 1)
        except TemplateError as error:
            raise ValueError(f"the chat template cannot render the first {index} messages: {error}") from None
        if not text.startswith(after) or not after.startswith(before):
            raise ValueError(
                f"the chat template writes the messages up to {index + 1} otherwise where others follow, so it is not "
                "certain which tokens are the assistant's; give a template with {% generation %} marks by "
                "chat_template_path, or set assistant_only_loss to false"
            )
        starts = after[len(before) :].lstrip()
        if before == render(index) and not any(starts.startswith(part) for part in texts(message)[:1]):
            raise ValueError(
                f"the chat template ignores add_generation_prompt, so it is not certain where message {index + 1} "
                "begins; give a template that heeds it, or one with {% generation %} marks, by chat_template_path"
            )
        stripped = after.rstrip()
        spans.append((len(before), len(stripped) if stripped.endswith(special) else len(after)))
    return spans
