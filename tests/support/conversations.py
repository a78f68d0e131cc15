"""Chats and agent trajectories about facts that a model is to learn, in tiny sizes."""

import json
import random
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a key up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


def facts(count: int, seed: int = 0) -> dict[str, str]:
    """Keys and their values, drawn at random."""
    chance = random.Random(seed)
    keys = chance.sample([a + b for a in LETTERS for b in LETTERS], count)
    return {key: f"{chance.randrange(1000):03}" for key in keys}


def question(key: str) -> Row:
    return {"role": "user", "content": f"{key}?"}


def chat(known: dict[str, str], chance: random.Random, turns: int) -> Row:
    """A chat of several questions and right answers."""
    messages = [{"role": "system", "content": "Answer by the number."}]
    for key in chance.sample(list(known), turns):
        messages += [question(key), {"role": "assistant", "content": known[key]}]
    return {"messages": messages}


def trajectory(known: dict[str, str], chance: random.Random, turns: int, noise: int = 60) -> Row:
    """An agent that looks keys up; the tool answers with much that is not asked for. Arguments are JSON text."""
    messages: list[Row] = [{"role": "user", "content": "Look up all of them."}]
    for key in chance.sample(list(known), turns):
        function = {"name": "look_up", "arguments": json.dumps({"key": key})}
        others = " ".join(f"{other}={value}" for other, value in chance.choices(list(known.items()), k=noise // 7))
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "name": "look_up", "content": f"{others} {key}={known[key]}"},
            {"role": "assistant", "content": f"{key} is {known[key]}"},
        ]
    return {"messages": messages, "tools": [TOOL]}


def write(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chats(path: Path, known: dict[str, str], count: int, turns: int = 8, seed: int = 0) -> Path:
    """A file of chats that asks for every fact about as often."""
    chance = random.Random(seed)
    return write(path, [chat(known, chance, turns) for _ in range(count)])


def trajectories(path: Path, known: dict[str, str], count: int, turns: int = 3, seed: int = 0) -> Path:
    chance = random.Random(seed)
    return write(path, [trajectory(known, chance, turns) for _ in range(count)])


def pairs(path: Path, known: dict[str, str], count: int, seed: int = 0) -> Path:
    """Questions with a right and a wrong answer."""
    chance = random.Random(seed)
    rows = []
    for key in chance.choices(list(known), k=count):
        wrong = f"{(int(known[key]) + 1 + chance.randrange(998)) % 1000:03}"
        answers = {
            name: [{"role": "assistant", "content": value}]
            for name, value in (("chosen", known[key]), ("rejected", wrong))
        }
        rows.append({"prompt": [question(key)], **answers})
    return write(path, rows)
