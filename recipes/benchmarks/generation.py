"""Answers over ranks: prefill, decoding and questions to a document, beside their limits and one GPU alone.

On two GPUs, the shape of an 8B model with random weights:

    torchrun --nproc-per-node 2 recipes/benchmarks/generation.py --liger --prompts 131072 524288 --decode 524288 \\
        --memory 262144 --alone 65536 131072 262144 --out outputs/generation_2xH100.json

On two CPU processes, to see that it works:

    torchrun --nproc-per-node 2 recipes/benchmarks/generation.py --shape tiny --device cpu --dtype float32 \\
        --prompts 256 --decode 256 --memory 128 --questions 2 --tokens 4 --alone 64 --out outputs/generation_cpu.json

What is measured, the slowest rank each time:

* prefill: `remember`, beside its limit. This is all matrix products of a rank's tokens, and attention of all tokens
  with a share of the heads; nothing is sent.
* attention: that of one new token in one layer without a window, beside the bytes of a rank's keys at `--bandwidth`,
  plus one exchange. On GPUs also as CUDA graphs, between which the ranks exchange, as `generate(cuda_graphs=True)`
  plays them.
* decoding: tokens a second of the whole model behind a document, as it is, by CUDA graphs, and with compiled layers.
* questions: tokens a second of so many answers at once, as they are and by CUDA graphs. In the seconds to the first
  token are those in which each call compares all weights with those that read the document.
* alone: the same model in one process, by `model.generate`, with its keys on the GPU and on the host, at the longest
  of `--alone` that it holds.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.generation.streamers import BaseStreamer

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

import hf_burst
from hf_burst.attention import ContextGroup, MaskPattern
from hf_burst.attention.shared_keys import Exchange, Keys, attend_to_shared, exchanged
from hf_burst.hf.generation.step_graphs import Recording
from hf_burst.kernels import Scores
from recipes.benchmarks.harness import Row, at_least, begin, options_of, settings_of, write
from recipes.benchmarks.ranks import Ranks
from recipes.benchmarks.training_job import add_model, apply_liger, make_model
from recipes.benchmarks.training_limits import attention_seconds, attentions_of, forward_products, widths_of

QUESTION = 32  # tokens
_CALLS = 100  # of what takes less than a millisecond
_WARM = 131072  # tokens of a prompt that goes before a longer one: with as many, the same kernels and schedule


class Clock(BaseStreamer):
    """When `generate` begins, and when it has chosen each token."""

    def __init__(self) -> None:
        self.begun, self.times = time.perf_counter(), list[float]()

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter() - self.begun)

    def end(self) -> None:
        pass


class Bench:
    """The model, and what is measured of it."""

    def __init__(self, arguments: argparse.Namespace, ranks: Ranks) -> None:
        self.arguments, self.ranks = arguments, ranks
        longest = max([*arguments.prompts, *arguments.decode, arguments.memory, *arguments.alone])
        dtype = getattr(torch, arguments.dtype)
        self.model: Any = make_model(arguments.shape, longest + 1024, dtype, ranks.device, arguments.layers).eval()
        if arguments.liger:
            apply_liger(self.model)
        self.model.config.use_cache = self.model.generation_config.use_cache = True
        self.model.generation_config.eos_token_id = None
        self.group = ContextGroup.from_mesh(dist.group.WORLD if ranks.size > 1 else None)
        self.config = self.model.config

    def tokens(self, rows: int, length: int) -> torch.Tensor:
        """Random ones, the same on every rank."""
        generator = torch.Generator().manual_seed(length)
        drawn = torch.randint(1, self.config.vocab_size, (rows, length), generator=generator)
        return drawn.to(self.ranks.device)

    def timed(self, function: Callable[[], Any], calls: int = 1, warm: Callable[[], Any] | None = None) -> float:
        """Seconds of a call on the slowest rank, of so many in a row, after one that does not count (`warm`)."""
        (warm or function)()
        self.ranks.align()
        return self.ranks.largest([self.ranks.time(function, calls)])[0]

    def alone(self, length: int, where: str) -> Row:
        """`model.generate` of one process; all ranks do the same, each by itself."""
        options = {"cache_implementation": "offloaded"} if where == "host" else {}
        short, prompt = self.tokens(1, min(length, _WARM)), self.tokens(1, length)
        self.model.generate(short, **self.settings(2), **options)
        return self.speed(partial(self.model.generate, prompt, **options))

    def prefill(self, length: int) -> Row:
        """The seconds of a document that is read, and their limit."""
        short, prompt = self.tokens(1, min(length, _WARM)), self.tokens(1, length)
        read = partial(hf_burst.remember, self.model)
        seconds = self.timed(lambda: read(prompt), warm=lambda: read(short))
        limit = self.prefill_limit(length)
        return {"seconds": seconds, "limit": limit, "share_of_limit": sum(limit.values()) / seconds}

    def prefill_limit(self, length: int) -> dict[str, float]:
        """Seconds of the products of all layers and of their attention, whose kinds may differ."""
        ranks, dtype = self.ranks, self.model.dtype
        once = forward_products(self.model.model, length // ranks.size, ranks)
        products = sum(once[width] for layer in self.model.model.layers for width in widths_of(layer))

        kinds = Counter(attentions_of(self.model.model)).items()
        attention = sum(count * attention_seconds(kind, dtype, ranks, length)[0] for kind, count in kinds)
        return {"products": products, "attention": attention}

    def attention(self, length: int) -> Row:
        """The seconds of one new token's attention in a layer that sees all tokens, its limit, and those of its
        exchange alone."""
        ranks, dtype, own = self.ranks, self.model.dtype, length // self.ranks.size
        kind = next(kind for kind in attentions_of(self.model.model) if kind.window is None)
        heads, size = kind.heads, kind.size
        keys, values = (torch.randn(1, kind.kv_heads, own, size, dtype=dtype, device=ranks.device) for _ in range(2))
        held = Keys(keys, values, torch.arange(own, device=ranks.device)[None], before=True)
        q = torch.randn(1, heads, 1, size, dtype=dtype, device=ranks.device)
        place, scores = torch.tensor([[length]], device=ranks.device), Scores(size**-0.5)

        def attend(group: ContextGroup, exchange: Exchange = exchanged) -> torch.Tensor:
            return attend_to_shared(q, place, [held], MaskPattern(), scores, None, group, size, exchange)

        part = torch.randn(1, heads, 1, size + 1, device=ranks.device)
        parts = [torch.empty_like(part) for _ in range(ranks.size)]
        exchange = self.timed(lambda: dist.all_gather(parts, part), _CALLS) if ranks.size > 1 else 0.0
        reading = (keys.nbytes + values.nbytes) / (self.arguments.bandwidth * 1e12)
        seconds, local = (self.timed(partial(attend, group), _CALLS) for group in (self.group, ContextGroup()))
        found = {"seconds": seconds, "without_exchange": local, "exchange": exchange, "reading": reading}
        found["share_of_limit"] = (reading + exchange) / seconds
        if ranks.cuda:
            recording = Recording(ranks.device)
            recording.record(lambda exchange: attend(self.group, exchange))
            found["by_graphs"] = self.timed(lambda: recording.play(exchanged), _CALLS)
            found["share_of_limit_by_graphs"] = (reading + exchange) / found["by_graphs"]
        return found

    def decoding(self, length: int) -> Row:
        """A question of one token to a document, in all ways."""
        for layer in self.model.model.layers:
            layer._compiled_call_impl = None  # as before `compile`
        document = hf_burst.remember(self.model, self.tokens(1, length))
        answer = partial(hf_burst.generate, self.model, self.tokens(1, 1), document=document)
        found: Row = {"bytes_of_keys": document.nbytes}
        for name in ("as it is", "by CUDA graphs", "compiled")[:: 1 if self.ranks.cuda else 2]:
            graphs = {"cuda_graphs": name == "by CUDA graphs"}
            if name == "compiled":
                torch._dynamo.config.allow_unspec_int_on_nn_module = True  # one graph for all layers
                for layer in self.model.model.layers:
                    layer.compile()
            answer(**self.settings(4), **graphs)
            found[name] = self.speed(partial(answer, **graphs))
        return found

    def questions(self, length: int, counts: list[int]) -> Row:
        """Answers to so many questions at once, to one document."""
        document = hf_burst.remember(self.model, self.tokens(1, length))
        found: Row = {"bytes_of_keys": document.nbytes}
        for count in counts:
            answer = partial(hf_burst.generate, self.model, self.tokens(count, QUESTION), document=document)
            for name in (str(count), f"{count} by CUDA graphs")[: 1 + self.ranks.cuda]:
                graphs = {"cuda_graphs": name != str(count)}
                answer(**self.settings(2), **graphs)
                found[name] = self.speed(partial(answer, **graphs))
        return found

    def speed(self, write: Callable[..., torch.Tensor]) -> Row:
        """Seconds to the first token, and tokens a second behind it, on the slowest rank that streams: of all tokens,
        and of the one in the middle when they are sorted, since the first ones record graphs or compile."""
        self.ranks.align()
        clock = Clock()
        rows = len(write(streamer=clock, **self.settings(self.arguments.tokens)))
        # the prompt comes first; hf_burst.generate streams on the first rank alone
        first, *later = clock.times[1:] or [0.0]
        each = torch.tensor([first, *later], dtype=torch.float64).diff()
        known = [first, float(each.mean()), float(each.median())] if later else [0.0] * 3
        begun, mean, middle = self.ranks.largest(known)
        return {
            "first_token_s": begun,
            "seconds_per_token": mean,
            "tokens_per_second": rows / mean,
            "tokens_per_second_later": rows / middle,
        }

    def settings(self, tokens: int) -> Row:
        return {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}


def main() -> int:
    """Measures all; what one GPU cannot hold is written down as it says so."""
    parser = options_of(__doc__, timeout_s=600.0)
    add_model(parser)
    parser.add_argument("--prompts", type=int, nargs="*", default=[131072, 524288], help="tokens that are read")
    parser.add_argument("--decode", type=int, nargs="*", default=[524288], help="tokens before those that are written")
    parser.add_argument("--memory", type=int, default=262144, help="tokens of the document that is asked")
    parser.add_argument("--questions", type=int, nargs="*", default=[1, 8, 64], help=f"of {QUESTION} tokens, at once")
    parser.add_argument("--tokens", type=at_least(2), default=32, help="that are written; the first is the prompt's")
    parser.add_argument("--alone", type=int, nargs="*", default=[], help="prompts of one process, the longest last")
    parser.add_argument("--bandwidth", type=float, default=3.0, help="TB/s at which keys can be read")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    ranks, result = begin(arguments)
    result["settings"] = settings_of(arguments)
    bench, rows = Bench(arguments, ranks), list[Row]()

    def measure(name: str, length: int, function: Callable[[], Row]) -> bool:
        found, failure = ranks.attempt(function)
        rows.append({"what": name, "length": length, **(found or {"failure": failure})})
        ranks.say(f"{name} {length:,}: {json.dumps(found or failure)}")
        write(arguments.out, {**result, "results": rows}, ranks)  # after each, in case that time runs out
        return failure is None

    for where in ("gpu", "host") if ranks.cuda else ("gpu",):  # before the model is patched
        for length in arguments.alone:
            if not measure(f"alone, keys on the {where}", length, partial(bench.alone, length, where)):
                break
    hf_burst.patch_model(bench.model)
    for length in arguments.decode:
        measure("attention of a token", length, partial(bench.attention, length))
    for length in arguments.prompts:
        measure("prefill", length, partial(bench.prefill, length))
    measure("questions", arguments.memory, partial(bench.questions, arguments.memory, arguments.questions))
    for length in arguments.decode:  # last, since it compiles parts of the model
        measure("decoding", length, partial(bench.decoding, length))
    ranks.close()
    return int(all("failure" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
