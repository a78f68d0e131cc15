"""`hf-burst check`: tests whether a model is exact over several ranks, and whether the loss of a batch is right."""

import argparse
from pathlib import Path

from ..check.compare import BATCH_TOLERANCE, TOLERANCE, BatchComparison
from ..check.run import check_batch, check_model, read_batch
from ..errors import ConfigError
from ..hf.admission import Verdict

_WHY = (
    "fp32 rounds sums at 6e-8 and ranks add in another order; one lost label of N moves the loss by about 1/N, so a "
    "short batch shows it best"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a name on the hub, a folder or config.json, or a class of Transformers")
    parser.add_argument(
        "--batch", type=Path, metavar="FILE", help="compare the loss of this saved output of a collator"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    parser.add_argument(
        "--limit", type=float, default=300.0, metavar="SECONDS", help="time limit (default %(default)g)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Compares two ranks with one process and prints the verdict; returns 0 if they are equal, else 1."""
    if arguments.limit <= 0:
        raise ConfigError(f"--limit is {arguments.limit:g}; give seconds above 0.")
    options = {"trust_remote_code": arguments.trust_remote_code, "time_limit": arguments.limit}
    if arguments.batch is None:
        verdict = check_model(arguments.model, **options)
        print(describe(arguments.model, verdict))
        return int(verdict.result != "exact")
    comparison, weights = check_batch(arguments.model, read_batch(arguments.batch), **options)
    print(describe_batch(comparison, weights))
    return int(not comparison.equal)


def describe(name: str, verdict: Verdict) -> str:
    """Returns a verdict as text."""
    lines = [f"{name}: {verdict.result}" + (f"; {verdict.note}" if verdict.note else "")]
    for kind, error in verdict.errors.items():
        lines.append(f"  {kind}: {'exact' if error <= TOLERANCE else 'wrong'}, greatest error {error:.0e}")
    if verdict.errors:
        lines.append(
            f"Two ranks next to one process, tiny, fp64, loss and all gradients; exact is up to {TOLERANCE:g}."
        )
    if verdict.uncompared:
        lines.append(
            f"Only text was compared; compare {verdict.uncompared} by a batch of your own: hf-burst check FOLDER "
            "--batch FILE."
        )
    if verdict.result == "exact":
        lines.append(
            f"Remembered as {verdict.fingerprint} for these versions of transformers, torch and hf_burst: patch_model "
            "serves this class with such a config here. Run the same command on every node that shares no home folder."
        )
    return "\n".join(lines)


def describe_batch(comparison: BatchComparison, weights: str) -> str:
    """Returns a comparison as text."""
    lines = [
        f"batch: {comparison.documents} sequences or packed documents, {comparison.labels} labels count",
        f"model: {weights}, fp32",
        f"{'':15}{'one process':>15}{'2 ranks':>15}",
    ]
    for name, pair in (("loss", comparison.loss), ("gradient norm", comparison.gradient_norm)):
        lines.append(f"{name:15}{pair[0]:15.7g}{pair[1]:15.7g}")
    if comparison.apart:
        lines.append("One process got the documents one by one: this class does not keep packed ones apart.")
    result = "equal" if comparison.equal else "different"
    lines.append(f"{result}: relative difference {comparison.error:.0e}, tolerance {BATCH_TOLERANCE:g} ({_WHY}).")
    return "\n".join(lines)
